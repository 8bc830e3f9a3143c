"""Fast ``tree_unflatten`` for one structure.

JAX runs each node's constructor: for a tree of named arrays most of a small step's time. Here a structure is analyzed
once and then copied node by node with the new leaves in place.
"""

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
    return lambda leaves: node


def _pick(index: int) -> Builder:
    return lambda leaves: leaves[index]


def _run_of(node: Any) -> slice | None:
    """The leaves of a container of nothing but leaves, which are consecutive."""
    children = list(node.values()) if type(node) is dict else node
    if not children or any(type(x) is not _Slot for x in children):
        return None
    return slice(children[0].index, children[-1].index + 1)


def _build_run(node: Any, run: slice) -> Builder:
    if type(node) is list:
        return lambda leaves: list(leaves[run])
    if type(node) is tuple:
        return lambda leaves: tuple(leaves[run])
    keys = list(node)
    return lambda leaves: dict(zip(keys, leaves[run], strict=True))


def _build(node: Any) -> tuple[Builder, bool]:
    """How to build a node, and whether one object will do for all calls: it has no leaf and cannot be changed."""
    kind = type(node)
    if kind is _Slot:
        return _pick(node.index), False
    if node is None:
        return _always(None), True
    if (run := _run_of(node) if kind in (list, tuple, dict) else None) is not None:
        return _build_run(node, run), False
    if kind is list:
        parts = [_build(x)[0] for x in node]
        return lambda leaves: [part(leaves) for part in parts], False
    if kind is tuple:
        built = [_build(x) for x in node]
        if all(fixed for _, fixed in built):
            return _always(node), True
        parts = [part for part, _ in built]
        return lambda leaves: tuple([part(leaves) for part in parts]), False
    if kind is dict:
        named = [(key, _build(x)[0]) for key, x in node.items()]
        return lambda leaves: {key: part(leaves) for key, part in named}, False
    if _plain_instance(node):
        return _build_instance(node)
    inner, treedef = jax.tree_util.tree_flatten(node)
    picks = [x.index for x in inner]
    return lambda leaves: jax.tree_util.tree_unflatten(treedef, [leaves[i] for i in picks]), False


def _build_instance(node: Any) -> tuple[Builder, bool]:
    cls, new = type(node), object.__new__
    children = {id(child) for child in jax.tree_util.tree_leaves(node, is_leaf=lambda x: x is not node)}
    attributes = dict(node.__dict__)
    changing = [(name, x.index) for name, x in attributes.items() if type(x) is _Slot]
    subtrees = {name: _build(x) for name, x in attributes.items() if type(x) is not _Slot and id(x) in children}
    nested = [(name, part) for name, (part, fixed) in subtrees.items() if not fixed]
    if not changing and not nested:
        return _always(node), True
    if len(changing) == 1 and not nested:
        ((only, index),) = changing

        def build_one(leaves: Sequence[Any]) -> Any:
            out = new(cls)
            copied = out.__dict__
            copied.update(attributes)
            copied[only] = leaves[index]
            return out

        return build_one, False

    def build(leaves: Sequence[Any]) -> Any:
        out = new(cls)
        copied = out.__dict__
        copied.update(attributes)
        for name, index in changing:
            copied[name] = leaves[index]
        for name, part in nested:
            copied[name] = part(leaves)
        return out

    return build, False


def unflattener(treedef: PyTreeDef) -> Builder:
    """A function from leaves to the tree of this structure; equal to ``treedef.unflatten`` in every respect."""
    slots = [_Slot(i) for i in range(treedef.num_leaves)]
    try:
        built, _ = _build(jax.tree_util.tree_unflatten(treedef, slots))
        leaves, again = jax.tree_util.tree_flatten(built(slots))
        if again == treedef and all(a is b for a, b in zip(leaves, slots, strict=True)):
            return built
    except Exception:
        # A node whose constructor looks at its leaves cannot be analyzed with placeholders.
        return treedef.unflatten
    return treedef.unflatten
