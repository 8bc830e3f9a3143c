"""PURE. Which piece of which array goes from which device to which, and in what rounds.

Pieces are the overlaps of source shards and target shards, so nothing moves that need not. Those between processes are
packed into slots of a fixed number of bytes; a round is a partial permutation of the devices, so that each device
sends at most one slot and receives at most one (a greedy edge colouring of the bipartite graph of sender and receiver).
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Sharding

from namedshard._moves import Bounds, bounds_of

ALIGNMENT = 16
SMALLEST_SLOT = 1 << 12


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A box of one array, from the shard that has it to the shard that wants it."""

    leaf: int
    box: Bounds
    source: jax.Device
    source_box: Bounds
    target: jax.Device
    target_box: Bounds


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """Which devices hold which box of an array, and the grid that the boxes form."""

    holders: Mapping[Bounds, tuple[jax.Device, ...]]
    cuts: tuple[tuple[tuple[int, int], ...], ...]


def layout_of(sharding: Sharding, shape: tuple[int, ...]) -> Layout:
    """The layout of an array of a shape under a sharding, on all its devices."""
    return layout({d: bounds_of(index, shape) for d, index in sharding.devices_indices_map(shape).items()}, len(shape))


def layout(boxes: Mapping[jax.Device, Bounds], ndim: int) -> Layout:
    """The layout of given boxes, which must form a grid."""
    holders: dict[Bounds, list[jax.Device]] = collections.defaultdict(list)
    for device, box in boxes.items():
        holders[box].append(device)
    cuts = tuple(tuple(sorted({box[d] for box in holders})) for d in range(ndim))
    return Layout({box: tuple(devices) for box, devices in holders.items()}, cuts)


def _overlaps(source: Layout, box: Bounds) -> Iterator[tuple[Bounds, Bounds]]:
    """(source box, overlap) for each source shard that has part of a box."""
    per_dim = [
        [((lo, hi), (max(lo, a), min(hi, b))) for lo, hi in cuts if lo < b and hi > a]
        for cuts, (a, b) in zip(source.cuts, box, strict=True)
    ]
    for combination in itertools.product(*per_dim):
        yield tuple(c[0] for c in combination), tuple(c[1] for c in combination)


def elements(box: Bounds) -> int:
    """Number of elements in a box."""
    return math.prod(b - a for a, b in box)


def pieces_for(leaf: int, source: Layout, target: Layout, itemsize: int, sent: dict[int, int]) -> Iterator[Piece]:
    """The pieces that bring one array from a layout to another.

    Each process receives each of its boxes once. ``sent`` counts the bytes that each device sends so far, for choosing
    among devices that hold the same box.
    """
    for box, devices in target.holders.items():
        by_process: dict[int, list[jax.Device]] = collections.defaultdict(list)
        for device in devices:
            by_process[device.process_index].append(device)
        for process, receivers in by_process.items():
            for source_box, overlap in _overlaps(source, box):
                holders = source.holders[source_box]
                here = [d for d in holders if d.process_index == process]
                sender = here[0] if here else min(holders, key=lambda d: (sent.get(d.id, 0), d.id))
                if not here:
                    sent[sender.id] = sent.get(sender.id, 0) + elements(overlap) * itemsize
                yield Piece(leaf, overlap, sender, source_box, receivers[0], box)


def _split(box: Bounds, limit: int) -> Iterator[Bounds]:
    """Cut a box along its leading dimensions into boxes of at most ``limit`` elements."""
    total = elements(box)
    if total <= limit or total == 1:
        yield box
        return
    dim = next(d for d, (a, b) in enumerate(box) if b - a > 1)
    a, b = box[dim]
    row = total // (b - a)
    step = max(1, limit // row)
    for lo in range(a, b, step):
        part = (*box[:dim], (lo, min(b, lo + step)), *box[dim + 1 :])
        yield from _split(part, limit)


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """What is sent when.

    Attributes:
        devices: All senders and receivers, in one order for every process.
        rounds: For each round, the (sender, receiver) positions in ``devices``.
        slot_bytes: Bytes of a slot.
        slots: For each step and each (sender, receiver) position pair, the (piece, offset in the slot)s.
    """

    devices: tuple[jax.Device, ...]
    rounds: tuple[tuple[tuple[int, int], ...], ...]
    slot_bytes: int
    slots: tuple[Mapping[tuple[int, int], tuple[tuple[Piece, int], ...]], ...]


def _colour(pairs: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    rounds: list[tuple[list[tuple[int, int]], set[int], set[int]]] = []
    for pair in pairs:
        for members, senders, receivers in rounds:
            if pair[0] not in senders and pair[1] not in receivers:
                break
        else:
            members, senders, receivers = [], set[int](), set[int]()
            rounds.append((members, senders, receivers))
        members.append(pair)
        senders.add(pair[0])
        receivers.add(pair[1])
    return [sorted(members) for members, _, _ in rounds]


def _rounded(size: int) -> int:
    """Up to one of eight steps between powers of two: few different programs, at most an eighth of padding."""
    unit = max(ALIGNMENT, 1 << max(0, (size - 1).bit_length() - 3))
    return -(-size // unit) * unit


def schedule(pieces: Sequence[Piece], itemsizes: Sequence[int], budget: int) -> Schedule:
    """Rounds and slots for the pieces that cross processes.

    A device's slots, sent and received together, stay under ``budget`` bytes in each step.
    """
    devices = tuple(
        sorted({d for p in pieces for d in (p.source, p.target)}, key=lambda d: (d.process_index, d.id)),
    )
    position = {d: i for i, d in enumerate(devices)}
    streams: dict[tuple[int, int], list[Piece]] = collections.defaultdict(list)
    for piece in pieces:
        streams[position[piece.source], position[piece.target]].append(piece)

    def padded(box: Bounds, leaf: int) -> int:
        return -(-elements(box) * itemsizes[leaf] // ALIGNMENT) * ALIGNMENT

    size = {pair: sum(padded(p.box, p.leaf) for p in stream) for pair, stream in streams.items()}
    pairs = sorted(streams, key=lambda pair: (-size[pair], pair))
    rounds = _colour(pairs)
    most = max(SMALLEST_SLOT, budget // (2 * max(1, len(rounds))) // ALIGNMENT * ALIGNMENT)
    slot_bytes = min(most, max(SMALLEST_SLOT, _rounded(max(size.values(), default=0))))
    steps: list[dict[tuple[int, int], list[tuple[Piece, int]]]] = []
    for pair in pairs:
        step, used = 0, 0
        for piece in streams[pair]:
            for box in _split(piece.box, max(1, slot_bytes // itemsizes[piece.leaf])):
                need = padded(box, piece.leaf)
                if used + need > slot_bytes:
                    step, used = step + 1, 0
                while len(steps) <= step:
                    steps.append(collections.defaultdict(list))
                steps[step][pair].append((dataclasses.replace(piece, box=box), used))
                used += need
    slots = tuple({pair: tuple(content) for pair, content in step.items()} for step in steps)
    return Schedule(devices, tuple(map(tuple, rounds)), slot_bytes, slots)


def moved_bytes(pieces: Sequence[Piece], itemsizes: Sequence[int]) -> int:
    """Bytes that must cross between processes."""
    return sum(
        elements(p.box) * itemsizes[p.leaf] for p in pieces if p.source.process_index != p.target.process_index
    )


def local_box(box: Bounds, within: Bounds) -> tuple[slice, ...]:
    """A box of the array as an index into a shard that has it."""
    return tuple(slice(a - lo, b - lo) for (a, b), (lo, _) in zip(box, within, strict=True))


def itemsize_of(dtype: Any) -> int:
    """Bytes of one element on the host."""
    return dtype.itemsize
