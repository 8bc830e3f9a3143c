"""PURE. What each argument of a compiled function must be, and what to do where it is not."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from namedshard import _jaxcompat as compat
from namedshard._errors import PlanError
from namedshard._leaves import Leaf, is_array_like
from namedshard._mapping import AxisMapping
from namedshard._mesh import MeshLike, manual_axes
from namedshard._mismatch import Mismatch, compare, compare_devices, mismatch_message
from namedshard._plan import LeafPlan, plan_leaves
from namedshard._route import placement_of, wanted_memory_kind


@dataclasses.dataclass(frozen=True, slots=True)
class Expectation:
    """What to do with one argument leaf before a call.

    Attributes:
        place: Where to put it first; None where it may stay.
        mismatch: How a committed array differs from what the call needs.
    """

    place: NamedSharding | None = None
    mismatch: Mismatch | None = None


_FINE = Expectation()


def _planned(
    walked: Sequence[Leaf], in_mapping: AxisMapping | None, mapping: AxisMapping | None, mesh: MeshLike
) -> Sequence[LeafPlan] | None:
    wanted = in_mapping if in_mapping is not None else mapping
    if wanted is None:
        return None
    structure = jax.tree_util.tree_structure([0] * len(walked))
    try:
        return plan_leaves(walked, structure, wanted, mesh, memory_kind=None, manual=manual_axes()).leaves
    except PlanError:
        # The compute mapping need not fit the arguments: only in_axis_resources speaks of them.
        if in_mapping is not None:
            raise
        return None


def _same_spec(x: jax.Array, mesh: Mesh) -> NamedSharding:
    """A plain array's own spec on another mesh where that makes sense, else replicated."""
    spec = getattr(x.sharding, "spec", PartitionSpec())
    try:
        wanted = NamedSharding(mesh, spec, memory_kind=x.sharding.memory_kind)
        wanted.shard_shape(x.shape)
    except ValueError:
        return NamedSharding(mesh, PartitionSpec(), memory_kind=x.sharding.memory_kind)
    return wanted


def _expect(leaf: Leaf, planned: LeafPlan | None, explicit: bool, mesh: MeshLike) -> Expectation:
    x = leaf.value
    spec = None if planned is None else planned.spec
    now = placement_of(x, staging=False)
    want = None if spec is None else NamedSharding(mesh, spec, memory_kind=wanted_memory_kind(now, None))
    if now.kind == "traced":
        return Expectation(want) if explicit else _FINE
    if now.kind == "abstract":
        return Expectation(want) if x.sharding is None else _FINE
    if now.kind == "host" or not now.committed:
        # Replicated where nothing else is said, as jit would do; done here, numpy and JAX arrays have one trace.
        return Expectation(want or (NamedSharding(mesh, PartitionSpec()) if isinstance(mesh, Mesh) else None))
    if not isinstance(mesh, Mesh):
        return _FINE
    mismatch = compare(leaf.path, x, want if explicit else None, mesh)
    if mismatch is None:
        return _FINE
    return Expectation(want or _same_spec(x, mesh), mismatch)


def _without_mesh(walked: Sequence[Leaf]) -> list[Expectation]:
    committed = [
        leaf for leaf in walked if is_array_like(leaf.value) and placement_of(leaf.value, staging=False).committed
    ]
    if not committed:
        return [_FINE] * len(walked)
    reference = max(committed, key=lambda leaf: len(leaf.value.sharding.device_set))
    out: list[Expectation] = []
    for leaf in walked:
        found = None
        if any(leaf is c for c in committed):
            found = compare_devices(leaf.path, leaf.value, reference.path, reference.value)
        out.append(Expectation(None, found) if found else _FINE)
    return out


def expectations(
    walked: Sequence[Leaf], in_mapping: AxisMapping | None, mapping: AxisMapping | None, mesh: MeshLike | None
) -> list[Expectation]:
    """For each argument leaf, what must happen before the call.

    With ``in_mapping`` each named leaf must have the sharding that it gives; otherwise committed arrays must be on the
    context mesh, in whatever spec. Host and uncommitted arrays are placed: by ``in_mapping``, else by ``mapping``.
    """
    if mesh is None:
        return _without_mesh(walked)
    planned = _planned(walked, in_mapping, mapping, mesh)
    out: list[Expectation] = []
    for i, leaf in enumerate(walked):
        if not is_array_like(leaf.value):
            out.append(_FINE)
        else:
            out.append(_expect(leaf, planned[i] if planned else None, in_mapping is not None, mesh))
    return out


def mismatch_text(
    name: str, bad: Sequence[tuple[Leaf, Expectation]], total: int, mapping_text: str, mesh: MeshLike | None
) -> str:
    """The whole message, with the exact calls that put things right."""
    fixes: list[str] = []
    for leaf, expectation in bad:
        root = _root(leaf.path)
        if leaf.names is not None and mapping_text != "none":
            fix = f"{root} = ns.shard({root}{mapping_text})"
        elif expectation.place is not None:
            spec = ", ".join(map(repr, expectation.place.spec))
            fix = (
                f"{leaf.path} = jax.device_put({leaf.path}, jax.sharding.NamedSharding(jax.sharding.get_mesh(),"
                f" jax.sharding.PartitionSpec({spec})))"
            )
        else:
            fix = "put all arguments on one mesh with ns.shard(..., mesh=mesh), and call under jax.set_mesh(mesh)"
        if fix not in fixes:
            fixes.append(fix)
    if mesh is not None:
        fixes.append('or pass on_mismatch="reshard" to move them at each call')
    found = [e.mismatch for _, e in bad if e.mismatch is not None]
    return mismatch_message(name, found, total, fixes)


def _root(path: str) -> str:
    for i, char in enumerate(path):
        if char in ".[":
            return path[:i]
    return path


def mapping_in_fix(in_mapping: AxisMapping | None, own: AxisMapping | None, mapping: AxisMapping | None) -> str:
    """How the fix spells the mapping: not at all where it is in force, ``"none"`` where there is none."""
    given = in_mapping if in_mapping is not None else own
    if given is not None:
        return f", {dict(given.rules)!r}"
    return "" if mapping is not None else "none"


def traced_devices(values: Sequence[Any], mesh: MeshLike | None) -> tuple[jax.Device, ...] | None:
    """The devices that a call is traced for, as far as is known before lowering."""
    if isinstance(mesh, Mesh):
        return tuple(mesh.devices.flat)
    if mesh is not None:
        return None
    arrays = [x for x in values if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)]
    if len(arrays) < len(values) and any(isinstance(x, jax.core.Tracer) for x in values):
        return None
    for x in arrays:
        if x.committed:
            return compat.device_order(x.sharding)
    return compat.device_order(arrays[0].sharding) if arrays else None
