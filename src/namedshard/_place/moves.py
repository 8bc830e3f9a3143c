"""EFFECTS. How each route is carried out, batched over all the leaves that take it."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from namedshard import _jaxcompat as compat
from namedshard._errors import (
    MemoryKindError,
    MixedAxesError,
    NarrowingError,
    TracedMoveError,
    at,
    count_of,
    message,
    warn_user,
)
from namedshard._place.boxes import (
    aligned_empty,
    bounds_of,
    distinct_shards,
    local_slices,
    raw_bounds,
    recipe,
    shape_of,
    whole,
)
from namedshard._place.route import Placement, Route
from namedshard._plan.mesh import MeshLike
from namedshard._types import Bounds, Device, Tracer


@dataclasses.dataclass(slots=True, eq=False)
class Move:
    """One array to bring to its place, and the array there once `run` is done.

    ``donate`` lets the move consume its source, which then nothing else may need.
    """

    path: str
    value: Any
    now: Placement
    want: NamedSharding
    route: Route
    donate: bool = False
    result: Any = None


def run(work: Sequence[Move], *, manual: frozenset[str]) -> None:
    """Carry out checked moves, filling in each one's ``result``."""
    by_route: dict[Route, list[Move]] = collections.defaultdict(list)
    for move in work:
        by_route[move.route].append(move)
    for move in by_route.pop(Route.ANNOTATE, []):
        move.result = move.value.update(sharding=move.want)
    for move in by_route.pop(Route.KEEP, []):
        move.result = move.value
    if traced := by_route.pop(Route.TRACED, []):
        _trace(traced, manual)
    if by_route:
        with compat.no_context_mesh():
            for route, moves in by_route.items():
                _EXECUTORS[route](moves)


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


def _constrain(x: Any, mesh: MeshLike, spec: PartitionSpec, *, is_argument: bool) -> Any:
    """``with_sharding_constraint`` on Auto axes, ``reshard`` on Explicit ones, one after the other on mixed meshes."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    auto = {n for n, t in types.items() if t == AxisType.Auto}
    explicit = {n for n, t in types.items() if t == AxisType.Explicit}
    abstract = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
    typed_for = jax.typeof(x).sharding.mesh
    has_devices = is_argument and not typed_for.empty
    if auto and not typed_for.empty and typed_for != abstract and (explicit or compat.any_explicit(typed_for)):
        # On an array typed for another mesh a constraint is an assertion, and a `reshard` of some axes loses the spec.
        x = jax.sharding.reshard(x, NamedSharding(compat.twin(mesh, AxisType.Explicit), spec))
    if not explicit:
        foreign = compat.abstract_context_mesh()
        if foreign is None or foreign == abstract or not compat.any_explicit(foreign):
            return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
        with jax.sharding.use_abstract_mesh(abstract):
            return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
    if isinstance(mesh, Mesh) and not has_devices and compat.abstract_context_mesh() is None:
        # Without a context mesh, only an Auto constraint tells the compiler which devices are meant.
        x = jax.lax.with_sharding_constraint(x, NamedSharding(compat.twin(mesh, AxisType.Auto), spec))
    if not auto:
        return jax.sharding.reshard(x, NamedSharding(mesh, spec))
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
                lines.append(f"{at(move.path)}: one dimension is mapped to {entry}: {kinds}")
    if lines:
        raise MixedAxesError(
            f"{count_of(len(lines), total)} cannot be sharded while tracing",
            lines,
            fix="map each dimension to mesh axes of one type, or shard it outside of compiled code",
        )


def _trace(moves: Sequence[Move], manual: frozenset[str]) -> None:
    staging = compat.staging()
    for move in moves:
        mesh, spec = move.want.mesh, _without(move.want.spec, manual)
        context = compat.abstract_context_mesh()
        if manual and context is not None:
            mesh = context
        x = move.value if isinstance(move.value, jax.Array) else jnp.array(move.value, native(move.value.dtype))
        if move.now.memory_kind != "device":
            # Collectives run on the device only: an array in host memory comes in, is moved, and goes back.
            x = jax.device_put(x, jax.memory.Space.Device)
        if set(mesh.axis_names) - manual:
            try:
                x = _constrain(x, mesh, spec, is_argument=isinstance(move.value, Tracer))
            except ValueError as error:
                if staging:
                    raise
                raise TracedMoveError(
                    f"{at(move.path)}: under eager vmap or grad an array cannot change its devices, nor a mapped"
                    " dimension its mesh",
                    str(error).splitlines()[:1],
                    fix="shard the arrays before the vmap or grad, or put it in jit",
                ) from error
        if move.want.memory_kind == "pinned_host":
            x = jax.device_put(x, jax.memory.Space.Host)
        move.result = x


# --- from the host ----------------------------------------------------------------------------------------------------


def native(dtype: Any) -> Any:
    """The dtype in this machine's byte order, which is the only one that JAX takes."""
    return dtype if jnp.issubdtype(dtype, jax.dtypes.extended) else np.dtype(dtype).newbyteorder("=")


def _largest(value: Any) -> float:
    """The largest finite magnitude among floats, or among the parts of complex numbers."""
    parts = [np.abs(p) for p in ((value.real, value.imag) if value.dtype.kind == "c" else (value,))]
    return float(max(np.max(p, where=np.isfinite(p), initial=0) for p in parts))


@runtime_checkable
class _HasValue(Protocol):
    @property
    def path(self) -> str: ...
    @property
    def value(self) -> Any: ...


def check_narrowing(work: Sequence[_HasValue], total: int) -> None:
    """64-bit integers that JAX would wrap without a word are an error, floats that become infinite a warning."""
    lines: list[str] = []
    infinite: list[str] = []
    for move in work:
        value = move.value
        if isinstance(value, jax.Array | jax.ShapeDtypeStruct) or value.dtype.kind not in "iufc" or not value.size:
            continue
        kept = jax.dtypes.canonicalize_dtype(native(value.dtype))
        if kept.itemsize == value.dtype.itemsize:
            continue
        if value.dtype.kind in "iu":
            low, high = int(np.min(value)), int(np.max(value))
            info = np.iinfo(kept)
            if low < info.min or high > info.max:
                lines.append(f"{at(move.path)}: {value.dtype} values from {low} to {high} do not fit {kept}")
        elif (largest := _largest(value)) > float(np.finfo(kept).max):
            infinite.append(f"{at(move.path)}: {value.dtype} values up to {largest:.3g} are infinite in {kept}")
    if infinite:
        warn_user(message(f"{count_of(len(infinite), total)} overflow in 32 bits", infinite), RuntimeWarning)
    if lines:
        raise NarrowingError(
            f"{count_of(len(lines), total)} would be narrowed to wrong values",
            lines,
            fix='enable 64-bit types (jax.config.update("jax_enable_x64", True)), or cast them first',
        )


def _from_host(moves: Sequence[Move]) -> None:
    rest: list[Move] = []
    for move in moves:
        value = move.value
        if not _in_this_memory(move):
            rest.append(move)
        elif isinstance(value, jax.Array):
            _rebuild(move)
        else:
            source = np.asarray(value)
            kept = jax.dtypes.canonicalize_dtype(native(source.dtype))
            with np.errstate(over="ignore"):
                move.result = _build(source.shape, kept, move.want, (whole(source.shape),), [source])
    _put(rest, [m.value if isinstance(m.value, jax.Array) else _own_copy(m.value) for m in rest])


def _own_copy(value: Any) -> np.ndarray:
    return np.array(value, dtype=native(value.dtype), copy=True)


def _put(moves: Sequence[Move], values: Sequence[Any]) -> None:
    """One ``device_put`` for all, never with its ``donate``: that deletes nothing, and crashes between two devices."""
    sources = [_unshared(v, m.want) for m, v in zip(moves, values, strict=True)]
    results = jax.device_put(sources, [m.want for m in moves])
    for move, result in zip(moves, results, strict=True):
        move.result = result
        if move.donate:
            move.value.delete()


def _unshared(x: Any, want: NamedSharding) -> Any:
    """The array, or a copy where ``device_put`` would hand back a buffer of it, to be lost when it is donated."""
    if not isinstance(x, jax.Array) or x.sharding.memory_kind != want.memory_kind:
        return x
    have, wanted = (s.devices_indices_map(x.shape) for s in (x.sharding, want))
    return jnp.copy(x) if any(wanted.get(d) == index for d, index in have.items()) else x


# --- between devices of this process ----------------------------------------------------------------------------------


def all_cpu(devices: Iterable[Device]) -> bool:
    """True if all of the devices are CPUs, whose memory numpy sees."""
    return all(d.platform == "cpu" for d in devices)


def _on_cpu(sharding: Sharding) -> bool:
    return all_cpu(sharding.device_set)


def _build(
    shape: tuple[int, ...], dtype: Any, want: NamedSharding, sources: tuple[Bounds, ...], values: Sequence[np.ndarray]
) -> jax.Array:
    """An array from pieces in this host's memory: one copy, no whole array in between, nothing aliased."""
    pieces = recipe(shape, sources, want)
    made: list[np.ndarray | None] = [None] * len(pieces)

    def piece(index: tuple[slice, ...] | None) -> np.ndarray:
        wanted = pieces[raw_bounds(index or ())]
        target = made[wanted.number]
        if target is None:
            target = made[wanted.number] = aligned_empty(wanted.shape, dtype)
            for source, (into, out_of) in wanted.cuts:
                target[into] = values[source][out_of]
        return target

    return jax.make_array_from_callback(shape, want, piece, dtype=dtype)


def _rebuild(move: Move) -> None:
    x = move.value
    distinct = distinct_shards(x.shape, x.sharding)
    shards = {s.device: s for s in x.addressable_shards}
    values = [np.asarray(shards[device].data) for device in distinct.values()]
    move.result = _build(x.shape, x.dtype, move.want, tuple(distinct), values)
    if move.donate:
        x.delete()


def _in_this_memory(move: Move) -> bool:
    """True if this host's own memory holds the source and will hold the result, and numpy can carry it over."""
    x = move.value
    if not (_on_cpu(move.want) and move.want.is_fully_addressable):
        return False
    return not isinstance(x, jax.Array) or not (compat.is_key_array(x) or x.weak_type or not _on_cpu(x.sharding))


def _within_process(moves: Sequence[Move]) -> None:
    """CONSTRAIN and DEVICE_PUT: on CPUs arrays are rebuilt from their pieces, elsewhere devices talk to each other."""
    constrained: list[Move] = []
    rest: list[Move] = []
    for move in moves:
        if _in_this_memory(move):
            _rebuild(move)
        elif move.route is Route.CONSTRAIN and not _on_cpu(move.want):
            constrained.append(move)
        else:
            rest.append(move)
    if constrained:
        constrain_jit(constrained)
    if rest:
        two_hops(rest)


def in_host_memory(sharding: Sharding | None) -> bool:
    """True if the arrays of a sharding (None: of the default device) lie in this host's own memory."""
    devices = jax.local_devices()[:1] if sharding is None else sharding.device_set
    return all(d.platform == "cpu" for d in devices)


def from_pieces(
    shape: tuple[int, ...], dtype: Any, sharding: Sharding | None, pieces: Mapping[Bounds, np.ndarray]
) -> jax.Array:
    """An array of pieces that are given up for it; those made by `aligned_empty` are taken over by CPU devices.

    ``sharding`` None is the default device, uncommitted, with one piece.
    """
    with compat.no_context_mesh():
        if sharding is None:
            return jax.device_put(next(iter(pieces.values())))
        if not sharding.addressable_devices:
            # JAX asks for a replicated array's one piece even where no device of this process holds it.
            return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)
        return jax.make_array_from_callback(
            shape, sharding, lambda index: pieces[bounds_of(index or (), shape)], dtype=dtype
        )


def onto_devices(
    shape: tuple[int, ...], sharding: Sharding | None, bounds: Bounds, piece: np.ndarray
) -> list[jax.Array]:
    """One piece on each of this process's devices that it belongs to."""
    with compat.no_context_mesh():
        if sharding is None:
            return [jax.device_put(piece)]
        indices = sharding.addressable_devices_indices_map(shape)
        devices = [d for d, index in indices.items() if bounds_of(index or (), shape) == bounds]
        places = [SingleDeviceSharding(d, memory_kind=sharding.memory_kind) for d in devices]
        return jax.device_put([piece] * len(places), places)


def read_box(piece: Any, held: Bounds, box: Bounds) -> np.ndarray:
    """A box of an array as numpy, from one device's (or the host's) piece that holds ``held``; on CPUs a view of it."""
    slices = local_slices(box, held)
    # The ellipsis keeps arrays of no dimensions arrays.
    index = (*slices, ...)
    if box == held or not isinstance(piece, jax.Array) or in_host_memory(piece.sharding):
        return np.asarray(piece)[index]
    if piece.sharding.memory_kind != _device_kind(piece.sharding):
        return np.asarray(piece)[index]
    # Only the box crosses to the host, and JAX keeps no copy of the whole piece there.
    with compat.no_context_mesh():
        return np.asarray(jax.lax.dynamic_slice(piece, [s.start for s in slices], shape_of(box)))


def from_device_pieces(shape: tuple[int, ...], sharding: Sharding | None, arrays: Sequence[jax.Array]) -> jax.Array:
    """An array of the pieces that `onto_devices` made."""
    if sharding is None:
        return arrays[0]
    return jax.make_array_from_single_device_arrays(shape, sharding, list(arrays))


def _device_kind(sharding: Sharding) -> str:
    return next(iter(sharding.addressable_devices)).default_memory().kind


def _in_device_memory(move: Move) -> Any:
    x = move.value
    kind = _device_kind(x.sharding)
    return x if x.sharding.memory_kind == kind else jax.device_put(x, x.sharding.with_memory_kind(kind))


def two_hops(moves: Sequence[Move]) -> None:
    """``device_put`` by way of device memory: it cannot change the devices' order and leave host memory in one go."""
    sources = [_in_device_memory(m) for m in moves]
    hop = [dataclasses.replace(m, want=m.want.with_memory_kind(_device_kind(m.want)), donate=False) for m in moves]
    _put(hop, sources)
    _finish(moves, [h.result for h in hop])


def _finish(moves: Sequence[Move], results: Sequence[Any]) -> None:
    """Bring results from device memory to the memory that is wanted, and give up the sources."""
    elsewhere = [i for i, (m, r) in enumerate(zip(moves, results, strict=True)) if r.sharding != m.want]
    moved = jax.device_put([results[i] for i in elsewhere], [moves[i].want for i in elsewhere])
    there = dict(zip(elsewhere, moved, strict=True))
    for i, (move, result) in enumerate(zip(moves, results, strict=True)):
        move.result = there.get(i, result)
        if move.donate:
            move.value.delete()


@functools.lru_cache(maxsize=256)
def _identity(shardings: tuple[Sharding, ...]) -> Callable[..., Any]:
    def identity(*xs: jax.Array) -> tuple[jax.Array, ...]:
        return xs

    return jax.jit(identity, out_shardings=shardings)


def constrain_jit(moves: Sequence[Move]) -> None:
    """One compiled identity for the whole batch; collectives between the devices, nothing passes through the host."""
    through = tuple(m.want.with_memory_kind(_device_kind(m.want)) for m in moves)
    _finish(moves, _identity(through)(*map(_in_device_memory, moves)))


_EXECUTORS: dict[Route, Callable[[Sequence[Move]], None]] = {
    Route.FROM_HOST: _from_host,
    Route.CONSTRAIN: _within_process,
    Route.DEVICE_PUT: _within_process,
    Route.CONSTRAIN_JIT: constrain_jit,
}


def _default_place() -> Sharding:
    """Where ``jax.numpy`` puts a host array: replicated over the mesh of ``jax.set_mesh``, or on the default device."""
    mesh, _ = compat.context_meshes()
    if mesh is not None:
        return NamedSharding(mesh, PartitionSpec())
    with compat.no_context_mesh():
        return jnp.zeros(()).sharding


def check_traced_kind(memory_kind: str | None) -> None:
    """Raise `MemoryKindError` for a memory kind that compiled code cannot move to; None is the device's own."""
    if memory_kind not in (None, "device", "pinned_host"):
        raise MemoryKindError(
            f"compiled code cannot place arrays in memory kind {memory_kind!r}",
            fix="use 'device' or 'pinned_host', or move the arrays with shard before or after the compiled call",
        )


def change_memory(values: Sequence[Any], memory_kind: str) -> list[Any]:
    """The same arrays in another memory kind, on the same devices in the same shards; traced or not.

    One array in several places stays one. Host arrays go to the devices that ``jax.numpy`` would take, and
    ``jax.ShapeDtypeStruct``s get the sharding.

    Raises:
        MemoryKindError: Compiled code has no word for the memory kind.
    """
    distinct = {id(x): x for x in values}
    moved: dict[int, Any] = {}
    eager: dict[int, Any] = {}
    for key, x in distinct.items():
        if isinstance(x, jax.ShapeDtypeStruct):
            moved[key] = x.update(sharding=(x.sharding or _default_place()).with_memory_kind(memory_kind))
        elif not isinstance(x, Tracer):
            eager[key] = x
    staging = bool(eager) and compat.staging()
    if staging:
        eager = {}
    if traced := {k: x for k, x in distinct.items() if k not in moved and k not in eager}:
        check_traced_kind(memory_kind)
        for key, x in traced.items():
            if not isinstance(x, jax.Array):
                x = jnp.array(x, jax.dtypes.canonicalize_dtype(native(x.dtype)))
            moved[key] = jax.device_put(x, compat.space_of_kind(memory_kind))
    sources: dict[int, Any] = {}
    places: dict[int, Sharding] = {}
    for key, x in eager.items():
        if not isinstance(x, jax.Array):
            # By way of no device: what is to live in host memory may be too large for one.
            sources[key], places[key] = _own_copy(x), _default_place().with_memory_kind(memory_kind)
        elif x.sharding.memory_kind != memory_kind:
            sources[key], places[key] = x, x.sharding.with_memory_kind(memory_kind)
        else:
            moved[key] = x
    if sources:
        with compat.no_context_mesh():
            moved |= zip(sources, jax.device_put(list(sources.values()), list(places.values())), strict=True)
    return [moved[id(x)] for x in values]
