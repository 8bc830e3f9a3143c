"""EFFECTS. Carries out plans: the only module that moves arrays.

A tree is planned and checked whole before the first byte moves, and work is batched per route over the tree.
"""

import collections
from collections.abc import Hashable, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from namedshard import _jaxcompat as compat
from namedshard._cache import BoundedCache
from namedshard._errors import MemoryKindError, NoMeshError, TracedMoveError, at, count_of, deleted_arrays, warn_once
from namedshard._place import local
from namedshard._place import transfer as collective
from namedshard._place.route import (
    Move,
    Route,
    check_movable,
    placement_of,
    route_for,
    same_place,
    wanted_memory_kind,
)
from namedshard._place.traced import check_mixed, check_traced_kind
from namedshard._plan.leaves import named_leaves
from namedshard._plan.mapping import AxisMapping, MappingLike, Policy, Unmatched, resolve_mapping, thread_hint
from namedshard._plan.mesh import (
    MeshLike,
    context_mesh,
    describe,
    device_ids,
    is_unattached,
    manual_axes,
    require_attached,
    require_mesh,
)
from namedshard._plan.names import AxesLike
from namedshard._plan.plan import Plan, check_unmatched, plan_leaves, with_policy
from namedshard._types import Device, Tracer

T = TypeVar("T")


class _CachedPlan:
    """A plan, its shardings, and for each leaf the last sharding object found to be in place: most calls stop there."""

    __slots__ = ("in_place", "plan", "shardings")

    def __init__(self, plan: Plan):
        self.plan = plan
        self.shardings: dict[tuple[int, str | None], NamedSharding] = {}
        self.in_place: list[Any] = [None] * len(plan.leaves)

    def sharding(self, index: int, memory_kind: str | None) -> NamedSharding:
        key = (index, memory_kind)
        found = self.shardings.get(key)
        if found is None:
            spec = self.plan.leaves[index].spec
            assert spec is not None
            found = self.shardings[key] = NamedSharding(self.plan.mesh, spec, memory_kind=memory_kind)
        return found


# By structure, avals, mapping, mesh, memory kind and the Manual axes in force: all that a plan depends on.
_plans: BoundedCache[_CachedPlan] = BoundedCache(512)


def _signature(leaf: Any) -> Hashable:
    if type(leaf) is compat.ArrayImpl:
        return leaf.aval
    return (tuple(leaf.shape), leaf.dtype) if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else None


def shard(  # noqa: PLR0913 - options of the public call
    tree: T,
    mapping: MappingLike | None = None,
    mesh: MeshLike | None = None,
    *,
    memory_kind: str | None = None,
    donate: bool = False,
    indivisible: Policy | None = None,
    axes: AxesLike | None = None,
    unmatched: Unmatched | None = None,
    check_replicas: bool = True,
) -> T:
    """Put every named array of a tree where the mapping wants it, by the route that works.

    The whole tree is planned and checked before the first byte moves. It works eagerly and under ``jit``, ``grad``,
    ``vmap``, ``scan`` and ``shard_map``, on Auto, Explicit and mixed meshes, whatever mesh is in force. Values, dtypes
    and weak types never change; arrays already in place come back as the same objects; one array object in two places
    of the tree stays one array; the result is committed.

    Args:
        tree: Any pytree. `haliax.NamedArray`s, fields of Equinox modules declared with ``axis_names`` metadata, and
            arrays that ``axes`` name are placed; ``jax.ShapeDtypeStruct``s among them are annotated with their
            sharding; all else is left as it is.
        mapping: Named axis → mesh axes; the context's (`axis_mapping`) by default. With none anywhere the tree is
            returned as it is, with one warning.
        mesh: A ``jax.sharding.Mesh``; the context's by default. While tracing, an ``AbstractMesh`` will do.
        memory_kind: ``"device"``, ``"pinned_host"``, ...; None keeps the kind each array has.
        donate: Give up the source arrays that have to move.
        indivisible: Overrides the mapping's policy for axes that do not divide: ``"error"`` or ``"replicate"``.
        axes: Names for arrays that carry none: by leaf path, ``{"layers.*.weight": "mlp embed"}``, or of a single
            array, ``"batch ... embed"``; see `AxisMapping`.
        unmatched: Overrides what the mapping says of arrays without names and rules without axes: ``"warn"``, once,
            ``"error"`` or ``"ignore"``. Traced arrays are never warned of.
        check_replicas: In a job of several processes, compare the copies of replicated arrays before they are split, as
            host values are: under ``jax.set_mesh`` JAX calls arrays replicated that each process made of its own.

    Returns:
        The tree with its arrays in place.

    Raises:
        NoMeshError: There is a mapping, but no mesh given and none in the context.
        AxisNamesError: ``axes`` do not fit the arrays, or nothing matches and the policy is ``"error"``.
        MeshAxisNotFoundError: A leaf's axis is mapped to a mesh axis that the mesh lacks.
        MeshAxisConflictError: Two axes of one leaf are mapped to one mesh axis.
        IndivisibleAxisError: A leaf's axis does not divide and the policy is ``"error"``.
        NoCandidateError: No candidate of a `first` rule fits a leaf.
        MemoryKindError: The mesh's devices do not offer the memory kind.
        HostValueError: A host value, or a replicated array, is not the same on each process.
        DeletedArrayError: A leaf was donated or deleted before.
        UnsupportedArrayError: A leaf is a numpy masked array, or still to be summed with other processes.
        NarrowingError: A 64-bit integer on the host does not fit the 32 bits that JAX would keep.
        TracedMoveError: A traced array was asked to leave the devices it is traced for.
        UnattachedDevicesError: An array with values was to move to the devices of a `topology_mesh`.

    Examples:
        >>> import haliax as hax, jax, jax.numpy as jnp, namedshard as ns
        >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
        >>> x = ns.shard(hax.named(jnp.arange(8.0), "batch"), {"batch": "data"}, mesh)
        >>> tuple(x.array.sharding.spec)
        ('data',)
    """
    found = resolve_mapping(mapping, axes)
    if found is None:
        if not any(leaf.own is not None for leaf in named_leaves(tree)):
            text = "shard: no axis mapping was given and none is in force; the tree is returned as it is"
            warn_once(text + thread_hint(), RuntimeWarning)
            return tree
        found = AxisMapping()
    found = with_policy(found, indivisible, unmatched)
    where = require_mesh(mesh, "shard")
    if memory_kind is not None and isinstance(where, Mesh):
        check_memory_kind(where, memory_kind)
    leaves, treedef = jax.tree_util.tree_flatten(tree)
    untraced = compat.nothing_traced()
    manual = frozenset[str]() if untraced else manual_axes()
    try:
        types, have, committed = compat.placements(leaves)
    except AttributeError:
        types, have, committed = [_signature(x) for x in leaves], [], [False]
    key = (treedef, tuple(types), found, where, memory_kind, manual)
    cached = _plans.get(key)
    if cached is None:
        named = named_leaves(tree, found)
        if untraced and not any(isinstance(x, Tracer) for x in leaves):
            check_unmatched("shard", named, found)
        planned = plan_leaves(named, treedef, found, where, memory_kind=memory_kind, manual=manual)
        cached = _plans.put(key, _CachedPlan(planned))
    # The lists hold the same objects in most calls, which Python compares first.
    known = have == cached.in_place and False not in committed and not compat.any_deleted(leaves)
    if untraced and (known or _all_in_place(cached, leaves, memory_kind)):
        return tree
    placed = _execute(cached, leaves, memory_kind, donate, manual, check_replicas)
    return jax.tree_util.tree_unflatten(treedef, placed)


def _is_concrete_array(x: Any) -> bool:
    return type(x) is compat.ArrayImpl or (
        isinstance(x, jax.Array) and not isinstance(x, Tracer) and compat.is_key_array(x)
    )


def _all_in_place(cached: _CachedPlan, leaves: Sequence[Any], memory_kind: str | None) -> bool:
    """Whether there is nothing to do, noting each leaf's sharding for the next call."""
    in_place = cached.in_place
    for i, (leaf, planned) in enumerate(zip(leaves, cached.plan.leaves, strict=True)):
        if planned.spec is None:
            in_place[i] = getattr(leaf, "sharding", None)
            continue
        if not _is_concrete_array(leaf) or leaf.is_deleted() or not leaf.committed:
            return False
        have = leaf.sharding
        if have is in_place[i]:
            continue
        want = cached.sharding(i, memory_kind or have.memory_kind)
        if not same_place(have, want, leaf.ndim):
            return False
        in_place[i] = have
    return True


def _execute(
    cached: _CachedPlan,
    leaves: Sequence[Any],
    memory_kind: str | None,
    donate: bool,
    manual: frozenset[str],
    check_replicas: bool,
) -> list[Any]:
    staging = compat.staging()
    planned, mesh = cached.plan.leaves, cached.plan.mesh
    nows = {i: placement_of(x, staging) for i, x in enumerate(leaves) if planned[i].spec is not None}
    concrete = sum(now.kind in ("host", "array") for now in nows.values())
    if concrete and isinstance(mesh, AbstractMesh):
        raise NoMeshError(
            f"{count_of(concrete, len(leaves))} cannot be placed: the mesh ({describe(mesh)}) is abstract and has no"
            " devices",
            fix="pass a jax.sharding.Mesh",
        )
    # Tied leaves, one array object in two places, stay one array.
    moves: dict[tuple[int, NamedSharding], Move] = {}
    by_leaf: dict[int, Move] = {}
    for i, now in nows.items():
        x, want = leaves[i], cached.sharding(i, wanted_memory_kind(now, memory_kind))
        if (id(x), want) not in moves:
            moves[id(x), want] = Move(planned[i].path, x, now, want, route_for(now, want, x.shape))
        by_leaf[i] = moves[id(x), want]
    work = list(moves.values())
    _check(work, len(leaves), mesh)
    kept = {id(x) for i, x in enumerate(leaves) if i not in by_leaf or by_leaf[i].route is Route.KEEP}
    shared = _donate_sources(work, kept) if donate else []
    _run(work, manual, check_replicas)
    for source in shared:
        source.delete()
    return [by_leaf[i].result if i in by_leaf else x for i, x in enumerate(leaves)]


@compat.explicit_transfers()
def _run(work: Sequence[Move], manual: frozenset[str], check_replicas: bool = True) -> None:
    """Carry out moves, those that involve other processes first."""
    concrete = any(m.route not in (Route.ANNOTATE, Route.TRACED) for m in work)
    alone = collective.run(work, check_replicas) if concrete and jax.process_count() > 1 else work
    local.run(alone, manual=manual)


def _donate_sources(work: Sequence[Move], kept: set[int]) -> list[jax.Array]:
    """Let each source that isn't kept anywhere be consumed by its move; returns those that several moves read."""
    movable = [m for m in work if m.now.kind == "array" and id(m.value) not in kept]
    readers = collections.Counter(id(m.value) for m in movable)
    for move in movable:
        move.donate = readers[id(move.value)] == 1
    return list({id(m.value): m.value for m in movable if not m.donate}.values())


def _check(work: Sequence[Move], total: int, mesh: MeshLike | None = None) -> None:
    """Everything that can be known to fail, before anything moves; with a mesh, also that traced arrays stay on it."""
    if gone := [m.path for m in work if m.now.kind == "array" and m.value.is_deleted()]:
        raise deleted_arrays("shard", gone, total)
    require_attached("shard", *{m.want.mesh for m in work if m.route not in (Route.ANNOTATE, Route.KEEP)})
    check_movable("shard", ((m.path, m.value, m.now) for m in work), total)
    if traced := [m for m in work if m.route is Route.TRACED]:
        if mesh is not None:
            _check_traced(traced, mesh, total)
        check_mixed(traced, total)
    local.check_narrowing(((m.path, m.value) for m in work), total)


def known_devices(mesh: Mesh) -> list[Device]:
    """The devices of a mesh whose memories this process knows: its own, or all those of a topology."""
    devices = list(mesh.devices.flat)
    return devices if is_unattached(mesh) else [d for d in devices if d.process_index == jax.process_index()]


def check_memory_kind(mesh: Mesh, memory_kind: str) -> None:
    """Raise `MemoryKindError` if the devices of a mesh, as far as this process can tell, lack a memory kind."""
    check_memory_of(known_devices(mesh), memory_kind)


def check_memory_of(devices: Sequence[Device], memory_kind: str) -> None:
    """The same for devices of one kind that belong to this process."""
    for device in devices[:1]:
        kinds = sorted(m.kind for m in device.addressable_memories())
        # Of a topology, only TPUs of the first process tell any. JAX forgets memory kinds if the first device doesn't.
        if not kinds and memory_kind != "device":
            raise MemoryKindError(
                f"memory kind {memory_kind!r} can't be asked of {device.platform} devices that aren't attached: JAX"
                " describes their arrays without one",
                fix='use "device", or compile where these devices are attached',
            )
        if kinds and memory_kind not in kinds:
            listed = ", ".join(map(repr, kinds))
            raise MemoryKindError(
                f"memory kind {memory_kind!r} is not offered by {device.platform} devices, which have {listed}",
                fix=f"use one of {listed}",
            )


def _check_traced(traced: Sequence[Move], mesh: MeshLike, total: int) -> None:
    """JAX ignores a traced ``device_put`` to other devices, and its errors about constraints name no leaf."""
    for move in traced:
        check_traced_kind(move.want.memory_kind)
    context = context_mesh()
    if not (isinstance(context, Mesh) and isinstance(mesh, Mesh)) or device_ids(context) == device_ids(mesh):
        return
    raise TracedMoveError(
        f"{count_of(len(traced), total)} cannot leave the traced mesh from compiled code",
        [f"{at(m.path)}: traced for devices {device_ids(context)}, wanted on {device_ids(mesh)}" for m in traced],
        fix="move the arrays with shard before or after the compiled call, or trace under"
        " jax.set_mesh(the wanted mesh)",
    )


def auto_sharded(tree: T, mesh: MeshLike | None = None, *, axes: AxesLike | None = None) -> T:
    """`shard` by the mapping in force; with none in force, the tree as it is, without a warning.

    Args:
        tree: Any pytree; see `shard`.
        mesh: A mesh; the context's by default.
        axes: Names for arrays that carry none; see `shard`.

    Returns:
        The tree with its arrays in place.

    Raises:
        NoMeshError: There is a mapping, but no mesh given and none in the context.
        NamedShardError: As `shard` does.

    Examples:
        >>> import haliax as hax, jax.numpy as jnp, namedshard as ns
        >>> x = hax.named(jnp.zeros(4), "batch")
        >>> ns.auto_sharded(x) is x
        True
    """
    mapping = resolve_mapping(None)
    return tree if mapping is None else shard(tree, mapping, mesh, axes=axes)


def place_leaves(
    paths: Sequence[str],
    values: Sequence[Any],
    wanted: Sequence[tuple[int, NamedSharding]],
    donate: Sequence[int] = (),
) -> list[Any]:
    """Bring some of many values to shardings, in one batch, with the checks of `shard`; the others stay as they are.

    ``wanted`` holds (index into ``values``, sharding); ``donate`` indices of arrays to give up if they have to move.
    """
    staging = compat.staging()
    work: list[Move] = []
    for i, want in wanted:
        now = placement_of(values[i], staging)
        route = route_for(now, want, values[i].shape)
        given_up = i in donate and isinstance(values[i], jax.Array) and route is not Route.TRACED
        work.append(Move(paths[i], values[i], now, want, route, given_up))
    _check(work, len(values))
    _run(work, manual_axes())
    out = list(values)
    for (i, _), move in zip(wanted, work, strict=True):
        out[i] = move.result
    return out
