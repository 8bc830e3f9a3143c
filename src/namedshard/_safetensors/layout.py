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


def boxes_in(part: Part, bounds: Bounds) -> list[Bounds]:
    """Boxes of the part's atoms, disjoint, that cover what it has within the bounds of the leaf."""
    per_dim: list[list[tuple[list[int], Bounds]]] = []
    for dim, (lo, hi) in enumerate(bounds):
        mine = [k for k, a in enumerate(part.atoms) if a.leaf_dim == dim]
        mine.sort(key=lambda k: -part.atoms[k].leaf_step)
        steps = [(part.atoms[k].extent, part.atoms[k].leaf_step) for k in mine]
        base = part.start[dim]
        per_dim.append([(mine, box) for box in _ranges(steps, lo - base, hi - base)])
    out: list[Bounds] = []
    for choice in itertools.product(*per_dim):
        box = [(0, 0)] * len(part.atoms)
        for mine, ranges in choice:
            for k, bound in zip(mine, ranges, strict=True):
                box[k] = bound
        if all(lo < hi for lo, hi in box):
            out.append(tuple(box))
    return out


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
        old, new = row_major(self.shape), row_major(shape)
        moved = {old_dim: new[i] for i, old_dim in enumerate(permutation)}
        parts = tuple((leaf, _restride(part, self.shape, old, moved)) for leaf, part in self.parts)
        return dataclasses.replace(self, shape=shape, parts=parts)

    def slice(self, start: Sequence[int], stop: Sequence[int]) -> "View":
        """Elements ``start[i]`` to ``stop[i]`` of each dimension."""
        shape = tuple(b - a for a, b in zip(start, stop, strict=True))
        old, new = row_major(self.shape), row_major(shape)
        parts: list[tuple[int, Part]] = []
        for leaf, part in self.parts:
            parts += ((leaf, p) for p in _narrow(part, self.shape, old, new, tuple(zip(start, stop, strict=True))))
        return dataclasses.replace(self, shape=shape, parts=tuple(parts))

    def shifted(self, shape: Sequence[int], at: Sequence[int]) -> "View":
        """This value as a corner of a larger one."""
        old, new = row_major(self.shape), row_major(shape)
        moved = dict(enumerate(new))
        extra = sum(a * s for a, s in zip(at, new, strict=True))
        parts: list[tuple[int, Part]] = []
        for leaf, part in self.parts:
            there = _restride(part, self.shape, old, moved)
            parts.append((leaf, dataclasses.replace(there, offset=there.offset + extra)))
        return dataclasses.replace(self, shape=tuple(shape), parts=tuple(parts))


def concatenate(views: Sequence[View], dim: int) -> View:
    """Values one after the other along a dimension.

    Raises:
        NotACopy: They were multiplied by different numbers.
    """
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


def _digits(offset: int, shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    return [(offset // stride) % n if n else 0 for n, stride in zip(shape, strides, strict=True)]


class _Placed(NamedTuple):
    atom: Atom
    dim: int
    step: int


def _by_dimension(part: Part, shape: Sequence[int], strides: Sequence[int]) -> list[_Placed]:
    """Each atom with the tensor dimension it runs along; atoms that run over an edge between two are split there."""
    out: list[_Placed] = []
    pending = list(part.atoms)
    digits = _digits(part.offset, shape, strides)
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
        out.append(_Placed(atom, dim, step))
    for dim, n in enumerate(shape):
        if digits[dim] + sum((p.atom.extent - 1) * p.step for p in out if p.dim == dim) >= max(n, 1):
            raise NotACopy("reshape across a slice")
    return out


def _sorted(atoms: Sequence[Atom], start: tuple[int, ...], offset: int) -> Part:
    kept = [a for a in atoms if a.extent != 1]
    return Part(tuple(sorted(kept, key=lambda a: -a.stride)), start, offset)


def _restride(part: Part, shape: Sequence[int], strides: Sequence[int], moved: dict[int, int]) -> Part:
    placed = _by_dimension(part, shape, strides)
    digits = _digits(part.offset, shape, strides)
    atoms = [p.atom._replace(stride=p.step * moved[p.dim]) for p in placed]
    return _sorted(atoms, part.start, sum(d * moved[i] for i, d in enumerate(digits)))


def _narrow(
    part: Part, shape: Sequence[int], strides: Sequence[int], new: Sequence[int], bounds: Bounds
) -> Iterator[Part]:
    placed = _by_dimension(part, shape, strides)
    digits = _digits(part.offset, shape, strides)
    per_dim: list[list[tuple[list[_Placed], Bounds]]] = []
    for dim, (lo, hi) in enumerate(bounds):
        mine = sorted((p for p in placed if p.dim == dim), key=lambda p: -p.step)
        steps = [(p.atom.extent, p.step) for p in mine]
        per_dim.append([(mine, box) for box in _ranges(steps, lo - digits[dim], hi - digits[dim])])
    for choice in itertools.product(*per_dim):
        start = list(part.start)
        index = [d - lo for d, (lo, _) in zip(digits, bounds, strict=True)]
        atoms: list[Atom] = []
        for mine, ranges in choice:
            for p, (lo, hi) in zip(mine, ranges, strict=True):
                start[p.atom.leaf_dim] += lo * p.atom.leaf_step
                index[p.dim] += lo * p.step
                atoms.append(Atom(hi - lo, p.atom.leaf_dim, p.atom.leaf_step, p.step * new[p.dim]))
        if all(a.extent > 0 for a in atoms):
            yield _sorted(atoms, tuple(start), sum(i * s for i, s in zip(index, new, strict=True)))
