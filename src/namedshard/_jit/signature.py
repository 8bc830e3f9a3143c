"""PURE. What identifies the arguments of a compiled function: arrays by type and place, all else by value and type.

Python holds ``1 == 1.0 == True`` and ``0.0 == -0.0``, which compile to different programs. So do values that are equal
but of another type where a structure holds them: static fields of modules, keys of dicts.
"""

import dataclasses
import functools
import itertools
import numbers
import operator
import types
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import haliax
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from namedshard import _jaxcompat as compat
from namedshard._errors import StaticArgumentError
from namedshard._jit.arguments import Arguments
from namedshard._plan.leaves import Leaf, is_array_like
from namedshard._plan.mapping import axis_names, spec_entries
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


def _leaf_key(x: Any) -> Hashable:
    if type(x) in _PLAIN:
        return type(x), x
    if isinstance(x, Tracer):
        return x.aval
    if isinstance(x, jax.Array):
        return x.aval, x.sharding, x.committed
    if isinstance(x, jax.ShapeDtypeStruct):
        return tuple(x.shape), x.dtype, x.weak_type, type(x), x.sharding, compat.memory_kind_of_struct(x)
    if is_array_like(x):
        return tuple(x.shape), x.dtype, getattr(x, "weak_type", False), type(x), getattr(x, "sharding", None)
    return static_key(x)


def signature(leaves: Sequence[Any]) -> tuple[Hashable, ...]:
    """What the argument leaves are, for looking up what to do with them. On the hot path of every call."""
    return tuple([(x.aval, x.sharding, x.committed) if type(x) is compat.ArrayImpl else _leaf_key(x) for x in leaves])


def program_key(arguments: Arguments, places: Sequence[NamedSharding | None]) -> Hashable:
    """What a trace depends on: numpy or jax, committed or not, makes no difference to it.

    ``places`` holds, for each array, where it is placed before the call; None where it stays.
    """
    avals = tuple(_aval_key(leaf.value, place) for leaf, place in zip(arguments.arrays, places, strict=True))
    return arguments.indices, avals, tuple(map(static_key, arguments.statics))


def _aval_key(x: Any, placed: NamedSharding | None) -> Hashable:
    if isinstance(x, Tracer | jax.Ref):
        return x.aval
    weak = bool(getattr(x, "weak_type", False))
    sharding = placed if placed is not None or isinstance(x, jax.Array) else getattr(x, "sharding", None)
    space, typed = compat.DEVICE_SPACE, None
    if sharding is not None:
        space = compat.space_of_kind(sharding.memory_kind)
        typed = _explicit_part(sharding, len(x.shape)) if isinstance(sharding, NamedSharding) else None
    elif isinstance(x, jax.ShapeDtypeStruct):
        space = compat.space_of_kind(compat.memory_kind_of_struct(x))
    elif isinstance(x, jax.Array):
        space, typed = compat.space_of_type(x.aval), _explicit_part(x.aval.sharding, x.ndim)
    return tuple(x.shape), jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True), weak, space, typed


def _explicit_part(sharding: NamedSharding, ndim: int) -> Hashable:
    """What a sharding adds to an array's type: its mesh and the Explicit axes of its spec; None without such axes."""
    mesh, spec = sharding.mesh, sharding.spec
    if not compat.any_explicit(mesh):
        return None
    explicit = {n for n, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t == AxisType.Explicit}
    entries = [tuple(n for n in axis_names(e) if n in explicit) for e in spec_entries(spec)]
    sums = spec.reduced, spec.unreduced, getattr(spec, "unreduced_kind", None)
    return mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh, (*entries, *[()] * (ndim - len(entries))), sums


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


class Held(NamedTuple):
    """What a structure holds beside its leaves, where equal structures may differ in it; made by `held_numbers`.

    ``contents`` is the whole structure by value, if something in it can be changed in place; else None.
    """

    treedef: PyTreeDef
    values: Sequence[Any]
    numbers: Hashable
    contents: Hashable


def held_numbers(treedef: PyTreeDef) -> Held | None:
    """The `held_values` of a structure and their `number_types`; None where nothing tells it from an equal one."""
    values = held_values(treedef)
    numbers = number_types(values)
    if numbers is None:
        return None
    return Held(treedef, values, numbers, _structure_key(treedef) if any(map(_is_mutable, values)) else None)


def differing_numbers(treedef: PyTreeDef, held: Held) -> tuple[Hashable, ...]:
    """The `number_types` of a structure, if it differs in them from an equal one; else nothing.

    Differs, too, if the other was changed in place: its program would build results from it.
    """
    values = held_values(treedef)
    if held.contents is None:
        # The very same objects are equal in type, too, and this is faster to check.
        if len(values) == len(held.values) and all(map(operator.is_, values, held.values)):
            return ()
    elif treedef is not held.treedef and number_types(held_values(held.treedef)) != held.numbers:
        return (number_types(values),)
    numbers = number_types(values)
    return () if numbers == held.numbers else (numbers,)


def same_structure(treedef: PyTreeDef, held: Held | None, other: PyTreeDef) -> bool:
    """Whether a structure is the ``other`` in every respect; ``held`` has the `held_numbers` of the other."""
    now = held_numbers(treedef)
    if held is not None and held.contents is not None:
        return now is not None and now.contents == held.contents
    return treedef == other and (now and now.numbers) == (held and held.numbers)


def _structure_key(treedef: Any) -> Hashable:
    data = treedef.node_data()
    return None if data is None else (data[0], _contents(data[1]), *map(_structure_key, treedef.children()))


def number_types(values: Sequence[Any]) -> Hashable:
    """A key for the types of the numbers among values, and the signs of zeros; None where there are no numbers."""
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
    if kind is bytes:
        # Equal to a bytearray.
        return kind
    if isinstance(x, frozenset):
        return frozenset(map(static_key, cast("frozenset[Any]", x)))
    if kind is not slice and not _hashable(x):
        return _contents(x)
    parts = _parts(x)
    return None if parts is None else number_types(parts)


def _is_mutable(x: Any) -> bool:
    """Whether a value or a part of it can be changed in place, as Python says by not hashing it."""
    return (type(x) is not slice and not _hashable(x)) or any(map(_is_mutable, _parts(x) or ()))


def _contents(x: Any) -> Hashable:
    """A key for a value as it is now, which a later change in place doesn't change.

    Raises:
        StaticArgumentError: It can't be hashed, and Python can't take it apart.
    """
    if _hashable(x):
        return static_key(x)
    kind = type(x)
    if isinstance(x, tuple):
        return kind, *map(_contents, cast("tuple[Any, ...]", x))
    if isinstance(x, set):
        return kind, frozenset(map(static_key, cast("set[Any]", x)))
    try:
        parts = (dict(x),) if isinstance(x, types.MappingProxyType) else x.__reduce_ex__(4)
        # What pickle would write: of containers these are iterators over the items.
        return kind, *(_contents(tuple(part) if isinstance(part, Iterator) else part) for part in parts)
    except (TypeError, RecursionError) as error:
        raise StaticArgumentError(
            f"a static field holds a value of type {kind.__name__}, which can be changed in place and can't be compared"
            " by its contents",
            fix="use a hashable value (a tuple, a frozen dataclass), or an array that isn't static",
        ) from error


def _parts(x: Any) -> Sequence[Any] | None:
    """The values that a container holds; None for anything else."""
    if isinstance(x, slice):
        return x.start, x.stop, x.step
    if isinstance(x, tuple | list):
        return cast("list[Any]", x)
    if isinstance(x, dict):
        return list(itertools.chain.from_iterable(cast("dict[Any, Any]", x).items()))
    if isinstance(x, functools.partial):
        return x.func, x.args, x.keywords
    if dataclasses.is_dataclass(x) or hasattr(type(x), "__attrs_attrs__"):
        fields = dataclasses.fields(x) if dataclasses.is_dataclass(x) else type(x).__attrs_attrs__
        return [getattr(x, field.name, None) for field in fields]
    return None


def _hashable(key: Any) -> bool:
    try:
        hash(key)
    except Exception:
        return False
    return True


def check_hashable(name: str, key: Hashable, leaves: Sequence[Leaf]) -> None:
    """Raise if the key of a call cannot be hashed: `StaticArgumentError` where leaves are the reason."""
    if bad := [leaf for leaf in leaves if not _hashable(_leaf_key(leaf.value))]:
        noun = "argument cannot be used as a static one" if len(bad) == 1 else "arguments cannot be used as static ones"
        raise StaticArgumentError(
            f"{name}: {len(bad)} {noun}",
            [f"argument {x.path} is neither an array nor hashable: {type(x.value).__name__}" for x in bad],
            fix="pass an array, or make it hashable (a tuple, a frozen dataclass)",
        )
    hash(key)
