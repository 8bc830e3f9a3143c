"""PURE. Which byte ranges to read for the shards that this process needs, and how to coalesce them.

A request is a box of a `Part`'s atoms that some shard needs. Requests are cut where the set of them changes, coalesced
where reading a little more is cheaper than another read, and split so that no read takes more memory than a limit.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from namedshard._place.boxes import volume, whole
from namedshard._safetensors.layout import Atom, Part, flat_offset
from namedshard._types import Bounds

WASTE = 0.02
"""Of the bytes read, the share that no request needs, at most: once to fill rows, and once to coalesce ranges."""
SHORT_RUN = 32 * 1024
"""Bytes below which a run is better read with its neighbours and copied out than read on its own."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReadSettings:
    """How to read a kind of source: with how many threads, and at most how much at once.

    Ranges up to ``coalesce_below`` bytes are coalesced with their neighbors. Above ``max_runs`` runs of a tensor, its
    rows of up to ``row_bytes`` are read whole: there the operating system, or the latency of a request, makes many
    short reads slower than the bytes between them.
    """

    threads: int
    read_bytes: int
    coalesce_below: int
    max_runs: int
    row_bytes: int


LOCAL = ReadSettings(threads=4, read_bytes=4 << 20, coalesce_below=64 << 10, max_runs=16384, row_bytes=4096)
REMOTE = ReadSettings(threads=16, read_bytes=16 << 20, coalesce_below=16 << 20, max_runs=64, row_bytes=16 << 20)


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """A box to read at once, from byte ``start`` on. ``requests`` are the numbers of the requests that need some of it.

    Its bytes are runs of ``run_bytes`` that follow one another in the file, one for each index of the first ``outer``
    atoms.
    """

    box: Bounds
    requests: tuple[int, ...]
    start: int
    run_bytes: int
    outer: int

    @property
    def nbytes(self) -> int:
        """Bytes read for it."""
        return self.run_bytes * volume(self.box[: self.outer])

    @property
    def stop(self) -> int:
        """Where its bytes end, if they are contiguous."""
        return self.start + self.nbytes


Cover = list[tuple[Bounds, tuple[int, ...]]]
"""Disjoint boxes, each with the numbers of the requests that need it."""


def _cover(atoms: Sequence[Atom], requests: Sequence[tuple[int, Bounds]], itemsize: int, row_bytes: int) -> Cover:
    """What the requests need, cut where the set of them changes. Rows of at most ``row_bytes`` are taken whole."""
    if not atoms:
        return [((), tuple(number for number, _ in requests))]
    out: Cover = []
    edges = sorted({edge for _, box in requests for edge in box[0]})
    for lo, hi in itertools.pairwise(edges):
        active = [(number, box[1:]) for number, box in requests if box[0][0] <= lo and hi <= box[0][1]]
        if active:
            rows = _cover(atoms[1:], active, itemsize, row_bytes)
            if hi - lo > 1:
                rows = _widen_rows(atoms[1:], rows, itemsize, row_bytes)
            out += [(((lo, hi), *box), numbers) for box, numbers in rows]
    return out


def _widen_rows(atoms: Sequence[Atom], rows: Cover, itemsize: int, row_bytes: int) -> Cover:
    """The boxes to read of each of several rows: the whole row, or those needed with short neighbors coalesced."""
    row = whole(atom.extent for atom in atoms)
    size = volume(row)
    # Atoms with gaps between them fill no range of the tensor.
    if not atoms or _run(atoms, row)[0] < size:
        return rows
    needed = sum(volume(box) for box, _ in rows)
    shortest = min(_run(atoms, box)[0] for box, _ in rows) * itemsize
    worthwhile = needed >= size * (1 - WASTE) and (len(rows) == 1 or shortest < SHORT_RUN)
    if size * itemsize <= row_bytes or worthwhile:
        return [(row, tuple(sorted({number for _, numbers in rows for number in numbers})))]
    return _coalesce_runs(atoms, rows, itemsize)


def _coalesce_runs(atoms: Sequence[Atom], cover: Cover, itemsize: int) -> Cover:
    """Short runs that follow one another as one run, which several requests need."""
    rest = whole(atom.extent for atom in atoms[1:])
    out: Cover = []
    for box, numbers in cover:
        if out and box[1:] == rest == out[-1][0][1:] and out[-1][0][0][1] == box[0][0]:
            before, others = out[-1]
            if min(_run(atoms, box)[0], _run(atoms, before)[0]) * itemsize < SHORT_RUN:
                out[-1] = ((before[0][0], box[0][1]), *rest), tuple(sorted({*numbers, *others}))
                continue
        out.append((box, numbers))
    return out


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


def plan_chunks(
    part: Part, requests: Sequence[Bounds], itemsize: int, begin: int, settings: ReadSettings
) -> Iterator[Chunk]:
    """What to read of one tensor, whose bytes begin at ``begin`` in its file, for these requests of a part."""
    if not part.size or not requests:
        return
    atoms, numbered = part.atoms, list(enumerate(requests))
    cover = _cover(atoms, numbered, itemsize, 0)
    if sum(volume(box) // _run(atoms, box)[0] for box, _ in cover) > settings.max_runs:
        cover = _cover(atoms, numbered, itemsize, settings.row_bytes)
    for rows, numbers in cover:
        for box in _split(rows, settings.read_bytes // itemsize):
            run, outer = _run(atoms, box)
            start = begin + flat_offset(part, box) * itemsize
            yield Chunk(box, numbers, start, run * itemsize, outer)


def run_offsets(part: Part, chunk: Chunk, itemsize: int) -> list[int]:
    """Where in the file each run of a chunk begins, in the order of its box."""
    at = np.array(chunk.start, np.int64)
    for atom, (lo, hi) in zip(part.atoms[: chunk.outer], chunk.box[: chunk.outer], strict=True):
        at = at[..., None] + np.arange(hi - lo, dtype=np.int64) * (atom.stride * itemsize)
    return at.reshape(-1).tolist()


def coalesce(spans: Sequence[tuple[int, int]], settings: ReadSettings) -> Iterator[list[int]]:
    """Groups of neighboring spans (start and stop, in order) that are better read as one; numbers of the spans."""
    group: list[int] = []
    begin = useful = 0
    for i, (start, stop) in enumerate(spans):
        length = stop - begin
        fits = stop - start <= settings.coalesce_below and length <= settings.read_bytes
        if group and not (fits and length <= (useful + stop - start) * (1 + WASTE)):
            yield group
            group = []
        if not group:
            begin, useful = start, 0
        group.append(i)
        useful += stop - start
    if group:
        yield group
