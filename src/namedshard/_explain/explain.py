"""What a plan would do with a tree and why: `explain`."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jaxtyping import PyTree

from namedshard import _jaxcompat as compat
from namedshard._errors import MAX_LISTED, did_you_mean, human_bytes
from namedshard._explain import report
from namedshard._explain.report import Explanation, Lint, Row, Totals
from namedshard._place.route import (
    Placement,
    Route,
    obstacle,
    placement_of,
    route_for,
    transient_bytes,
    wanted_memory_kind,
)
from namedshard._place.shard import check_memory_kind
from namedshard._plan.best_effort import best_effort_spec
from namedshard._plan.leaves import Leaf, jax_dtype
from namedshard._plan.mapping import AxisMapping, MappingLike, Policy, axis_names, mesh_axes_of
from namedshard._plan.mesh import MeshLike, describe, manual_axes
from namedshard._plan.names import UNNAMED, AxesLike, unmatched_patterns
from namedshard._plan.plan import LeafPlan, Plan, Problem, fixes, plan_leaves, resolve
from namedshard._types import PyTreeDef

LARGE = 16 * 2**20
"""Bytes from which a replicated leaf is worth a lint."""


def explain(
    tree: PyTree,
    mapping: MappingLike | None = None,
    mesh: MeshLike | None = None,
    *,
    memory_kind: str | None = None,
    indivisible: Policy | None = None,
    axes: AxesLike | None = None,
) -> Explanation:
    """Tell what `shard` would do with a tree, leaf by leaf, and why. Moves nothing.

    For each leaf: its axes, the wanted spec, bytes per device, where it is now, the route, every candidate that lost
    and why. Leaves that cannot be placed are shown with what is wrong; they raise nothing. Below the table stand sums
    and lints: keys of the mapping that match no axis, mesh axes that are absent or unused, large leaves left
    replicated, names that do not fit.

    Args:
        tree: Any pytree; see `plan`. Abstract leaves and an ``AbstractMesh`` will do, and then no backend is touched.
        mapping: Named axis → mesh axes; the context's (`axis_mapping`) by default.
        mesh: A ``jax.sharding.Mesh`` or ``AbstractMesh``; the context's by default.
        memory_kind: As `shard` takes it.
        indivisible: As `shard` takes it.
        axes: As `shard` takes it.

    Returns:
        An `Explanation`: print it.

    Raises:
        NoMappingError: No mapping given and none in the context.
        NoMeshError: No mesh given and none in the context.
        MappingError: The mapping is not well formed.
        AxisNamesError: ``axes`` do not fit the arrays.
        MemoryKindError: The mesh's devices do not offer the memory kind.

    Examples:
        >>> import haliax as hax, jax, namedshard as ns
        >>> mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
        >>> Vocab, Embed = hax.Axis("vocab", 30522), hax.Axis("embed", 384)
        >>> table = hax.NamedArray(jax.ShapeDtypeStruct((30522, 384), "float32"), (Vocab, Embed))
        >>> e = ns.explain({"table": table}, {"vocab": ns.first("model", "data", None)}, mesh)
        >>> print(e.rows[0].why[0])
        vocab → 'data' by first('model', 'data', None): 'model' is indivisible (30522 = 4*7630 + 2)
    """
    leaves, found, where = resolve(tree, mapping, mesh, indivisible, axes)
    if memory_kind is not None and isinstance(where, Mesh):
        check_memory_kind(where, memory_kind)
    return explain_leaves(leaves, jax.tree_util.tree_structure(tree), found, where, memory_kind=memory_kind)


def explain_leaves(
    leaves: Sequence[Leaf],
    treedef: PyTreeDef,
    mapping: AxisMapping,
    mesh: MeshLike,
    *,
    memory_kind: str | None = None,
    in_file: bool = False,
    lints: Iterable[Lint] = (),
) -> Explanation:
    """Explain leaves that are walked already.

    ``in_file`` is for the tensors of a checkpoint, which have no placement; ``lints`` are added to those found here.
    """
    problems: list[Problem] = []
    manual = manual_axes()
    plan = plan_leaves(leaves, treedef, mapping, mesh, memory_kind=memory_kind, manual=manual, collect=problems)
    wrong: dict[str, tuple[str, ...]] = {}
    for problem in problems:
        wrong[problem.path] = (*wrong.get(problem.path, ()), problem.text)
    staging = compat.staging()
    found: list[Row] = []
    for leaf, planned in zip(leaves, plan.leaves, strict=True):
        if planned.shape is None:
            continue
        bad = wrong.get(planned.path, ())
        why = [] if bad else [report.why_text(c, planned.why, mesh, manual) for c in planned.why]
        if leaf.own is not None and any(name in leaf.own.rules for name in leaf.names or ()):
            why.append(f"carries its own mapping {dict(leaf.own.rules)!r}")
        reasons = tuple(w for w in (*why, planned.note) if w)
        if in_file:
            route = "error" if bad else "read" if planned.spec is not None else "best effort"
            planned = _as_loaded(planned, mesh)
            found.append(Row(planned.path, planned, "in file", route, reasons, bad, memory_kind=memory_kind))
        else:
            found.append(_row(planned, leaf.value, reasons, bad, mesh, memory_kind, staging))
    rows = tuple(found)
    axes = list(dict.fromkeys(name for row in rows for name, _ in row.plan.axes or () if name != UNNAMED))
    ruled = {*mapping.rules, *(c.axis for row in rows for c in row.plan.why if c.rule is not None)}
    patterns = unmatched_patterns(mapping.axes_items, [row.path for row in rows])
    hints = [Lint("unmatched pattern", line) for line in patterns]
    lints = (*lints, *hints, *_lints(rows, axes, mapping, mesh, manual))
    unmapped = tuple(name for name in axes if name not in ruled)
    fixing = tuple(fixes(problems, mesh, manual))
    return Explanation(plan, rows, lints, _totals(plan, rows), unmapped, fixing)


def _as_loaded(planned: LeafPlan, mesh: MeshLike) -> LeafPlan:
    """What a device holds of a tensor after `load_safetensors`, which also places arrays without names."""
    spec = best_effort_spec(planned.shape or (), mesh) if planned.spec is None else planned.spec
    pieces = math.prod(mesh.shape[name] for entry in spec for name in axis_names(entry))
    held = planned.bytes // planned.dtype.itemsize * jax_dtype(planned.dtype).itemsize
    return dataclasses.replace(planned, spec=spec, bytes_per_device=held // pieces)


def _row(
    planned: LeafPlan,
    value: Any,
    why: tuple[str, ...],
    problems: tuple[str, ...],
    mesh: MeshLike,
    memory_kind: str | None,
    staging: bool,
) -> Row:
    """The row of a leaf in memory."""
    placement = placement_of(value, staging)
    now = _placement_text(value, placement, mesh)
    if now == "deleted" and planned.spec is not None:
        problems = (*problems, "the array was donated or deleted")
    if planned.spec is not None and (reason := obstacle(value, placement)):
        problems = (*problems, reason)
    if problems:
        return Row(planned.path, planned, now, "error", why, problems)
    kind = wanted_memory_kind(placement, memory_kind)
    route, transient, across = _route(planned, placement, mesh, kind)
    return Row(planned.path, planned, now, route, why, transient_bytes=transient, across=across, memory_kind=kind)


def _route(planned: LeafPlan, now: Placement, mesh: MeshLike, memory_kind: str | None) -> tuple[str, int, bool]:
    """The route, the most bytes on one device during the move, and whether that involves several processes."""
    if planned.spec is None or planned.shape is None:
        return Route.LEFT.value, 0, False
    if now.kind == "array" and not isinstance(mesh, Mesh):
        return "needs devices", 0, False
    want = NamedSharding(mesh, planned.spec, memory_kind=memory_kind)
    route = route_for(now, want, planned.shape)
    if now.kind == "traced" or not isinstance(mesh, Mesh):
        return route.value, 0, False
    moves = route not in (Route.KEEP, Route.ANNOTATE)
    devices = want.device_set | (now.sharding.device_set if now.kind == "array" and now.sharding else set())
    across = moves and len({d.process_index for d in devices}) > 1
    return route.value, transient_bytes(now, want, planned.shape, planned.dtype.itemsize), across


def _placement_text(value: Any, now: Placement, mesh: MeshLike) -> str:
    if now.kind == "array" and value.is_deleted():
        return "deleted"
    where = now.kind if now.sharding is None else _sharding_text(now.sharding, mesh)
    if now.sharding is not None and not now.committed and now.kind == "array":
        where += ", uncommitted"
    if now.memory_kind in (None, "device"):  # that every device has, and that says nothing
        return where
    return where + (" " if now.sharding is None else ", ") + now.memory_kind


def _sharding_text(sharding: Any, mesh: MeshLike) -> str:
    """A sharding seen from a mesh: what differs from the mesh is named."""
    if isinstance(sharding, SingleDeviceSharding):
        device = next(iter(sharding.device_set))
        return f"{device.platform}:{device.id}"
    if not isinstance(sharding, NamedSharding):
        return type(sharding).__name__
    text = report.spec_text(sharding.spec)
    have = sharding.mesh
    if have == mesh:
        return text
    if have.shape != mesh.shape:
        return f"{text} on mesh {describe(have)}"
    if isinstance(have, Mesh) and isinstance(mesh, Mesh) and have.devices.tolist() != mesh.devices.tolist():
        same = set(have.devices.flat) == set(mesh.devices.flat)
        return text + (" in another device order" if same else " on other devices")
    return text + ("" if have.axis_types == mesh.axis_types else " on other axis types")


def _totals(plan: Plan, rows: Sequence[Row]) -> Totals:
    placed = [row for row in rows if row.plan.spec is not None and not row.problems]
    left = [row.plan for row in rows if row.plan.spec is None]
    return Totals(
        leaves=len(rows),
        bytes=sum(row.plan.bytes for row in rows),
        bytes_per_device=sum(row.plan.bytes_per_device for row in placed),
        bytes_replicated=sum(row.plan.bytes_per_device for row in placed if not _used(row.plan)),
        bytes_in_host_memory=sum(
            row.plan.bytes_per_device for row in placed if row.memory_kind in ("pinned_host", "unpinned_host")
        ),
        left=len(left),
        bytes_left=sum(p.bytes for p in left),
        others=len(plan.leaves) - len(rows),
        problems=sum(bool(row.problems) for row in rows),
    )


def _used(plan: LeafPlan) -> set[str]:
    """The mesh axes that a leaf is split over."""
    return {name for entry in plan.spec or () for name in axis_names(entry)}


# --- lints ------------------------------------------------------------------------------------------------------------


def _lints(
    rows: Sequence[Row], axes: Sequence[str], mapping: AxisMapping, mesh: MeshLike, manual: frozenset[str]
) -> Iterator[Lint]:
    unmatched = {key: did_you_mean(key, axes) for key in mapping.rules if key not in axes}
    for key, hint in unmatched.items():
        if hint:
            yield Lint("unmatched key", f"mapping key {key!r} matches no axis{hint}")
    if far := [key for key, hint in unmatched.items() if not hint]:
        keys = f"key{'s' * (len(far) > 1)} {', '.join(map(repr, far))} match{'es' * (len(far) == 1)}"
        yield Lint("unmatched key", f"mapping {keys} no axis{_known(axes)}")
    for key, rule in mapping.rules.items():
        for name in mesh_axes_of(rule):
            if name not in mesh.shape:
                hint = did_you_mean(name, list(mesh.shape))
                yield Lint(
                    "absent mesh axis",
                    f"the rule for {key} ({rule!r}) names mesh axis {name!r}, but the mesh has {describe(mesh)}{hint}",
                )
    used = set[str]().union(*(_used(row.plan) for row in rows))
    for name, size in mesh.shape.items():
        if size > 1 and name not in used and name not in manual and rows:
            yield Lint("unused mesh axis", f"mesh axis {name!r}={size} splits no leaf")
    if mesh.size > 1:
        yield from _some([lint for row in report.collapse(rows) for lint in _large(row)])
    yield from _some(
        [Lint("names do not fit", f"{r.path}: {r.plan.note}") for r in report.collapse(rows) if r.plan.note]
    )


def _known(axes: Sequence[str]) -> str:
    if not axes:
        return ": no leaf has axis names"
    more = ", ..." if len(axes) > MAX_LISTED else ""
    return f" (the axes are {', '.join(axes[:MAX_LISTED])}{more})"


def _large(row: Row) -> Iterator[Lint]:
    if row.plan.bytes < LARGE or _used(row.plan) or row.problems:
        return
    of = report.axes_text(row.plan)
    size = human_bytes(row.plan.bytes)
    each = f" ×{row.leaves}" if row.leaves > 1 else ""
    reason = f"none of {of} is sharded" if row.plan.axes else f"{of} has no axis names"
    yield Lint("large replica", f"{row.path}{each} is left replicated, {size} each: {reason}")


def _some(found: Sequence[Lint]) -> Iterator[Lint]:
    yield from found[:MAX_LISTED]
    if len(found) > MAX_LISTED:
        yield Lint(found[0].kind, f"... and {len(found) - MAX_LISTED} more")
