"""EFFECTS. Boxes of shards as numpy, copied off their devices once."""

import itertools
import threading

import jax
import numpy as np

from namedshard import _jaxcompat as compat
from namedshard._cache import BoundedCache
from namedshard._place.boxes import local_slices, overlap, shape_of
from namedshard._place.local import device_kind, relabelled
from namedshard._place.rounds import chunk_of
from namedshard._place.route import on_cpus
from namedshard._types import Bounds

BLOCK_BYTES = 64 << 20
"""The most that is copied off a device at a time."""

KEPT = 4
"""Blocks that are kept, since several boxes are read from one, by several readers at about the same time."""

_slice = jax.jit(jax.lax.dynamic_slice, static_argnums=2)


class ShardReader:
    """Reads boxes of this process's shards, or of host arrays; from several threads, too.

    CPU devices' memory is read where it is. Accelerators' shards are copied in blocks, each once if boxes are read in
    order, and by one program for all blocks of a shape. Blocks take up to ``budget`` bytes, or 64 KiB each.
    """

    def __init__(self, budget: int):
        self._block_bytes = max(1 << 16, min(BLOCK_BYTES, budget // KEPT))
        self._kept: BoundedCache[tuple[jax.Array, np.ndarray]] = BoundedCache(KEPT)
        self._lock = threading.Lock()

    @compat.explicit_transfers()
    def read(self, piece: jax.Array | np.ndarray, held: Bounds, box: Bounds) -> np.ndarray:
        """A box of an array, from the piece of it that holds ``held``; a view where that is possible."""
        slices = local_slices(box, held)
        if not isinstance(piece, jax.Array) or on_cpus(piece.sharding) or not all(shape_of(box)):
            # The ellipsis keeps arrays of no dimensions arrays.
            return np.asarray(piece)[(*slices, ...)]
        wanted = tuple((s.start, s.stop) for s in slices)
        on_device = piece.sharding.memory_kind == device_kind(piece.sharding)
        shape = chunk_of(piece.shape, max(1, self._block_bytes // piece.dtype.itemsize)) if on_device else piece.shape
        numbers = (range(lo // n, -(-hi // n)) for (lo, hi), n in zip(wanted, shape, strict=True))
        found = list(itertools.product(*numbers))
        out = np.empty(shape_of(box), piece.dtype) if len(found) > 1 else None
        for number in found:
            start = tuple(min(i * n, most - n) for i, n, most in zip(number, shape, piece.shape, strict=True))
            block = self._block(piece, start, shape)
            inside = tuple((at, at + n) for at, n in zip(start, shape, strict=True))
            if out is None:
                return block[(*local_slices(wanted, inside), ...)]
            shared = overlap(wanted, inside)
            assert shared is not None
            out[local_slices(shared, wanted)] = block[local_slices(shared, inside)]
        assert out is not None
        return out

    def _block(self, piece: jax.Array, start: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
        key = id(piece), start
        with self._lock:
            # The piece is kept with it, or another one could get its id.
            kept = self._kept.get(key) or self._kept.put(key, (piece, copy_block(piece, start, shape)))
        return kept[1]


def copy_block(piece: jax.Array, start: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    """A block of a shard on the host; JAX keeps no copy of it."""
    with compat.no_context_mesh(), compat.keeping_bits([piece.dtype]):
        if shape != piece.shape:
            return np.asarray(_slice(piece, start, shape))
        # The copy is kept by the array that is read, so that is another one of the same memory.
        return np.asarray(relabelled(piece, piece.sharding.memory_kind or "device"))
