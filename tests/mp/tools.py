"""What the cases build on: meshes over the processes' devices, values of every dtype, exact comparisons."""

import ctypes
import gc
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import haliax as hax
import jax
import ml_dtypes
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from namedshard._jaxcompat import coordination_client

ME, COUNT = jax.process_index(), jax.process_count()
DEVICES = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
DTYPES = (
    np.float32,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
    ml_dtypes.float8_e8m0fnu,
    ml_dtypes.int4,
    ml_dtypes.uint4,
    np.bool_,
    np.complex64,
    np.float16,
    np.int8,
    np.int32,
    np.uint32,
)


def mesh(shape: Sequence[int], names: str, types: Any = AUTO, devices: Sequence[jax.Device] = DEVICES) -> Mesh:
    """A mesh over the first devices given."""
    axes = tuple(names.split())
    kinds = types if isinstance(types, tuple) else (types,) * len(axes)
    return Mesh(np.array(devices[: math.prod(shape)]).reshape(shape), axes, axis_types=kinds)


def own(process: int) -> list[jax.Device]:
    """A process's devices."""
    return [d for d in DEVICES if d.process_index == process]


def interleaved() -> list[jax.Device]:
    """One device of each process, then the next of each, and so on."""
    rows = itertools.zip_longest(*(own(p) for p in range(COUNT)))
    return [d for row in rows for d in row if d is not None]


def values(dtype: Any, shape: Sequence[int] = (24, 24, 2), seed: int = 0) -> np.ndarray:
    """Numbers that a mix-up of elements would change."""
    bits = np.random.default_rng(seed).integers(0, 256, size=(*shape, np.dtype(dtype).itemsize), dtype=np.uint8)
    if dtype is np.bool_:
        return (bits[..., 0] & 1).astype(np.bool_)
    if dtype in (ml_dtypes.int4, ml_dtypes.uint4):
        return (bits[..., 0] & 7).astype(dtype)
    # All bit patterns, also those that are no numbers.
    return bits.view(dtype)[..., 0]


def raw(x: Any) -> Any:
    """The integers under keys."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x)
    return x


def same_bits(a: Any, b: Any) -> bool:
    """Equal in dtype, shape and every bit."""
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def check(x: jax.Array, value: np.ndarray, want: Mesh, spec: PartitionSpec, kind: str = "device") -> None:
    """The very placement, committed, and the value's bits in every shard that this process has."""
    sharding = NamedSharding(want, spec, memory_kind=kind)
    equal(x.sharding.mesh, want)
    equal(x.sharding.is_equivalent_to(sharding, x.ndim), True)
    equal(x.sharding.memory_kind, kind)
    equal(x.committed, True)
    data = raw(x)
    equal(data.shape, value.shape)
    equal([s.device for s in data.addressable_shards], [d for d in want.devices.flat if d.process_index == ME])
    for shard in data.addressable_shards:
        if not same_bits(shard.data, value[shard.index]):
            raise AssertionError(f"wrong values in shard {shard.index} on {shard.device}")


def equal(a: Any, b: Any) -> None:
    """Assert that two things are equal, showing both."""
    if not a == b:
        raise AssertionError(f"not equal:\n{a}\n{b}")


@contextmanager
def patched(where: Any, name: str, by: Any) -> Iterator[None]:
    """Another attribute in a place, on this process."""
    original = getattr(where, name)
    setattr(where, name, by)
    try:
        yield
    finally:
        setattr(where, name, original)


def message_of(kind: type[BaseException], call: Callable[[], Any]) -> str:
    """The message of the exception that a call must raise."""
    try:
        got = call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}, but {got}")


def put(value: np.ndarray, where: Mesh, spec: PartitionSpec, kind: str = "device") -> jax.Array:
    """A global array made without namedshard: by JAX, from each process's parts."""
    sharding = NamedSharding(where, spec)
    made = jax.make_array_from_callback(value.shape, sharding, lambda index: value[index], dtype=value.dtype)
    return made if kind == "device" else jax.device_put(made, sharding.with_memory_kind(kind))


def keys(value: np.ndarray, where: Mesh, spec: PartitionSpec, impl: str) -> jax.Array:
    """A global array of typed keys over these integers."""
    return jax.random.wrap_key_data(put(value, where, PartitionSpec(*spec, None)), impl=impl)


def memory(field: str) -> int:
    """Bytes of memory of this process: ``VmRSS`` now, ``VmHWM`` at the most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def forget_peak() -> None:
    """What was freed goes back to the system, and the peak is that of what is left."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


_barriers = itertools.count()


def together() -> None:
    """Wait until all processes are here, by other means than namedshard's."""
    coordination_client().wait_at_barrier(f"together {next(_barriers)}", 100_000)


def named(x: Any, names: str) -> hax.NamedArray:
    """A NamedArray over an array."""
    return hax.NamedArray(x, tuple(hax.Axis(n, s) for n, s in zip(names.split(), x.shape, strict=True)))
