"""PURE. Names, an axis mapping and a mesh to a plan: which leaf goes where, and why.

Nothing here touches a backend or moves a byte; an ``AbstractMesh`` is enough. Every other module asks this one, and no
other decides a sharding.
"""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from namedshard import _errors as errors
from namedshard._plan.leaves import Leaf, is_array_like, named_leaves, obstacle_to_names
from namedshard._plan.mapping import (
    AxisMapping,
    First,
    MappingLike,
    MeshAxes,
    Policy,
    Rule,
    Unmatched,
    axis_names,
    own_over,
    resolve_mapping,
    spec_entry,
)
from namedshard._plan.mesh import MeshLike, describe, manual_axes, reduce_mesh, require_mesh, restore_mesh
from namedshard._plan.names import UNNAMED, AxesLike, dotted
from namedshard._types import PyTreeDef

Places: TypeAlias = Callable[[PyTree], Sequence[NamedSharding | None]]

_output_places: contextvars.ContextVar[Places | None] = contextvars.ContextVar("output_places", default=None)


@contextlib.contextmanager
def output_places(places: Places) -> Generator[None, None, None]:
    """What is traced in this block becomes the result, or a part of it, of something that places it so."""
    token = _output_places.set(places)
    try:
        yield
    finally:
        _output_places.reset(token)


def planned_shardings(tree: PyTree) -> Sequence[NamedSharding | None] | None:
    """Where the leaves of a tree that is being traced will go; None if nothing is known."""
    places = _output_places.get()
    return None if places is None else places(tree)


ABSENT, BUSY, INDIVISIBLE = "absent", "busy", "indivisible"


@dataclasses.dataclass(frozen=True, slots=True)
class AxisChoice:
    """What one axis of one leaf got: the rule, the candidate that won, those that lost and why.

    ``lost`` holds (candidate, reason) with reason ``"absent"``, ``"busy"`` or ``"indivisible"``.
    """

    axis: str
    size: int
    rule: Rule
    won: MeshAxes
    lost: tuple[tuple[MeshAxes, str], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class LeafPlan:
    """Where one leaf goes.

    Attributes:
        path: The leaf path, as ``jax.tree_util.keystr`` prints it, without the leading dot.
        axes: (name, size) of each dimension, or None for a leaf without names. Of a dimension that is several axes, the
            major one and its size; ``"_"`` for a dimension without a name.
        shape: The global shape; None for leaves that are no arrays.
        dtype: The dtype; None for leaves that are no arrays.
        spec: The wanted ``PartitionSpec``; None for leaves that are left exactly as they are.
        memory_kind: The wanted memory kind; None keeps the kind that the array has.
        bytes: Bytes of the whole array.
        bytes_per_device: Bytes of one shard under ``spec``.
        why: One `AxisChoice` per dimension, empty for leaves without names.
        note: Why a leaf with names, or a dimension of it, is left alone, if it is.
    """

    path: str
    axes: tuple[tuple[str, int], ...] | None
    shape: tuple[int, ...] | None
    dtype: Any
    spec: PartitionSpec | None
    memory_kind: str | None
    bytes: int
    bytes_per_device: int
    why: tuple[AxisChoice, ...] = ()
    note: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """Where every leaf of a tree goes; made by `plan`.

    It can be pickled; in a process without the mesh's devices, its mesh is then the ``AbstractMesh``.

    Attributes:
        leaves: One `LeafPlan` per raw leaf, in ``jax.tree_util.tree_leaves`` order.
        mapping: The mapping planned with.
        mesh: The mesh planned for (an ``AbstractMesh`` will do).
        treedef: The tree's structure.
    """

    leaves: tuple[LeafPlan, ...]
    mapping: AxisMapping
    mesh: MeshLike
    treedef: PyTreeDef

    def __reduce__(self) -> tuple[Any, ...]:
        # A tree, since a pickled structure of Equinox modules isn't equal to theirs: it holds their sentinels.
        tree = jax.tree_util.tree_unflatten(self.treedef, range(len(self.leaves)))
        return _restore_plan, (self.leaves, self.mapping, reduce_mesh(self.mesh), tree)

    @property
    def specs(self) -> PyTree:
        """The tree with a ``PartitionSpec`` for each leaf that is placed and None for the others."""
        return jax.tree_util.tree_unflatten(self.treedef, [leaf.spec for leaf in self.leaves])

    @property
    def shardings(self) -> PyTree:
        """The tree with a ``NamedSharding`` for each leaf that is placed and None for the others."""
        return jax.tree_util.tree_unflatten(self.treedef, [self.sharding_of(leaf) for leaf in self.leaves])

    def sharding_of(self, leaf: LeafPlan) -> NamedSharding | None:
        """One leaf's sharding on this plan's mesh; None if it is left as it is."""
        if leaf.spec is None:
            return None
        return NamedSharding(self.mesh, leaf.spec, memory_kind=leaf.memory_kind)

    @property
    def bytes_per_device(self) -> int:
        """Bytes that the placed leaves take on each device."""
        return sum(leaf.bytes_per_device for leaf in self.leaves if leaf.spec is not None)

    def __getitem__(self, path: str) -> LeafPlan:
        """The plan of the leaf at a path.

        Raises:
            KeyError: There is no such leaf; names the closest path.
        """
        for leaf in self.leaves:
            if leaf.path == path:
                return leaf
        if same := [leaf.path for leaf in self.leaves if dotted(leaf.path) == dotted(path)]:
            raise KeyError(f"no leaf {path!r}: it is {same[0]!r}")
        raise KeyError(f"no leaf {path!r}{errors.did_you_mean(path, [leaf.path for leaf in self.leaves])}")


def _restore_plan(leaves: tuple[LeafPlan, ...], mapping: AxisMapping, mesh: Any, tree: Any) -> Plan:
    return Plan(leaves, mapping, restore_mesh(*mesh), jax.tree_util.tree_structure(tree))


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """One axis of one leaf that its mapping's rule cannot be applied to."""

    kind: type[errors.PlanError]
    path: str
    text: str
    axis: str
    size: int
    mesh_axes: tuple[str, ...]


class _MeshView:
    """A mesh's axes, less those that an enclosing ``shard_map`` holds."""

    def __init__(self, mesh: MeshLike, manual: frozenset[str]):
        manual |= {n for n, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t == AxisType.Manual}
        self.sizes: Mapping[str, int] = mesh.shape
        self.manual = manual
        self.mesh = mesh

    def free(self, axes: MeshAxes) -> tuple[str, ...]:
        return tuple(n for n in axis_names(axes) if n not in self.manual)

    def size(self, names: Sequence[str]) -> int:
        return math.prod(self.sizes[n] for n in names)


def _remainder_text(size: int, pieces: int) -> str:
    return f"{size} = {pieces}*{size // pieces} + {size % pieces}"


def lost_text(
    size: int, lost: Iterable[tuple[MeshAxes, str]], mesh: MeshLike, manual: frozenset[str], holders: Mapping[str, str]
) -> str:
    """Why each candidate lost, with the arithmetic; ``holders`` are the axes that hold mesh axes."""
    texts: list[str] = []
    for candidate, reason in lost:
        names = [n for n in axis_names(candidate) if n not in manual]
        if reason == BUSY:
            reason = f"busy (axis {next(holders[n] for n in names if n in holders)} has it)"
        elif reason == INDIVISIBLE:
            reason = f"indivisible ({_remainder_text(size, math.prod(mesh.shape[n] for n in names))})"
        texts.append(f"{candidate!r} is {reason}")
    return "; ".join(texts)


def absent_text(axis: str, names: Sequence[str], mesh: MeshLike) -> str:
    """What is wrong with an axis that is mapped to mesh axes of which the mesh lacks some."""
    gone = [n for n in names if n not in mesh.shape]
    hint = "".join(errors.did_you_mean(n, list(mesh.shape)) for n in gone)
    return f"axis {axis} is mapped to {', '.join(map(repr, gone))}, but the mesh has {describe(mesh)}{hint}"


def _indivisible_text(axis: str, size: int, names: tuple[str, ...], view: _MeshView) -> str:
    n = view.size(names)
    by = f"mesh axis {names[0]!r}={n}" if len(names) == 1 else f"mesh axes {names}={n}"
    return f"axis {axis}={size} is not divisible by {by} ({_remainder_text(size, n)})"


@dataclasses.dataclass(slots=True)
class _Chooser:
    """Fits the rules to one leaf, in the mapping's own order."""

    leaf: Leaf
    mapping: AxisMapping
    view: _MeshView
    problems: list[Problem]
    replicated: list[tuple[str, str]]
    taken: dict[str, str] = dataclasses.field(default_factory=dict[str, str])

    def run(self) -> tuple[AxisChoice, ...]:
        names = self.leaf.names or ()
        sizes = dict(zip(names, self.leaf.axis_sizes, strict=True))
        chosen: dict[str, AxisChoice] = {}
        for axis, rule in self.mapping.rules.items():
            if axis in sizes and axis != UNNAMED:
                chosen[axis] = self._choose(axis, sizes[axis], rule)
                for mesh_axis in self.view.free(chosen[axis].won):
                    self.taken[mesh_axis] = axis
        return tuple(
            chosen.get(name) or AxisChoice(name, size, None, None)
            for name, size in zip(names, self.leaf.axis_sizes, strict=True)
        )

    def _fits(self, size: int, candidate: MeshAxes) -> str:
        names = self.view.free(candidate)
        if any(n not in self.view.sizes for n in names):
            return ABSENT
        if any(n in self.taken for n in names):
            return BUSY
        return INDIVISIBLE if names and size % self.view.size(names) else ""

    def _choose(self, axis: str, size: int, rule: Rule) -> AxisChoice:
        candidates = rule.candidates if isinstance(rule, First) else (rule,)
        lost: list[tuple[MeshAxes, str]] = []
        for candidate in candidates:
            reason = self._fits(size, candidate)
            if not reason:
                return AxisChoice(axis, size, rule, spec_entry(self.view.free(candidate)), tuple(lost))
            lost.append((candidate, reason))
        nothing = AxisChoice(axis, size, rule, None, tuple(lost))
        if self.mapping.indivisible == "replicate" and any(reason == INDIVISIBLE for _, reason in lost):
            names = next(self.view.free(c) for c, reason in lost if reason == INDIVISIBLE)
            self.replicated.append((self.leaf.path, _indivisible_text(axis, size, names, self.view)))
        else:
            kind, text = self._problem(axis, size, rule, lost)
            names = () if isinstance(rule, First) else self.view.free(rule)
            self.problems.append(Problem(kind, self.leaf.path, text, axis, size, names))
        return nothing

    def _problem(
        self, axis: str, size: int, rule: Rule, lost: list[tuple[MeshAxes, str]]
    ) -> tuple[type[errors.PlanError], str]:
        if isinstance(rule, First):
            tried = lost_text(size, lost, self.view.mesh, self.view.manual, self.taken)
            return errors.NoCandidateError, f"no candidate of {rule!r} fits axis {axis}={size}: {tried}"
        names = self.view.free(rule)
        reason = lost[0][1]
        if reason == ABSENT:
            return errors.MeshAxisNotFoundError, absent_text(f"{axis}={size}", names, self.view.mesh)
        if reason == BUSY:
            held = next(n for n in names if n in self.taken)
            return (
                errors.MeshAxisConflictError,
                f"axes {self.taken[held]} and {axis} are both mapped to mesh axis {held!r}",
            )
        return errors.IndivisibleAxisError, _indivisible_text(axis, size, names, self.view)


def _fix_indivisible(problems: list[Problem], view: _MeshView) -> str:
    distinct = {(p.axis, p.size, p.mesh_axes): p for p in problems}
    padded = {(a, s): -(-s // view.size(m)) * view.size(m) for a, s, m in distinct}
    if len(distinct) > 1:
        pads = ", ".join(f"{axis}={size} to {to}" for (axis, size), to in padded.items())
        return f'pad the axes ({pads}), map them to mesh axes that divide them, or pass indivisible="replicate"'
    (axis, size, mesh_axes) = next(iter(distinct))
    fitting = [f"{n!r}={k}" for n, k in view.sizes.items() if n not in mesh_axes and k > 1 and size % k == 0]
    other = f"map {axis} to {' or '.join(fitting)}, " if fitting else ""
    return f'pad the axis to {padded[(axis, size)]}, {other}or pass indivisible="replicate"'


# Of problems of several kinds, the first kind here is raised; the fix of the last depends on the axes.
FIXES: dict[type[errors.PlanError], str] = {
    errors.MeshAxisNotFoundError: "map the axis to a mesh axis that exists, or use first(..., None)",
    errors.MeshAxisConflictError: "map one of the two axes to None or to another mesh axis, or use first(...)"
    " to let it give way",
    errors.NoCandidateError: "end the candidates with None to leave the axis unsharded when nothing fits",
    errors.IndivisibleAxisError: "",
}


def fixes(problems: Sequence[Problem], mesh: MeshLike, manual: frozenset[str]) -> list[str]:
    """How to fix problems, one line per kind."""
    by_kind = {kind: [p for p in problems if p.kind is kind] for kind in FIXES}
    view = _MeshView(mesh, manual)
    return [FIXES[kind] or _fix_indivisible(found, view) for kind, found in by_kind.items() if found]


def raise_problems(problems: Sequence[Problem], total: int, mesh: MeshLike, manual: frozenset[str]) -> None:
    """Raise the error that lists all these problems of ``total`` leaves."""
    bad = len({p.path for p in problems})
    raise next(kind for kind in FIXES if any(p.kind is kind for p in problems))(
        f"{errors.count_of(bad, total)} cannot be sharded by this mapping",
        [f"{errors.at(p.path)}: {p.text}" for p in problems],
        fix="\n  fix: ".join(fixes(problems, mesh, manual)),
    )


def _mapping_for(leaf: Leaf, mapping: AxisMapping, mesh: MeshLike) -> AxisMapping:
    names = leaf.names or ()
    found = mapping.for_names(names)
    if leaf.mesh_axes:
        # Flax's names may be those of mesh axes.
        bare = {n: tuple(n.split("+")) for n in names if n not in found.rules and set(n.split("+")) <= {*mesh.shape}}
        found = found | bare if bare else found
    return found if leaf.own is None else own_over(leaf.own, found)


def plan_leaves(
    leaves: Sequence[Leaf],
    treedef: PyTreeDef,
    mapping: AxisMapping,
    mesh: MeshLike,
    *,
    memory_kind: str | None,
    manual: frozenset[str],
    collect: list[Problem] | None = None,
    source: str = "",
) -> Plan:
    """Plan leaves that are walked already; see `plan`.

    With a list to ``collect`` problems in, nothing is raised or warned of: an axis with a problem is left unsharded.
    Leaves read from a ``source`` are warned of at each call.
    """
    view = _MeshView(mesh, manual)
    problems: list[Problem] = []
    replicated: list[tuple[str, str]] = []
    out: list[LeafPlan] = []
    for leaf in leaves:
        if not is_array_like(leaf.value):
            out.append(LeafPlan(leaf.path, None, None, None, None, None, 0, 0, note=leaf.note))
            continue
        shape, dtype = tuple(leaf.value.shape), leaf.value.dtype
        size = math.prod(shape) * dtype.itemsize
        if leaf.names is None:
            out.append(LeafPlan(leaf.path, None, shape, dtype, None, None, size, size, note=leaf.note))
            continue
        effective = _mapping_for(leaf, mapping, mesh)
        why = _Chooser(leaf, effective, view, problems, replicated).run()
        pieces = math.prod(view.size(view.free(choice.won)) for choice in why)
        spec = PartitionSpec(*(choice.won for choice in why))
        axes = tuple(zip(leaf.names, leaf.axis_sizes, strict=True))
        out.append(LeafPlan(leaf.path, axes, shape, dtype, spec, memory_kind, size, size // pieces, why, leaf.note))
    total = sum(leaf.shape is not None for leaf in out)
    if collect is not None:
        collect.extend(problems)
    elif problems:
        raise_problems(problems, total, mesh, manual)
    if replicated and collect is None:
        bad = errors.count_of(len({path for path, _ in replicated}), total)
        lines = [f"{errors.at(path)}: {text}" for path, text in replicated]
        headline = f'{source}{": " * bool(source)}{bad} replicated along an axis (indivisible="replicate")'
        (errors.warn_user if source else errors.warn_once)(errors.message(headline, lines))
    return Plan(tuple(out), mapping, mesh, treedef)


def with_policy(mapping: AxisMapping, indivisible: Policy | None, unmatched: Unmatched | None = None) -> AxisMapping:
    """The mapping under the policies given for this call, if any."""
    if indivisible in (None, mapping.indivisible) and unmatched in (None, mapping.unmatched):
        return mapping
    return AxisMapping(mapping, indivisible=indivisible, unmatched=unmatched)


def check_unmatched(what: str, leaves: Sequence[Leaf], mapping: AxisMapping) -> None:
    """Warn, or raise, where a mapping has rules and no array a name, or a rule resembles an axis without matching one.

    Raises:
        AxisNamesError: The policy is ``"error"``.
    """
    rules = [name for name, rule in mapping.rules.items() if rule is not None]
    if mapping.unmatched == "ignore" or not rules:
        return
    arrays = [leaf for leaf in leaves if is_array_like(leaf.value) and not obstacle_to_names(leaf.value)]
    axes = {name for leaf in arrays for name in leaf.names or ()} - {UNNAMED}
    if arrays and all(leaf.names is None for leaf in arrays):
        lines = [f"rules: {', '.join(rules)}"]
        lines += [f"axes pattern: {pattern!r}" for pattern, _ in mapping.axes_items if pattern]
        lines += [f"leaf: {errors.at(leaf.path)}: {leaf.note or tuple(leaf.value.shape)}" for leaf in arrays]
        headline = f"{what}: none of {len(arrays)} arrays has axis names, so the mapping places none"
        fix = 'name them by leaf path with axes={"layers.*.weight": "mlp embed"}, or pass unmatched="ignore"'
    else:
        bare = sorted(axes - mapping.rules.keys())
        hints = {name: errors.did_you_mean(name, bare) for name in rules if name not in axes}
        lines = [f"{name!r}{hint}" for name, hint in hints.items() if hint]
        headline = f"{what}: {len(lines)} of {len(rules)} rules match no axis, but resemble one"
        fix = 'use the name that the arrays have, or pass unmatched="ignore"'
    if lines and mapping.unmatched == "error":
        raise errors.AxisNamesError(headline, lines, fix)
    if lines:
        errors.warn_once(errors.message(headline, lines, fix))


def resolve(
    tree: PyTree,
    mapping: MappingLike | None,
    mesh: MeshLike | None,
    indivisible: Policy | None,
    axes: AxesLike | None = None,
) -> tuple[list[Leaf], AxisMapping, MeshLike]:
    """A tree's leaves, and the mapping and mesh to plan them with: those given, else those in force; see `plan`."""
    found = resolve_mapping(mapping, axes)
    leaves = named_leaves(tree, found)
    if found is None:
        if not any(leaf.own is not None for leaf in leaves):
            raise errors.NoMappingError(
                "no axis mapping: none was given and none is in force", fix="pass mapping=, or enter axis_mapping"
            )
        found = AxisMapping()
    return leaves, with_policy(found, indivisible), require_mesh(mesh)


def plan(
    tree: PyTree,
    mapping: MappingLike | None = None,
    mesh: MeshLike | None = None,
    *,
    memory_kind: str | None = None,
    indivisible: Policy | None = None,
    axes: AxesLike | None = None,
) -> Plan:
    """Plan where each leaf of a tree goes. Pure: moves nothing and touches no backend.

    Args:
        tree: Any pytree of `haliax.NamedArray`s (of arrays or ``jax.ShapeDtypeStruct``s, any shape and dtype),
            Equinox modules whose fields are declared with ``axis_names`` metadata, arrays that ``axes`` name, and other
            leaves, which are left as they are.
        mapping: Named axis → mesh axes; the context's (`axis_mapping`) by default.
        mesh: A ``jax.sharding.Mesh`` or ``AbstractMesh``; the context's by default.
        memory_kind: The memory kind to place into; None keeps the kind of each array.
        indivisible: Overrides the mapping's policy for axes that do not divide: ``"error"`` or ``"replicate"``.
        axes: Names for arrays that carry none, by leaf path, or of a single array; see `AxisMapping`.

    Returns:
        A `Plan` with one `LeafPlan` per leaf.

    Raises:
        NoMappingError: No mapping given and none in the context.
        NoMeshError: No mesh given and none in the context.
        MeshAxisNotFoundError: A leaf's axis is mapped to a mesh axis that the mesh lacks.
        MeshAxisConflictError: Two axes of one leaf are mapped to one mesh axis.
        IndivisibleAxisError: A leaf's axis does not divide and the policy is ``"error"``.
        NoCandidateError: No candidate of a `first` rule fits a leaf.
        AxisNamesError: ``axes`` do not fit the arrays.

    Examples:
        >>> import haliax as hax, jax, namedshard as ns
        >>> mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
        >>> axes = hax.Axis("mlp", 512), hax.Axis("embed", 64)
        >>> w = hax.NamedArray(jax.ShapeDtypeStruct((512, 64), "float32"), axes)
        >>> p = ns.plan({"w": w}, {"mlp": "model"}, mesh)
        >>> p["['w']"].spec, p["['w']"].bytes_per_device
        (P('model', None), 32768)
    """
    leaves, found, where = resolve(tree, mapping, mesh, indivisible, axes)
    treedef = jax.tree_util.tree_structure(tree)
    return plan_leaves(leaves, treedef, found, where, memory_kind=memory_kind, manual=manual_axes())
