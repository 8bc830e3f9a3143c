"""PURE. The rounds in which devices send each other pieces of their shards until each has what it is to have.

A piece is the overlap of a source shard and a target shard, so nothing is sent that need not be. A round is a partial
permutation of the devices, whose pieces have one shape, so that one program fits all devices.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence

from jax.sharding import Sharding

from namedshard._place.boxes import AnyDevice, Layout, layout_of, local_slices, shape_of, shards_in
from namedshard._types import Bounds

Pair = tuple[int, int]
Start = tuple[int, ...]

CHUNK_BYTES = 64 << 20
"""What a move may use on a device beyond source and target shards."""

_COPIES = 5
"""What is sent, what is received, and up to three copies that compilers make of it, as between slices."""

# Of the chunk sizes that fit, the one that sends the fewest rows twice is taken; twice as many chunks are no better.
_MOST_CHUNKS = 2

_TILE = 128
"""What devices keep together of a dimension: chunks are multiples of it where the piece is."""


@dataclasses.dataclass(frozen=True, slots=True)
class Round:
    """What each device cuts out of its shard, sends and writes.

    Attributes:
        pairs: (sender, receiver) positions; a device may keep its own piece.
        cut_at: For each sender where its piece starts in its source shard.
        write_at: For each receiver where the piece belongs in its target shard.
    """

    pairs: tuple[Pair, ...]
    cut_at: dict[int, Start]
    write_at: dict[int, Start]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Group:
    """The rounds whose pieces have one shape. They take place at once, a chunk of each piece at a time."""

    piece: tuple[int, ...]
    chunk: tuple[int, ...]
    rounds: tuple[Round, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of chunks along each dimension; the last may overlap the one before."""
        return tuple(-(-n // c) for n, c in zip(self.piece, self.chunk, strict=True))

    @property
    def elements(self) -> int:
        """The number of elements that a device sends at a time."""
        return len(self.rounds) * math.prod(self.chunk)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """How an array gets from one layout to another.

    Attributes:
        devices: All devices of both layouts; positions in rounds are positions here.
        steps: The groups that take place at once: all, in one chunk, or one after the other in several.
        whole: Each device's shard is what one device is to have: nothing is cut, and nothing to be put together.
    """

    devices: tuple[AnyDevice, ...]
    steps: tuple[tuple[Group, ...], ...]
    whole: bool

    @property
    def elements(self) -> int:
        """The most elements that a device sends at a time."""
        return max(sum(group.elements for group in step) for step in self.steps)


@functools.lru_cache(maxsize=4096)
def plan_between(have: Sharding, want: Sharding, shape: tuple[int, ...], itemsize: int) -> Plan:
    """The plan for an array that isn't empty, within `CHUNK_BYTES`."""
    return plan(layout_of(have, shape), layout_of(want, shape), CHUNK_BYTES // _COPIES // itemsize)


def transient_bytes(have: Sharding, want: Sharding, shape: tuple[int, ...], itemsize: int) -> int:
    """The most that the plan takes on a device beyond source and target shards."""
    return _COPIES * plan_between(have, want, shape, itemsize).elements * itemsize


def plan(source: Layout, target: Layout, most: int) -> Plan:
    """The rounds from a layout to another, of which a device sends about ``most`` elements at a time.

    A device keeps what it has. Else a device of its own process sends it, if one has it; holders of a box take turns.
    """
    receivers = {d for devices in target.holders.values() for d in devices}
    senders = {d for devices in source.holders.values() for d in devices}
    devices = tuple(sorted(senders | receivers, key=lambda d: (d not in receivers, d.process_index, d.id)))
    position = {d: i for i, d in enumerate(devices)}
    by_shape: dict[tuple[int, ...], list[tuple[Pair, Start, Start]]] = collections.defaultdict(list)
    for sender, receiver, box, had, wanted in _pieces(source, target):
        cut, write = (tuple(s.start for s in local_slices(box, within)) for within in (had, wanted))
        by_shape[shape_of(box)].append(((position[sender], position[receiver]), cut, write))
    groups = tuple(Group(shape, shape, _rounds(pieces)) for shape, pieces in by_shape.items())
    if sum(group.elements for group in groups) <= most:
        shapes = {shape_of(box) for box in (*source.holders, *target.holders)}
        alike = senders == receivers and shapes == by_shape.keys()
        return Plan(devices, (groups,), whole=alike and len(shapes) == len(groups[0].rounds) == 1)
    steps = tuple((dataclasses.replace(g, chunk=chunk_of(g.piece, max(1, most // len(g.rounds)))),) for g in groups)
    return Plan(devices, steps, whole=False)


def _pieces(source: Layout, target: Layout) -> Iterable[tuple[AnyDevice, AnyDevice, Bounds, Bounds, Bounds]]:
    """(sender, receiver, box, source box, target box) of every piece."""
    sent: collections.Counter[AnyDevice] = collections.Counter()
    for wanted, receivers in target.holders.items():
        for had, box in shards_in(source, wanted):
            holders = source.holders[had]
            for receiver in receivers:
                near = [d for d in holders if d.process_index == receiver.process_index]
                candidates = [receiver] if receiver in near else near or holders
                sender = min(candidates, key=lambda d: sent[d])
                sent[sender] += sender != receiver
                yield sender, receiver, box, had, wanted


def color_edges(pairs: Iterable[Pair]) -> list[int]:
    """The number of the round of each pair: in a round each device sends at most once, and receives at most once.

    A greedy edge coloring of the bipartite graph of senders and receivers.
    """
    numbers: list[int] = []
    sending: dict[int, int] = collections.defaultdict(int)
    receiving: dict[int, int] = collections.defaultdict(int)
    for sender, receiver in pairs:
        busy = sending[sender] | receiving[receiver]
        lowest_free = ~busy & (busy + 1)
        sending[sender] |= lowest_free
        receiving[receiver] |= lowest_free
        numbers.append(lowest_free.bit_length() - 1)
    return numbers


def _rounds(pieces: Sequence[tuple[Pair, Start, Start]]) -> tuple[Round, ...]:
    members: dict[int, list[tuple[Pair, Start, Start]]] = collections.defaultdict(list)
    for number, piece in zip(color_edges(pair for pair, _, _ in pieces), pieces, strict=True):
        members[number].append(piece)
    return tuple(
        Round(
            tuple(sorted(pair for pair, _, _ in found)),
            {sender: cut for (sender, _), cut, _ in found},
            {receiver: write for (_, receiver), _, write in found},
        )
        for found in members.values()
    )


def chunk_of(piece: tuple[int, ...], most: int) -> tuple[int, ...]:
    """The shape of the chunks of a piece, of at most so many elements."""
    chunk = list(piece)
    for d, n in enumerate(piece):
        row = math.prod(piece[d + 1 :])
        if n * row <= most:
            break
        fit = max(1, most // row)
        unit = math.gcd(n, _TILE, 1 << (fit.bit_length() - 1))
        units, fewest = n // unit, -(-(n // unit) // (fit // unit))
        sizes = {-(-units // count) for count in range(fewest, min(units, _MOST_CHUNKS * fewest) + 1)}
        chunk[d] = unit * min(sizes, key=lambda c: (-(-units // c) * c, -c))
    return tuple(chunk)
