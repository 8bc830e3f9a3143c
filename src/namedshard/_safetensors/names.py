"""PURE. Leaf paths to tensor names and layouts, as Haliax's state dicts have them, and back."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import equinox as eqx
import jax
from haliax import NamedArray

from namedshard._errors import CheckpointError, at, did_you_mean, message
from namedshard._plan.leaves import is_array_like, named_leaves, path_string
from namedshard._safetensors.export import exported, exports_itself, is_stacked
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


@dataclasses.dataclass(frozen=True, slots=True)
class Unknown:
    """Leaves that a module exports in a way that cannot be followed, and why."""

    paths: tuple[str, ...]
    why: str


def join(prefix: str | None, key: str | None) -> str | None:
    """``prefix.key``, either of which may be absent."""
    if prefix is None or key is None:
        return key if prefix is None else prefix
    return f"{prefix}.{key}"


def _key_name(key: Any) -> str:
    for attribute in ("name", "idx", "key"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _children(node: Any) -> list[tuple[Any, Any]]:
    def stop(x: Any) -> bool:
        return x is not node

    flat = jax.tree_util.tree_flatten_with_path(node, is_leaf=stop)[0]
    return [(path[0], child) for path, child in flat if path]


def _one_layer(stacked: Any) -> tuple[Any, dict[str, int | None]]:
    """One layer's module with abstract arrays, and which dimension of each leaf counts the layers, if any."""
    block = stacked.Block
    dims: dict[str, int | None] = {}

    def cut(path: tuple[Any, ...], x: Any) -> Any:
        where = path_string(path)
        if isinstance(x, NamedArray):
            if not is_array_like(x.array):
                return x
            try:
                position = next((i for i, axis in enumerate(x.axes) if axis.name == block.name), None)
            except ValueError:
                # The names do not fit the array, which is then a plain one.
                return cut(path, x.array)
            dims[where] = position
            if position is None:
                return x
            axes = tuple(axis for i, axis in enumerate(x.axes) if i != position)
            return NamedArray(cast("Any", _without(x.array, position)), axes)
        if is_array_like(x):
            dims[where] = 0 if x.shape and x.shape[0] == block.size else None
            return x if dims[where] is None else _without(x, 0)
        return x

    def stop(x: Any) -> bool:
        return isinstance(x, NamedArray)

    layer = jax.tree_util.tree_map_with_path(cut, stacked.stacked, is_leaf=stop)
    return layer, dims


def _without(x: Any, dim: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*x.shape[:dim], *x.shape[dim + 1 :]), x.dtype)


def _walk(node: Any, path: tuple[Any, ...], prefix: str | None) -> Iterator[Tensor | Unknown]:
    if node is None:
        return
    if isinstance(node, NamedArray):
        node = node.array
    if is_array_like(node):
        where = path_string(path)
        shape = tuple(node.shape)
        yield Tensor(prefix or "", shape, ((where, identity(shape)),))
    elif is_stacked(node):
        yield from _walk_stacked(node, path, prefix)
    elif exports_itself(node):
        yield from _walk_export(node, path, prefix)
    else:
        renamed: Mapping[str, str | None] = {}
        if isinstance(node, eqx.Module) and hasattr(node, "_state_dict_key_map"):
            renamed = cast("Any", node)._state_dict_key_map()
        for key, child in _children(node):
            name = _key_name(key)
            yield from _walk(child, (*path, key), join(prefix, renamed.get(name, name)))


def _walk_stacked(node: Any, path: tuple[Any, ...], prefix: str | None) -> Iterator[Tensor | Unknown]:
    layer, dims = _one_layer(node)
    here = path_string((*path, jax.tree_util.GetAttrKey("stacked")))
    for tensor in list(_walk(layer, (), None)):
        if isinstance(tensor, Unknown):
            yield Unknown(tuple(_under(here, where) for where in tensor.paths), tensor.why)
            continue
        per_layer = [(_under(here, where), part, dims[where]) for where, part in tensor.parts]
        if all(dim is None for _, _, dim in per_layer):
            parts = tuple((where, part) for where, part, _ in per_layer)
            yield dataclasses.replace(tensor, name=join(prefix, tensor.name) or "", parts=parts)
            continue
        for i in range(node.Block.size):
            parts = tuple((where, part if dim is None else layer_of(part, dim, i)) for where, part, dim in per_layer)
            name = join(join(prefix, str(i)), tensor.name or None) or ""
            yield dataclasses.replace(tensor, name=name, parts=parts)


def _walk_export(node: Any, path: tuple[Any, ...], prefix: str | None) -> Iterator[Tensor | Unknown]:
    here = path_string(path)
    kind = type(node).__name__
    try:
        tensors = exported(node)
    except Exception as error:
        paths = tuple(leaf.path for leaf in named_leaves(node) if is_array_like(leaf.value))
        yield Unknown(
            tuple(_under(here, p) for p in paths), f"{kind}.to_state_dict raises {type(error).__name__}: {error}"
        )
        return
    for name, value, paths in tensors:
        if isinstance(value, View):
            parts = tuple((_under(here, paths[leaf]), part) for leaf, part in value.parts)
            yield Tensor(join(prefix, name or None) or "", value.shape, parts, value.scale)
        else:
            mine = [paths[i] for i in sorted(value.leaves)] or paths
            yield Unknown(tuple(_under(here, p) for p in mine), f"{kind} computes tensor {name!r}: {value}")


def _under(here: str, path: str) -> str:
    """A path within a node, seen from the tree's root."""
    return here + path if not here or not path or path.startswith("[") else f"{here}.{path}"


def _listed(names: Names | None, path: str) -> list[str] | str | None:
    if names is None:
        return None
    given = names(path) if callable(names) else names.get(path)
    return given if given is None or isinstance(given, str) else list(given)


def _named(path: str, shape: tuple[int, ...], given: list[str] | str, default: list[Tensor]) -> list[Tensor] | str:
    """The leaf's tensors under other names, or what is wrong with these."""
    alone = [t for t in default if len(t.parts) == 1]
    if isinstance(given, str):
        if len(default) == len(alone) == 1:
            return [dataclasses.replace(default[0], name=given)]
        return [Tensor(given, shape, ((path, identity(shape)),))]
    if len(default) == len(alone) == len(given):
        return [dataclasses.replace(t, name=n) for t, n in zip(default, given, strict=True)]
    if not shape or shape[0] != len(given):
        return (
            f"{at(path)}: {len(given)} names for shape {shape}: give one, or one for each index of the first dimension"
        )
    layer = identity(shape[1:])
    return [Tensor(n, shape[1:], ((path, layer_of(layer, 0, i)),)) for i, n in enumerate(given)]


def tensors_of(tree: Any, names: Names | None = None, *, all_of_them: bool = False) -> list[Tensor]:
    """The tensors that a tree is stored as.

    Args:
        tree: Any tree of arrays or ``jax.ShapeDtypeStruct``s.
        names: Names for some leaves; the others keep those of Haliax's state dicts.
        all_of_them: Whether tensors that a module computes matter also where their leaves are stored otherwise.

    Returns:
        Tensors in the tree's order, those that ``names`` renames last.

    Raises:
        CheckpointError: ``names`` has paths that are no leaves, or names are missing or do not fit; all are listed.
    """
    shapes = {leaf.path: tuple(leaf.value.shape) for leaf in named_leaves(tree) if is_array_like(leaf.value)}
    default: dict[str, list[Tensor]] = {path: [] for path in shapes}
    walked = list(_walk(tree, (), None))
    order = [t for t in walked if isinstance(t, Tensor)]
    for tensor in order:
        for path in dict.fromkeys(path for path, _ in tensor.parts):
            default[path].append(tensor)
    lines: list[str] = []
    if isinstance(names, Mapping):
        lines += [f"{p}: no such leaf{did_you_mean(p, list(shapes))}" for p in names if p not in shapes]
    given = {path: _listed(names, path) for path in shapes}
    out = [t for t in order if all(given[path] is None for path, _ in t.parts)]
    for path, wanted in given.items():
        if wanted is not None:
            renamed = _named(path, shapes[path], wanted, default[path])
            if isinstance(renamed, str):
                lines.append(renamed)
            else:
                out += renamed
    held: dict[str, list[Part]] = {}
    for tensor in out:
        for path, part in tensor.parts:
            held.setdefault(path, []).append(part)
    for unknown in (t for t in walked if isinstance(t, Unknown)):
        lost = [p for p in unknown.paths if not covered(held.get(p, []), shapes[p])]
        if all_of_them and not lost:
            lost = [p for p in unknown.paths if given[p] is None]
        lines += [f"{at(path)}: {unknown.why}" for path in lost]
    lines += [f"{at(path)}: has no name" for t in out if not t.name for path, _ in t.parts]
    if lines:
        raise CheckpointError(
            message(
                f"{len(lines)} names do not fit the tree",
                lines,
                fix="correct names=, by leaf path as explain prints it",
            )
        )
    return out
