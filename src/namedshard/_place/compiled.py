"""EFFECTS. Moves arrays between shardings over the same devices by compiled programs, without leaving the devices.

An array's shards are labelled, for free, as blocks of one array over the order of devices that is wanted. In each round
of `rounds` every device cuts one piece of its block, one ``ppermute`` sends it to where it belongs, and it is written
there; the results are labelled as what is wanted. Left to themselves, compilers gather whole arrays for some changes,
fail on others, and don't keep every bit.
"""

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from namedshard import _jaxcompat as compat
from namedshard._place import rounds
from namedshard._place.boxes import bounds_of
from namedshard._types import Bounds, Device

AXIS = "device"


def move_compiled(arrays: Sequence[jax.Array], wanted: Sequence[NamedSharding]) -> list[jax.Array]:
    """Arrays in device memory with the shardings wanted, which have the same devices; no typed keys, none empty.

    Those with one order of devices take part in one compiled program.
    """
    moved: dict[int, jax.Array] = {}
    batches: dict[tuple[Device, ...], list[int]] = collections.defaultdict(list)
    for i, (x, want) in enumerate(zip(arrays, wanted, strict=True)):
        if _boxes(x.sharding, x.shape) == _boxes(want, x.shape):
            same = jax.make_array_from_single_device_arrays(x.shape, want, compat.shards_of(x), dtype=x.dtype)
            # The source may be deleted, and its memory with it.
            moved[i] = _copy_to(want)(same)
        else:
            batches[compat.device_order(want)].append(i)
    for order, numbers in batches.items():
        program = _program(order, tuple((arrays[i].shape, arrays[i].sharding, wanted[i]) for i in numbers))
        results = program(*(_stacked(arrays[i], order) for i in numbers))
        for i, blocks in zip(numbers, results, strict=True):
            shape, dtype = arrays[i].shape, arrays[i].dtype
            moved[i] = jax.make_array_from_single_device_arrays(shape, wanted[i], compat.shards_of(blocks), dtype=dtype)
    return [moved[i] for i in range(len(arrays))]


def lowered(shape: tuple[int, ...], dtype: Any, have: Sharding, want: NamedSharding) -> Any:
    """The program for one array, for the compiler to tell what it needs; the devices needn't be attached."""
    order = compat.device_order(want)
    block = (have.shard_shape(shape)[0] * len(order), *have.shard_shape(shape)[1:])
    struct = jax.ShapeDtypeStruct(block, dtype, sharding=_by_device(order))
    return _program(order, ((shape, have, want),)).lower(struct)


def _by_device(order: tuple[Device, ...]) -> NamedSharding:
    """One block of the first dimension on each device."""
    return NamedSharding(Mesh(np.array(order), (AXIS,)), PartitionSpec(AXIS))


def _stacked(x: jax.Array, order: tuple[Device, ...]) -> jax.Array:
    """The shards of an array as one array's blocks; nothing is copied."""
    first, *rest = x.sharding.shard_shape(x.shape)
    shape = (first * len(order), *rest)
    return jax.make_array_from_single_device_arrays(shape, _by_device(order), compat.shards_of(x), dtype=x.dtype)


@functools.lru_cache(maxsize=256)
def _copy_to(want: NamedSharding) -> Callable[..., Any]:
    return jax.jit(jnp.copy, out_shardings=want)


@functools.lru_cache(maxsize=4096)
def _boxes(sharding: Sharding, shape: tuple[int, ...]) -> dict[Device, Bounds]:
    return {device: bounds_of(index, shape) for device, index in sharding.devices_indices_map(shape).items()}


@functools.lru_cache(maxsize=256)
def _program(order: tuple[Device, ...], changes: tuple[tuple[tuple[int, ...], Sharding, NamedSharding], ...]) -> Any:
    """One compiled program from the blocks of arrays to those that are wanted of each."""
    position = {device: i for i, device in enumerate(order)}
    processes = [device.process_index for device in order]

    def by_position(sharding: Sharding, shape: tuple[int, ...]) -> list[Bounds]:
        boxes = _boxes(sharding, shape)
        return [boxes[device] for device in sorted(boxes, key=lambda d: position[d])]

    plans = [
        (want.shard_shape(shape), rounds.plan(by_position(have, shape), by_position(want, shape), processes))
        for shape, have, want in changes
    ]

    def change(*blocks: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(_exchanged(block, *plan) for block, plan in zip(blocks, plans, strict=True))

    sharding = _by_device(order)
    specs = (sharding.spec,) * len(changes)
    return jax.jit(jax.shard_map(change, mesh=sharding.mesh, in_specs=specs, out_specs=specs, check_vma=False))


def _exchanged(block: jax.Array, shape: tuple[int, ...], plan: Sequence[rounds.Round]) -> jax.Array:
    """This device's block of what is wanted."""
    bits = _as_bits(block)
    out = jnp.zeros(shape, bits.dtype)
    me = jax.lax.axis_index(AXIS)
    for r in plan:
        # One round after the other, or the compiler would keep the pieces of many at once.
        bits, out = jax.lax.optimization_barrier((bits, out))
        piece = jax.lax.dynamic_slice(bits, jnp.asarray(r.cut_at)[me], r.shape)
        if any(sender != receiver for sender, receiver in r.pairs):
            piece = jax.lax.ppermute(piece, AXIS, r.pairs)
        start = jnp.asarray(r.write_at)[me]
        if len(r.pairs) < len(r.write_at):
            receives = np.zeros(len(r.write_at), bool)
            receives[[receiver for _, receiver in r.pairs]] = True
            piece = jnp.where(jnp.asarray(receives)[me], piece, jax.lax.dynamic_slice(out, start, r.shape))
        out = jax.lax.dynamic_update_slice(out, piece, start)
    return _of_bits(out, block.dtype)


def _as_bits(x: jax.Array) -> jax.Array:
    """The bits of floats as unsigned integers, and what takes less than a byte as bytes."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = jax.lax.bitcast_convert_type(x, f"uint{jnp.finfo(x.dtype).bits}")
    return x.astype(jnp.int8) if x.dtype in (jnp.bool_, jnp.int2, jnp.uint2, jnp.int4, jnp.uint4) else x


def _of_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    if not jnp.issubdtype(dtype, jnp.floating):
        return bits.astype(dtype)
    return jax.lax.bitcast_convert_type(bits.astype(f"uint{jnp.finfo(dtype).bits}"), dtype)
