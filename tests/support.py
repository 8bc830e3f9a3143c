"""What several test modules build on: meshes over the 8 devices, arrays with distinct elements, exact comparisons."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import haliax as hax
import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from namedshard._place import reader

DEVICES = np.array(jax.devices())
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def mesh(shape: tuple[int, ...], names: str, types: Any = AUTO, devices: Any = DEVICES) -> Mesh:
    """A mesh over the first devices given."""
    axes = tuple(names.split())
    kinds = types if isinstance(types, tuple) else (types,) * len(axes)
    return Mesh(np.asarray(devices)[: math.prod(shape)].reshape(shape), axes, axis_types=kinds)


M8 = mesh((8,), "data")
M8_REVERSED = mesh((8,), "data", devices=DEVICES[::-1])
E8 = mesh((8,), "data", EXPLICIT)
M42 = mesh((4, 2), "data model")
E42 = mesh((4, 2), "data model", EXPLICIT)
MIXED42 = mesh((4, 2), "data model", (AUTO, EXPLICIT))
ONE_OF_EACH = {"auto": M42, "explicit": E42, "mixed": MIXED42}


def na(x: Any, names: str) -> hax.NamedArray:
    """A NamedArray over an array (or struct) with these axis names."""
    listed = names.split()
    return hax.NamedArray(x, tuple(hax.Axis(n, s) for n, s in zip(listed, x.shape, strict=True)))


def unchecked(x: Any, names: str, *sizes: int) -> hax.NamedArray:
    """A NamedArray whose names need not fit its array: what tools make that map a function over a tree."""
    like = hax.NamedArray(
        np.zeros(sizes, np.float32), tuple(hax.Axis(n, s) for n, s in zip(names.split(), sizes, strict=True))
    )
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(like), [x])


def unreduced(x: Any) -> jax.Array:
    """A float matrix with these values once it's summed over ``"model"``: each device holds a part of the sum."""
    placed, one = (
        jax.device_put(v, NamedSharding(E42, s))
        for v, s in ((x, PartitionSpec(None, "model")), (np.eye(x.shape[1], dtype=x.dtype), PartitionSpec("model")))
    )
    wanted = PartitionSpec(None, None, unreduced={"model"})
    with jax.set_mesh(E42):
        return jax.jit(lambda a, b: jax.numpy.einsum("ij,jk->ik", a, b, out_sharding=wanted))(placed, one)


def counting(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    """0, 1, 2, ... so that every element is distinct."""
    return np.arange(math.prod(shape)).astype(dtype).reshape(shape)


def bits(x: Any) -> bytes:
    """The bytes of an array's values, from wherever it lives."""
    if isinstance(x, jax.Array):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return bits(jax.random.key_data(to_device_memory(x)))
        x = np.asarray(x)
    return np.ascontiguousarray(x).view(np.uint8).tobytes() if x.size else b""


def to_device_memory(x: jax.Array) -> jax.Array:
    """Random keys can only be read from there."""
    return jax.device_put(x, x.sharding.with_memory_kind("device"))


def order(x: Any) -> list[int]:
    """Device ids in the order of an array's or mesh's own placement."""
    if isinstance(x, Mesh):
        return [d.id for d in x.devices.flat]
    return [d.id for d in x.sharding.mesh.devices.flat]


def assert_exactly(x: Any, wanted: Mesh, spec: PartitionSpec, kind: str = "device") -> None:
    """The very mesh, an equivalent spec, the memory kind, and committed."""
    x = getattr(x, "array", x)
    assert isinstance(x.sharding, NamedSharding), x.sharding
    assert x.sharding.mesh is wanted
    assert order(x) == order(wanted)
    assert x.sharding.is_equivalent_to(NamedSharding(wanted, spec, memory_kind=kind), x.ndim), x.sharding
    assert x.sharding.memory_kind == kind
    assert x.committed


_compilations: list[str] = []


def _note(event: str, _: float, **__: Any) -> None:
    if event.endswith(("jaxpr_to_mlir_module_duration", "backend_compile_duration", "jaxpr_trace_duration")):
        _compilations.append(event)


jax.monitoring.register_event_duration_secs_listener(_note)


@contextlib.contextmanager
def nothing_compiled() -> Iterator[None]:
    """Fails if the block traces, lowers or compiles anything."""
    before = len(_compilations)
    yield
    assert _compilations[before:] == []


@contextlib.contextmanager
def nothing_moved() -> Iterator[None]:
    """Fails if the block puts anything on a device: for calls that must fail before they begin."""
    before = jax.live_arrays()
    yield
    known = {id(x) for x in before}
    assert [x for x in jax.live_arrays() if id(x) not in known] == []


def sizes_copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each block that is copied off a device from now on."""
    sizes: list[int] = []
    real = reader.copy_block

    def noted(*args: Any) -> np.ndarray:
        block = real(*args)
        sizes.append(block.nbytes)
        return block

    monkeypatch.setattr(reader, "copy_block", noted)
    return sizes
