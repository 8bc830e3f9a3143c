"""Named axis → mesh axes: `AxisMapping`, `first`, arrays that carry a mapping, and the context shared with Haliax."""

import collections
import contextlib
import dataclasses
import functools
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

import haliax.partitioning
import jax
from haliax import NamedArray
from jax.sharding import PartitionSpec

from namedshard._errors import MappingError

MeshAxes: TypeAlias = str | tuple[str, ...] | None
"""What one named axis is split over: nothing, one mesh axis, or the product of several."""

Policy: TypeAlias = Literal["error", "replicate"]
"""What to do with an axis that does not divide."""


@dataclasses.dataclass(frozen=True)
class First:
    """Ordered candidates for one named axis; made by `first`."""

    candidates: tuple[MeshAxes, ...]

    def __repr__(self) -> str:
        return f"first({', '.join(map(repr, self.candidates))})"


Rule: TypeAlias = MeshAxes | First
MappingLike: TypeAlias = Mapping[str, Any]


def first(*candidates: str | tuple[str, ...] | None) -> First:
    """Ordered candidates for a named axis.

    The first candidate wins that exists in the mesh, is still free in the array at hand, and divides the axis. End
    with ``None`` to leave the axis unsharded when nothing fits; without it, that is an error.

    Args:
        *candidates: Mesh axis names, tuples of them (the product), or ``None``.

    Returns:
        A rule to use as a value of an `AxisMapping`.

    Raises:
        MappingError: No candidate was given, or one is neither a name, a tuple of names nor ``None``.

    Examples:
        >>> import namedshard as ns
        >>> ns.AxisMapping({"heads": ns.first("model", "data", None)})
        AxisMapping({'heads': first('model', 'data', None)})
    """
    if not candidates:
        raise MappingError("first() needs at least one candidate")
    return First(tuple(_mesh_axes("first(...)", c) for c in candidates))


def axis_names(axes: MeshAxes) -> tuple[str, ...]:
    """The mesh axes of a rule without candidates, or of one entry of a spec."""
    return (axes,) if isinstance(axes, str) else (axes or ())


def spec_entries(spec: PartitionSpec) -> tuple[MeshAxes, ...]:
    """A spec's entries; one with ``reduced`` or ``unreduced`` axes can't be iterated over."""
    return tuple(getattr(spec, "partitions", spec))


def plain_spec(spec: PartitionSpec) -> PartitionSpec:
    """The spec without ``reduced`` and ``unreduced`` axes: that of the summed array."""
    return PartitionSpec(*spec_entries(spec))


def spec_entry(names: Sequence[str]) -> MeshAxes:
    """The inverse of `axis_names`."""
    return names[0] if len(names) == 1 else (tuple(names) or None)


def _mesh_axes(where: str, value: Any) -> MeshAxes:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, tuple | list) and all(isinstance(v, str) for v in cast("list[Any]", value)):
        names = tuple(cast("list[str]", value))
        if len(set(names)) != len(names):
            raise MappingError(f"{where}: mesh axes {names} repeat")
        return spec_entry(names)
    raise MappingError(
        f"{where}: {value!r} is not a rule",
        fix="use a mesh axis name, a tuple of names (their product), first(...), or None",
    )


def mesh_axes_of(rule: Rule) -> list[str]:
    """Every mesh axis that a rule names, each once."""
    candidates = rule.candidates if isinstance(rule, First) else (rule,)
    return list(dict.fromkeys(n for c in candidates for n in axis_names(c)))


class AxisMapping(Mapping[str, Any]):
    """From named axis to mesh axes.

    Frozen, hashable, and a `Mapping`; a plain ``dict`` is accepted wherever one is asked for. Read as a mapping, as
    Haliax's own functions do, each rule gives its first candidate.

    Args:
        rules: For each named axis: ``None`` (unsharded), a mesh axis name, a tuple of names (their product), or
            `first`. Where axes of one array compete for a mesh axis, the order of this mapping decides.
        indivisible: ``"error"``, or ``"replicate"`` to leave an axis unsharded that does not divide (with a warning
            that lists the leaves). ``None`` keeps the policy of ``rules`` where that is an `AxisMapping`.

    Raises:
        MappingError: A key is not a string, or a value is not a rule.

    Examples:
        >>> import namedshard as ns
        >>> m = ns.AxisMapping({"embed": "data", "mlp": ns.first("model", "data", None)})
        >>> m["mlp"], m.rules["mlp"]
        ('model', first('model', 'data', None))
    """

    __slots__ = ("_hash", "_items", "_rules", "indivisible")
    indivisible: Policy

    def __init__(self, rules: MappingLike | None = None, *, indivisible: Policy | None = None):
        given = rules.rules if isinstance(rules, AxisMapping) else (rules or {})
        if indivisible is None:
            indivisible = rules.indivisible if isinstance(rules, AxisMapping) else "error"
        if indivisible not in ("error", "replicate"):
            raise MappingError(f"indivisible={indivisible!r}: use 'error' or 'replicate'")
        checked: dict[str, Rule] = {}
        for name, value in given.items():
            if not isinstance(name, str):
                raise MappingError(f"mapping key {name!r} is not an axis name: use a string")
            checked[name] = value if isinstance(value, First) else _mesh_axes(f"axis {name!r}", value)
        object.__setattr__(self, "_rules", checked)
        object.__setattr__(self, "_items", tuple(checked.items()))
        object.__setattr__(self, "indivisible", indivisible)
        object.__setattr__(self, "_hash", hash((self._items, indivisible)))

    @property
    def rules(self) -> Mapping[str, Rule]:
        """The rules as given, with every `first` whole."""
        return self._rules

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("AxisMapping is frozen; use `mapping | {...}` to make another")

    def __getitem__(self, name: str) -> MeshAxes:
        rule = self._rules[name]
        return rule.candidates[0] if isinstance(rule, First) else rule

    def __iter__(self) -> Iterator[str]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def __or__(self, other: MappingLike) -> "AxisMapping":
        """This mapping with the other's rules, which win; the other's policy wins if it is an `AxisMapping`."""
        added = other if isinstance(other, AxisMapping) else AxisMapping(other, indivisible=self.indivisible)
        return AxisMapping({**self._rules, **added._rules}, indivisible=added.indivisible)

    def __ror__(self, other: MappingLike) -> "AxisMapping":
        return AxisMapping(other, indivisible=self.indivisible) | self

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if isinstance(other, AxisMapping):
            return self._hash == other._hash and self._items == other._items and self.indivisible == other.indivisible
        if isinstance(other, Mapping):
            return self._rules == dict(cast("Mapping[str, Any]", other))
        return NotImplemented

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(AxisMapping, indivisible=self.indivisible), (dict(self._rules),)

    def __repr__(self) -> str:
        policy = "" if self.indivisible == "error" else f", indivisible={self.indivisible!r}"
        return f"AxisMapping({self._rules!r}{policy})"


class _Known(threading.local):
    """Haliax's context keeps a plain dict, which has no place for `first` and the policy: they are found again here."""

    def __init__(self) -> None:
        self.stack: list[tuple[Any, AxisMapping]] = []
        self.foreign: tuple[Any, tuple[tuple[str, Any], ...], AxisMapping] | None = None


_known = _Known()
_active_threads: collections.Counter[int] = collections.Counter()


def current_mapping() -> AxisMapping | None:
    """The mapping in force in this thread, set by `axis_mapping` or by Haliax's own, or ``None``."""
    raw = haliax.partitioning.current_thread_local_mapping()
    if raw is None:
        return None
    for seen, mapping in reversed(_known.stack):
        if seen is raw:
            return mapping
    items = tuple(raw.items())
    if _known.foreign is not None and _known.foreign[0] is raw and _known.foreign[1] == items:
        return _known.foreign[2]
    mapping = AxisMapping(raw)
    _known.foreign = (raw, items, mapping)
    return mapping


@contextlib.contextmanager
def axis_mapping(mapping: MappingLike, merge: bool = False) -> Generator[AxisMapping, None, None]:
    """Put a mapping in force for this thread, as `haliax.axis_mapping` does; each sees the other's.

    Args:
        mapping: An `AxisMapping` or a plain ``dict``.
        merge: Add to the mapping in force instead of replacing it. The inner mapping wins (in Haliax it loses).

    Yields:
        The mapping now in force.

    Raises:
        MappingError: The mapping is not well formed.

    Examples:
        >>> import namedshard as ns
        >>> with ns.axis_mapping({"batch": "data"}):
        ...     with ns.axis_mapping({"batch": None, "mlp": "model"}, merge=True) as inner:
        ...         print(inner)
        AxisMapping({'batch': None, 'mlp': 'model'})
    """
    outer = current_mapping() if merge else None
    given = mapping if isinstance(mapping, AxisMapping) else AxisMapping(mapping)
    wanted = given if outer is None else outer | mapping
    with haliax.partitioning.axis_mapping(wanted):
        me = threading.get_ident()
        _known.stack.append((haliax.partitioning.current_thread_local_mapping(), wanted))
        _active_threads[me] += 1
        try:
            yield wanted
        finally:
            _active_threads[me] -= 1
            _known.stack.pop()


def resolve_mapping(mapping: MappingLike | None) -> AxisMapping | None:
    """The mapping given, else the one in force, else None."""
    if mapping is None:
        return current_mapping()
    return mapping if isinstance(mapping, AxisMapping) else AxisMapping(mapping)


@jax.tree_util.register_pytree_node_class
class MappedArray(NamedArray):
    """A `haliax.NamedArray` that carries its own mapping; made by `with_mapping`.

    The mapping is pytree metadata: ``jax.tree.map``, ``jit``, ``grad`` and optimizer states keep it, arithmetic gives
    a plain `NamedArray`.
    """

    # The default is for `dataclasses.replace`, which makes an array that carries nothing.
    mapping: AxisMapping = AxisMapping()

    def tree_flatten(self) -> Any:
        """The array, with axes and mapping as metadata."""
        children, axes = super().tree_flatten()
        return children, (axes, self.mapping)

    @classmethod
    def tree_unflatten(cls, aux: Any, tree: Any) -> Any:
        """The inverse of `tree_flatten`; shapes are not checked, since JAX passes placeholders."""
        axes, mapping = aux
        return _carry(NamedArray.tree_unflatten(axes, tree), mapping)


def _carry(named: NamedArray, mapping: AxisMapping) -> MappedArray:
    out = object.__new__(MappedArray)
    vars(out).update(vars(named), mapping=mapping)
    return out


def with_mapping(named_array: NamedArray, mapping: MappingLike) -> NamedArray:
    """An array that carries its own mapping.

    Its entries override the caller's mapping for the axes that they name, in `shard`, `plan` and everything built on
    them. Nothing is moved.

    Args:
        named_array: A `haliax.NamedArray` of any shape and dtype.
        mapping: The array's own rules; merged over those that it carries already.

    Returns:
        A `NamedArray` with the same array.

    Raises:
        MappingError: The mapping is not well formed.
        TypeError: The first argument is not a `NamedArray`.

    Examples:
        >>> import haliax as hax, jax.numpy as jnp, namedshard as ns
        >>> x = ns.with_mapping(hax.named(jnp.zeros((4, 2)), ("embed", "mlp")), {"mlp": None})
        >>> ns.carried_mapping(x)
        AxisMapping({'mlp': None})
    """
    if not isinstance(named_array, NamedArray):
        raise TypeError(f"with_mapping takes a haliax.NamedArray, not {type(named_array).__name__}")
    own = carried_mapping(named_array)
    return _carry(named_array, AxisMapping(mapping) if own is None else own | mapping)


def carried_mapping(named_array: NamedArray) -> AxisMapping | None:
    """The mapping that an array carries, or ``None``.

    Args:
        named_array: Any `haliax.NamedArray`.

    Returns:
        The mapping given to `with_mapping`.

    Examples:
        >>> import haliax as hax, jax.numpy as jnp, namedshard as ns
        >>> x = hax.named(jnp.zeros(4), "embed")
        >>> ns.carried_mapping(x), ns.carried_mapping(ns.with_mapping(x, {"embed": "data"}))
        (None, AxisMapping({'embed': 'data'}))
    """
    return named_array.mapping if isinstance(named_array, MappedArray) else None


def own_over(own: AxisMapping, mapping: AxisMapping) -> AxisMapping:
    """The caller's mapping with an array's own rules over it; the array's come first where axes compete.

    An array that asks for ``indivisible="replicate"`` gets it.
    """
    rest = {name: rule for name, rule in mapping.rules.items() if name not in own.rules}
    policy = own.indivisible if own.indivisible == "replicate" else mapping.indivisible
    return AxisMapping({**own.rules, **rest}, indivisible=policy)


def thread_hint() -> str:
    """A hint for messages where this thread has no mapping and another one has: contexts are thread-local."""
    me = threading.get_ident()
    if any(count for thread, count in list(_active_threads.items()) if thread != me):
        return " in this thread (another thread has one: contexts are thread-local, so pass mapping= and mesh= along)"
    return ""
