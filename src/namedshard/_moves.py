"""EFFECTS. How each route is carried out, batched over all the leaves that take it."""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding

from namedshard import _jaxcompat as compat
from namedshard._errors import MixedAxesError, NarrowingError, TracedMoveError, count_of, message
from namedshard._route import Placement, Route


@dataclasses.dataclass(slots=True)
class Move:
    """One array to bring to its place, and the array there once `run` is done."""

    path: str
    value: Any
    now: Placement
    want: NamedSharding
    route: Route
    result: Any = None


def run(work: Sequence[Move], *, donate: bool, manual: frozenset[str]) -> None:
    """Carry out checked moves, filling in each one's ``result``."""
    by_route: dict[Route, list[Move]] = collections.defaultdict(list)
    for move in work:
        by_route[move.route].append(move)
    for move in by_route.pop(Route.ANNOTATE, []):
        old = move.value
        move.result = jax.ShapeDtypeStruct(old.shape, old.dtype, sharding=move.want, weak_type=old.weak_type)
    for move in by_route.pop(Route.KEEP, []):
        move.result = move.value
    if traced := by_route.pop(Route.TRACED, []):
        _trace(traced, manual)
    if by_route:
        with compat.no_context_mesh():
            for route, moves in by_route.items():
                _EXECUTORS[route](moves, donate)


# --- traced -----------------------------------------------------------------------------------------------------------


def _without(spec: PartitionSpec, manual: frozenset[str]) -> PartitionSpec:
    def keep(entry: Any) -> Any:
        names = tuple(n for n in ((entry,) if isinstance(entry, str) else (entry or ())) if n not in manual)
        return None if not names else (names[0] if len(names) == 1 else names)

    return PartitionSpec(*map(keep, spec))


def _part(spec: PartitionSpec, names: set[str], elsewhere: Any) -> PartitionSpec:
    """The entries made of these mesh axes only."""
    entries = ((e,) if isinstance(e, str) else tuple(e or ()) for e in spec)
    kept = (e if e and set(e) <= names else None for e in entries)
    return PartitionSpec(*((k[0] if len(k) == 1 else k) if k else elsewhere for k in kept))


def _constrain(x: Any, mesh: Any, spec: PartitionSpec) -> Any:
    """``with_sharding_constraint`` on Auto axes, ``reshard`` on Explicit ones, one after the other on mixed meshes."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    auto = {n for n, t in types.items() if t == AxisType.Auto}
    explicit = {n for n, t in types.items() if t == AxisType.Explicit}
    if not explicit:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
    if isinstance(mesh, jax.sharding.Mesh) and compat.abstract_context_mesh() is None:
        # Without a context mesh, only an Auto constraint tells the compiler which devices are meant.
        x = jax.lax.with_sharding_constraint(x, NamedSharding(compat.auto_twin(mesh), spec))
    if not auto:
        return jax.sharding.reshard(x, NamedSharding(mesh, spec))
    abstract = mesh.abstract_mesh if isinstance(mesh, jax.sharding.Mesh) else mesh
    with jax.sharding.use_abstract_mesh(abstract):
        x = jax.sharding.reshard(x, _part(spec, explicit, None))
        unconstrained = PartitionSpec.UNCONSTRAINED
        entries = _part(spec, auto, None)
        explicit_dims = _part(spec, explicit, None)
        merged = (unconstrained if e is not None else a for a, e in zip(entries, explicit_dims, strict=True))
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*merged)))


def check_mixed(work: Sequence[Move], total: int) -> None:
    """No dimension may be over Auto and Explicit axes at once while tracing: no constraint can say so."""
    lines: list[str] = []
    for move in work:
        types = dict(zip(move.want.mesh.axis_names, move.want.mesh.axis_types, strict=True))
        for entry in move.want.spec:
            if isinstance(entry, tuple) and len({types[n] for n in entry}) > 1:
                kinds = ", ".join(f"{n!r} is {types[n].name}" for n in entry)
                lines.append(f"{move.path}: one dimension is mapped to {entry}: {kinds}")
    if lines:
        raise MixedAxesError(
            message(
                f"{count_of(len(lines), total)} cannot be sharded while tracing",
                lines,
                fix="map each dimension to mesh axes of one type, or shard it outside of compiled code",
            )
        )


def _trace(moves: Sequence[Move], manual: frozenset[str]) -> None:
    staging = compat.staging()
    for move in moves:
        mesh, spec = move.want.mesh, _without(move.want.spec, manual)
        context = compat.abstract_context_mesh()
        if manual and context is not None:
            mesh = context
        x = move.value if isinstance(move.value, jax.Array) else jnp.asarray(move.value)
        if move.now.memory_kind != "device":
            # Collectives run on the device only: an array in host memory comes in, is moved, and goes back.
            x = jax.device_put(x, jax.memory.Space.Device)
        if set(mesh.axis_names) - manual:
            try:
                x = _constrain(x, mesh, spec)
            except ValueError as error:
                if staging:
                    raise
                raise TracedMoveError(
                    message(
                        f"{move.path}: under eager vmap or grad an array cannot change its devices",
                        str(error).splitlines()[:1],
                        fix="shard the arrays before the vmap or grad, or put it in jit",
                    )
                ) from error
        kind = move.want.memory_kind
        if kind == "pinned_host":
            x = jax.device_put(x, jax.memory.Space.Host)
        elif kind not in (None, "device"):
            x = jax.device_put(x, NamedSharding(mesh, spec, memory_kind=kind))
        move.result = x


# --- from the host ----------------------------------------------------------------------------------------------------


def check_narrowing(work: Sequence[Move], total: int) -> None:
    """64-bit integers that JAX would wrap without a word are an error."""
    lines: list[str] = []
    for move in work:
        value = move.value
        if isinstance(value, jax.Array | jax.ShapeDtypeStruct) or value.dtype.kind not in "iu" or not value.size:
            continue
        kept = jax.dtypes.canonicalize_dtype(value.dtype)
        if kept != value.dtype:
            low, high = int(np.min(value)), int(np.max(value))
            info = np.iinfo(kept)
            if low < info.min or high > info.max:
                lines.append(f"{move.path}: {value.dtype} values from {low} to {high} do not fit {kept}")
    if lines:
        raise NarrowingError(
            message(
                f"{count_of(len(lines), total)} would be narrowed to wrong values",
                lines,
                fix='enable 64-bit types (jax.config.update("jax_enable_x64", True)), or cast them first',
            )
        )


def _from_host(moves: Sequence[Move], donate: bool) -> None:
    values = [
        m.value if isinstance(m.value, jax.Array) else np.array(m.value, dtype=m.value.dtype, copy=True) for m in moves
    ]
    _put(moves, values, donate)


def _put(moves: Sequence[Move], values: Sequence[Any], donate: bool) -> None:
    results = jax.device_put(list(values), [m.want for m in moves], donate=donate)
    for move, result in zip(moves, results, strict=True):
        move.result = result


# --- between devices of this process ----------------------------------------------------------------------------------


def _on_cpu(sharding: Sharding) -> bool:
    return all(d.platform == "cpu" for d in sharding.device_set)


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Host memory aligned so that a CPU device takes it over instead of copying it."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


Bounds = tuple[tuple[int, int], ...]


def bounds_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
    """Start and stop of each dimension."""
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))


def copy_overlap(target: np.ndarray, at: Bounds, source: np.ndarray, source_at: Bounds) -> None:
    """Copy what two boxes of one array share from one box to the other."""
    overlap = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(at, source_at, strict=True)]
    if all(lo < hi for lo, hi in overlap):
        into = tuple(slice(lo - a, hi - a) for (lo, hi), (a, _) in zip(overlap, at, strict=True))
        out_of = tuple(slice(lo - c, hi - c) for (lo, hi), (c, _) in zip(overlap, source_at, strict=True))
        target[into] = source[out_of]


def _rebuild(x: jax.Array, want: NamedSharding) -> jax.Array:
    """A new array from pieces of an old one, all in this host's memory: one copy, no whole array in between."""
    shape = x.shape
    sources = {bounds_of(s.index, shape): s for s in x.addressable_shards}
    pieces = [(at, np.asarray(s.data)) for at, s in sources.items()]
    made: dict[Bounds, np.ndarray] = {}

    def piece(index: tuple[slice, ...] | None) -> np.ndarray:
        at = bounds_of(index or (), shape)
        if at not in made:
            made[at] = aligned_empty(tuple(b - a for a, b in at), x.dtype)
            for source_at, source in pieces:
                copy_overlap(made[at], at, source, source_at)
        return made[at]

    return jax.make_array_from_callback(shape, want, piece, dtype=x.dtype)


def _within_process(moves: Sequence[Move], donate: bool) -> None:
    """CONSTRAIN and DEVICE_PUT: on CPUs arrays are rebuilt from their pieces, elsewhere devices talk to each other."""
    rest: list[Move] = []
    for move in moves:
        x = move.value
        weak = getattr(x, "weak_type", False)
        if _on_cpu(x.sharding) and _on_cpu(move.want) and not compat.is_key_array(x) and not weak:
            move.result = _rebuild(x, move.want)
            if donate:
                x.delete()
        else:
            rest.append(move)
    by_device = [m for m in rest if m.route is Route.CONSTRAIN and not _on_cpu(m.want)]
    if by_device:
        _constrain_jit(by_device, donate)
    if rest := [m for m in rest if m not in by_device]:
        _two_hops(rest, donate)


def _device_kind(sharding: Sharding) -> str:
    return next(iter(sharding.addressable_devices)).default_memory().kind


def _two_hops(moves: Sequence[Move], donate: bool) -> None:
    """``device_put``, by way of device memory: it cannot change the devices' order and leave host memory in one step."""
    values: list[Any] = []
    for move in moves:
        x = move.value
        kind = _device_kind(x.sharding)
        if x.sharding.memory_kind != kind:
            x = jax.device_put(x, x.sharding.with_memory_kind(kind))
        values.append(x)
    through = [m.want.with_memory_kind(_device_kind(m.want)) for m in moves]
    values = jax.device_put(values, through, donate=donate)
    _put(moves, values, donate=False)
    if donate:
        for move in moves:
            if move.result is not move.value and not move.value.is_deleted():
                move.value.delete()


@functools.lru_cache(maxsize=256)
def _identity(shardings: tuple[Sharding, ...], donate: bool) -> Callable[..., Any]:
    def identity(*xs: jax.Array) -> tuple[jax.Array, ...]:
        return xs

    return jax.jit(identity, out_shardings=shardings, donate_argnums=tuple(range(len(shardings))) if donate else ())


def _constrain_jit(moves: Sequence[Move], donate: bool) -> None:
    """One compiled identity for the whole batch; collectives between the devices, nothing passes through the host."""
    kinds = [_device_kind(m.want) for m in moves]
    values = [
        m.value if m.value.sharding.memory_kind == k else jax.device_put(m.value, m.value.sharding.with_memory_kind(k))
        for m, k in zip(moves, kinds, strict=True)
    ]
    through = tuple(m.want.with_memory_kind(k) for m, k in zip(moves, kinds, strict=True))
    _put(moves, _identity(through, donate)(*values), donate=False)


def _collective(moves: Sequence[Move], donate: bool) -> None:
    raise NotImplementedError


_EXECUTORS: dict[Route, Callable[[Sequence[Move], bool], None]] = {
    Route.FROM_HOST: _from_host,
    Route.CONSTRAIN: _within_process,
    Route.DEVICE_PUT: _within_process,
    Route.CONSTRAIN_JIT: _constrain_jit,
    Route.COLLECTIVE: _collective,
}
