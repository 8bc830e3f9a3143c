"""EFFECTS. Shards arrays while tracing, by constraints that the compiler carries out."""

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from namedshard import _jaxcompat as compat
from namedshard._errors import MemoryKindError, MixedAxesError, TracedMoveError, at, count_of
from namedshard._place.route import Move
from namedshard._plan.leaves import jax_dtype, native_dtype
from namedshard._plan.mapping import axis_names, spec_entry
from namedshard._plan.mesh import MeshLike
from namedshard._types import Tracer


def scrambled(dtype: Any) -> bool:
    """Whether XLA on CPUs corrupts values of a dtype on their way from device to device: they travel as ``int8``."""
    return dtype in (jnp.int2, jnp.uint2)


def _is_on_host(x: Any) -> bool:
    return compat.memory_kind_of_traced(x) == "pinned_host"


def _only(spec: PartitionSpec, names: set[str]) -> PartitionSpec:
    """A spec without the mesh axes that are not among these."""
    return PartitionSpec(*(spec_entry([n for n in axis_names(entry) if n in names]) for entry in spec))


def _constrain(x: Any, mesh: MeshLike, spec: PartitionSpec, *, is_argument: bool) -> Any:
    """``with_sharding_constraint`` on Auto axes, ``reshard`` on Explicit ones, one after the other on mixed meshes."""
    if scrambled(x.dtype):
        # Without barriers, XLA converts after the transfer.
        safe = jax.lax.optimization_barrier(x.astype(jnp.int8))
        moved = _constrain(safe, mesh, spec, is_argument=is_argument)
        return jax.lax.optimization_barrier(moved).astype(x.dtype)
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    auto = {n for n, t in types.items() if t == AxisType.Auto}
    explicit = {n for n, t in types.items() if t == AxisType.Explicit}
    abstract = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
    typed_for = jax.typeof(x).sharding.mesh
    has_devices = is_argument and not typed_for.empty
    if auto and not typed_for.empty and typed_for != abstract and (explicit or compat.any_explicit(typed_for)):
        # On an array typed for another mesh a constraint is an assertion, and a `reshard` of some axes loses the spec.
        x = jax.sharding.reshard(x, NamedSharding(compat.twin(mesh, AxisType.Explicit), spec))
    if not explicit:
        foreign = compat.abstract_context_mesh()
        typed = foreign is not None and foreign != abstract and compat.any_explicit(foreign)
        with jax.sharding.use_abstract_mesh(abstract) if typed else contextlib.nullcontext():
            return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
    on_host = auto and _is_on_host(x)
    if isinstance(mesh, Mesh) and (on_host or not (has_devices or compat.abstract_context_mesh())):
        # In host memory, only a constraint to the whole spec makes TPU compilers shard the value before its transfer;
        # without a context mesh, only an Auto one tells the compiler which devices are meant.
        x = jax.lax.with_sharding_constraint(x, NamedSharding(compat.twin(mesh, AxisType.Auto), spec))
    if not auto:
        return jax.sharding.reshard(x, NamedSharding(mesh, spec))
    with jax.sharding.use_abstract_mesh(abstract):
        explicit_spec = _only(spec, explicit)
        x = jax.sharding.reshard(x, explicit_spec)
        pairs = zip(_only(spec, auto), explicit_spec, strict=True)
        merged = (a if e is None else PartitionSpec.UNCONSTRAINED for a, e in pairs)
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*merged)))


def check_mixed(work: Sequence[Move], total: int) -> None:
    """No dimension may be over Auto and Explicit axes at once while tracing: no constraint can say so."""
    lines: list[str] = []
    for move in work:
        types = dict(zip(move.want.mesh.axis_names, move.want.mesh.axis_types, strict=True))
        for entry in move.want.spec:
            if isinstance(entry, tuple) and len({types[n] for n in entry}) > 1:
                kinds = ", ".join(f"{n!r} is {types[n].name}" for n in entry)
                lines.append(f"{at(move.path)}: one dimension is mapped to {entry}: {kinds}")
    if lines:
        raise MixedAxesError(
            f"{count_of(len(lines), total)} cannot be sharded while tracing",
            lines,
            fix="map each dimension to mesh axes of one type, or shard it outside of compiled code",
        )


def _on_device(x: Any) -> Any:
    """A traced array brought from host memory to the device, in the shards that it has there."""
    # Without a barrier, TPU compilers give what comes in the sharding that is asked for later, and then let the hosts
    # exchange shards over their network, or fail.
    return jax.lax.optimization_barrier(jax.device_put(x, jax.memory.Space.Device))


def constrain_traced(work: Sequence[Move], manual: frozenset[str]) -> None:
    """Carry out the moves of traced arrays; ``manual`` are the mesh axes of an enclosing ``shard_map``."""
    staging = compat.staging()
    context = compat.abstract_context_mesh()
    for move in work:
        mesh = context if manual and context is not None else move.want.mesh
        x = move.value if isinstance(move.value, jax.Array) else jnp.array(move.value, native_dtype(move.value.dtype))
        to_host = move.want.memory_kind == "pinned_host"
        # Collectives run on the device only. What was computed reaches host memory sharded as it is constrained there;
        # an argument comes in, is moved, and goes back.
        if move.now.memory_kind != "device" and (not to_host or compat.is_argument(x) or scrambled(x.dtype)):
            x = _on_device(x)
        if set(mesh.axis_names) - manual:
            spec = _only(move.want.spec, set(move.want.mesh.axis_names) - manual)
            try:
                x = _constrain(x, mesh, spec, is_argument=isinstance(move.value, Tracer))
            except ValueError as error:
                if staging:
                    raise
                raise TracedMoveError(
                    f"{at(move.path)}: under eager vmap or grad an array cannot change its devices, nor a mapped"
                    " dimension its mesh",
                    str(error).splitlines()[:1],
                    fix="shard the arrays before the vmap or grad, or put it in jit",
                ) from error
        move.result = jax.device_put(x, jax.memory.Space.Host) if to_host and not _is_on_host(x) else x


def check_traced_kind(memory_kind: str | None) -> None:
    """Raise `MemoryKindError` for a memory kind that compiled code cannot move to; None is the device's own."""
    if memory_kind not in (None, "device", "pinned_host"):
        raise MemoryKindError(
            f"compiled code cannot place arrays in memory kind {memory_kind!r}",
            fix="use 'device' or 'pinned_host', or move the arrays with shard before or after the compiled call",
        )


def change_traced_memory(x: Any, memory_kind: str) -> Any:
    """A traced array (or a host array, while tracing) in another memory kind."""
    check_traced_kind(memory_kind)
    x = x if isinstance(x, jax.Array) else jnp.array(x, jax_dtype(x.dtype))
    if memory_kind != "pinned_host" and _is_on_host(x):
        return _on_device(x)
    return jax.device_put(x, compat.space_of_kind(memory_kind))
