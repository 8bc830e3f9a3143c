"""Fast ``tree_unflatten`` for one structure.

JAX runs each node's constructor: for a tree of named arrays most of a small step's time. Here a structure is analyzed
once and then copied node by node with the new leaves in place.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
from haliax import NamedArray

from namedshard._types import PyTreeDef

Builder = Callable[[Sequence[Any]], Any]


class _Slot:
    """Stands for the leaf of that number."""

    __slots__ = ("index",)

    def __init__(self, index: int):
        self.index = index


def _plain_instance(node: Any) -> bool:
    """Nodes that are nothing but a ``__dict__``, so that copying it makes an equal node."""
    return isinstance(node, eqx.Module | NamedArray) and not any(
        cls.__dict__.get("__slots__") for cls in type(node).__mro__
    )


def _always(node: Any) -> Builder:
    return lambda _: node


def _each(nodes: Sequence[Any], parts: Sequence[Builder | None]) -> Builder:
    made = [part or _always(x) for x, part in zip(nodes, parts, strict=True)]
    return lambda leaves: [part(leaves) for part in made]


def _build(node: Any) -> Builder | None:
    """How to build a node; None where one object will do for all calls: it has no leaf and cannot be changed."""
    if type(node) is _Slot:
        return operator.itemgetter(node.index)
    if node is None or jax.tree_util.all_leaves([node]):
        return None
    if type(node) in (list, tuple, dict):
        return _build_container(node)
    if _plain_instance(node):
        return _build_instance(node)
    inner, treedef = jax.tree_util.tree_flatten(node)
    collect = _each(inner, [_build(x) for x in inner])
    return lambda leaves: jax.tree_util.tree_unflatten(treedef, collect(leaves))


def _build_container(node: Any) -> Builder | None:
    kind = type(node)
    children = list(node.values()) if kind is dict else node
    parts = [_build(x) for x in children]
    if kind is tuple and not any(parts):
        return None
    collect = _each(children, parts)
    if children and all(type(x) is _Slot for x in children):
        # The leaves of a container of nothing but leaves are consecutive.
        collect = operator.itemgetter(slice(children[0].index, children[-1].index + 1))
    if kind is dict:
        keys = list(node)
        return lambda leaves: dict(zip(keys, collect(leaves), strict=True))
    return lambda leaves: kind(collect(leaves))


def _build_instance(node: Any) -> Builder | None:
    cls, new = type(node), object.__new__
    children = {id(child) for child in jax.tree_util.tree_leaves(node, is_leaf=lambda x: x is not node)}
    attributes = dict(node.__dict__)
    parts = {name: _build(x) for name, x in attributes.items() if id(x) in children}
    changing = [(name, part) for name, part in parts.items() if part is not None]
    if not changing:
        return None

    if len(changing) == 1:
        ((only, value),) = changing

        def build_one(leaves: Sequence[Any]) -> Any:
            out = new(cls)
            copied = out.__dict__
            copied.update(attributes)
            copied[only] = value(leaves)
            return out

        return build_one

    def build(leaves: Sequence[Any]) -> Any:
        out = new(cls)
        copied = out.__dict__
        copied.update(attributes)
        for name, part in changing:
            copied[name] = part(leaves)
        return out

    return build


def filled(statics: Sequence[Any], indices: Sequence[int], arrays: Sequence[Any]) -> list[Any]:
    """All leaves of a tree, from the static ones and the arrays."""
    full = list(statics)
    for i, x in zip(indices, arrays, strict=True):
        full[i] = x
    return full


def unflattener(treedef: PyTreeDef, statics: Sequence[Any], indices: Sequence[int]) -> Builder:
    """A function from arrays to the tree of this structure with them and the static leaves.

    It is equal to ``treedef.unflatten`` of the `filled` leaves in every respect.
    """
    slots = [_Slot(n) for n in range(len(indices))]
    whole = filled(statics, indices, slots)
    try:
        tree = jax.tree_util.tree_unflatten(treedef, whole)
        built = _build(tree) or _always(tree)
        leaves, again = jax.tree_util.tree_flatten(built(slots))
        if again == treedef and all(a is b for a, b in zip(leaves, whole, strict=True)):
            return built
    except Exception:
        # A node whose constructor looks at its leaves cannot be analyzed with placeholders.
        pass
    return lambda arrays: treedef.unflatten(filled(statics, indices, arrays))
