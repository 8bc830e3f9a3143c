"""PURE. Boxes of arrays: what part of which piece makes up another piece."""

import dataclasses
import functools
import math
from typing import Any, TypeAlias

import numpy as np
from jax.sharding import NamedSharding, Sharding

from namedshard._types import Bounds as Bounds
from namedshard._types import Device


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Host memory aligned so that a CPU device takes it over instead of copying it."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.__array_interface__["data"][0] % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def bounds_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
    """Start and stop of each dimension."""
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))


Cut: TypeAlias = tuple[tuple[slice, ...], tuple[slice, ...]]
"""The same part of an array, as slices of one box that holds it and of another."""


def cut(at: Bounds, source_at: Bounds) -> Cut | None:
    """What two boxes of one array share, in each one's own coordinates; None if nothing."""
    overlap = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(at, source_at, strict=True)]
    if not all(lo < hi for lo, hi in overlap):
        return None
    into = tuple(slice(lo - a, hi - a) for (lo, hi), (a, _) in zip(overlap, at, strict=True))
    return into, tuple(slice(lo - c, hi - c) for (lo, hi), (c, _) in zip(overlap, source_at, strict=True))


def copy_overlap(target: np.ndarray, at: Bounds, source: np.ndarray, source_at: Bounds) -> None:
    """Copy what two boxes of one array share from one box to the other."""
    if (both := cut(at, source_at)) is not None:
        target[both[0]] = source[both[1]]


RawBounds: TypeAlias = tuple[tuple[int | None, int | None], ...]


def raw_bounds(index: tuple[slice, ...]) -> RawBounds:
    """An index as JAX gives it, as a key: slices cannot be one before Python 3.12."""
    return tuple([(s.start, s.stop) for s in index])


@dataclasses.dataclass(slots=True, eq=False)
class Piece:
    """One distinct shard of a wanted array: its number and shape, and the parts of sources that it is copied from."""

    number: int
    shape: tuple[int, ...]
    cuts: list[tuple[int, Cut]]


@functools.lru_cache(maxsize=4096)
def recipe(shape: tuple[int, ...], sources: tuple[Bounds, ...], want: NamedSharding) -> dict[RawBounds, Piece]:
    """Every piece of a wanted array, by the index that JAX asks for it with."""
    made: dict[RawBounds, Piece] = {}
    for index in want.addressable_devices_indices_map(shape).values():
        key = raw_bounds(index or ())
        if key not in made:
            at = bounds_of(index or (), shape)
            cuts = [(i, both) for i, source in enumerate(sources) if (both := cut(at, source)) is not None]
            made[key] = Piece(len(made), tuple(b - a for a, b in at), cuts)
    return made


@functools.lru_cache(maxsize=4096)
def distinct_shards(shape: tuple[int, ...], sharding: Sharding) -> dict[Bounds, Device]:
    """One device for each different shard."""
    found: dict[Bounds, Device] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        found.setdefault(bounds_of(index or (), shape), device)
    return found
