"""PURE. Boxes of arrays: which part of which shard makes up another shard."""

import functools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from jax.sharding import Sharding

from namedshard._types import Bounds, Device

SHARED_BYTES = 128 << 10
"""Up to here one allocation for all shards of an array is faster than one for each."""


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Host memory, aligned so that a CPU device takes it over.

    A copy would be a task of its own, which can wait forever behind collectives that occupy all of XLA's threads.
    """
    raw = np.empty(math.prod(shape) * np.dtype(dtype).itemsize + 64, np.uint8)
    return np.ndarray(shape, dtype, raw, -raw.__array_interface__["data"][0] % 64)


@functools.lru_cache(maxsize=4096)
def _common_size(shape: tuple[int, ...], sharding: Sharding) -> tuple[int, ...]:
    sizes = {shape_of(box) for box in distinct_shards(shape, sharding)}
    return sizes.pop() if len(sizes) == 1 else ()


def empty_shards(shape: tuple[int, ...], sharding: Sharding, dtype: np.dtype[Any]) -> dict[Bounds, np.ndarray]:
    """Memory for each distinct shard of this process, aligned as `aligned_empty` does; small ones share theirs."""
    found, size = distinct_shards(shape, sharding), _common_size(shape, sharding)
    bytes_of_one = math.prod(size) * dtype.itemsize
    if size and not bytes_of_one % 64 and len(found) * bytes_of_one <= SHARED_BYTES:
        return dict(zip(found, aligned_empty((len(found), *size), dtype), strict=True))
    return {box: aligned_empty(shape_of(box), dtype) for box in found}


def bounds_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
    """Start and stop of each dimension."""
    # Lists, here and below, since tuples of generators take twice as long, and moves of small arrays count it.
    return tuple([s.indices(n)[:2] for s, n in zip(index, shape, strict=True)])


def whole(shape: Iterable[int]) -> Bounds:
    """The box that is all of an array."""
    return tuple((0, n) for n in shape)


def shape_of(box: Bounds) -> tuple[int, ...]:
    """The size of a box along each dimension."""
    return tuple([hi - lo for lo, hi in box])


def volume(box: Bounds) -> int:
    """Number of elements of a box."""
    return math.prod(hi - lo for lo, hi in box)


def rounded_up(size: tuple[int, ...], most: tuple[int, ...], small: int) -> tuple[int, ...]:
    """One of few sizes: each dimension a power of two or ``most``, which it also is while there are few elements.

    Each size of a slice is a program of its own.
    """
    out: list[int] = []
    for n, limit in zip(reversed(size), reversed(most), strict=True):
        few = math.prod(out) * limit <= small
        out.append(limit if few else min(limit, 1 << (n - 1).bit_length()))
    return tuple(reversed(out))


def overlap(a: Bounds, b: Bounds) -> Bounds | None:
    """What two boxes share, or None."""
    out = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return out if all(lo < hi for lo, hi in out) else None


def local_slices(box: Bounds, within: Bounds) -> tuple[slice, ...]:
    """A box as an index into an array that holds the box ``within``."""
    return tuple(slice(lo - start, hi - start) for (lo, hi), (start, _) in zip(box, within, strict=True))


@functools.lru_cache(maxsize=4096)
def shard_sources(
    shape: tuple[int, ...], sources: tuple[Bounds, ...], want: Sharding
) -> dict[Bounds, list[tuple[int, tuple[slice, ...], tuple[slice, ...]]]]:
    """For each box that this process's devices want: (source number, slices of the box, slices of the source)."""
    found: dict[Bounds, list[tuple[int, tuple[slice, ...], tuple[slice, ...]]]] = {}
    for box in distinct_shards(shape, want):
        shared = ((i, source, overlap(box, source)) for i, source in enumerate(sources))
        found[box] = [(i, local_slices(s, box), local_slices(s, source)) for i, source, s in shared if s is not None]
    return found


@functools.lru_cache(maxsize=4096)
def distinct_shards(shape: tuple[int, ...], sharding: Sharding) -> dict[Bounds, Device]:
    """One device for each different shard."""
    return {box: device for device, box in reversed(device_boxes(shape, sharding).items())}


@functools.lru_cache(maxsize=4096)
def device_boxes(shape: tuple[int, ...], sharding: Sharding) -> dict[Device, Bounds]:
    """The shard of each of this process's devices."""
    indices = sharding.addressable_devices_indices_map(shape)
    return {device: bounds_of(index or (), shape) for device, index in indices.items()}
