"""PURE. How a tensor of a file lies in a leaf of a tree: sliced, transposed, flattened or split, but always a copy.

A `Part` says it as two index maps of one box of atoms: where each atom goes in the leaf, and where in the tensor. Every
slice, transposition and reshape that a state dict makes of a leaf keeps that form.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from namedshard._place.boxes import shape_of, whole
from namedshard._types import Bounds


class Atom(NamedTuple):
    """``extent`` equal steps: ``leaf_step`` along dimension ``leaf_dim``, ``stride`` elements in the tensor."""

    extent: int
    leaf_dim: int
    leaf_step: int
    stride: int


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Elements that a tensor and a leaf share. Atoms are in the tensor's order, the slowest first.

    ``start`` is the first element's index in the leaf, ``offset`` its place in the flat tensor.
    """

    atoms: tuple[Atom, ...]
    start: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(atom.extent for atom in self.atoms)

    @property
    def whole(self) -> Bounds:
        """The box of all atoms."""
        return whole(atom.extent for atom in self.atoms)


def identity(shape: Sequence[int]) -> Part:
    """The tensor is the leaf."""
    strides = row_major(shape)
    atoms = (Atom(n, i, 1, s) for i, (n, s) in enumerate(zip(shape, strides, strict=True)) if n != 1)
    return Part(tuple(atoms), (0,) * len(shape), 0)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a C-ordered array."""
    out = list(itertools.accumulate(reversed(shape), lambda a, b: a * b, initial=1))
    return tuple(reversed(out[:-1]))


def layer_of(part: Part, dim: int, index: int) -> Part:
    """The part seen from a leaf with one more dimension, of which the tensor has the slice at one index."""
    atoms = (a._replace(leaf_dim=a.leaf_dim + (a.leaf_dim >= dim)) for a in part.atoms)
    start = (*part.start[:dim], index, *part.start[dim:])
    return Part(tuple(atoms), start, part.offset)


def _ranges(steps: Sequence[tuple[int, int]], lo: int, hi: int) -> Iterator[Bounds]:
    """Boxes of the atoms (extent, step; the longest step first) of one dimension that make up the indices lo to hi."""
    if not steps:
        if lo <= 0 < hi:
            yield ()
        return
    (extent, step), rest = steps[0], steps[1:]
    span = 1 + sum((e - 1) * s for e, s in rest)
    first, last = max(0, (lo - span) // step + 1), min(extent, -(-hi // step))
    full_first, full_last = max(first, -(-lo // step)), min(last, (hi - span) // step + 1)
    edges = range(first, last)
    if full_first < full_last:
        yield ((full_first, full_last), *((0, e) for e, _ in rest))
        edges = [*range(first, full_first), *range(full_last, last)]
    for i in edges:
        for box in _ranges(rest, lo - i * step, hi - i * step):
            yield ((i, i + 1), *box)


def _boxes(atoms: Sequence[tuple[int, int, int]], start: Sequence[int], bounds: Bounds) -> Iterator[Bounds]:
    """Boxes of the atoms (extent, dimension, step), disjoint, that make up the indices within the bounds."""
    order: list[int] = []
    per_dim: list[list[Bounds]] = []
    for dim, (lo, hi) in enumerate(bounds):
        mine = sorted((k for k, atom in enumerate(atoms) if atom[1] == dim), key=lambda k: -atoms[k][2])
        steps = [(atoms[k][0], atoms[k][2]) for k in mine]
        per_dim.append(list(_ranges(steps, lo - start[dim], hi - start[dim])))
        order += mine
    for choice in itertools.product(*per_dim):
        box = dict(zip(order, itertools.chain(*choice), strict=True))
        if all(lo < hi for lo, hi in box.values()):
            yield tuple(box[k] for k in range(len(atoms)))


def boxes_in(part: Part, bounds: Bounds) -> list[Bounds]:
    """Boxes of the part's atoms, disjoint, that cover what it has within the bounds of the leaf."""
    return list(_boxes([(a.extent, a.leaf_dim, a.leaf_step) for a in part.atoms], part.start, bounds))


def leaf_view(part: Part, box: Bounds, array: np.ndarray, origin: Sequence[int]) -> np.ndarray:
    """The elements of a box, as a view in the atoms' order of an array that holds the leaf from ``origin`` on."""
    at = [s - o for s, o in zip(part.start, origin, strict=True)]
    strides: list[int] = []
    for atom, (lo, _) in zip(part.atoms, box, strict=True):
        at[atom.leaf_dim] += lo * atom.leaf_step
        strides.append(array.strides[atom.leaf_dim] * atom.leaf_step)
    # The ellipsis keeps arrays of no dimensions arrays.
    corner = array[(*(slice(i, None) for i in at), ...)]
    # numpy cannot stride over some of the dtypes that it does not know by name, but over their bytes.
    plain = corner.view(f"u{array.itemsize}") if array.itemsize in (1, 2, 4, 8) else corner
    return np.lib.stride_tricks.as_strided(plain, shape_of(box), strides).view(array.dtype)


def leaf_bounds(part: Part, box: Bounds) -> Bounds:
    """The smallest box of the leaf that holds a box of the part's atoms."""
    out = [(at, at + 1) for at in part.start]
    for atom, (lo, hi) in zip(part.atoms, box, strict=True):
        a, b = out[atom.leaf_dim]
        out[atom.leaf_dim] = (a + lo * atom.leaf_step, b + (hi - 1) * atom.leaf_step)
    return tuple(out)


def flat_offset(part: Part, box: Bounds) -> int:
    """Where in the flat tensor a box begins."""
    return part.offset + sum(lo * atom.stride for atom, (lo, _) in zip(part.atoms, box, strict=True))


def covered(parts: Sequence[Part], shape: Sequence[int]) -> bool:
    """True if the parts hold every element of a leaf: one of them all by itself, or several without overlap."""
    size = math.prod(shape)
    if any(part.size == size for part in parts) or not size:
        return True
    return sum(part.size for part in parts) == size and _disjoint(parts, len(shape))


def _disjoint(parts: Sequence[Part], ndim: int) -> bool:
    boxes = [leaf_bounds(part, part.whole) for part in parts]
    return any(
        all(a[d][1] <= b[d][0] for a, b in itertools.pairwise(sorted(boxes, key=lambda box, d=d: box[d])))
        for d in range(ndim)
    ) or all(
        any(x[1] <= y[0] or y[1] <= x[0] for x, y in zip(a, b, strict=True))
        for a, b in itertools.combinations(boxes, 2)
    )


class NotACopy(Exception):
    """An operation makes of leaves what no `Part` can say. ``leaves`` are their numbers, as far as they are known."""

    leaves: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """A value computed from leaves by copying only: its shape, and the parts of leaves that fill it.

    ``parts`` holds (leaf number, part); ``scale`` is what every element was multiplied by.
    """

    shape: tuple[int, ...]
    parts: tuple[tuple[int, Part], ...]
    scale: float = 1.0

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def scaled(self, factor: float) -> "View":
        """Every element multiplied by a number."""
        if factor == 0 or not math.isfinite(factor):
            raise NotACopy(f"multiplied by {factor}, which cannot be undone")
        return dataclasses.replace(self, scale=self.scale * factor)

    def reshape(self, shape: Sequence[int]) -> "View":
        """The flat order stays, and with it every part."""
        return dataclasses.replace(self, shape=tuple(shape))

    def transpose(self, permutation: Sequence[int]) -> "View":
        """Dimension ``i`` of the result is dimension ``permutation[i]``."""
        shape = tuple(self.shape[i] for i in permutation)
        strides = dict(zip(permutation, row_major(shape), strict=True))
        return self._restride(shape, [strides[i] for i in range(len(shape))])

    def slice(self, start: Sequence[int], stop: Sequence[int]) -> "View":
        """Elements ``start[i]`` to ``stop[i]`` of each dimension."""
        bounds = tuple(zip(start, stop, strict=True))
        shape = shape_of(bounds)
        return self._restride(shape, row_major(shape), bounds=bounds)

    def shifted(self, shape: Sequence[int], at: Sequence[int]) -> "View":
        """This value as a corner of a larger one."""
        strides = row_major(shape)
        return self._restride(shape, strides, offset=sum(a * s for a, s in zip(at, strides, strict=True)))

    def _restride(
        self, shape: Sequence[int], strides: Sequence[int], bounds: Bounds | None = None, offset: int = 0
    ) -> "View":
        """What is within the bounds, with one stride for each dimension of this value, in a value of another shape."""
        bounds = bounds or whole(self.shape)
        parts = ((leaf, p) for leaf, part in self.parts for p in _restride(part, self.shape, strides, bounds, offset))
        return dataclasses.replace(self, shape=tuple(shape), parts=tuple(parts))


def concatenate(views: Sequence[View], dim: int) -> View:
    """Values one after the other along a dimension."""
    if len({view.scale for view in views}) > 1:
        raise NotACopy("concatenate of values with different scales")
    shape = list(views[0].shape)
    shape[dim] = sum(view.shape[dim] for view in views)
    parts: list[tuple[int, Part]] = []
    at = [0] * len(shape)
    for view in views:
        parts += view.shifted(shape, at).parts
        at[dim] += view.shape[dim]
    return View(tuple(shape), tuple(parts), views[0].scale)


def _by_dimension(part: Part, shape: Sequence[int], start: Sequence[int]) -> list[tuple[Atom, int, int]]:
    """(atom, tensor dimension it runs along, step along it); atoms that run over an edge between two are split."""
    out: list[tuple[Atom, int, int]] = []
    pending = list(part.atoms)
    strides = row_major(shape)
    while pending:
        atom = pending.pop()
        dim = next((d for d, (n, s) in enumerate(zip(shape, strides, strict=True)) if n > 1 and s <= atom.stride), None)
        if dim is None or atom.stride % strides[dim]:
            raise NotACopy("reshape across a slice")
        step = atom.stride // strides[dim]
        room = shape[dim] // step
        if atom.extent > room:
            if shape[dim] % step or atom.extent % room:
                raise NotACopy("reshape across a slice")
            pending.append(atom._replace(extent=room))
            pending.append(Atom(atom.extent // room, atom.leaf_dim, atom.leaf_step * room, atom.stride * room))
            continue
        out.append((atom, dim, step))
    for dim, n in enumerate(shape):
        if start[dim] + sum((atom.extent - 1) * step for atom, d, step in out if d == dim) >= max(n, 1):
            raise NotACopy("reshape across a slice")
    return out


def _restride(part: Part, shape: Sequence[int], strides: Sequence[int], bounds: Bounds, offset: int) -> Iterator[Part]:
    if not part.size:
        yield part
        return
    first = [part.offset // stride % n for n, stride in zip(shape, row_major(shape), strict=True)]
    placed = _by_dimension(part, shape, first)
    for box in _boxes([(atom.extent, dim, step) for atom, dim, step in placed], first, bounds):
        start = list(part.start)
        at = offset + sum((i - lo) * stride for i, (lo, _), stride in zip(first, bounds, strides, strict=True))
        atoms: list[Atom] = []
        for (atom, dim, step), (lo, hi) in zip(placed, box, strict=True):
            start[atom.leaf_dim] += lo * atom.leaf_step
            at += lo * step * strides[dim]
            atoms.append(Atom(hi - lo, atom.leaf_dim, atom.leaf_step, step * strides[dim]))
        kept = sorted((atom for atom in atoms if atom.extent != 1), key=lambda atom: -atom.stride)
        yield Part(tuple(kept), tuple(start), at)
