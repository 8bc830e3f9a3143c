"""PURE. What a module's own ``to_state_dict`` does, read off its jaxpr: which tensor is which view of which leaf.

Haliax's modules may rename, flatten, transpose, split and scale on their way into a state dict, each class by its own
code. That code is traced, on shapes only, and every operation in it that merely copies is followed backwards.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import equinox as eqx
import haliax.state_dict
import jax
import numpy as np
from haliax import NamedArray
from haliax.nn import BlockSeq, Stacked

from namedshard import _jaxcompat as compat
from namedshard._cache import BoundedCache
from namedshard._plan.leaves import is_array_like
from namedshard._safetensors.layout import NotACopy, View, concatenate, identity
from namedshard._types import PyTreeDef

Value = View | np.ndarray | NotACopy
"""A view of leaves, a constant, or why it is neither."""

_BASE = haliax.state_dict.ModuleWithStateDictSerialization
_DEFAULTS: tuple[Any, ...] = (None, _BASE.to_state_dict, _BASE.flatten_for_export, BlockSeq.to_state_dict)
_PREFIX = "@"


def exports_itself(node: Any) -> bool:
    """True for modules with code of their own for state dicts."""
    if not isinstance(node, eqx.Module):
        return False
    methods = (getattr(type(node), name, None) for name in ("to_state_dict", "flatten_for_export"))
    return any(method not in _DEFAULTS for method in methods)


def is_stacked(node: Any) -> bool:
    """True for layers stacked as Haliax's own class has them."""
    return isinstance(node, Stacked) and type(node).to_state_dict is Stacked.to_state_dict


def trace_export(module: Any) -> "_Trace":
    """For each tensor of a module's state dict its name (without prefix), and what it is of the module's arrays."""
    arrays_only = _without_empty_names(eqx.filter(module, is_array_like))
    leaves, treedef = jax.tree_util.tree_flatten(arrays_only)
    shapes = tuple((tuple(x.shape), x.dtype) for x in leaves)
    found = _traces.get((treedef, shapes))
    if found is None:
        found = _traces.put((treedef, shapes), _trace(treedef, shapes))
    return found


def _without_empty_names(module: Any) -> Any:
    """The module with None for each NamedArray that has lost its array.

    Equinox's filters keep the names around a None, and Haliax's modules expect a bare one, as that of an absent bias.
    """

    def emptied(x: Any) -> Any:
        return None if isinstance(x, NamedArray) and not jax.tree_util.tree_leaves(x) else x

    return jax.tree_util.tree_map(emptied, module, is_leaf=lambda x: isinstance(x, NamedArray))


_Trace: TypeAlias = tuple[tuple[str, View | NotACopy], ...]
_traces: BoundedCache[_Trace] = BoundedCache(1024)


def _trace(treedef: PyTreeDef, shapes: tuple[tuple[tuple[int, ...], Any], ...]) -> _Trace:
    names: list[str] = []

    def export(*arrays: jax.Array) -> list[Any]:
        module = haliax.state_dict.flatten_modules_for_export(jax.tree_util.tree_unflatten(treedef, arrays))
        tensors = haliax.state_dict.to_state_dict(module, _PREFIX)
        names.extend(tensors)
        return [getattr(x, "array", x) for x in tensors.values()]

    closed = jax.make_jaxpr(export)(*(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes))
    inputs: list[Value] = [View(s, ((i, identity(s)),)) for i, (s, _) in enumerate(shapes)]
    outputs = _run(closed.jaxpr, [np.asarray(c) for c in closed.consts], inputs)
    plain = (value if isinstance(value, View | NotACopy) else NotACopy("a constant") for value in outputs)
    return tuple((re.sub(rf"^{_PREFIX}\.?", "", name), value) for name, value in zip(names, plain, strict=True))


def _run(jaxpr: Any, consts: Sequence[Value], inputs: Sequence[Value]) -> list[Value]:
    known: dict[Any, Value] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))

    def value_of(atom: Any) -> Value:
        return np.asarray(atom.val) if hasattr(atom, "val") else known[atom]

    for eqn in jaxpr.eqns:
        arguments = [value_of(atom) for atom in eqn.invars]
        try:
            results = _step(eqn, arguments)
        except NotACopy as reason:
            reason.leaves = frozenset[int]().union(*map(_leaves_of, arguments))
            results = [reason] * len(eqn.outvars)
        known.update(zip(eqn.outvars, results, strict=True))
    return [value_of(atom) for atom in jaxpr.outvars]


def _leaves_of(value: Value) -> frozenset[int]:
    if isinstance(value, View):
        return frozenset(leaf for leaf, _ in value.parts)
    return value.leaves if isinstance(value, NotACopy) else frozenset()


def _step(eqn: Any, arguments: list[Value]) -> Sequence[Value]:
    for argument in arguments:
        if isinstance(argument, NotACopy):
            raise NotACopy(str(argument))
    name = eqn.primitive.name
    inner = compat.called(eqn)
    if inner is not None:
        consts = [np.asarray(c) for c in getattr(inner, "consts", ())]
        return _run(getattr(inner, "jaxpr", inner), consts, arguments)
    if not any(isinstance(argument, View) for argument in arguments):
        made = eqn.primitive.bind(*arguments, **eqn.params)
        return [np.asarray(x) for x in (made if eqn.primitive.multiple_results else [made])]
    if name not in _RULES:
        raise NotACopy(f"{name} is no copy")
    made = _RULES[name](eqn, arguments)
    return made if isinstance(made, list) else [made]


def _reshape(eqn: Any, arguments: list[Any]) -> View:
    if eqn.primitive.name == "reshape" and eqn.params["dimensions"] is not None:
        raise NotACopy("reshape in another order is no copy")
    return arguments[0].reshape(eqn.outvars[0].aval.shape)


def _broadcast(eqn: Any, arguments: list[Any]) -> View:
    if arguments[0].size != eqn.outvars[0].aval.size:
        raise NotACopy("a broadcast repeats elements")
    return _reshape(eqn, arguments)


def _slice(eqn: Any, arguments: list[Any]) -> View:
    if any(step != 1 for step in eqn.params["strides"] or ()):
        raise NotACopy("a slice with steps is not followed")
    return arguments[0].slice(*([int(i) for i in eqn.params[key]] for key in ("start_indices", "limit_indices")))


def _dynamic_slice(eqn: Any, arguments: list[Any]) -> View:
    view, sizes = arguments[0], eqn.params["slice_sizes"]
    if any(isinstance(a, View) for a in arguments[1:]):
        raise NotACopy("a slice at a computed place is no copy")
    starts = [min(max(int(a), 0), n - k) for a, n, k in zip(arguments[1:], view.shape, sizes, strict=True)]
    return view.slice(starts, [a + k for a, k in zip(starts, sizes, strict=True)])


def _split(eqn: Any, arguments: list[Any]) -> list[View]:
    view, axis = arguments[0], eqn.params["axis"]
    ends = np.cumsum(eqn.params.get("sizes", [1] * len(eqn.outvars))).tolist()
    out: list[View] = []
    for first, last, var in zip([0, *ends], ends, eqn.outvars, strict=False):
        start, stop = [0] * len(view.shape), list(view.shape)
        start[axis], stop[axis] = first, last
        out.append(view.slice(start, stop).reshape(var.aval.shape))
    return out


def _concatenate(eqn: Any, arguments: list[Any]) -> View:
    if not all(isinstance(a, View) for a in arguments):
        raise NotACopy("a constant is joined on")
    return concatenate(arguments, eqn.params["dimension"])


def _scale(eqn: Any, arguments: list[Any]) -> View:
    view, factor = arguments
    if isinstance(factor, View) and eqn.primitive.name == "mul":
        view, factor = factor, view
    one = not isinstance(factor, View) and factor.size == 1
    if not one or not isinstance(view, View) or view.shape != eqn.outvars[0].aval.shape:
        raise NotACopy(f"{eqn.primitive.name} is no copy")
    by = float(np.reshape(factor, ()))
    return view.scaled(by if eqn.primitive.name == "mul" else 1.0 / by)


_RULES: dict[str, Callable[[Any, list[Any]], View | list[View]]] = {
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "broadcast_in_dim": _broadcast,
    "transpose": lambda eqn, arguments: arguments[0].transpose(eqn.params["permutation"]),
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "split": _split,
    "unstack": _split,
    "concatenate": _concatenate,
    **dict.fromkeys(("mul", "div"), _scale),
    **dict.fromkeys(
        ("convert_element_type", "copy", "copy_p", "sharding_constraint", "optimization_barrier"),
        lambda eqn, arguments: arguments[0],
    ),
}
