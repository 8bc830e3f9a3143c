"""PURE. Which bytes to read for the pieces of a leaf that this process needs, in which order and how joined.

A piece is a box of a `Part`'s atoms. Boxes are cut where the set of pieces that want them changes, joined where reading
a little more is cheaper than another request, and split so that none takes more memory than a limit.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from namedshard._safetensors.layout import Atom, Bounds, Part, flat_offset, volume

WASTE = 0.02
"""Of the bytes read, the part that may be read in vain: once to fill rows, and once to join neighbouring ranges."""
SHORT_RUN = 32 * 1024
"""Bytes below which a run is better read with its neighbours and copied out than read on its own."""


@dataclasses.dataclass(frozen=True, slots=True)
class Habits:
    """What suits a kind of source.

    How many threads read it, how large a read is at most, up to which size neighbours are joined, and above how many
    runs of a tensor its rows are read whole, up to which size of a row: there the operating system, or the time that a
    request takes, makes many short reads dearer than the bytes between them.
    """

    threads: int
    read_bytes: int
    join_below: int
    max_runs: int
    row_bytes: int


LOCAL = Habits(threads=4, read_bytes=4 << 20, join_below=64 << 10, max_runs=16384, row_bytes=4096)
REMOTE = Habits(threads=16, read_bytes=16 << 20, join_below=16 << 20, max_runs=64, row_bytes=16 << 20)


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """A box to read at once, from byte ``start`` on. ``pieces`` are the numbers of the pieces that want some of it.

    Its bytes are runs of ``run_bytes`` that follow one another in the file, one for each index of the first ``outer``
    atoms.
    """

    box: Bounds
    pieces: tuple[int, ...]
    start: int
    run_bytes: int
    outer: int

    @property
    def nbytes(self) -> int:
        """Bytes read for it."""
        return self.run_bytes * math.prod(b - a for a, b in self.box[: self.outer])


def _dense(atoms: Sequence[Atom]) -> bool:
    """True if the atoms fill a stretch of the tensor without holes."""
    expected = 1
    for atom in reversed(atoms):
        if atom.stride != expected:
            return False
        expected *= atom.extent
    return True


def _cover(
    atoms: Sequence[Atom], boxes: Sequence[tuple[int, Bounds]], itemsize: int, fill: int
) -> list[tuple[Bounds, tuple[int, ...]]]:
    """Disjoint boxes, each with the pieces that want it. Rows of at most ``fill`` bytes are taken whole."""
    if not atoms:
        return [((), tuple(piece for piece, _ in boxes))]
    out: list[tuple[Bounds, tuple[int, ...]]] = []
    cuts = sorted({edge for _, box in boxes for edge in box[0]})
    inner = atoms[1:]
    for lo, hi in itertools.pairwise(cuts):
        active = [(piece, box[1:]) for piece, box in boxes if box[0][0] <= lo and hi <= box[0][1]]
        if not active:
            continue
        below = _cover(inner, active, itemsize, fill)
        if hi - lo > 1 and inner and _dense(inner):
            row_bytes = math.prod(a.extent for a in inner) * itemsize
            if row_bytes <= fill or _better_whole(inner, below, itemsize):
                below = [(tuple((0, a.extent) for a in inner), tuple(sorted({piece for piece, _ in active})))]
            else:
                below = _neighbours_joined(inner, below, itemsize)
        out += [(((lo, hi), *box), pieces) for box, pieces in below]
    return out


def _neighbours_joined(
    atoms: Sequence[Atom], boxes: Sequence[tuple[Bounds, tuple[int, ...]]], itemsize: int
) -> list[tuple[Bounds, tuple[int, ...]]]:
    """Short runs that follow one another as one run, which several pieces want."""
    rest = tuple((0, a.extent) for a in atoms[1:])
    out: list[tuple[Bounds, tuple[int, ...]]] = []
    for box, pieces in boxes:
        if out and box[1:] == rest and out[-1][0][1:] == rest and out[-1][0][0][1] == box[0][0]:
            before, others = out[-1]
            if min(_run(atoms, box)[0], _run(atoms, before)[0]) * itemsize < SHORT_RUN:
                out[-1] = (((before[0][0], box[0][1]), *rest), tuple(sorted({*others, *pieces})))
                continue
        out.append((box, pieces))
    return out


def _better_whole(atoms: Sequence[Atom], boxes: Sequence[tuple[Bounds, tuple[int, ...]]], itemsize: int) -> bool:
    total = math.prod(a.extent for a in atoms)
    if sum(volume(box) for box, _ in boxes) < total * (1 - WASTE):
        return False
    return len(boxes) == 1 or min(_run(atoms, box)[0] for box, _ in boxes) * itemsize < SHORT_RUN


def _run(atoms: Sequence[Atom], box: Bounds) -> tuple[int, int]:
    """Elements that follow one another in the file, and the number of atoms outside of such a run."""
    run, k = 1, len(atoms)
    while k and atoms[k - 1].stride == run:
        k -= 1
        lo, hi = box[k]
        run *= hi - lo
        if hi - lo != atoms[k].extent:
            break
    while k and box[k - 1][1] - box[k - 1][0] == 1:
        k -= 1
    return run, k


def _split(box: Bounds, limit: int) -> Iterator[Bounds]:
    """Boxes of at most ``limit`` elements, cut along the slowest atoms, in the file's order."""
    if volume(box) <= max(limit, 1):
        yield box
        return
    dim = next(i for i, (lo, hi) in enumerate(box) if hi - lo > 1)
    lo, hi = box[dim]
    row = volume(box) // (hi - lo)
    step = max(1, limit // row)
    for at in range(lo, hi, step):
        part = (*box[:dim], (at, min(at + step, hi)), *box[dim + 1 :])
        yield from _split(part, limit)


def chunks(part: Part, pieces: Sequence[Bounds], itemsize: int, begin: int, habits: Habits) -> Iterator[Chunk]:
    """What to read of one tensor, which begins at byte ``begin`` of its file, for these pieces of a part."""
    if not part.size:
        return
    atoms, numbered = part.atoms, list(enumerate(pieces))
    boxes = _cover(atoms, numbered, itemsize, 0)
    if sum(volume(box) // _run(atoms, box)[0] for box, _ in boxes) > habits.max_runs:
        boxes = _cover(atoms, numbered, itemsize, habits.row_bytes)
    for whole, wanted in boxes:
        for box in _split(whole, habits.read_bytes // itemsize):
            run, outer = _run(atoms, box)
            start = begin + flat_offset(part, box) * itemsize
            yield Chunk(box, wanted, start, run * itemsize, outer)


def run_offsets(part: Part, chunk: Chunk, itemsize: int) -> list[int]:
    """Where in the file each run of a chunk begins, in the order of its box."""
    at = np.array(chunk.start, np.int64)
    for atom, (lo, hi) in zip(part.atoms[: chunk.outer], chunk.box[: chunk.outer], strict=True):
        at = at[..., None] + np.arange(hi - lo, dtype=np.int64) * (atom.stride * itemsize)
    return at.reshape(-1).tolist()


def joined(spans: Sequence[tuple[int, int]], habits: Habits) -> Iterator[list[int]]:
    """Groups of neighbouring spans (start and stop, in order) that are better read as one; numbers of the spans."""
    group: list[int] = []
    begin = end = useful = 0
    for i, (start, stop) in enumerate(spans):
        fits = group and stop - start <= habits.join_below and stop - begin <= habits.read_bytes
        if fits and stop - begin <= (useful + stop - start) * (1 + WASTE):
            group.append(i)
            useful += stop - start
            end = max(end, stop)
            continue
        if group:
            yield group
        group, begin, end, useful = [i], start, stop, stop - start
    if group:
        yield group
