"""The only door to what is private in JAX, or differs between its versions.

Each name here is used for a reason that no public function serves; ``tests/test_jaxcompat.py`` tells when one moves.
"""

import contextlib
import contextvars
import functools
from collections.abc import Generator, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import config as _config
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import distributed as _distributed
from jax._src import mesh as _mesh_module
from jax._src import source_info_util as _source_info
from jax._src import util as _util
from jax._src.array import ArrayImpl as ArrayImpl
from jax._src.core import ShardingTypeError as ShardingTypeError
from jax._src.interpreters import pxla as _pxla
from jax._src.lib import _jax as _jaxlib  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
from jax.extend.core import (
    ClosedJaxpr,  # pyright: ignore[reportPrivateImportUsage]
    Jaxpr,
)
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from namedshard._types import Device, Tracer

# jax 0.12 moved the two context holders from `config` to `mesh`.
_holders: Any = _mesh_module if hasattr(_mesh_module, "device_context") else _config
_EMPTY_MESH = Mesh(np.empty((), dtype=object), ())
_EMPTY_ABSTRACT_MESH = AbstractMesh((), ())

PLAIN_CALLS = frozenset(
    "jit pjit closed_call core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr checkpoint remat2".split()  # noqa: SIM905
)
"""Operations that only run a jaxpr, once, on their arguments; what else they hold is rules of differentiation."""


def context_meshes() -> tuple[Mesh | None, Mesh | None]:
    """The concrete meshes of ``jax.set_mesh`` and of ``with mesh:``, each None when not in force.

    ``jax.sharding.get_mesh`` refuses to answer while tracing, which is when the answer matters most.
    """
    by_set_mesh = _mesh_module.get_concrete_mesh()
    by_with = _mesh_module.thread_resources.env.physical_mesh
    return None if by_set_mesh.empty else by_set_mesh, None if by_with.empty else by_with


def abstract_context_mesh() -> AbstractMesh | None:
    """The abstract mesh in force (set while tracing, and inside ``shard_map`` with its Manual axes), or None."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def nothing_traced() -> bool:
    """True outside of every ``jit``, ``vmap``, ``grad`` and ``scan``."""
    return _core.trace_state_clean()


def staging() -> bool:
    """True where operations on concrete arrays are recorded for a compiler (``jit``), not run at once.

    Under eager ``vmap`` and ``grad`` they still run at once.
    """
    if _core.trace_state_clean():
        return False
    # The devices of the mesh in context may not be attached.
    with _without_mesh():
        return isinstance(jax.lax.full((), False), Tracer)


@contextlib.contextmanager
def _without_mesh() -> Generator[None, None, None]:
    abstract = _holders.abstract_mesh_context_manager.swap_local(_EMPTY_ABSTRACT_MESH)
    concrete = _holders.device_context.swap_local(_EMPTY_MESH)
    try:
        yield
    finally:
        _holders.abstract_mesh_context_manager.set_local(abstract)
        _holders.device_context.set_local(concrete)


@contextlib.contextmanager
def no_context_mesh() -> Generator[None, None, None]:
    """Run at once and with no mesh in force.

    JAX refuses some moves whose device order differs from the context mesh's, and ``jax.set_mesh`` itself refuses to
    run under eager ``vmap`` and ``grad``.
    """
    with contextlib.nullcontext() if _core.trace_state_clean() else jax.ensure_compile_time_eval(), _without_mesh():
        yield


@contextlib.contextmanager
def explicit_transfers() -> Generator[None, None, None]:
    """Count transfers as explicit, as those of ``jax.device_put``: ``jax.transfer_guard("disallow")`` allows them."""
    with _config.explicit_device_put_scope(), _config.explicit_device_get_scope():
        yield


_MeshT = TypeVar("_MeshT", bound=Mesh | AbstractMesh)


def twin(mesh: _MeshT, axis_type: AxisType) -> _MeshT:
    """The same devices and names with every axis of one type."""
    types = (axis_type,) * len(mesh.axis_names)
    made: Any = (
        Mesh(mesh.devices, mesh.axis_names, axis_types=types)
        if isinstance(mesh, Mesh)
        else mesh.update(axis_types=types)
    )
    return made


def memory_kind_of_traced(x: Any) -> str:
    """``"pinned_host"`` for a traced array that lives in host memory, else ``"device"``: tracers have no sharding."""
    return "pinned_host" if space_of_type(jax.typeof(x)) == jax.memory.Space.Host else "device"


def is_argument(x: Any) -> bool:
    """Whether a traced array is an argument of what is being traced for a compiler, or not known to be computed."""
    return getattr(x, "parent", None) is None


def memory_kind_of_struct(x: Any) -> str | None:
    """The memory kind of a struct's sharding; without one, what ``jax.eval_shape`` found (jax 0.10 forgets it)."""
    if x.sharding is not None:
        return x.sharding.memory_kind
    return "pinned_host" if getattr(x, "_memory_space", None) == jax.memory.Space.Host else None


def is_key_array(x: Any) -> bool:
    """True for arrays of typed PRNG keys, whose bytes are reached only through ``jax.random.key_data``."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def device_order(sharding: jax.sharding.Sharding) -> tuple[Device, ...]:
    """A sharding's devices in its own order; the public ``device_set`` forgets the order."""
    return tuple(sharding._device_assignment)  # pyright: ignore[reportPrivateUsage]


def is_attached(device: Device) -> bool:
    """Whether a device can run programs: those of a topology are only compiled for."""
    client: Any = getattr(device, "client", None)
    return not isinstance(client, _jaxlib.CompileOnlyPyClient)


def user_source(eqn: Any) -> str:
    """``"file:line"`` of the user's code that a jaxpr's equation comes from."""
    frame = _source_info.user_frame(eqn.source_info.traceback)
    return "unknown source" if frame is None else f"{frame.file_name}:{frame.start_line}"


_compiles: contextvars.ContextVar[tuple[list[int], ...]] = contextvars.ContextVar("compiles", default=())


def _on_compile(event: str, duration_secs: float, **kwargs: str | int) -> None:
    if event == _dispatch.BACKEND_COMPILE_EVENT:
        for counter in _compiles.get():
            counter[0] += 1


jax.monitoring.register_event_duration_secs_listener(_on_compile)


@contextlib.contextmanager
def count_compiles() -> Generator[list[int], None, None]:
    """A list with the number of executables that this thread makes in the block."""
    counter = [0]
    token = _compiles.set((*_compiles.get(), counter))
    try:
        yield counter
    finally:
        _compiles.reset(token)


def trace_key() -> Hashable:
    """Everything about the context that a trace depends on, apart from the arguments.

    JAX's own key for this holds every option, ``with mesh:`` and the abstract mesh; the concrete mesh, whose device
    order matters, is added.
    """
    return _config.trace_context(), _mesh_module.get_concrete_mesh()


CRASHES_ON_DELETED = jax.__version_info__ < (0, 12)
"""Whether a jitted function that was called before crashes on a deleted array over several devices (jax 0.10 does)."""


# A property's own getter takes half the time of the property.
_aval, _sharding, _committed = (vars(ArrayImpl)[name].fget for name in ("aval", "_sharding", "_committed"))


def placements(leaves: Sequence[Any]) -> tuple[list[Any], list[Any], list[bool]]:
    """The avals, shardings and committedness of arrays, faster than public properties; `AttributeError` for others."""
    try:
        return list(map(_aval, leaves)), list(map(_sharding, leaves)), list(map(_committed, leaves))
    except TypeError as error:
        raise AttributeError("not all leaves are arrays") from error


def any_deleted(arrays: Sequence[ArrayImpl]) -> bool:
    """Whether any of these arrays was donated or deleted."""
    return True in map(ArrayImpl.is_deleted, arrays)


def shards_of(x: Any) -> list[Any]:
    """An array's shards here, in the order of ``addressable_devices_indices_map``; none once it is deleted.

    Public properties take longer.
    """
    return x._arrays or []


def first_buffer(x: ArrayImpl) -> int:
    """The address of an array's first shard here, or the object's own where there is none or it is not known.

    Does not wait for the computation that fills it.
    """
    shards = shards_of(x)
    try:
        return shards[0].unsafe_buffer_pointer() if shards else id(x)
    except jax.errors.JaxRuntimeError:
        return id(x)


def space_of_type(aval: Any) -> Any:
    """The memory space that a type names."""
    return getattr(aval, "memory_space", DEVICE_SPACE)


def typed_struct(x: Any) -> Any:
    """A struct on one device by a `NamedSharding`: of a `SingleDeviceSharding`, a trace forgets the memory kind."""
    sharding = x.sharding if isinstance(x, jax.ShapeDtypeStruct) else None
    if not isinstance(sharding, SingleDeviceSharding) or sharding.memory_kind != "pinned_host":
        return x
    mesh = Mesh(np.array(list(sharding.device_set)), ("device",), axis_types=(AxisType.Auto,))
    return x.update(sharding=NamedSharding(mesh, PartitionSpec(), memory_kind=sharding.memory_kind))


def is_explicitly_sharded(aval: Any) -> bool:
    """Whether a type says how the array is sharded, over a mesh with Explicit axes."""
    sharding = getattr(aval, "sharding", None)
    return sharding is not None and not sharding.mesh.empty and any_explicit(sharding.mesh)


DEVICE_SPACE = jax.memory.Space.Device


def output_memory_kinds(compiled: Any) -> list[str]:
    """The memory kinds that a compiled program writes its outputs to, whatever JAX says of their shardings."""
    (kinds,) = compiled.runtime_executable().get_output_memory_kinds()
    return list(kinds)


def space_of_kind(memory_kind: str | None) -> Any:
    """The memory space of a memory kind, as tracing sees it."""
    return jax.memory.Space.Host if memory_kind == "pinned_host" else DEVICE_SPACE


def any_explicit(mesh: Mesh | AbstractMesh) -> bool:
    """True if some mesh axis is Explicit: then shardings are part of array types."""
    return AxisType.Explicit in mesh.axis_types


def coordination_client() -> Any:
    """The key-value store that ``jax.distributed.initialize`` joins the processes by, or None without it."""
    return _distributed.global_state.client


def as_weak(x: Any) -> Any:
    """The same buffers as an array of weak type; no public function makes one of existing shards."""
    return ArrayImpl(x.aval.update(weak_type=True), x.sharding, shards_of(x), committed=True)


def run_equation(eqn: Any, values: Sequence[Any], params: dict[str, Any] | None = None) -> list[Any]:
    """The outputs of one equation of a jaxpr on given inputs, as a custom interpreter runs it.

    It runs under the options that it was traced under, but with the mesh now in context; ``params`` replace its own.
    """
    mesh = jax.sharding.get_abstract_mesh()
    with eqn.ctx.manager, jax.sharding.use_abstract_mesh(mesh):
        return bind(eqn.primitive, eqn.params if params is None else params, values)


def bind(primitive: Any, params: dict[str, Any], values: Sequence[Any]) -> list[Any]:
    """The outputs of a primitive with the parameters that a jaxpr holds; some keep their functions among them."""
    bound = primitive.get_bind_params(params)
    # Up to jax 0.9 a pair with the functions among the parameters.
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    out = primitive.bind(*functions, *values, **params)
    return list(out) if primitive.multiple_results else [out]


def equation_options(eqn: Any) -> Hashable:
    """The options that an equation was traced under, apart from the mesh."""
    ctx = eqn.ctx
    metadata = ctx.xla_metadata
    return ctx.compute_type, ctx.threefry_partitionable, tuple(sorted(metadata.items())) if metadata else None


@functools.lru_cache(maxsize=64)
def _of_keys(dtype: Any) -> tuple[tuple[int, ...], Any]:
    """The shape of the data, and the implementation, of one key of this dtype."""
    found: list[Any] = []

    def look(key: Any) -> Any:
        found.append(jax.random.key_impl(key))
        return jax.random.key_data(key)

    return tuple(jax.eval_shape(look, jax.ShapeDtypeStruct((), dtype)).shape), found[0]


def key_impl(aval: Any) -> Any:
    """What ``jax.random.key_impl`` returns for keys of this type."""
    return _of_keys(aval.dtype)[1]


def key_data_shape(aval: Any) -> tuple[int, ...]:
    """The shape of what ``jax.random.key_data`` returns for keys of this type."""
    return (*aval.shape, *_of_keys(aval.dtype)[0])


def clear_with_jax(cache: Any) -> None:
    """Lets ``jax.clear_caches()`` clear a cache, by its method ``cache_clear``."""
    _util.register_cache(cache, "namedshard")


def called(eqn: Any) -> ClosedJaxpr | Jaxpr | None:
    """The jaxpr that an equation runs, if that's all it does."""
    if eqn.primitive.name not in PLAIN_CALLS:
        return None
    return next(eqn.params[name] for name in ("jaxpr", "call_jaxpr", "fun_jaxpr") if name in eqn.params)


def inner_jaxprs(value: Any) -> Iterator[Jaxpr]:
    """The jaxprs in an equation's parameter, or in a dict or sequence of parameters."""
    if isinstance(value, ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, Jaxpr):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from inner_jaxprs(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from inner_jaxprs(item)


@functools.lru_cache(maxsize=4096)
def _sharded_aval(shape: tuple[int, ...], dtype: Any, sharding: Any, weak: bool) -> Any:
    return _core.update_aval_with_sharding(_core.ShapedArray(shape, dtype, weak_type=weak), sharding)


def put_shards(
    shape: tuple[int, ...], dtype: Any, sharding: Any, shards: dict[Device, np.ndarray], weak: bool = False
) -> jax.Array:
    """An array of each device's shard, with all its bits; public functions take twice as long for small ones."""
    with keeping_bits([np.dtype(dtype)]):
        aval = _sharded_aval(shape, dtype, sharding, weak)
    put = _pxla.xc.batched_device_put  # pyright: ignore[reportPrivateImportUsage]
    return put(aval, sharding, list(shards.values()), list(shards), True, enable_x64=True)


_NARROWED = frozenset(map(np.dtype, ("int64", "uint64", "float64", "complex128")))


def keeping_bits(dtypes: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    """A context in which JAX moves 64-bit arrays as they are, also while 64-bit types are off."""
    narrows = not jax.config.jax_enable_x64 and not _NARROWED.isdisjoint(dtypes)
    return jax.enable_x64(True) if narrows else contextlib.nullcontext()
