"""EFFECTS. Moves that involve several processes.

On CPUs all of them go through `exchange`: pieces travel straight from the shard that has them to the shard that wants
them, in slots of bounded size. Elsewhere `compiled` programs do the same without leaving the devices.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from namedshard import _jaxcompat as compat
from namedshard._place import exchange as ex
from namedshard._place import local
from namedshard._place.boxes import Layout, aligned_empty, distinct_shards, layout_of, local_slices, shape_of, volume
from namedshard._place.keys import like, raw, raw_sharding, raw_type
from namedshard._place.reader import ShardReader
from namedshard._place.rounds import CHUNK_BYTES
from namedshard._place.route import Move, Route, stays_on_devices
from namedshard._plan.leaves import jax_dtype
from namedshard._processes.agreement import LeafDescription, agree, describe_leaf, fingerprint_sharding
from namedshard._processes.coordination import guard_exchange, run_watched, wait_for_processes
from namedshard._types import Bounds, Device


def _processes_of(move: Move) -> set[int]:
    devices = set(move.want.device_set)
    if move.now.kind == "array" and move.now.committed and move.now.sharding is not None:
        devices |= move.now.sharding.device_set
    return {d.process_index for d in devices}


def run(work: Sequence[Move], check_replicas: bool = True) -> list[Move]:
    """Carry out the moves that involve other processes; returns those that this process carries out alone.

    With ``check_replicas``, the copies of a replicated array are compared before each process keeps a part of its own.
    """
    me = jax.process_index()
    spanning: list[Move] = []
    elsewhere: list[Move] = []
    own: list[Move] = []
    for move in work:
        involved = _processes_of(move)
        if move.route in (Route.ANNOTATE, Route.KEEP, Route.TRACED) or involved == {me}:
            own.append(move)
        else:
            (elsewhere if len(involved) == 1 else spanning).append(move)
    with compat.no_context_mesh():
        if spanning:
            _run(spanning, check_replicas)
        # Sources that are given up go last: the call may fail before.
        for move in elsewhere:
            _finish(move, {})
    return own


def _run(work: Sequence[Move], check_replicas: bool) -> None:
    # Whatever can fail on one process alone comes before the others wait for it.
    ways: dict[Route, list[Move]] = collections.defaultdict(list)
    for move in work:
        ways[_way(move)].append(move)
    exchanged = ways[Route.COLLECTIVE]
    targets: list[Layout] = []
    buffers: list[dict[Bounds, np.ndarray]] = []
    for x, want in ((raw_type(m.value), raw_sharding(m.value, m.want)) for m in exchanged):
        targets.append(layout_of(want, x.shape))
        buffers.append({box: aligned_empty(shape_of(box), x.dtype) for box in distinct_shards(x.shape, want)})
    agree("shard", [_described(m, check_replicas) for m in work])
    permuted = ways[Route.PERMUTE]
    # This process has no part in moves between devices of which it has none.
    near = [m for m in permuted if m.value.sharding.addressable_devices or m.want.addressable_devices]
    with guard_exchange(bool(permuted or exchanged)):
        if near:
            local.move_on_devices(near, _wait_watched)
            _wait_watched([move.result for move in near])
        if exchanged:
            crowd = max(collections.Counter(d.process_index for d in jax.devices()).values())
            exchange([raw(m.value) for m in exchanged], targets, buffers, CHUNK_BYTES * crowd)
        elsewhere = [(m, {}) for m in permuted if m not in near]
        for move, pieces in [*zip(exchanged, buffers, strict=True), *elsewhere]:
            _finish(move, pieces)
    for move in ways[Route.FROM_HOST]:
        x = move.value
        move.result = like(x, local.shard_host_value(raw(x), raw_sharding(x, move.want)))
        if move.donate:
            x.delete()


def _described(move: Move, check_replicas: bool) -> LeafDescription:
    x, have = move.value, move.now.sharding
    if move.route is Route.FROM_HOST or have is None or not check_replicas:
        return describe_leaf(move.path, x, move.want, host=move.route is Route.FROM_HOST)
    everywhere = len({d.process_index for d in have.device_set}) == jax.process_count()
    if not (everywhere and have.is_fully_replicated) or move.want.is_fully_replicated:
        return describe_leaf(move.path, x, move.want)
    # JAX calls an array replicated, under jax.set_mesh, that each process made of values of its own.
    copy = np.asarray(compat.shards_of(raw(x))[0])
    described = describe_leaf(move.path, copy, move.want, host=True)
    return dataclasses.replace(described, aval=f"{x.dtype}{list(x.shape)} as {fingerprint_sharding(have)}")


def _wait_watched(arrays: Any) -> None:
    run_watched(lambda: jax.block_until_ready(arrays))


def _finish(move: Move, pieces: Mapping[Bounds, np.ndarray]) -> None:
    """Assemble the result from this process's pieces of it, and delete a source that is given up."""
    x = move.value
    base = raw_type(x)
    dtype = base.dtype if isinstance(x, jax.Array) else jax_dtype(base.dtype)
    move.result = like(x, local.from_pieces(tuple(base.shape), dtype, raw_sharding(x, move.want), pieces))
    if move.donate:
        x.delete()


def _way(move: Move) -> Route:
    """FROM_HOST, PERMUTE or COLLECTIVE."""
    if move.route is Route.FROM_HOST:
        return Route.FROM_HOST
    permuted = stays_on_devices(move.now, move.want, move.value.shape, move.route)
    return Route.PERMUTE if permuted else Route.COLLECTIVE


# --- the pieces themselves --------------------------------------------------------------------------------------------


def exchange(
    arrays: Sequence[jax.Array],
    targets: Sequence[Layout],
    buffers: Sequence[Mapping[Bounds, np.ndarray]],
    budget: int,
    reader: ShardReader | None = None,
) -> None:
    """Fill this process's target boxes of global arrays; every process calls it with the same arrays and targets.

    To be called within `guard_exchange`, with all that leads to it after the processes have agreed to the call. The
    arrays are no typed keys; ``buffers`` hold memory for each target box of this process; ``budget`` is the bytes that
    a process may use for sending and receiving at a time; what a ``reader`` uses is its own.
    """
    changes = [
        (layout_of(x.sharding, x.shape), target, x.dtype.itemsize) for x, target in zip(arrays, targets, strict=True)
    ]
    schedule = ex.schedule(changes, jax.process_index(), budget)
    shards: dict[int, dict[Device, Any]] = {}
    reader = reader or ShardReader(budget // 4)

    def read(leaf: int, piece: ex.Piece, box: Bounds) -> np.ndarray:
        if leaf not in shards:
            shards[leaf] = {s.device: s.data for s in arrays[leaf].addressable_shards}
        return reader.read(shards[leaf][piece.source], piece.source_box, box)

    def write(leaf: int, piece: ex.Piece, box: Bounds, data: np.ndarray) -> None:
        buffers[leaf][piece.target_box][local_slices(box, piece.target_box)] = data

    for leaf, piece in schedule.local:
        limit = max(budget, ex.SMALLEST_SLOT) // arrays[leaf].dtype.itemsize
        size = volume(piece.box)
        for first in range(0, size, limit):
            for _, box in ex.flat_range(piece.box, first, min(size, first + limit)):
                write(leaf, piece, box, read(leaf, piece, box))
    if schedule.streams or any(d.process_index == jax.process_index() for d in schedule.devices):
        wait_for_processes(schedule.devices)
        for phase in schedule.phases:
            _run_phase(schedule, phase, [x.dtype for x in arrays], read, write)


def _slot(memory: np.ndarray, fragment: ex.Fragment, dtype: Any) -> np.ndarray:
    size = volume(fragment.box) * dtype.itemsize
    return memory[fragment.offset : fragment.offset + size].view(dtype).reshape(shape_of(fragment.box))


def _run_phase(
    schedule: ex.Schedule, phase: ex.Phase, dtypes: Sequence[Any], read: Callable[..., Any], write: Callable[..., None]
) -> None:
    me = jax.process_index()
    program = _compile_rounds(schedule.devices, phase.rounds, phase.slot_bytes)
    mine = [i for i, d in enumerate(schedule.devices) if d.process_index == me]
    outgoing = [{i: aligned_empty((1, phase.slot_bytes), np.uint8) for i in mine} for _ in phase.rounds]
    for step in range(phase.steps):
        start = phase.start + step * phase.slot_bytes
        stop = start + phase.slot_bytes
        for slots, pairs in zip(outgoing, phase.rounds, strict=True):
            for sender, receiver in pairs:
                if sender in slots:
                    for f in schedule.streams[sender, receiver].between(start, stop):
                        _slot(slots[sender][0], f, dtypes[f.leaf])[...] = read(f.leaf, f.piece, f.box)
        for slots, pairs in zip(program(outgoing), phase.rounds, strict=True):
            for sender, receiver in pairs:
                if receiver in slots:
                    for f in schedule.streams[sender, receiver].between(start, stop):
                        write(f.leaf, f.piece, f.box, _slot(slots[receiver][0], f, dtypes[f.leaf]))
        slots = None  # or the next step's would come beside this one's


Slots = Sequence[Mapping[int, np.ndarray]]


@functools.lru_cache(maxsize=64)
def _compile_rounds(
    devices: tuple[Device, ...], rounds: tuple[tuple[ex.Pair, ...], ...], slot_bytes: int
) -> Callable[[Slots], Slots]:
    """One compiled step: in every round a partial permutation of the devices' slots."""
    mesh = Mesh(np.array(devices), ("device",))
    spec = PartitionSpec("device")
    sharding = NamedSharding(mesh, spec)
    position = {d: i for i, d in enumerate(devices)}

    # One array a round: stacked in one array, the slots would be copied once more.
    def permute(*slots: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jax.lax.ppermute(s, "device", pairs) for s, pairs in zip(slots, rounds, strict=True))

    permuted = jax.jit(jax.shard_map(permute, mesh=mesh, in_specs=spec, out_specs=spec))

    def step(outgoing: Slots) -> Slots:
        shape, dtype = (len(devices), slot_bytes), np.dtype(np.uint8)
        rows = [{((i, i + 1), (0, slot_bytes)): memory for i, memory in memories.items()} for memories in outgoing]
        slots = [local.from_pieces(shape, dtype, sharding, pieces) for pieces in rows]
        arrived = run_watched(lambda: jax.block_until_ready(permuted(*slots)))
        return [{position[s.device]: np.asarray(s.data) for s in x.addressable_shards} for x in arrived]

    return step
