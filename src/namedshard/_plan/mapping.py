"""Named axis → mesh axes: `AxisMapping`, `first`, arrays that carry a mapping, and the context shared with Haliax."""

import collections
import contextlib
import dataclasses
import functools
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast, get_args

import haliax.partitioning
import jax
from haliax import Axis, NamedArray
from jax.sharding import AbstractMesh, Mesh, PartitionSpec, Sharding

from namedshard._errors import MappingError
from namedshard._plan.names import Axes, AxesLike, check_axes

MeshAxes: TypeAlias = str | tuple[str, ...] | None
"""What one named axis is split over: nothing, one mesh axis, or the product of several."""

Policy: TypeAlias = Literal["error", "replicate"]
"""What to do with an axis that does not divide."""

Unmatched: TypeAlias = Literal["warn", "error", "ignore"]
"""What to do where arrays have no names, or a rule resembles an axis without matching one."""

_POLICIES = get_args(Policy), get_args(Unmatched)


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
    if any(isinstance(c, list) for c in candidates):
        listed: list[Any] = [tuple(cast("list[str]", c)) if isinstance(c, list) else c for c in candidates]
        inside = ", ".join(map(repr, listed[0] if len(listed) == 1 else listed))
        raise MappingError("first() takes candidates one by one, not in a list", fix=f"write first({inside})")
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
        axes: Names for arrays that carry none, by leaf path: ``{"layers.*.weight": "mlp embed"}``. The first pattern
            that matches counts. Parts of a path are joined by dots, and a pattern may start at any of them; ``*`` is
            anything within a part, ``**`` any number of parts, ``re:`` starts a regular expression for the whole path.
            Names are written as in einops: ``_`` for a dimension without a name, ``...`` for any number of them,
            ``"(heads=12 head_size) embed"`` where a dimension is several axes, of which the first can be sharded.
            They come before those of ``rules`` where that is an `AxisMapping`.
        unmatched: What `shard`, `init` and `fsdp` do where arrays have no names, or a rule resembles an axis without
            matching it: ``"warn"``, ``"error"`` or ``"ignore"``. ``None`` keeps that of ``rules``.

    Raises:
        MappingError: A key is not a string, a value is not a rule, or names can't be read.

    Examples:
        >>> import namedshard as ns
        >>> m = ns.AxisMapping({"embed": "data", "mlp": ns.first("model", "data", None)})
        >>> m["mlp"], m.rules["mlp"]
        ('model', first('model', 'data', None))
    """

    __slots__ = ("_hash", "_items", "_rules", "axes_items", "indivisible", "unmatched")
    indivisible: Policy
    axes_items: Axes
    unmatched: Unmatched

    def __init__(
        self,
        rules: MappingLike | None = None,
        *,
        indivisible: Policy | None = None,
        axes: AxesLike | None = None,
        unmatched: Unmatched | None = None,
    ):
        of = rules if isinstance(rules, AxisMapping) else None
        policies = (
            indivisible or (of.indivisible if of else "error"),
            unmatched or (of.unmatched if of else "warn"),
        )
        for name, value, allowed in zip(("indivisible", "unmatched"), policies, _POLICIES, strict=True):
            if value not in allowed:
                raise MappingError(f"{name}={value!r}: use {' or '.join(map(repr, allowed))}")
        checked: dict[str, Rule] = {}
        for name, value in _given_rules(rules).items():
            if not isinstance(name, str):
                raise MappingError(f"mapping key {name!r} is not an axis name: use {_key_fix(name)}")
            checked[name] = value if isinstance(value, First) else _mesh_axes(f"axis {name!r}", value)
        named = _merged(check_axes(axes), of.axes_items if of else ())
        object.__setattr__(self, "_rules", checked)
        object.__setattr__(self, "_items", tuple(checked.items()))
        object.__setattr__(self, "indivisible", policies[0])
        object.__setattr__(self, "unmatched", policies[1])
        object.__setattr__(self, "axes_items", named)
        object.__setattr__(self, "_hash", hash((self._items, policies, named)))

    @property
    def axes(self) -> Mapping[str, str]:
        """The names by pattern, in order."""
        return dict(self.axes_items)

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
        """This mapping with the other's rules and names, which win; so do its policies if it is an `AxisMapping`."""
        added = other if isinstance(other, AxisMapping) else AxisMapping(other, **self._policies())
        rules = AxisMapping({**self._rules, **added._rules}, **added._policies())
        return rules.named(_merged(added.axes_items, self.axes_items))

    def __ror__(self, other: MappingLike) -> "AxisMapping":
        return AxisMapping(other, **self._policies()) | self

    def _policies(self) -> dict[str, Any]:
        return {"indivisible": self.indivisible, "unmatched": self.unmatched}

    def named(self, axes: Axes) -> "AxisMapping":
        """This mapping with exactly these names."""
        if axes == self.axes_items and type(self) is AxisMapping:
            return self
        return AxisMapping(self._rules, axes=dict(axes), **self._policies())

    def for_names(self, names: Sequence[str]) -> "AxisMapping":
        """The mapping for an array with these axes."""
        return self

    def _key(self) -> tuple[Any, ...]:
        return self._items, self.indivisible, self.unmatched, self.axes_items

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if isinstance(other, AxisMapping):
            return self._hash == other._hash and self._key() == other._key()
        if isinstance(other, Mapping):
            return not self.axes_items and self._rules == dict(cast("Mapping[str, Any]", other))
        return NotImplemented

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(AxisMapping, axes=self.axes, **self._policies()), (dict(self._rules),)

    def __repr__(self) -> str:
        shown = [repr(self._rules)]
        shown += [f"axes={self.axes!r}"] if self.axes_items else []
        shown += [f"indivisible={self.indivisible!r}"] if self.indivisible != "error" else []
        shown += [f"unmatched={self.unmatched!r}"] if self.unmatched != "warn" else []
        return f"AxisMapping({', '.join(shown)})"


def _merged(first_names: Axes, then: Axes) -> Axes:
    """Names by pattern, of which those for a pattern given twice are the first's."""
    return tuple((dict(first_names) | dict(then) | dict(first_names)).items())


def _given_rules(rules: Any) -> Mapping[Any, Any]:
    """The rules of what was given as a mapping; an error that says what it is where it is none."""
    if rules is None:
        return {}
    if isinstance(rules, AxisMapping):
        return rules.rules
    if isinstance(rules, Mapping):
        return cast("Mapping[Any, Any]", rules)
    if isinstance(rules, Mesh | AbstractMesh):
        fix = "pass the mapping before the mesh: shard(tree, mapping, mesh)"
        raise MappingError("a mesh was given as the mapping", fix=fix)
    if isinstance(rules, PartitionSpec | Sharding):
        kind = "PartitionSpec" if isinstance(rules, PartitionSpec) else type(rules).__name__
        fix = 'name what each axis is split over, {"embed": "data"}, or use jax.device_put with a sharding'
        raise MappingError(f"a {kind} was given as the mapping, which is from axis names to mesh axes", fix=fix)
    raise MappingError(f"{rules!r} is no mapping", fix='use a dict from axis names to mesh axes, {"embed": "data"}')


def _key_fix(key: Any) -> str:
    return f"its name, {key.name!r}" if isinstance(key, Axis) else "a string"


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
    wanted = as_mapping(mapping) if outer is None else outer | mapping
    with haliax.partitioning.axis_mapping(wanted):
        me = threading.get_ident()
        _known.stack.append((haliax.partitioning.current_thread_local_mapping(), wanted))
        _active_threads[me] += 1
        try:
            yield wanted
        finally:
            _active_threads[me] -= 1
            _known.stack.pop()


def as_mapping(mapping: MappingLike) -> AxisMapping:
    """The mapping itself, or one with these rules."""
    return mapping if isinstance(mapping, AxisMapping) else AxisMapping(mapping)


def resolve_mapping(mapping: MappingLike | None, axes: AxesLike | None = None) -> AxisMapping | None:
    """The mapping given, else the one in force, else None.

    Its names are those of ``axes``, then its own, then those of the mapping in force.
    """
    found = current_mapping() if mapping is None else mapping
    if found is None:
        return None
    return with_context_names(as_mapping(found), () if axes is None else check_axes(axes))


def with_context_names(mapping: AxisMapping, axes: Axes = ()) -> AxisMapping:
    """A mapping with names that come before its own, and those of the mapping in force after them."""
    current = current_mapping()
    context = () if current is None else current.axes_items
    return mapping if not axes and context in ((), mapping.axes_items) else _with_names(mapping, axes, context)


@functools.lru_cache(maxsize=512)
def _with_names(mapping: AxisMapping, before: Axes, after: Axes) -> AxisMapping:
    return mapping.named(_merged(before, _merged(mapping.axes_items, after)))


class FsdpMapping(AxisMapping):
    """The parameter mapping of `fsdp`, or that of its computation for arrays such as the batch."""

    __slots__ = ("compute",)
    compute: AxisMapping

    def __init__(self, parameters: AxisMapping, compute: AxisMapping):
        super().__init__(parameters)
        object.__setattr__(self, "compute", compute)
        object.__setattr__(self, "_hash", hash((self._key(), compute)))

    def for_names(self, names: Sequence[str]) -> AxisMapping:
        """The mapping for an array with these axes.

        An axis that only the computation places makes it the batch, if it takes what parameters are split over or none
        of the array's axes is a parameter's. Else it splits a parameter further while that is computed with.
        """
        only = [n for n in names if self.compute.rules.get(n) is not None and self.rules.get(n) is None]
        taken = {mesh_axis for rule in self.rules.values() for mesh_axis in mesh_axes_of(rule)}
        competes = any(not taken.isdisjoint(mesh_axes_of(self.compute.rules[n])) for n in only)
        alone = all(self.rules.get(n) is None for n in names)
        return self.compute if only and (competes or alone) else self

    def named(self, axes: Axes) -> AxisMapping:
        """This mapping with exactly these names."""
        return self if axes == self.axes_items else FsdpMapping(super().named(axes), self.compute)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FsdpMapping) and super().__eq__(other) and self.compute == other.compute

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return FsdpMapping, (super().named(self.axes_items), self.compute)


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
    return AxisMapping({**own.rules, **rest}, indivisible=policy, axes=mapping.axes, unmatched=mapping.unmatched)


def thread_hint() -> str:
    """A hint for messages where this thread has no mapping and another one has: contexts are thread-local."""
    me = threading.get_ident()
    if any(count for thread, count in list(_active_threads.items()) if thread != me):
        return " in this thread (another thread has one: contexts are thread-local, so pass mapping= and mesh= along)"
    return ""
