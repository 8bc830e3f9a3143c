"""EFFECTS. Moves that involve several processes.

On CPUs all of them go through `exchange`: pieces travel straight from the shard that has them to the shard that wants
them, in slots of bounded size. Elsewhere the compiler's collectives are used where source and target have the same
devices, and `exchange` where they do not.
"""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from namedshard import _exchange as ex
from namedshard import _jaxcompat as compat
from namedshard import _moves as moves
from namedshard._route import Route
from namedshard._sync import Line, agree, refuse_local

CHUNK_BYTES = 64 << 20
"""What `shard` may use per device beyond source and target shards."""


def processes_of(move: moves.Move) -> frozenset[int]:
    """The processes that own devices of a move's source or target."""
    devices = set(move.want.device_set)
    if move.now.kind == "array" and move.now.committed and move.now.sharding is not None:
        devices |= move.now.sharding.device_set
    return frozenset(d.process_index for d in devices)


def run(work: Sequence[moves.Move]) -> list[moves.Move]:
    """Carry out the moves that involve other processes; returns the rest, which are this process's own affair."""
    me = jax.process_index()
    spanning: list[moves.Move] = []
    own: list[moves.Move] = []
    for move in work:
        involved = processes_of(move)
        if move.route in (Route.ANNOTATE, Route.KEEP, Route.TRACED) or involved == {me}:
            own.append(move)
        elif len(involved) == 1:
            with compat.no_context_mesh():
                move.result = _rebuilt(move.value, move.want, {})
        else:
            spanning.append(move)
    if spanning:
        with compat.no_context_mesh():
            local = agree("shard", [_line(m) for m in spanning])
            refuse_local("shard", [spanning[i].path for i in sorted(local)])
            _run(spanning)
    return own


def _run(work: Sequence[moves.Move]) -> None:
    exchanged: list[moves.Move] = []
    for move in work:
        if move.route is Route.FROM_HOST:
            _from_host(move)
        elif move.route is Route.COLLECTIVE or moves.all_cpu(move.want.device_set):
            exchanged.append(move)
    compiled = [m for m in work if m.route is Route.CONSTRAIN_JIT and m not in exchanged]
    if compiled:
        moves.constrain_jit(compiled)
    reordered = [m for m in work if m.route is Route.DEVICE_PUT and m not in exchanged]
    if reordered:
        moves.two_hops(reordered)
    if exchanged:
        _exchange_moves(exchanged)


# --- the pieces themselves --------------------------------------------------------------------------------------------


def raw(x: jax.Array) -> jax.Array:
    """The array itself, or the integers under an array of typed keys."""
    return jax.random.key_data(x) if compat.is_key_array(x) else x


def _raw_sharding(x: jax.Array, want: NamedSharding) -> NamedSharding:
    extra = raw_ndim(x) - x.ndim
    spec = PartitionSpec(*want.spec, *[None] * (x.ndim - len(want.spec) + extra))
    return NamedSharding(want.mesh, spec, memory_kind=want.memory_kind) if extra else want


def raw_ndim(x: jax.Array) -> int:
    """Dimensions of the integers under an array of keys, else its own."""
    return raw(x).ndim


def _rebuilt(x: Any, want: NamedSharding, pieces: Mapping[moves.Bounds, np.ndarray]) -> jax.Array:
    """An array of pieces of this process, in the form (keys, weak type) that the source has."""
    if not isinstance(x, jax.Array):
        return moves.from_pieces(tuple(x.shape), jax.dtypes.canonicalize_dtype(moves.native(x.dtype)), want, pieces)
    base = raw(x)
    built = moves.from_pieces(base.shape, base.dtype, _raw_sharding(x, want), pieces)
    if compat.is_key_array(x):
        return jax.random.wrap_key_data(built, impl=jax.random.key_impl(x))
    return compat.as_weak(built) if x.weak_type else built


def _from_host(move: moves.Move) -> None:
    """Each process puts only its own shards of a value that all of them have."""
    x = move.value
    value = np.asarray(raw(x) if isinstance(x, jax.Array) else x)
    dtype = jax.dtypes.canonicalize_dtype(moves.native(value.dtype))
    want = _raw_sharding(x, move.want) if isinstance(x, jax.Array) else move.want
    pieces: dict[moves.Bounds, np.ndarray] = {}
    for index in want.addressable_devices_indices_map(value.shape).values():
        box = moves.bounds_of(index or (), value.shape)
        if box not in pieces:
            pieces[box] = moves.aligned_empty(tuple(b - a for a, b in box), dtype)
            moves.copy_overlap(pieces[box], box, value, tuple((0, n) for n in value.shape))
    move.result = _rebuilt(x, move.want, pieces)


def _exchange_moves(work: Sequence[moves.Move]) -> None:
    me = jax.process_index()
    arrays = [raw(m.value) for m in work]
    wanted = [_raw_sharding(m.value, m.want) for m in work]
    targets = [ex.layout_of(w, x.shape) for w, x in zip(wanted, arrays, strict=True)]
    buffers: dict[tuple[int, moves.Bounds], np.ndarray] = {}
    for i, (x, target) in enumerate(zip(arrays, targets, strict=True)):
        for box, devices in target.holders.items():
            if any(d.process_index == me for d in devices):
                buffers[i, box] = moves.aligned_empty(tuple(b - a for a, b in box), x.dtype)
    exchange(arrays, targets, buffers, CHUNK_BYTES)
    for i, move in enumerate(work):
        move.result = _rebuilt(move.value, move.want, {box: b for (n, box), b in buffers.items() if n == i})
        if move.donate:
            move.value.delete()


def _views(x: jax.Array) -> dict[jax.Device, Any]:
    """This process's shards; on CPUs as views of their memory."""
    on_cpu = moves.all_cpu(x.sharding.device_set)
    return {s.device: np.asarray(s.data) if on_cpu else s.data for s in x.addressable_shards}


def exchange(
    arrays: Sequence[jax.Array],
    targets: Sequence[ex.Layout],
    buffers: Mapping[tuple[int, moves.Bounds], np.ndarray],
    budget: int,
) -> None:
    """Fill this process's target boxes of global arrays; every process calls it with the same arrays and targets.

    Args:
        arrays: Global arrays (no typed keys).
        targets: For each, which devices want which box.
        buffers: For each array and target box of this process, memory to fill.
        budget: Bytes that a device may use for sending and receiving at a time.
    """
    me = jax.process_index()
    sent: dict[int, int] = {}
    pieces: list[ex.Piece] = []
    for i, (x, target) in enumerate(zip(arrays, targets, strict=True)):
        if x.size:
            pieces += ex.pieces_for(i, ex.layout_of(x.sharding, x.shape), target, x.dtype.itemsize, sent)
    crossing = [p for p in pieces if p.source.process_index != p.target.process_index]
    views: dict[int, dict[jax.Device, Any]] = {}

    def read(piece: ex.Piece) -> np.ndarray:
        if piece.leaf not in views:
            views[piece.leaf] = _views(arrays[piece.leaf])
        shard = views[piece.leaf][piece.source]
        return np.asarray(shard[ex.local_box(piece.box, piece.source_box)])

    def write(piece: ex.Piece, data: np.ndarray) -> None:
        buffers[piece.leaf, piece.target_box][ex.local_box(piece.box, piece.target_box)] = data

    for piece in pieces:
        if piece.source.process_index == piece.target.process_index == me:
            write(piece, read(piece))
    if not crossing:
        return
    plan = ex.schedule(crossing, [x.dtype.itemsize for x in arrays], budget)
    if not any(d.process_index == me for d in plan.devices):
        return
    program = _program(plan.devices, plan.rounds, plan.slot_bytes)
    for step in plan.slots:
        _run_step(plan, step, program, arrays, read, write)


def _slot(memory: np.ndarray, offset: int, piece: ex.Piece, dtype: Any) -> np.ndarray:
    shape = tuple(b - a for a, b in piece.box)
    size = ex.elements(piece.box) * dtype.itemsize
    return memory[offset : offset + size].view(dtype).reshape(shape)


def _run_step(
    plan: ex.Schedule, step: Mapping[tuple[int, int], Any], program: Any, arrays: Sequence[jax.Array], read: Any, write: Any
) -> None:
    rounds = {pair: r for r, pairs in enumerate(plan.rounds) for pair in pairs}
    shape = (len(plan.rounds), plan.slot_bytes)
    me = jax.process_index()
    outgoing = {
        i: moves.aligned_empty(shape, np.uint8) for i, d in enumerate(plan.devices) if d.process_index == me
    }
    for (sender, receiver), content in step.items():
        if sender in outgoing:
            for piece, offset in content:
                slot = outgoing[sender][rounds[sender, receiver]]
                _slot(slot, offset, piece, arrays[piece.leaf].dtype)[...] = read(piece)
    result = program(outgoing)
    for (sender, receiver), content in step.items():
        if receiver in outgoing:
            slot = result[receiver][rounds[sender, receiver]]
            for piece, offset in content:
                write(piece, _slot(slot, offset, piece, arrays[piece.leaf].dtype))


@functools.lru_cache(maxsize=64)
def _program(devices: tuple[jax.Device, ...], rounds: tuple[tuple[tuple[int, int], ...], ...], slot_bytes: int) -> Any:
    """One compiled step: every round a partial permutation of the devices' slots."""
    mesh = Mesh(np.array(devices), ("device",))
    sharding = NamedSharding(mesh, PartitionSpec("device"))
    count = len(rounds)

    def permute(slots: jax.Array) -> jax.Array:
        return jnp.stack([jax.lax.ppermute(slots[r], "device", pairs) for r, pairs in enumerate(rounds)])

    permuted = jax.jit(
        jax.shard_map(permute, mesh=mesh, in_specs=PartitionSpec("device"), out_specs=PartitionSpec("device")),
        donate_argnums=0,
    )

    def step(outgoing: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        pieces = {((i * count, (i + 1) * count), (0, slot_bytes)): memory for i, memory in outgoing.items()}
        slots = moves.from_pieces((len(devices) * count, slot_bytes), np.dtype(np.uint8), sharding, pieces)
        arrived = permuted(slots)
        position = {d: i for i, d in enumerate(devices)}
        return {position[s.device]: np.asarray(s.data) for s in arrived.addressable_shards}

    return step


# --- what each process says of a move -----------------------------------------------------------------------------------


def type_text(x: Any) -> str:
    """``"float32[8,16]"``."""
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def sharding_text(sharding: Sharding) -> str:
    """A sharding in words that are equal on two processes only if the shardings are."""
    devices = [d.id for d in compat.device_order(sharding)]
    if isinstance(sharding, NamedSharding):
        axes = dict(sharding.mesh.shape)
        return f"{sharding.spec} of {axes} on devices {devices} in {sharding.memory_kind}"
    kind = "device" if isinstance(sharding, SingleDeviceSharding) else type(sharding).__name__
    return f"{kind} {devices} in {sharding.memory_kind}"


def _line(move: moves.Move) -> Line:
    x = move.value
    target = sharding_text(move.want)
    if move.route is Route.FROM_HOST:
        value = np.asarray(raw(x) if isinstance(x, jax.Array) else x)
        digest = hashlib.blake2b(np.ascontiguousarray(value).tobytes(), digest_size=16).hexdigest()
        return Line(move.path, type_text(x), digest, target, host=True)
    return Line(move.path, type_text(x), sharding_text(x.sharding), target, local=x.is_fully_addressable)
