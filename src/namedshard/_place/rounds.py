"""PURE. The rounds in which devices exchange pieces of their shards until each has what it is to have.

A piece is the overlap of a source shard and a target shard, so nothing is sent that need not be. A round is a partial
permutation of the devices, whose pieces have one shape, so that one program fits all devices.
"""

import collections
import dataclasses
from collections.abc import Iterable, Sequence

from namedshard._place.boxes import local_slices, overlap, shape_of
from namedshard._types import Bounds

Pair = tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Round:
    """What each device cuts out of its shard, sends and writes.

    Attributes:
        shape: The shape of every piece.
        pairs: (sender, receiver) positions; a device may keep its own piece.
        cut_at: For each device where its piece starts in its source shard; zeros where it sends none.
        write_at: For each device where the piece belongs in its target shard; zeros where it receives none.
    """

    shape: tuple[int, ...]
    pairs: tuple[Pair, ...]
    cut_at: tuple[tuple[int, ...], ...]
    write_at: tuple[tuple[int, ...], ...]


def plan(source: Sequence[Bounds], target: Sequence[Bounds], processes: Sequence[int]) -> tuple[Round, ...]:
    """The rounds from each device's source box to its target box; ``processes`` tells whose devices they are.

    A device keeps what it has. Else a device of its own process sends it, if one has it; holders of a box take turns.
    """
    pieces = _pieces(source, target, processes)
    by_shape: dict[tuple[int, ...], list[tuple[Pair, Bounds]]] = collections.defaultdict(list)
    for pair, box in pieces:
        by_shape[shape_of(box)].append((pair, box))
    found: list[Round] = []
    for shape, group in by_shape.items():
        members: dict[int, list[tuple[Pair, Bounds]]] = collections.defaultdict(list)
        for number, piece in zip(color_edges(pair for pair, _ in group), group, strict=True):
            members[number].append(piece)
        found += [_round(shape, pieces, source, target) for pieces in members.values()]
    return tuple(found)


def _pieces(source: Sequence[Bounds], target: Sequence[Bounds], processes: Sequence[int]) -> list[tuple[Pair, Bounds]]:
    holders: dict[Bounds, list[int]] = collections.defaultdict(list)
    for device, box in enumerate(source):
        holders[box].append(device)
    sent: collections.Counter[int] = collections.Counter()
    pieces: list[tuple[Pair, Bounds]] = []
    for receiver, wanted in enumerate(target):
        for box, devices in holders.items():
            if (shared := overlap(box, wanted)) is None:
                continue
            near = [d for d in devices if processes[d] == processes[receiver]]
            candidates = [receiver] if receiver in devices else near or devices
            sender = min(candidates, key=lambda d: (sent[d], d))
            sent[sender] += sender != receiver
            pieces.append(((sender, receiver), shared))
    return pieces


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


def _round(
    shape: tuple[int, ...],
    members: Sequence[tuple[Pair, Bounds]],
    source: Sequence[Bounds],
    target: Sequence[Bounds],
) -> Round:
    nowhere = (0,) * len(shape)
    cut_at, write_at = [nowhere] * len(source), [nowhere] * len(target)
    for (sender, receiver), box in members:
        cut_at[sender] = tuple(s.start for s in local_slices(box, source[sender]))
        write_at[receiver] = tuple(s.start for s in local_slices(box, target[receiver]))
    return Round(shape, tuple(sorted(pair for pair, _ in members)), tuple(cut_at), tuple(write_at))
