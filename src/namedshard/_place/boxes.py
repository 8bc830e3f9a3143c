"""PURE. Boxes of arrays: which devices hold which, and which part of which shard makes up another shard."""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jax.sharding import Sharding

from namedshard._types import Bounds, Device

AnyDevice: TypeAlias = Any
"""A ``jax.Device``, or anything else with an ``id`` and a ``process_index``: plans need no real ones."""

_TOGETHER = 1 << 20


def _aligned(size: int) -> tuple[np.ndarray, int]:
    """Memory, and where in it so many aligned bytes start."""
    raw = np.empty(size + 64, np.uint8)
    return raw, -raw.__array_interface__["data"][0] % 64


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Host memory, aligned so that a CPU device takes it over.

    A copy would be a task of its own, which can wait forever behind collectives that occupy all of XLA's threads.
    """
    return aligned_empties([shape], dtype)[0]


def aligned_empties(shapes: Sequence[tuple[int, ...]], dtype: Any) -> list[np.ndarray]:
    """The same for several arrays. Small ones share an allocation, which is freed with the last of them."""
    kind = np.dtype(dtype)
    sizes = [-(-math.prod(shape) * kind.itemsize // 64) * 64 for shape in shapes]
    if sum(sizes) > _TOGETHER:
        return [np.ndarray(shape, kind, *_aligned(size)) for shape, size in zip(shapes, sizes, strict=True)]
    raw, start = _aligned(sum(sizes))
    starts = itertools.accumulate(sizes[:-1], initial=start)
    return [np.ndarray(shape, kind, raw, at) for shape, at in zip(shapes, starts, strict=True)]


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


def overlap(a: Bounds, b: Bounds) -> Bounds | None:
    """What two boxes share, or None."""
    out = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return out if all(lo < hi for lo, hi in out) else None


def local_slices(box: Bounds, within: Bounds) -> tuple[slice, ...]:
    """A box as an index into an array that holds the box ``within``."""
    return tuple(slice(lo - start, hi - start) for (lo, hi), (start, _) in zip(box, within, strict=True))


class Copies(NamedTuple):
    """How the distinct shards of an array are copied from those that it has.

    Attributes:
        readers: The position among this process's devices of each distinct shard; empty for a host array.
        shapes: The shape of each distinct shard wanted.
        parts: (wanted shard, slices of it, source, slices of the source).
        owners: The number of the wanted shard of each of this process's devices.
    """

    readers: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    parts: tuple[tuple[int, tuple[slice, ...], int, tuple[slice, ...]], ...]
    owners: dict[Device, int]


@functools.lru_cache(maxsize=4096)
def copies(shape: tuple[int, ...], have: Sharding | None, want: Sharding) -> Copies:
    """How to copy an array from one sharding (None: the host) to another one, on this process's devices."""
    sources = {whole(shape): None} if have is None else distinct_shards(shape, have)
    wanted = list(distinct_shards(shape, want))
    shared = itertools.product(enumerate(wanted), enumerate(sources))
    parts = tuple(
        (i, local_slices(part, box), n, local_slices(part, source))
        for (i, box), (n, source) in shared
        if (part := overlap(box, source)) is not None
    )
    owners = {device: wanted.index(box) for device, box in device_boxes(shape, want).items()}
    order = [] if have is None else list(device_boxes(shape, have))
    readers = tuple(order.index(device) for device in sources.values() if device is not None)
    return Copies(readers, tuple(map(shape_of, wanted)), parts, owners)


@functools.lru_cache(maxsize=4096)
def distinct_shards(shape: tuple[int, ...], sharding: Sharding) -> dict[Bounds, Device]:
    """One device for each different shard."""
    return {box: device for device, box in reversed(device_boxes(shape, sharding).items())}


@functools.lru_cache(maxsize=4096)
def device_boxes(shape: tuple[int, ...], sharding: Sharding) -> dict[Device, Bounds]:
    """The shard of each of this process's devices."""
    indices = sharding.addressable_devices_indices_map(shape)
    return {device: bounds_of(index or (), shape) for device, index in indices.items()}


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Which devices hold which box of an array, the grid that the boxes form, and how many hold the same box."""

    holders: Mapping[Bounds, tuple[AnyDevice, ...]]
    cuts: tuple[tuple[tuple[int, int], ...], ...]
    copies: int


@functools.lru_cache(maxsize=1024)
def layout_of(sharding: Sharding, shape: tuple[int, ...]) -> Layout:
    """The layout of an array of a shape under a sharding, on all its devices."""
    return layout({d: bounds_of(index, shape) for d, index in sharding.devices_indices_map(shape).items()}, len(shape))


@functools.lru_cache(maxsize=1024)
def whole_on(devices: tuple[AnyDevice, ...], shape: tuple[int, ...]) -> Layout:
    """The layout of an array that each of some devices holds whole."""
    return layout(dict.fromkeys(devices, whole(shape)), len(shape))


def layout(boxes: Mapping[AnyDevice, Bounds], ndim: int) -> Layout:
    """The layout of given boxes, which must form a grid."""
    holders: dict[Bounds, list[AnyDevice]] = collections.defaultdict(list)
    for device, box in boxes.items():
        holders[box].append(device)
    cuts = tuple(tuple(sorted({box[d] for box in holders})) for d in range(ndim))
    copies = max(map(len, holders.values()), default=1)
    return Layout({box: tuple(devices) for box, devices in holders.items()}, cuts, copies)


def shards_in(source: Layout, box: Bounds) -> Iterator[tuple[Bounds, Bounds]]:
    """(source box, overlap) for each source shard that has part of a box."""
    # The boxes form a grid, so that only those that meet the box are looked at.
    per_dim = [[c for c in cuts if overlap((c,), (d,))] for cuts, d in zip(source.cuts, box, strict=True)]
    for source_box in itertools.product(*per_dim):
        if (shared := overlap(source_box, box)) is not None:
            yield source_box, shared
