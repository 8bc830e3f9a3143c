"""EFFECTS. Elements of a leaf in this host's memory, from whatever placement, box by box."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from namedshard._place import boxes, exchange, moves
from namedshard._place import transfer as collective
from namedshard._safetensors.layout import Bounds, Part, boxes_in, leaf_bounds, leaf_view, overlap


@dataclasses.dataclass(frozen=True, slots=True)
class Pieces:
    """A leaf, or some of it, as pieces that this process has."""

    dtype: np.dtype[Any]
    pieces: Sequence[tuple[Bounds, Any]]

    def read(self, part: Part, box: Bounds) -> np.ndarray:
        """The elements of a box of a part, in its atoms' order; a view of a piece where one has them all."""
        out: np.ndarray | None = None
        for bounds, data in self.pieces:
            for mine in boxes_in(part, bounds):
                shared = overlap(mine, box)
                if shared is None:
                    continue
                region = leaf_bounds(part, shared)
                array = moves.host_piece(
                    data, tuple((a - o, b - o) for (a, b), (o, _) in zip(region, bounds, strict=True))
                )
                view = leaf_view(part, shared, array, [lo for lo, _ in region])
                if shared == box:
                    return view
                if out is None:
                    out = np.empty([hi - lo for lo, hi in box], self.dtype)
                out[tuple(slice(a - lo, b - lo) for (a, b), (lo, _) in zip(shared, box, strict=True))] = view
        assert out is not None
        return out


def pieces_of(value: Any) -> Pieces:
    """The pieces of a leaf that this process has whole, each distinct one once."""
    if not isinstance(value, jax.Array):
        array = np.asarray(value)
        return Pieces(array.dtype, [(tuple((0, n) for n in array.shape), array)])
    found: dict[Bounds, Any] = {}
    for shard in value.addressable_shards:
        found.setdefault(boxes.bounds_of(shard.index, value.shape), shard.data)
    return Pieces(value.dtype, list(found.items()))


def gathered(value: jax.Array, region: Bounds, owner: int, budget: int) -> Pieces | None:
    """A region of a shared array on one process; None on the others. A collective."""
    device = next(d for d in jax.devices() if d.process_index == owner)
    target = exchange.layout({device: region}, value.ndim)
    buffers: dict[tuple[int, Bounds], np.ndarray] = {}
    if owner == jax.process_index():
        buffers[0, region] = np.empty([hi - lo for lo, hi in region], value.dtype)
    collective.exchange([value], [target], buffers, budget)
    return Pieces(value.dtype, [(region, buffer) for (_, region), buffer in buffers.items()]) if buffers else None
