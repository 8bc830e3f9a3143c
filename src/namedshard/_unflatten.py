"""Fast ``tree_unflatten`` for one structure.

JAX runs each node's constructor: for a tree of named arrays most of a small step's time. Here a structure is studied
once and then copied node by node with the new leaves in place.
"""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
from haliax import NamedArray

Builder = Callable[[Sequence[Any]], Any]


class _Slot:
    """Stands for the leaf of that number."""

    __slots__ = ("index",)

    def __init__(self, index: int):
        self.index = index


def _plain_instance(node: Any) -> bool:
    """Nodes that are nothing but a ``__dict__``, so that copying it makes an equal node."""
    return isinstance(node, eqx.Module | NamedArray) and not any(cls.__dict__.get("__slots__") for cls in type(node).__mro__)


def _has_slot(node: Any) -> bool:
    return any(isinstance(x, _Slot) for x in jax.tree_util.tree_leaves(node))


def _builder(node: Any) -> Builder:
    if type(node) is _Slot:
        index = node.index
        return lambda leaves: leaves[index]
    if not _has_slot(node):
        return lambda leaves: node
    if type(node) is list:
        parts = [_builder(x) for x in node]
        return lambda leaves: [part(leaves) for part in parts]
    if type(node) is tuple:
        parts = [_builder(x) for x in node]
        return lambda leaves: tuple([part(leaves) for part in parts])
    if type(node) is dict:
        named = [(key, _builder(x)) for key, x in node.items()]
        return lambda leaves: {key: part(leaves) for key, part in named}
    if _plain_instance(node):
        return _instance_builder(node)
    inner, treedef = jax.tree_util.tree_flatten(node)
    picks = [x.index for x in inner]
    return lambda leaves: jax.tree_util.tree_unflatten(treedef, [leaves[i] for i in picks])


def _instance_builder(node: Any) -> Builder:
    cls, new = type(node), object.__new__
    fixed = dict(node.__dict__)
    changing = [(name, x.index) for name, x in fixed.items() if type(x) is _Slot]
    nested = [(name, _builder(x)) for name, x in fixed.items() if type(x) is not _Slot and _has_slot(x)]
    if len(changing) == 1 and not nested:
        ((only, index),) = changing

        def build_one(leaves: Sequence[Any]) -> Any:
            out = new(cls)
            attributes = out.__dict__
            attributes.update(fixed)
            attributes[only] = leaves[index]
            return out

        return build_one

    def build(leaves: Sequence[Any]) -> Any:
        out = new(cls)
        attributes = out.__dict__
        attributes.update(fixed)
        for name, index in changing:
            attributes[name] = leaves[index]
        for name, part in nested:
            attributes[name] = part(leaves)
        return out

    return build


def unflattener(treedef: jax.tree_util.PyTreeDef) -> Builder:
    """A function from leaves to the tree of this structure; equal to ``treedef.unflatten`` in every respect."""
    slots = [_Slot(i) for i in range(treedef.num_leaves)]
    try:
        built = _builder(jax.tree_util.tree_unflatten(treedef, slots))
        leaves, again = jax.tree_util.tree_flatten(built(slots))
        if again == treedef and all(a is b for a, b in zip(leaves, slots, strict=True)):
            return built
    except Exception:
        # A node whose constructor looks at its leaves cannot be studied with placeholders.
        return treedef.unflatten
    return treedef.unflatten
