"""The leaves of a tree with their paths and names: what every plan starts from."""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import haliax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray

from namedshard._plan.mapping import AxisMapping, carried_mapping


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """One raw leaf of a tree (as ``jax.tree_util.tree_leaves`` lists them).

    ``names`` is None for plain leaves; ``note`` says why a leaf that has names is planned as a plain one.
    """

    path: str
    value: Any
    names: tuple[str, ...] | None
    own: AxisMapping | None = None
    note: str = ""


def is_array_like(x: Any) -> bool:
    """True for leaves with a shape and a dtype: JAX and numpy arrays, tracers and ``ShapeDtypeStruct``s.

    Nodes may have both too: ask only about what JAX takes for a leaf.
    """
    return isinstance(getattr(x, "shape", None), tuple) and hasattr(x, "dtype") and not isinstance(x, type)


def axis_name(axis: haliax.Axis | str) -> str:
    """The name of an axis, which may be given by it alone."""
    return axis if isinstance(axis, str) else axis.name


@functools.cache
def _named_fields(cls: type) -> dict[str, tuple[str, ...]]:
    """Fields of an ``eqx.Module`` class declared with ``axis_names`` metadata."""
    if not (issubclass(cls, eqx.Module) and dataclasses.is_dataclass(cls)):
        return {}
    out: dict[str, tuple[str, ...]] = {}
    for field in dataclasses.fields(cls):
        names = field.metadata.get("axis_names")
        if names is not None and not field.metadata.get("static", False):
            listed = (names,) if isinstance(names, str | haliax.Axis) else tuple(names)
            out[field.name] = tuple(map(axis_name, listed))
    return out


def path_string(path: tuple[Any, ...]) -> str:
    """A leaf path as ``jax.tree_util.keystr`` prints it, without the leading dot."""
    return jax.tree_util.keystr(path).removeprefix(".")


@functools.cache
def jax_can_hold(dtype: Any) -> bool:
    """Whether an array of a dtype can be a JAX array."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return True
    return jnp.issubdtype(dtype, np.bool_) or (jnp.issubdtype(dtype, np.number) and dtype.type not in _NUMPY_ONLY)


# Numbers to numpy alone.
_NUMPY_ONLY = (np.timedelta64, np.longdouble, np.clongdouble)


def native_dtype(dtype: Any) -> Any:
    """The dtype in this machine's byte order, which is the only one that JAX takes."""
    return dtype if jnp.issubdtype(dtype, jax.dtypes.extended) else np.dtype(dtype).newbyteorder("=")


def jax_dtype(dtype: Any) -> Any:
    """The dtype of the JAX array made from a host array: narrowed where 64-bit types are disabled."""
    return jax.dtypes.canonicalize_dtype(native_dtype(dtype), allow_extended_dtype=True)


def _names_that_fit(value: Any, names: tuple[str, ...]) -> tuple[tuple[str, ...] | None, str]:
    if isinstance(value, jax.Ref):
        return None, "a jax.Ref is changed in place; left as it is"
    if len(value.shape) != len(names):
        return None, f"names ({', '.join(names)}) do not fit rank {len(value.shape)}; left as it is"
    if not jax_can_hold(value.dtype):
        return None, f"JAX has no dtype {value.dtype}; left as it is"
    return names, ""


def _of_named(full: tuple[Any, ...], named: NamedArray) -> Iterator[Leaf]:
    path = path_string(full)
    if not (jax.tree_util.all_leaves([named.array]) and is_array_like(named.array)):
        # A whole tree (a Hessian, the state of optax.sm3), whose arrays the names aren't about.
        yield from (Leaf(leaf.path, leaf.value, None) for leaf in _walk(full, named.array))
        return
    # `named.axes` raises where some tool (optax's factored states) left an array of another rank under the names.
    _, axes = NamedArray.tree_flatten(named)
    fitting, note = _names_that_fit(named.array, tuple(map(axis_name, axes)))
    yield Leaf(path, named.array, fitting, carried_mapping(named), note)


def _walk(prefix: tuple[Any, ...], tree: Any) -> Iterator[Leaf]:
    def named(x: Any) -> bool:
        return isinstance(x, NamedArray) or bool(_named_fields(type(x)))

    for path, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=named)[0]:
        full = prefix + path
        if isinstance(node, NamedArray):
            yield from _of_named(full, node)
        elif fields := _named_fields(type(node)):
            children = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x, node=node: x is not node)[0]
            for (key,), child in children:
                names = fields.get(getattr(key, "name", ""))
                if names is not None and is_array_like(child) and not isinstance(child, NamedArray):
                    fitting, note = _names_that_fit(child, names)
                    yield Leaf(path_string((*full, key)), child, fitting, note=note)
                else:
                    yield from _walk((*full, key), child)
        else:
            yield Leaf(path_string(full), node, None)


def _without_placeholders(leaves: list[Leaf]) -> list[Leaf]:
    """Optax's factored states put ``zeros((1,))`` where a parameter of one axis has no state of that kind."""
    ones = [i for i, leaf in enumerate(leaves) if leaf.names and tuple(leaf.value.shape) == (1,)]
    if not ones:
        return leaves
    named = [leaf for leaf in leaves if leaf.names]
    longer = {n for leaf in named for n, size in zip(leaf.names or (), leaf.value.shape, strict=True) if size != 1}
    for i in ones:
        (name,) = leaves[i].names or ("",)
        if name in longer:
            note = f"axis {name} has another size in the other leaves; left as it is"
            leaves[i] = dataclasses.replace(leaves[i], names=None, note=note)
    return leaves


def with_distinct_paths(leaves: list[Leaf]) -> list[Leaf]:
    """The leaves, those of one path with an index appended to it: nodes may give several children one key."""
    taken = collections.Counter(leaf.path for leaf in leaves)
    if len(taken) == len(leaves):
        return leaves
    shared = {path: itertools.count() for path, count in taken.items() if count > 1}
    out: list[Leaf] = []
    for leaf in leaves:
        if (numbers := shared.get(leaf.path)) is not None:
            path = next(path for n in numbers if (path := f"{leaf.path}[{n}]") not in taken)
            taken[path] += 1
            leaf = dataclasses.replace(leaf, path=path)
        out.append(leaf)
    return out


def named_leaves(tree: Any) -> list[Leaf]:
    """All raw leaves in order, each with a path that no other has and, where it has them, its axis names."""
    return with_distinct_paths(_without_placeholders(list(_walk((), tree))))
