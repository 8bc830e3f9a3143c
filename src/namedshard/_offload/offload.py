"""`offload` and `offload_optimizer`: chosen leaves live in host memory, verified."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from namedshard import _jaxcompat as compat
from namedshard._errors import MemoryKindError, OffloadError, count_of, deleted_arrays
from namedshard._offload.budget import update_within
from namedshard._place.gather import parse_bytes
from namedshard._place.local import change_memory, check_narrowing
from namedshard._place.route import check_movable, placement_of
from namedshard._place.shard import check_memory_of, known_devices
from namedshard._place.traced import check_traced_kind
from namedshard._plan.leaves import Leaf, is_array_like, jax_can_hold, named_leaves
from namedshard._plan.mesh import context_mesh, require_attached
from namedshard._plan.plan import planned_shardings
from namedshard._types import Device, Tracer

Where: TypeAlias = str | Callable[[str, Any], bool]


def _predicate(where: Where) -> Callable[[str, Any], bool]:
    if not isinstance(where, str):
        return where
    try:
        pattern = re.compile(where)
    except re.error as error:
        raise OffloadError(f"where={where!r} is not a regular expression: {error}") from error
    # Leaf paths have no leading dot; a pattern like r"\\.mu" must match a state whose root has the field, too.
    return lambda path, leaf: bool(pattern.search(path) or pattern.search("." + path))


def _per_device(x: Any, planned: NamedSharding | None = None) -> int | None:
    """Bytes on each device, or None while tracing where neither a plan nor a type tells the shards."""
    if not x.ndim:
        return _bytes(x)
    if isinstance(x, Tracer):
        typed = jax.typeof(x).sharding
        by_type = None if typed.mesh.empty or any(t != AxisType.Explicit for t in typed.mesh.axis_types) else typed
        sharding = planned or by_type
        if sharding is None and _devices() > 1:
            return None
    else:
        sharding = getattr(x, "sharding", None)
    shape = x.shape if sharding is None else sharding.shard_shape(x.shape)
    return math.prod(shape) * x.dtype.itemsize


def _devices() -> int:
    """How many devices traced code will run on: those of the mesh in context, not of the machine that compiles."""
    mesh = context_mesh()
    return jax.device_count() if mesh is None else mesh.size


def _arrays(leaves: Sequence[Leaf]) -> list[int]:
    arrays = [i for i, leaf in enumerate(leaves) if is_array_like(leaf.value) and not isinstance(leaf.value, jax.Ref)]
    return [i for i in arrays if jax_can_hold(leaves[i].value.dtype)]


def _candidates(leaves: Sequence[Leaf], where: Where, min_size: int) -> list[int]:
    """Leaves that may go to host memory: chosen, arrays, no scalars, large enough."""
    arrays, chosen = _arrays(leaves), _predicate(where)
    found = [i for i in arrays if chosen(leaves[i].path, leaves[i].value)]
    sized = [i for i in found if leaves[i].value.ndim and _bytes(leaves[i].value) >= max(1, min_size)]
    if not sized:
        reason = "scalars" if not min_size else f"scalars, or smaller than min_size={min_size} bytes"
        which = f"the only matches are {reason}" if found else "nothing matches"
        raise OffloadError(
            f"where={where!r} selects no leaf for host memory: {which}; the arrays are",
            [f"{leaves[i].path} ({_bytes(leaves[i].value)} bytes)" for i in arrays],
        )
    return sized


def _bytes(x: Any) -> int:
    return math.prod(x.shape) * x.dtype.itemsize


def _largest_until_fit(state: Any, leaves: Sequence[Leaf], candidates: Sequence[int], fit: int) -> list[int]:
    """The largest candidates, until what stays takes at most ``fit`` bytes per device."""
    arrays = {i: leaves[i].value for i in _arrays(leaves)}
    if sum(map(_bytes, arrays.values())) <= fit:
        return []
    planned = planned_shardings(state) or [None] * len(leaves)
    sizes = {i: size for i, x in arrays.items() if (size := _per_device(x, planned[i])) is not None}
    if unknown := [leaves[i].path for i in arrays if i not in sizes]:
        raise OffloadError(
            f"fit={fit} bytes per device cannot be counted while tracing: the shards of"
            f" {count_of(len(unknown), len(leaves))} are not known",
            unknown,
            fix="create the state with ns.init(tx.init, params), which knows them",
        )
    staying = sum(sizes.values())
    chosen: list[int] = []
    for i in sorted(candidates, key=lambda i: (-sizes[i], i)):
        if staying <= fit:
            break
        staying -= sizes[i]
        chosen.append(i)
    if staying > fit:
        raise OffloadError(
            f"fit={fit} bytes per device cannot be reached: {staying} bytes stay with every selected leaf in host"
            " memory",
            fix="select more leaves with where, shard the states over more devices, or allow more bytes",
        )
    return sorted(chosen)


def _at_least(leaves: Sequence[Leaf], on_host: Container[int]) -> int:
    """Bytes of the state that stay on each device, at the least, if these leaves live on the host."""
    staying = (leaves[i].value for i in _arrays(leaves) if i not in on_host)
    return sum(size if (size := _per_device(x)) is not None else _bytes(x) // _devices() for x in staying)


def _concrete(leaves: Iterable[Leaf]) -> list[jax.Array]:
    return [x.value for x in leaves if isinstance(x.value, jax.Array) and not isinstance(x.value, Tracer)]


def _a_device(leaves: Sequence[Leaf]) -> Device:
    """A device of this process that the leaves are on; while tracing, of the mesh in force."""
    near = [d for x in _concrete(leaves)[:1] for d in x.sharding.addressable_devices]
    mesh = context_mesh()
    if not near and isinstance(mesh, Mesh):
        near = known_devices(mesh)
    return (near or jax.local_devices())[0]


def _check_deleted(leaves: Sequence[Leaf], chosen: Sequence[int]) -> None:
    values = {leaves[i].path: leaves[i].value for i in chosen}
    arrays = {path: x for path, x in values.items() if isinstance(x, jax.Array) and not isinstance(x, Tracer)}
    if gone := [path for path, x in arrays.items() if x.is_deleted()]:
        raise deleted_arrays("offload", gone, len(leaves))


def _for_unplaced(leaves: Sequence[Leaf]) -> NamedSharding | None:
    """Where arrays go that nobody placed: replicated over the mesh in context, else the one of all other leaves.

    On one device they would not fit the next step; an optimizer's state may hold such parameters themselves.
    """
    meshes = {s.mesh for x in _concrete(leaves) if x.committed and isinstance(s := x.sharding, NamedSharding)}
    mesh = context_mesh() or (meshes.pop() if len(meshes) == 1 else None)
    return NamedSharding(mesh, PartitionSpec()) if isinstance(mesh, Mesh) else None


def _moved(leaves: Sequence[Leaf], chosen: Sequence[int], memory_kind: str) -> list[Any]:
    _check_deleted(leaves, chosen)
    staging = compat.staging()
    found = [(leaves[i].path, x := leaves[i].value, placement_of(x, staging)) for i in chosen]
    check_movable("offload", found, len(leaves))
    check_narrowing(((leaves[i].path, leaves[i].value) for i in chosen), len(leaves))
    values = [leaf.value for leaf in leaves]
    moved = change_memory([values[i] for i in chosen], memory_kind, _for_unplaced(leaves))
    for i, x in zip(chosen, moved, strict=True):
        values[i] = x
    return values


T = TypeVar("T")


def offload(tree: T, where: Where = ".*", memory_kind: str = "pinned_host", *, min_size: int = 0) -> T:
    """Put chosen leaves of a tree into host memory; shards, values and the tree's structure stay as they are.

    Works eagerly and in compiled code. One array object in two places of the tree stays one. Numpy arrays and
    uncommitted arrays are replicated over the mesh in context, else the mesh that the tree's other arrays are on, else
    they go to the default device; ``jax.ShapeDtypeStruct``s get their sharding with the memory kind. Arithmetic on the
    result needs it back on the device: ``ns.shard(..., memory_kind="device")``.

    Args:
        tree: Any pytree. Its arrays (any shape, dtype and placement) may be chosen, all else is left as it is.
        where: A regular expression, searched for in each leaf path, or a predicate of (leaf path, leaf).
        memory_kind: The memory kind to move to.
        min_size: Only arrays of at least so many bytes are moved. Scalars never are.

    Returns:
        The tree with the chosen leaves in that memory.

    Raises:
        OffloadError: Nothing is chosen (lists the leaves there are), or the pattern is no regular expression.
        MemoryKindError: The devices do not offer the memory kind, or compiled code has no word for it: there it is
            ``"pinned_host"`` or ``"device"``.
        DeletedArrayError: A chosen array was donated or deleted before.
        UnsupportedArrayError: A chosen array is a numpy masked array.
        NarrowingError: A 64-bit integer in a numpy array does not fit the 32 bits that JAX would keep.
        UnattachedDevicesError: An array with values was to be replicated over a `topology_mesh` in context.

    Examples:
        >>> import jax.numpy as jnp, namedshard as ns
        >>> tree = ns.offload({"big": jnp.ones((4, 4)), "step": jnp.int32(0)}, where="big")
        >>> tree["big"].sharding.memory_kind, tree["step"].sharding.memory_kind
        ('pinned_host', 'device')
    """
    leaves = named_leaves(tree)
    return _with_offloaded(tree, leaves, _candidates(leaves, where, min_size), memory_kind)


def _with_offloaded(tree: Any, leaves: Sequence[Leaf], chosen: Sequence[int], memory_kind: str) -> Any:
    check_memory_of([_a_device(leaves)], memory_kind)
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(tree), _moved(leaves, chosen, memory_kind))


def _is_on_device(x: Any) -> bool:
    return placement_of(x, staging=False).memory_kind in (None, "device")


@functools.cache
def _check_compiler(device: Device, memory_kind: str) -> None:
    """Compile one transfer there and back, once per process, and look at where the program writes to."""

    def there_and_back(x: jax.Array) -> jax.Array:
        (on_device,) = change_memory([x], "device")
        return change_memory([on_device + 1], memory_kind)[0]

    with compat.no_context_mesh():
        place = SingleDeviceSharding(device, memory_kind=memory_kind)
        compiled = jax.jit(there_and_back).lower(jax.ShapeDtypeStruct((8,), "float32", sharding=place)).compile()
    (kept,) = compat.output_memory_kinds(compiled)
    if kept != memory_kind:
        raise OffloadError(
            f"the compiler for {device.platform} devices leaves a result meant for {memory_kind!r} in {kept!r}",
            fix="use a newer jaxlib, or do not offload on this backend",
        )


def _verify(leaves: Sequence[Leaf], chosen: Sequence[int], want_host: bool, when: str) -> None:
    """JAX's types know the memory space of every array, also while tracing: nothing is left to hope."""
    wrong = [leaves[i].path for i in chosen if _is_on_device(leaves[i].value) == want_host]
    if wrong:
        there = "device memory" if want_host else "host memory"
        raise OffloadError(
            f"{count_of(len(wrong), len(chosen))} selected for host memory are in {there} {when}",
            wrong,
            fix="keep the optimizer's own update between the transfers: wrap the outermost transformation",
        )


def offload_optimizer(
    transformation: Any,
    where: Where = ".*",
    memory_kind: str = "pinned_host",
    *,
    min_size: int = 0,
    budget: int | str | None = None,
    fit: int | str | None = None,
) -> Any:
    r"""Wrap an optax transformation so that chosen parts of its state live in host memory.

    The state is created there (`init`), moved to the device for each update and moved back. Works eagerly, in
    ``jax.jit``, `named_jit` and ``scan``, on any mesh; values are those of the wrapped transformation. That the chosen
    leaves are on the device for the update and in host memory after it is checked at every trace, by the memory spaces
    that JAX keeps in array types.

    Args:
        transformation: Any ``optax.GradientTransformation``, with or without extra arguments.
        where: A regular expression, searched for in the state's leaf paths (e.g. ``r"\.(mu|nu)\b"``), or a predicate
            of (leaf path, leaf).
        memory_kind: The memory kind to live in. Compiled updates take ``"pinned_host"`` only.
        min_size: Only arrays of at least so many bytes. Scalars and counts never move.
        budget: In compiled code, bytes of states that are brought to a device at a time; None sets no bound. A number,
            or text like ``"1GiB"``. States that one update needs at once are never parted. Where types do not tell the
            shards (on Auto meshes), states count whole.
        fit: Instead of all that ``where`` selects, take its largest leaves until the state that stays takes at most so
            many bytes per device. ``init`` chooses; from then on a leaf is known by where it lives.

    Returns:
        An ``optax.GradientTransformationExtraArgs``.

    Raises:
        ImportError: optax is not installed.
        OffloadError: Nothing is selected (lists the leaves there are), or ``fit`` cannot be reached, or not be counted
            since ``init`` is traced; at an update, a leaf is not where it is said to be.
        MemoryKindError: The devices do not offer the memory kind, it is no host memory, or compiled code has no word
            for it.
        DeletedArrayError: The state was donated or deleted before.
        ValueError: ``budget`` or ``fit`` is no size.

    Examples:
        >>> import jax.numpy as jnp, namedshard as ns, optax
        >>> tx = ns.offload_optimizer(optax.adam(1e-3), where=r"\.(mu|nu)\b")
        >>> state = tx.init({"w": jnp.ones((4, 4))})
        >>> state[0].mu["w"].sharding.memory_kind, state[0].count.sharding.memory_kind
        ('pinned_host', 'device')
    """
    try:
        import optax
    except ImportError as error:
        raise ImportError("offload_optimizer needs optax: pip install 'namedshard[optax]'") from error
    if memory_kind == "device":
        raise MemoryKindError(
            "offload_optimizer cannot offload to memory kind 'device', where the state is without it",
            fix="use 'pinned_host', or the optimizer as it is",
        )
    offloaded = _OffloadedOptimizer(
        optax.with_extra_args_support(transformation),
        where,
        memory_kind,
        min_size,
        None if budget is None else parse_bytes(budget),
        None if fit is None else parse_bytes(fit),
    )
    return optax.GradientTransformationExtraArgs(offloaded.init, offloaded.update)


@dataclasses.dataclass(frozen=True, slots=True)
class _OffloadedOptimizer:
    """The two functions of `offload_optimizer`, and its arguments."""

    inner: Any
    where: Where
    memory_kind: str
    min_size: int
    budget: int | None
    fit: int | None

    def init(self, params: Any) -> Any:
        """The state of the wrapped transformation, with the chosen leaves in host memory."""
        require_attached("offload_optimizer: init", context_mesh())
        state = self.inner.init(params)
        leaves = named_leaves(state)
        chosen = _candidates(leaves, self.where, self.min_size)
        if self.fit is not None:
            chosen = _largest_until_fit(state, leaves, chosen, self.fit)
        return _with_offloaded(state, leaves, chosen, self.memory_kind)

    def update(self, updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        """The update of the wrapped transformation on the device."""
        require_attached("offload_optimizer: update", context_mesh())
        leaves, treedef = named_leaves(state), jax.tree_util.tree_structure(state)
        chosen = _candidates(leaves, self.where, self.min_size)
        traced = any(isinstance(leaves[i].value, Tracer) for i in chosen)
        if traced:
            check_traced_kind(self.memory_kind)
        lost = [i for i in chosen if _is_on_device(leaves[i].value)]
        if self.fit is not None:
            # `init` chose: a leaf is known by where it lives.
            chosen = [i for i in chosen if not _is_on_device(leaves[i].value)]
            lost = lost if _at_least(leaves, frozenset(chosen)) > self.fit else []
        if lost and (traced or self.fit is not None):
            found = count_of(len(lost), len(leaves))
            raise OffloadError(
                f"{found} that belong in host memory are in device memory at the update",
                [leaves[i].path for i in lost],
                fix="create the state, or its structs, with ns.init(tx.init, params), since jax.eval_shape forgets"
                " memory kinds; move a state that was loaded with ns.offload",
            )

        def run(values: Sequence[Any]) -> tuple[Any, Any]:
            on_device = jax.tree_util.tree_unflatten(treedef, values)
            _verify(named_leaves(on_device), chosen, False, "at the update")
            return self.inner.update(updates, on_device, params, **extra)

        if traced:
            _check_compiler(_a_device(leaves), self.memory_kind)
        if traced and self.budget is not None:
            _check_deleted(leaves, chosen)
            values = [x.value for x in leaves]
            sizes = {i: _per_device(values[i]) or _bytes(values[i]) for i in chosen}
            new_updates, new_state = update_within(run, values, sizes, self.memory_kind, self.budget)
        else:
            # Numpy states, of a checkpoint for example, are for JAX to place beside the gradients.
            placed = [i for i in chosen if isinstance(leaves[i].value, jax.Array)]
            new_updates, new_state = run(_moved(leaves, placed, "device"))
            new_leaves = named_leaves(new_state)
            values = _moved(new_leaves, self._chosen_after(new_leaves, chosen), self.memory_kind)
            new_state = jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(new_state), values)
        after = named_leaves(new_state)
        _verify(after, self._chosen_after(after, chosen), True, "after the update")
        return new_updates, new_state

    def _chosen_after(self, leaves: Sequence[Leaf], chosen: Sequence[int]) -> Sequence[int]:
        """The leaves of the new state that belong in host memory; where they live can't tell before they are moved."""
        return _candidates(leaves, self.where, self.min_size) if self.fit is None else chosen
