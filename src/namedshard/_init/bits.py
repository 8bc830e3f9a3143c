"""Random bits of a sharded array: each device draws those of its own shard, a chunk at a time.

JAX's own threefry holds three more arrays of the result's size while it runs, since its rounds are a loop over whole
arrays. Element ``i`` depends on the key and on ``i`` only (``jax_threefry_partitionable``), so any part of the array
can be drawn by itself: here in chunks that stay in the processor's cache, straight into the result.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array

from namedshard import _jaxcompat as compat
from namedshard._init.jaxpr import BitsMaker
from namedshard._plan.mesh import MeshLike

# A chunk takes three times its size while it is drawn. Small ones cost time: starting each operation does.
_CHUNK = 1 << 15
_LEAST_CHUNK = 1 << 13
_LEAST_OF_A_KEY = 1 << 10
_DTYPES = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}


def _chunk(size: int) -> int:
    """Elements to draw at once for a shard of a size."""
    return max(1, min(_CHUNK, max(size // 8, min(_LEAST_CHUNK, size // 2))))


@dataclasses.dataclass(frozen=True, slots=True)
class _Rows:
    """A shard as rows and columns: a chunk is some rows, each of all columns.

    ``dims`` and ``strides`` give each dimension's extent in the shard and its step in the whole array's flat order;
    the first ``batch`` dimensions choose the key; those before ``split`` make up the rows.
    """

    dims: tuple[int, ...]
    strides: tuple[int, ...]
    batch: int
    split: int

    @property
    def rows(self) -> int:
        return math.prod(self.dims[: self.split])

    @property
    def columns(self) -> int:
        return math.prod(self.dims[self.split :])


def _as_rows(local: tuple[int, ...], whole: tuple[int, ...], batch: int) -> _Rows:
    strides = tuple(math.prod(whole[i + 1 :]) if i >= batch else 0 for i in range(len(whole)))
    chunk = _chunk(math.prod(local))
    if len(local) > batch and local[-1] > chunk:
        inner = next(n for n in range(chunk, 0, -1) if local[-1] % n == 0)
        local = (*local[:-1], local[-1] // inner, inner)
        strides = (*strides[:-1], inner, 1)
    split = len(local)
    while split > batch and math.prod(local[split - 1 :]) <= chunk:
        split -= 1
    return _Rows(local, strides, batch, split)


Counter: TypeAlias = tuple[Array, Array]
"""64-bit numbers as their high and low uint32 halves: JAX has no uint64 without x64."""


def _times(x: Array, factor: int) -> Counter:
    """uint32 times a Python integer below 2**64, modulo 2**64."""
    high, low = np.uint32(factor >> 32), factor & 0xFFFFFFFF
    if factor < 1 << 16:
        # The usual case by far, and a quarter of the work: strides of small arrays.
        upper = (x >> 16) * np.uint32(low)
        lower = (x & 0xFFFF) * np.uint32(low)
        total = (upper << 16) + lower
        return (upper >> 16) + (total < lower).astype(jnp.uint32), total
    x0, x1, f0, f1 = x & 0xFFFF, x >> 16, np.uint32(low & 0xFFFF), np.uint32(low >> 16)
    middle = ((x0 * f0) >> 16) + ((x0 * f1) & 0xFFFF) + ((x1 * f0) & 0xFFFF)
    carried = ((x0 * f1) >> 16) + ((x1 * f0) >> 16) + (middle >> 16)
    return x1 * f1 + carried + x * high, ((x0 * f0) & 0xFFFF) | (middle << 16)


def _plus(a: Counter, b: Counter) -> Counter:
    low = a[1] + b[1]
    return a[0] + b[0] + (low < b[1]).astype(jnp.uint32), low


def _flat(index: Array, dims: Sequence[int], strides: Sequence[int]) -> Counter:
    """Positions along some dimensions of the shard to offsets, by the given strides."""
    zeros = jnp.zeros(index.shape, jnp.uint32)
    out = zeros, zeros
    for n, stride in zip(reversed(dims), reversed(strides), strict=True):
        out = _plus(out, _times(index % np.uint32(n), stride))
        index = index // np.uint32(n)
    return out


def _draw(data: Array, rows: _Rows, start: Counter, first_key: Array, dtype: jnp.dtype) -> Array:
    """Bits of one shard, ``[rows, columns]``, given the flat offset and the key number that it starts at."""
    each = math.prod(rows.dims[rows.batch : rows.split])
    at_once = min(rows.rows, max(1, _chunk(rows.rows * rows.columns) // rows.columns))
    if rows.batch and each * rows.columns >= _LEAST_OF_A_KEY:
        at_once = min(at_once, each)
    columns = _flat(jnp.arange(rows.columns, dtype=jnp.uint32), rows.dims[rows.split :], rows.strides[rows.split :])
    columns = columns[0][None, :], columns[1][None, :]
    keys = data.reshape(-1, 2)

    def chunk(row: Array) -> Array:
        index = row.astype(jnp.uint32) + jnp.arange(at_once, dtype=jnp.uint32)
        first = _plus(_flat(index, rows.dims[: rows.split], rows.strides[: rows.split]), start)
        high, low = _plus((first[0][:, None], first[1][:, None]), columns)
        if not rows.batch:
            k1, k2 = keys[0, 0], keys[0, 1]
        elif at_once <= each:
            number = _batch_number(index[:1] // np.uint32(each), rows, first_key)[0]
            k1, k2 = keys[number, 0], keys[number, 1]
        else:
            number = _batch_number(index // np.uint32(each), rows, first_key)
            k1, k2 = (jnp.broadcast_to(keys[number, i][:, None], low.shape) for i in (0, 1))
        one, other = threefry2x32_p.bind(k1, k2, high, low)
        return (one ^ other).astype(dtype)

    if at_once == rows.rows:
        return chunk(jnp.uint32(0))
    # Chunks start anew with each key, or run through all rows.
    stretch = each if rows.batch and at_once <= each else rows.rows
    chunks = -(-stretch // at_once)

    def body(i: Array, made: Array) -> Array:
        # The last chunk of a stretch overlaps the one before it where they do not come out even.
        row = i // chunks * stretch + jnp.minimum(i % chunks * at_once, stretch - at_once)
        return jax.lax.dynamic_update_slice(made, chunk(row), (row, 0))

    empty = jnp.zeros((rows.rows, rows.columns), dtype)
    return jax.lax.fori_loop(0, rows.rows // stretch * chunks, body, empty)


def _batch_number(index: Array, rows: _Rows, first_key: Array) -> Array:
    """Which key each row uses: its position in the shard's batch dimensions, and where those lie in the whole."""
    dims = rows.dims[: rows.batch]
    out = jnp.zeros(index.shape, jnp.uint32)
    for d in reversed(range(len(dims))):
        out += (index % np.uint32(dims[d]) + first_key[d]) * first_key[len(dims) + d]
        index = index // np.uint32(dims[d])
    return out


def bits_maker(targets: Sequence[tuple[tuple[int, ...], NamedSharding | None]]) -> BitsMaker:
    """Draws bits in the sharding of the target, given as (shape, sharding), that has their shape.

    Where there is none, or for other generators than JAX's default, it leaves them to JAX.
    """
    by_shape = dict(reversed(targets))

    def bits(key: Array, width: int, shape: tuple[int, ...]) -> Array | None:
        whole = (*key.shape, *shape)
        threefry = str(jax.random.key_impl(key)) == "threefry2x32" and jax.config.jax_threefry_partitionable
        if whole not in by_shape or not threefry or width not in _DTYPES or not 0 < math.prod(shape) < 2**63:
            return None
        sharding = by_shape[whole]
        data, batch, dtype = jax.random.key_data(key), key.ndim, jnp.dtype(_DTYPES[width])
        if sharding is None:
            return local_bits(data, whole, whole, batch, (0,) * len(whole), dtype)
        mesh, spec, local = compat.twin(sharding.mesh, AxisType.Auto), sharding.spec, sharding.shard_shape(whole)

        def shard(data: Array) -> Array:
            starts = [_axis_index(entry, mesh.shape) * n for entry, n in zip(_entries(spec, whole), local, strict=True)]
            return local_bits(data, local, whole, batch, starts, dtype)

        return _shard_map(shard, mesh, spec)(data)

    return bits


def _shard_map(fn: Callable[[Array], Array], mesh: MeshLike, spec: PartitionSpec) -> Callable[[Array], Array]:
    return jax.shard_map(fn, mesh=mesh, in_specs=PartitionSpec(), out_specs=spec, check_vma=False)


def _entries(spec: PartitionSpec, shape: tuple[int, ...]) -> tuple[tuple[str, ...], ...]:
    padded = (*spec, *(None,) * (len(shape) - len(spec)))
    return tuple((e,) if isinstance(e, str) else tuple(e or ()) for e in padded)


def _axis_index(names: tuple[str, ...], sizes: dict[str, int]) -> Array | int:
    index: Array | int = 0
    for name in names:
        index = index * sizes[name] + jax.lax.axis_index(name)
    return index


def local_bits(
    data: Array,
    local: tuple[int, ...],
    whole: tuple[int, ...],
    batch: int,
    starts: Sequence[Array | int],
    dtype: jnp.dtype,
) -> Array:
    """The bits of one shard, shape ``local``, of an array of shape ``whole`` that starts at ``starts``.

    Args:
        data: The words of the keys, shape ``[*whole[:batch], 2]``.
        local: The shard's shape.
        whole: The array's shape.
        batch: How many leading dimensions choose the key.
        starts: Where the shard starts in each dimension.
        dtype: uint8, uint16 or uint32.
    """
    rows = _as_rows(local, whole, batch)
    strides = [math.prod(whole[i + 1 :]) for i in range(len(whole))]
    start = jnp.uint32(0), jnp.uint32(0)
    for begin, stride in zip(starts[batch:], strides[batch:], strict=True):
        start = _plus(start, _times(jnp.asarray(begin, jnp.uint32), stride))
    key_strides = [math.prod(whole[i + 1 : batch]) for i in range(batch)]
    first_key = jnp.stack([jnp.asarray(b, jnp.uint32) for b in (*starts[:batch], *key_strides)] or [jnp.uint32(0)])
    return _draw(data, rows, start, first_key, dtype).reshape(local)
