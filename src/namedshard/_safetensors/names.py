"""PURE. Leaf paths to tensor names and layouts, as Haliax's state dicts have them, and back."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import equinox as eqx
import haliax as hax
import jax
from haliax import NamedArray

from namedshard._errors import CheckpointError, at, did_you_mean
from namedshard._plan.leaves import is_array_like, named_leaves
from namedshard._safetensors.export import exports_itself, is_stacked, trace_export
from namedshard._safetensors.layout import Part, View, covered, identity, layer_of

Renamed: TypeAlias = str | Sequence[str]
Names: TypeAlias = Mapping[str, Renamed] | Callable[[str], Renamed | None]
"""Leaf path to the name of its tensor, or to the names of one tensor for each index of its first dimension."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a checkpoint, and the parts of leaves (by path) that it holds."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[tuple[str, Part], ...]
    scale: float = 1.0

    @property
    def paths(self) -> tuple[str, ...]:
        """The leaves that it has elements of, each once."""
        return tuple(dict.fromkeys(path for path, _ in self.parts))

    def parts_of(self, path: str) -> list[Part]:
        """The parts of one leaf that it has."""
        return [part for where, part in self.parts if where == path]


def tensors_by_leaf(tensors: Iterable[Tensor]) -> dict[str, list[Tensor]]:
    """The tensors that have elements of each leaf, by path."""
    out: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        for path in tensor.paths:
            out.setdefault(path, []).append(tensor)
    return out


@dataclasses.dataclass(frozen=True, slots=True)
class Unknown:
    """Leaves that a module exports in a way that cannot be traced back to them, and why."""

    paths: tuple[str, ...]
    why: str


def join(prefix: str | None, key: str | None) -> str | None:
    """``prefix.key``, either of which may be absent."""
    present = [name for name in (prefix, key) if name is not None]
    return ".".join(present) if present else None


def _one_layer(stacked: Any, paths: Sequence[str]) -> tuple[Any, dict[str, int | None]]:
    """One layer's module with abstract arrays, and which dimension of each leaf counts the layers, if any."""
    dims: dict[str, int | None] = {}
    block, numbered = stacked.Block, iter(paths)

    def cut(x: Any, axes: tuple[hax.Axis, ...] | None = None) -> Any:
        path = next(numbered)
        if not is_array_like(x):
            return x
        if axes is None:
            dim = 0 if tuple(x.shape[:1]) == (block.size,) else None
        else:
            dim = next((i for i, axis in enumerate(axes) if axis.name == block.name), None)
        dims[path] = dim
        if dim is not None:
            x = jax.ShapeDtypeStruct((*x.shape[:dim], *x.shape[dim + 1 :]), x.dtype)
            axes = axes and (*axes[:dim], *axes[dim + 1 :])
        return x if axes is None else NamedArray(x, axes)

    def cut_named(x: Any) -> Any:
        if not isinstance(x, NamedArray):
            return cut(x)
        try:
            axes = tuple(x.axes) if jax.tree_util.all_leaves([x.array]) else None
        except ValueError:
            # Names that do not fit.
            axes = None
        return jax.tree_util.tree_map(cut, x.array) if axes is None else cut(x.array, axes)

    return jax.tree_util.tree_map(cut_named, stacked.stacked, is_leaf=lambda x: isinstance(x, NamedArray)), dims


def _walk(node: Any, paths: Iterator[str], prefix: str | None) -> Iterator[Tensor | Unknown]:
    """The tensors of a subtree, named as `haliax.state_dict` names them; ``paths`` are those of its leaves."""
    while isinstance(node, NamedArray):
        node = node.array
    if jax.tree_util.all_leaves([node]):
        path = next(paths)
        if is_array_like(node):
            shape = tuple(node.shape)
            yield Tensor(prefix or "", shape, ((path, identity(shape)),))
    elif (stacked := is_stacked(node)) or exports_itself(node):
        walk = _walk_stacked if stacked else _walk_export
        yield from walk(node, list(itertools.islice(paths, jax.tree_util.tree_structure(node).num_leaves)), prefix)
    else:
        renamed: Mapping[str, str | None] = {}
        if isinstance(node, eqx.Module) and hasattr(node, "_state_dict_key_map"):
            renamed = cast("Any", node)._state_dict_key_map()
        for key, child in jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]:
            name = jax.tree_util.keystr(key, simple=True)
            yield from _walk(child, paths, join(prefix, renamed.get(name, name)))


def _walk_stacked(node: Any, paths: Sequence[str], prefix: str | None) -> Iterator[Tensor | Unknown]:
    layer, dims = _one_layer(node, paths)
    for tensor in _walk(layer, iter(paths), None):
        if isinstance(tensor, Unknown):
            yield tensor
            continue
        # What no leaf has once for each layer is stored once.
        per_layer = any(dims[path] is not None for path in tensor.paths)
        for i in range(node.Block.size if per_layer else 1):
            parts: list[tuple[str, Part]] = []
            for where, part in tensor.parts:
                dim = dims[where]
                parts.append((where, part if dim is None else layer_of(part, dim, i)))
            name = join(join(prefix, str(i) if per_layer else None), tensor.name or None)
            yield Tensor(name or "", tensor.shape, tuple(parts), tensor.scale)


def _walk_export(node: Any, paths: Sequence[str], prefix: str | None) -> Iterator[Tensor | Unknown]:
    kind = type(node).__name__
    arrays = tuple(p for p, x in zip(paths, jax.tree_util.tree_leaves(node), strict=True) if is_array_like(x))
    try:
        tensors = trace_export(node)
    except Exception as error:
        yield Unknown(arrays, f"{kind}.to_state_dict raises {type(error).__name__}: {error}")
        return
    for name, value in tensors:
        if isinstance(value, View):
            parts = tuple((arrays[leaf], part) for leaf, part in value.parts)
            yield Tensor(join(prefix, name or None) or "", value.shape, parts, value.scale)
        else:
            mine = tuple(arrays[i] for i in sorted(value.leaves)) or arrays
            yield Unknown(mine, f"{kind} computes tensor {name!r}: {value}")


def _rename_leaf(path: str, shape: tuple[int, ...], given: Renamed, default: list[Tensor]) -> list[Tensor] | str:
    """The leaf's tensors under other names, or why that is impossible."""
    alone = all(len(t.parts) == 1 for t in default)
    if isinstance(given, str):
        if alone and len(default) == 1:
            return [dataclasses.replace(default[0], name=given)]
        return [Tensor(given, shape, ((path, identity(shape)),))]
    if alone and len(default) == len(given):
        return [dataclasses.replace(t, name=n) for t, n in zip(default, given, strict=True)]
    if not shape or shape[0] != len(given):
        return (
            f"{at(path)}: {len(given)} names for shape {shape}: give one, or one for each index of the first dimension"
        )
    layer = identity(shape[1:])
    return [Tensor(n, shape[1:], ((path, layer_of(layer, 0, i)),)) for i, n in enumerate(given)]


def _rename(
    tensors: Sequence[Tensor], names: Names | None, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[list[Tensor], set[str], list[str]]:
    """The tensors, those of leaves with given names last and renamed; these leaves; what is wrong with the names."""
    look_up = names if callable(names) else (names or {}).get
    given = {path: name for path in shapes if (name := look_up(path)) is not None}
    unknown = [path for path in names if path not in shapes] if isinstance(names, Mapping) else []
    lines = [f"{path}: no such leaf{did_you_mean(path, list(shapes))}" for path in unknown]
    by_leaf = tensors_by_leaf(tensors)
    out = [tensor for tensor in tensors if given.keys().isdisjoint(tensor.paths)]
    for path, name in given.items():
        renamed = _rename_leaf(path, shapes[path], name, by_leaf.get(path, []))
        if isinstance(renamed, str):
            lines.append(renamed)
        else:
            out += renamed
    return out, set(given), lines


def tensors_of(tree: Any, names: Names | None = None, *, require_all: bool = False) -> list[Tensor]:
    """The tensors that a tree is stored as, in the tree's order, those that ``names`` renames last.

    With ``require_all``, a tensor that a module computes is an error even if other tensors hold all of its leaves,
    unless ``names`` has these.
    """
    leaves = named_leaves(tree)
    shapes = {leaf.path: tuple(leaf.value.shape) for leaf in leaves if is_array_like(leaf.value)}
    walked = list(_walk(tree, (leaf.path for leaf in leaves), None))
    tensors, renamed, lines = _rename([tensor for tensor in walked if isinstance(tensor, Tensor)], names, shapes)
    lines += _find_lost(walked, tensors, shapes, renamed if require_all else None)
    lines += [f"{at(path)}: has no name" for tensor in tensors if not tensor.name for path, _ in tensor.parts]
    if lines:
        raise CheckpointError(
            f"{len(lines)} names do not fit the tree",
            lines,
            fix="correct names=, by leaf path as explain prints it",
        )
    return tensors


def _find_lost(
    walked: Sequence[Tensor | Unknown],
    tensors: Sequence[Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    renamed: set[str] | None,
) -> list[str]:
    """Leaves that computed tensors come from and no tensor holds; if there are none, those not in ``renamed``."""
    by_leaf = tensors_by_leaf(tensors)
    lines: list[str] = []
    for unknown in walked:
        if isinstance(unknown, Unknown):
            lost = [path for path in unknown.paths if not hold_leaf(by_leaf.get(path, []), path, shapes[path])]
            if renamed is not None and not lost:
                lost = [path for path in unknown.paths if path not in renamed]
            lines += [f"{at(path)}: {unknown.why}" for path in lost]
    return lines


def hold_leaf(tensors: Sequence[Tensor], path: str, shape: Sequence[int]) -> bool:
    """True if tensors hold every element of a leaf."""
    return covered([part for tensor in tensors for part in tensor.parts_of(path)], shape)
