"""EFFECTS. Moves arrays inside one process, batched over all the leaves that take the same route."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from namedshard import _jaxcompat as compat
from namedshard._errors import NarrowingError, at, count_of, message, warn_user
from namedshard._place import boxes
from namedshard._place.compiled import move_compiled
from namedshard._place.keys import like, raw, raw_sharding
from namedshard._place.route import Move, Route, on_cpus, placement_of, stays_on_devices, unreduced_axes
from namedshard._place.traced import change_traced_memory, constrain_traced
from namedshard._plan.leaves import jax_dtype
from namedshard._plan.mapping import plain_spec
from namedshard._plan.mesh import require_attached
from namedshard._types import Bounds


def run(work: Sequence[Move], *, manual: frozenset[str]) -> None:
    """Carry out checked moves, filling in each one's ``result``."""
    traced: list[Move] = []
    concrete: list[Move] = []
    for move in work:
        if move.route is Route.ANNOTATE:
            move.result = move.value.update(sharding=move.want)
        elif move.route is Route.KEEP:
            move.result = move.value
        else:
            (traced if move.route is Route.TRACED else concrete).append(move)
    if traced:
        constrain_traced(traced, manual)
    if concrete:
        with compat.no_context_mesh():
            _move(concrete)


def _move(work: Sequence[Move]) -> None:
    """On CPUs arrays are copied shard by shard, elsewhere devices send to each other."""
    from_host: list[Move] = []
    permuted: list[Move] = []
    rest: list[Move] = []
    for move in work:
        _sum(move)
        if _in_this_memory(move):
            _copy_shards(move)
        elif move.route is Route.FROM_HOST:
            from_host.append(move)
        else:
            (permuted if stays_on_devices(move.now, move.want, move.value.shape, move.route) else rest).append(move)
    if from_host:
        values = [m.value if isinstance(m.value, jax.Array) else _own(m.value) for m in from_host]
        _put(from_host, [m.want for m in from_host], values)
    if permuted:
        move_on_devices(permuted)
    if rest:
        # By way of device memory: `device_put` cannot change the devices' order and leave host memory at once.
        _put(rest, [_device_sharding(m.want) for m in rest], [m.value for m in rest])


def summed(x: jax.Array) -> jax.Array:
    """The array, or the sum of its parts where it is ``unreduced``: such shards are no parts of its values."""
    if not unreduced_axes(x.sharding):
        return x
    have: Any = x.sharding
    return _identity(NamedSharding(have.mesh, plain_spec(have.spec)))(_to_device_memory(x))


@functools.lru_cache(maxsize=256)
def _identity(sharding: Sharding) -> Any:
    return jax.jit(lambda x: x, out_shardings=sharding)


def _sum(move: Move) -> None:
    if isinstance(x := move.value, jax.Array) and (total := summed(x)) is not x:
        if move.donate:
            x.delete()
        move.value, move.now, move.donate = total, placement_of(total, staging=False), True


def _largest(value: Any) -> float:
    """The largest finite magnitude among floats, or among the parts of complex numbers."""
    parts = [np.abs(p) for p in ((value.real, value.imag) if value.dtype.kind == "c" else (value,))]
    return float(max(np.max(p, where=np.isfinite(p), initial=0) for p in parts))


def check_narrowing(leaves: Iterable[tuple[str, Any]], total: int) -> None:
    """Check (path, value)s: 64-bit integers that JAX would wrap are an error, floats that become infinite a warning."""
    lines: list[str] = []
    infinite: list[str] = []
    for path, value in leaves:
        if isinstance(value, jax.Array | jax.ShapeDtypeStruct) or value.dtype.kind not in "iufc" or not value.size:
            continue
        kept = jax_dtype(value.dtype)
        if kept.itemsize == value.dtype.itemsize:
            continue
        if value.dtype.kind in "iu":
            low, high = int(np.min(value)), int(np.max(value))
            info = np.iinfo(kept)
            if low < info.min or high > info.max:
                lines.append(f"{at(path)}: {value.dtype} values from {low} to {high} do not fit {kept}")
        elif (largest := _largest(value)) > float(np.finfo(kept).max):
            infinite.append(f"{at(path)}: {value.dtype} values up to {largest:.3g} are infinite in {kept}")
    if infinite:
        warn_user(message(f"{count_of(len(infinite), total)} overflow in 32 bits", infinite), RuntimeWarning)
    if lines:
        raise NarrowingError(
            f"{count_of(len(lines), total)} would be narrowed to wrong values",
            lines,
            fix='enable 64-bit types (jax.config.update("jax_enable_x64", True)), or cast them first',
        )


def shard_host_value(value: Any, want: NamedSharding) -> jax.Array:
    """A host array, or one that this process has whole, copied into this process's shards."""
    dtype = value.dtype if isinstance(value, jax.Array) else jax_dtype(value.dtype)
    with np.errstate(over="ignore"):
        return _copy(boxes.copies(value.shape, None, want), value.shape, dtype, want, [np.asarray(value)])


def _own(value: Any) -> np.ndarray:
    """A copy of a host array as JAX will hold it."""
    with np.errstate(over="ignore"):
        return np.array(value, dtype=jax_dtype(value.dtype), copy=True)


def _put(work: Sequence[Move], through: Sequence[NamedSharding], values: Sequence[Any]) -> None:
    """One ``device_put`` for all, never with its ``donate``: that deletes nothing, and crashes between two devices."""
    with compat.keeping_bits(v.dtype for v in values):
        held = [_to_device_memory(v) if isinstance(v, jax.Array) else v for v in values]
        sources = [_unshared(v, s) for v, s in zip(held, through, strict=True)]
        _finish(work, jax.device_put(sources, list(through)))


def _unshared(x: Any, want: NamedSharding) -> Any:
    """The array, or a copy where ``device_put`` would hand back a buffer of it, to be lost when it is donated."""
    if not isinstance(x, jax.Array) or x.sharding.memory_kind != want.memory_kind:
        return x
    have, wanted = (s.devices_indices_map(x.shape) for s in (x.sharding, want))
    return jnp.copy(x) if any(wanted.get(d) == index for d, index in have.items()) else x


def _copy(
    plan: boxes.Copies,
    shape: tuple[int, ...],
    dtype: Any,
    want: NamedSharding,
    values: Sequence[np.ndarray],
    *,
    weak: bool = False,
) -> jax.Array:
    """An array from shards of it in this host's memory: one copy, no whole array in between, nothing aliased."""
    if not plan.owners:
        return from_pieces(shape, dtype, want, {})
    pieces = boxes.aligned_empties(plan.shapes, dtype)
    for piece, into, source, out_of in plan.parts:
        pieces[piece][into] = values[source][out_of]
    return compat.put_shards(shape, dtype, want, {device: pieces[i] for device, i in plan.owners.items()}, weak)


def _copy_shards(move: Move) -> None:
    x = move.value
    if not isinstance(x, jax.Array):
        move.result = shard_host_value(x, move.want)
        return
    plan = boxes.copies(x.shape, x.sharding, move.want)
    shards = compat.shards_of(x)
    values = [np.asarray(shards[i]) for i in plan.readers]
    move.result = _copy(plan, x.shape, x.dtype, move.want, values, weak=x.weak_type)
    if move.donate:
        x.delete()


def _in_this_memory(move: Move) -> bool:
    """True if this host's own memory holds all of source and result, and numpy can carry it over."""
    x = move.value
    if isinstance(x, jax.Array) and compat.is_key_array(x):
        return False
    # Compilers forget where arrays without elements belong.
    return not x.size or (on_cpus(move.want) and (not isinstance(x, jax.Array) or on_cpus(x.sharding)))


@compat.explicit_transfers()
def from_pieces(
    shape: tuple[int, ...], dtype: Any, sharding: Sharding | None, pieces: Mapping[Bounds, Any]
) -> jax.Array:
    """An array of pieces that are given up for it; those made by `boxes.aligned_empty` are taken over by CPU devices.

    The pieces are host arrays or lists that `onto_devices` made. ``sharding`` None is the default device, uncommitted,
    with one piece.
    """
    with compat.no_context_mesh():
        if on_devices := [x for piece in pieces.values() if isinstance(piece, list) for x in piece]:
            found: list[jax.Array] = on_devices
            return found[0] if sharding is None else jax.make_array_from_single_device_arrays(shape, sharding, found)
        if sharding is None:
            return jax.device_put(next(iter(pieces.values())))
        held = boxes.device_boxes(shape, sharding)
        if not held:
            return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)
        return compat.put_shards(shape, dtype, sharding, {d: pieces[box] for d, box in held.items()})


def onto_devices(
    shape: tuple[int, ...], sharding: Sharding | None, bounds: Bounds, piece: np.ndarray
) -> list[jax.Array]:
    """One piece on each of this process's devices that it belongs to."""
    with compat.no_context_mesh():
        if sharding is None:
            return [jax.device_put(piece)]
        devices = [d for d, box in boxes.device_boxes(shape, sharding).items() if box == bounds]
        places = [SingleDeviceSharding(d, memory_kind=sharding.memory_kind) for d in devices]
        return jax.device_put([piece] * len(places), places)


def device_kind(sharding: Sharding) -> str:
    """The memory that arrays on this process's devices go to unless told otherwise; its own kind where it has none."""
    here = next(iter(sharding.addressable_devices), None)
    return here.default_memory().kind if here else sharding.memory_kind or "device"


def _device_sharding(want: NamedSharding) -> NamedSharding:
    return want.with_memory_kind(device_kind(want))


def _to_device_memory(x: jax.Array) -> jax.Array:
    kind = device_kind(x.sharding)
    return x if x.sharding.memory_kind == kind else jax.device_put(x, x.sharding.with_memory_kind(kind))


def _finish(work: Sequence[Move], results: Sequence[jax.Array]) -> None:
    """Move results to the memory that is wanted, and delete the sources that are given up."""
    for move, result in zip(work, _in_memory(results, [m.want for m in work]), strict=True):
        move.result = result
        if move.donate:
            move.value.delete()


def _in_memory(results: Sequence[jax.Array], wanted: Sequence[NamedSharding]) -> list[jax.Array]:
    elsewhere = [i for i, (r, want) in enumerate(zip(results, wanted, strict=True)) if r.sharding != want]
    moved = jax.device_put([results[i] for i in elsewhere], [wanted[i] for i in elsewhere])
    there = dict(zip(elsewhere, moved, strict=True))
    return [there.get(i, result) for i, result in enumerate(results)]


def move_on_devices(work: Sequence[Move], wait: Callable[[Any], object] = jax.block_until_ready) -> None:
    """By compiled programs, from device to device; nothing passes through the host."""
    with compat.keeping_bits(m.value.dtype for m in work):
        sources = [_to_device_memory(raw(m.value)) for m in work]
        wanted = [raw_sharding(m.value, m.want) for m in work]
        moved = move_compiled(sources, list(map(_device_sharding, wanted)), wait)
        there = _in_memory(moved, wanted)
        for move, x in zip(work, there, strict=True):
            move.result = like(move.value, x)
            if move.donate:
                move.value.delete()


# --- memory kinds -----------------------------------------------------------------------------------------------------


def _default_sharding() -> Sharding:
    """Where ``jax.numpy`` puts a host array: replicated over the mesh of ``jax.set_mesh``, or on the default device."""
    mesh, _ = compat.context_meshes()
    if mesh is not None:
        return NamedSharding(mesh, PartitionSpec())
    with compat.no_context_mesh():
        return jnp.zeros(()).sharding


@compat.explicit_transfers()
def change_memory(values: Sequence[Any], memory_kind: str, unplaced: Sharding | None = None) -> list[Any]:
    """The same arrays in another memory kind, on the same devices in the same shards; traced or not.

    One array in several places stays one. Host arrays and uncommitted ones go to ``unplaced``, by default the devices
    that ``jax.numpy`` would take, and ``jax.ShapeDtypeStruct``s get the sharding.
    """
    staging = compat.staging()
    moved: dict[int, Any] = {}
    eager: dict[int, tuple[Any, Sharding]] = {}
    for key, x in {id(x): x for x in values}.items():
        now = placement_of(x, staging)
        if now.kind == "abstract":
            moved[key] = x.update(sharding=(x.sharding or _default_sharding()).with_memory_kind(memory_kind))
        elif now.kind == "traced":
            moved[key] = change_traced_memory(x, memory_kind)
        elif now.kind == "host":
            # By way of no device: what is to live in host memory may be too large for one.
            eager[key] = _own(x), (unplaced or _default_sharding()).with_memory_kind(memory_kind)
        elif now.memory_kind == memory_kind:
            moved[key] = x
        else:
            sharding = x.sharding if now.committed else unplaced or _default_sharding()
            eager[key] = x, sharding.with_memory_kind(memory_kind)
    require_attached("offload", *{getattr(sharding, "mesh", None) for _, sharding in eager.values()})
    if eager:
        with compat.no_context_mesh(), compat.keeping_bits(x.dtype for x, _ in eager.values()):
            results = jax.device_put([x for x, _ in eager.values()], [sharding for _, sharding in eager.values()])
        moved |= zip(eager, results, strict=True)
    return [moved[id(x)] for x in values]


def relabelled(x: jax.Array, memory_kind: str) -> jax.Array:
    """An array whose sharding names another memory kind than the one that its shards are in."""
    shards = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding.with_memory_kind(memory_kind), shards)
