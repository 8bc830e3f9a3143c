"""PURE. Which piece of which array goes from which device to which, and in what steps.

Pieces are the overlaps of source shards and target shards, so nothing moves that need not. All that one device sends
to another is a stream of bytes; streams advance together, a slot of a fixed number of bytes at a time. A round is a
partial permutation of the devices, in which each sends at most one slot and receives at most one.
"""

import bisect
import collections
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

from namedshard._place.boxes import AnyDevice, Layout, shards_in, volume
from namedshard._place.rounds import Pair, color_edges
from namedshard._types import Bounds

ALIGNMENT = 16
SMALLEST_SLOT = 1 << 12
# Devices that hold the same box take turns in sending it; so many different plans are kept for one pair of layouts.
TURNS = 8

# What is sent, what is received, and three times as much for allocators: their threads do not hand memory back at once.
_SHARES = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A box of an array, from the shard that has it to the shard that wants it."""

    box: Bounds
    source: AnyDevice
    source_box: Bounds
    target: AnyDevice
    target_box: Bounds

    @property
    def crosses(self) -> bool:
        """Whether it goes from one process to another."""
        return self.source.process_index != self.target.process_index


def pieces_between(source: Layout, target: Layout, turn: int = 0) -> Iterator[Piece]:
    """The pieces that bring an array from a layout to another; each process receives each of its boxes once.

    A process takes what it holds itself. Other holders of the same box take turns, beginning with the ``turn``-th.
    """
    asked: dict[Bounds, int] = collections.defaultdict(lambda: turn)
    for box, devices in target.holders.items():
        receivers: dict[int, AnyDevice] = {}
        for device in devices:
            receivers.setdefault(device.process_index, device)
        for process, receiver in receivers.items():
            for source_box, shared in shards_in(source, box):
                holders = source.holders[source_box]
                sender = next((d for d in holders if d.process_index == process), None)
                if sender is None:
                    sender = holders[asked[source_box] % len(holders)]
                    asked[source_box] += 1
                yield Piece(shared, sender, source_box, receiver, box)


@dataclasses.dataclass(frozen=True, eq=False)
class _Between:
    """One array's pieces that concern a process, each with its bytes, and what all processes exchange for it."""

    mine: tuple[tuple[Piece, int], ...]
    crossing: Mapping[tuple[AnyDevice, AnyDevice], int]


# A model has many arrays and few ways in which they move.
@functools.lru_cache(maxsize=256)
def _between(source: Layout, target: Layout, turn: int, itemsize: int, process: int) -> _Between:
    mine: list[tuple[Piece, int]] = []
    crossing: dict[tuple[AnyDevice, AnyDevice], int] = collections.defaultdict(int)
    for piece in pieces_between(source, target, turn):
        size = -(-volume(piece.box) * itemsize // ALIGNMENT) * ALIGNMENT
        if process in (piece.source.process_index, piece.target.process_index):
            mine.append((piece, size))
        if piece.crosses:
            crossing[piece.source, piece.target] += size
    return _Between(tuple(mine), crossing)


@dataclasses.dataclass(frozen=True, slots=True)
class Fragment:
    """The part of a piece that is in one slot: a box of the piece's array, and where its bytes are in the slot."""

    leaf: int
    piece: Piece
    box: Bounds
    offset: int


class Stream:
    """Pieces of arrays one after the other, each padded to `ALIGNMENT` bytes."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, Piece, int]] = []
        self._starts: list[int] = []
        self.bytes = 0

    def add(self, leaf: int, piece: Piece, itemsize: int, size: int) -> None:
        """Append a piece of an array with elements of ``itemsize`` bytes; ``size`` is padded."""
        self.pieces.append((leaf, piece, itemsize))
        self._starts.append(self.bytes)
        self.bytes += size

    def between(self, start: int, stop: int) -> Iterator[Fragment]:
        """What is in the bytes from ``start`` to ``stop``, which are multiples of `ALIGNMENT`."""
        for i in range(max(0, bisect.bisect_right(self._starts, start) - 1), len(self.pieces)):
            leaf, piece, itemsize = self.pieces[i]
            at = self._starts[i]
            if at >= stop:
                return
            first = max(0, start - at) // itemsize
            last = min(volume(piece.box), (stop - at) // itemsize)
            for begin, box in flat_range(piece.box, first, last):
                yield Fragment(leaf, piece, box, at + begin * itemsize - start)


def flat_range(box: Bounds, first: int, last: int) -> Iterator[tuple[int, Bounds]]:
    """The elements ``first`` to ``last`` of a box, in C order, as (number of its first element, box)es."""
    if first >= last:
        return
    if not box:
        yield 0, ()
        return
    (low, _), rest = box[0], box[1:]
    row = volume(rest)
    top, bottom = -(-first // row), last // row
    if top > bottom:  # within one row
        yield from _in_row(low, rest, bottom, first - bottom * row, last - bottom * row)
        return
    if first < top * row:
        yield from _in_row(low, rest, top - 1, first - (top - 1) * row, row)
    if top < bottom:
        yield top * row, ((low + top, low + bottom), *rest)
    if bottom * row < last:
        yield from _in_row(low, rest, bottom, 0, last - bottom * row)


def _in_row(low: int, rest: Bounds, index: int, first: int, last: int) -> Iterator[tuple[int, Bounds]]:
    for begin, box in flat_range(rest, first, last):
        yield index * volume(rest) + begin, ((low + index, low + index + 1), *box)


@dataclasses.dataclass(frozen=True, slots=True)
class Phase:
    """Steps in which the same devices send to the same devices, in rounds of (sender, receiver) positions.

    In each of the ``steps`` a stream advances by ``slot_bytes``; earlier phases have sent its first ``start`` bytes.
    """

    rounds: tuple[tuple[Pair, ...], ...]
    slot_bytes: int
    start: int
    steps: int


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """What is exchanged when between ``devices``; the same on every process, except what is a process's own.

    Its own are the (leaf, piece)s that stay in it (``local``), and the ``streams`` that it sends and receives, by
    (sender, receiver) positions in ``devices``. ``crossing_bytes`` is what all processes together must send.
    """

    devices: tuple[AnyDevice, ...]
    phases: tuple[Phase, ...]
    local: tuple[tuple[int, Piece], ...]
    streams: Mapping[Pair, Stream]
    crossing_bytes: int


def schedule(changes: Sequence[tuple[Layout, Layout, int]], process: int, budget: int) -> Schedule:
    """The exchange that carries out changes (layout, wanted layout, itemsize), with one process's pieces and streams.

    Of the ``budget`` of bytes that a process may use, slots, sent and received together, take a quarter.
    """
    turns: collections.Counter[tuple[Layout, Layout]] = collections.Counter()
    kinds: collections.Counter[_Between] = collections.Counter()
    leaves: list[_Between] = []
    for source, target, itemsize in changes:
        turn = turns[source, target] % min(TURNS, source.copies)
        between = _between(source, target, turn, itemsize, process)
        turns[source, target] += 1
        kinds[between] += 1
        leaves.append(between)
    sizes: dict[tuple[AnyDevice, AnyDevice], int] = collections.defaultdict(int)
    for between, count in kinds.items():
        for devices, size in between.crossing.items():
            sizes[devices] += count * size
    devices = tuple(sorted({d for pair in sizes for d in pair}, key=lambda d: (d.process_index, d.id)))
    position = {d: i for i, d in enumerate(devices)}
    local: list[tuple[int, Piece]] = []
    streams: dict[Pair, Stream] = collections.defaultdict(Stream)
    for leaf, between in enumerate(leaves):
        for piece, size in between.mine:
            if piece.crosses:
                pair = position[piece.source], position[piece.target]
                streams[pair].add(leaf, piece, changes[leaf][2], size)
            else:
                local.append((leaf, piece))
    crowd = max(collections.Counter(d.process_index for d in devices).values(), default=1)
    phases = _phases({(position[s], position[t]): size for (s, t), size in sizes.items()}, budget // crowd)
    return Schedule(devices, phases, tuple(local), streams, sum(sizes.values()))


def _phases(sizes: Mapping[Pair, int], budget: int) -> tuple[Phase, ...]:
    """Phases that together are as long as each stream, with ``budget`` bytes a device.

    A stream that is at its end sends padding, so a phase ends where half of its streams do, unless that saves little.
    """
    phases: list[Phase] = []
    start = 0
    while active := sorted((pair for pair, size in sizes.items() if size > start), key=lambda p: (-sizes[p], p)):
        left = [sizes[pair] - start for pair in active]
        length = left[0] if len(left) * left[0] <= 1.25 * sum(left) else left[len(left) // 2]
        rounds = _rounds(active)
        most = max(SMALLEST_SLOT, budget // (_SHARES * len(rounds)) // ALIGNMENT * ALIGNMENT)
        slot_bytes = min(most, max(SMALLEST_SLOT, _rounded(-(-length // -(-length // most)))))
        steps = -(-length // slot_bytes)
        phases.append(Phase(rounds, slot_bytes, start, steps))
        start += steps * slot_bytes
    return tuple(phases)


def _rounds(pairs: Sequence[Pair]) -> tuple[tuple[Pair, ...], ...]:
    rounds: dict[int, list[Pair]] = collections.defaultdict(list)
    for number, pair in zip(color_edges(pairs), pairs, strict=True):
        rounds[number].append(pair)
    return tuple(tuple(sorted(members)) for members in rounds.values())


def _rounded(size: int) -> int:
    """Up to one of eight steps between powers of two: few different programs, at most an eighth of padding."""
    unit = max(ALIGNMENT, 1 << max(0, (size - 1).bit_length() - 3))
    return -(-size // unit) * unit
