"""PURE. What identifies the arguments of a compiled function: arrays by type and place, all else by value and type.

Python holds ``1 == 1.0 == True`` and ``0.0 == -0.0``, which compile to different programs. So do values that are equal
but of another type where a structure holds them: static fields of modules, keys of dicts.
"""

import dataclasses
import itertools
import numbers
import operator
import types
from collections.abc import Hashable, Sequence
from typing import Any, cast

import haliax
import jax
import numpy as np

from namedshard import _jaxcompat as compat
from namedshard._errors import StaticArgumentError, message
from namedshard._plan.leaves import Leaf, is_array_like
from namedshard._types import PyTreeDef, Tracer

_PLAIN = frozenset([int, bool, str, bytes, type(None), type, types.FunctionType, types.BuiltinFunctionType])
"""Types whose values need no second look: not array-like, and equal only if they are of one type and value."""


def static_key(x: Any) -> Hashable:
    """A key under which two leaves are equal only if a compiled function may treat them alike.

    It is as hashable as the leaf. Two ``nan``s have one key, or they would compile at every call.
    """
    kind = type(x)
    if kind in _PLAIN:
        return kind, x
    if kind is slice:
        # Hashable by itself from Python 3.12 on.
        return kind, static_key(x.start), static_key(x.stop), static_key(x.step)
    return _number_key(x) if isinstance(x, numbers.Number) else (kind, x, _mark(x))


def _number_key(x: Any) -> Hashable:
    kind = type(x)
    if isinstance(x, float):
        return kind, float(x).hex()
    if isinstance(x, complex):
        return kind, x.real.hex(), x.imag.hex()
    return kind, x


def _other(x: Any) -> Hashable:
    if type(x) in _PLAIN:
        return type(x), x
    if isinstance(x, Tracer):
        return x.aval
    if isinstance(x, jax.Array):
        return x.aval, x.sharding, x.committed
    if is_array_like(x):
        return tuple(x.shape), x.dtype, getattr(x, "weak_type", False), type(x), getattr(x, "sharding", None)
    return static_key(x)


def signature(leaves: Sequence[Any]) -> tuple[Hashable, ...]:
    """What the argument leaves are, for looking up what to do with them. Every call comes through here."""
    return tuple([(x.aval, x.sharding, x.committed) if type(x) is compat.ArrayImpl else _other(x) for x in leaves])


# --- values that a structure holds ------------------------------------------------------------------------------------


def held_values(treedef: PyTreeDef) -> list[Any]:
    """The metadata of all nodes in a row: static fields, keys."""
    found: list[Any] = []

    def node(_: Any, data: Any) -> None:
        if type(data) is tuple or type(data) is list:
            found.extend(cast("list[Any]", data))
        elif data is not None:
            found.append(data)

    treedef.walk(node, id, range(treedef.num_leaves))
    return found


def same_objects(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two rows hold the very same objects, which says more than that they are equal, and sooner."""
    return len(a) == len(b) and all(map(operator.is_, a, b))


def number_types(values: Sequence[Any]) -> Hashable:
    """What tells rows of equal values apart: the types of their numbers, and the signs of zeros. None: nothing can."""
    marks = tuple([_mark(v) for v in values])
    return marks if any(mark is not None for mark in marks) else None


def _mark(x: Any) -> Hashable:
    kind = type(x)
    if kind in (int, bool):
        return kind
    if kind is str or x is None or kind is haliax.Axis or isinstance(x, type):
        return None
    if isinstance(x, np.generic):
        return kind, x.tobytes()
    if isinstance(x, numbers.Number):
        return _number_key(x)
    if isinstance(x, slice):
        return number_types([x.start, x.stop, x.step])
    if isinstance(x, set | frozenset):
        return frozenset(map(static_key, cast("set[Any]", x)))
    if isinstance(x, tuple | list):
        return number_types(cast("list[Any]", x))
    if isinstance(x, dict):
        return number_types(list(itertools.chain.from_iterable(cast("dict[Any, Any]", x).items())))
    if dataclasses.is_dataclass(x) or hasattr(kind, "__attrs_attrs__"):
        fields = dataclasses.fields(x) if dataclasses.is_dataclass(x) else kind.__attrs_attrs__
        return number_types([getattr(x, field.name, None) for field in fields])
    return None


# --- what cannot be an argument ---------------------------------------------------------------------------------------


def _hashable(x: Any) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True


def check_hashable(name: str, walked: Sequence[Leaf]) -> None:
    """Raise `StaticArgumentError` for every leaf that cannot be looked up by its value."""
    bad = [leaf for leaf in walked if not is_array_like(leaf.value) and not _hashable(leaf.value)]
    if bad:
        noun = "argument cannot be used as a static one" if len(bad) == 1 else "arguments cannot be used as static ones"
        raise StaticArgumentError(
            message(
                f"{name}: {len(bad)} {noun}",
                [f"argument {x.path} is neither an array nor hashable: {type(x.value).__name__}" for x in bad],
                fix="pass an array, or make it hashable (a tuple, a frozen dataclass)",
            )
        )
