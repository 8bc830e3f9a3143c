"""EFFECTS. Moves arrays between devices by compiled programs, without leaving the devices.

Following `rounds`, every device that has a shard cuts pieces out of it, one ``ppermute`` a round sends them to where
they belong, and there they are written. Shards of source and result are labelled, for free, as blocks of arrays over
the devices in one order. Where both have the same devices, all this is one program, else each of the three is one on
its own devices. A large array is sent in chunks by the same programs. Left to themselves, compilers gather whole arrays
for some changes, fail on others, and don't keep every bit.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from namedshard import _jaxcompat as compat
from namedshard._place import rounds
from namedshard._place.boxes import layout_of
from namedshard._types import Bounds, Device

AXIS = "device"


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """What a program depends on: leaves that change alike share it."""

    shape: tuple[int, ...]
    dtype: Any
    have: Sharding
    want: NamedSharding


def move_compiled(
    arrays: Sequence[jax.Array],
    wanted: Sequence[NamedSharding],
    wait: Callable[[Any], object] = jax.block_until_ready,
) -> list[jax.Array]:
    """Arrays in device memory with the shardings wanted; no typed keys, none empty, devices of one kind.

    ``wait`` blocks until arrays are ready: no more is on its way than `rounds.CHUNK_BYTES` allow.
    """
    moved: list[jax.Array] = []
    on_the_way = 0
    for x, want in zip(arrays, wanted, strict=True):
        if _boxes(x.sharding, x.shape) == _boxes(want, x.shape):
            same = jax.make_array_from_single_device_arrays(x.shape, want, compat.shards_of(x), dtype=x.dtype)
            # The source may be deleted, and its memory with it.
            moved.append(_copy_to(want)(same))
            continue
        change = Change(x.shape, x.dtype, x.sharding, want)
        out: jax.Array | None = None
        for step in _steps(change):
            for chunk in range(step.chunks):
                if on_the_way + step.bytes > rounds.CHUNK_BYTES:
                    wait((moved, out))
                    on_the_way = 0
                on_the_way += step.bytes
                out = step(chunk, x, out)
        shards = [] if out is None else compat.shards_of(out)
        moved.append(jax.make_array_from_single_device_arrays(x.shape, want, shards, dtype=x.dtype))
    return moved


def lowered(shape: tuple[int, ...], dtype: Any, have: Sharding, want: NamedSharding) -> list[Any]:
    """The programs for one array, for the compiler to tell what they need; the devices needn't be attached."""
    return [program for step in _steps(Change(shape, jnp.dtype(dtype), have, want)) for program in step.lowered()]


@functools.lru_cache(maxsize=4096)
def _boxes(sharding: Sharding, shape: tuple[int, ...]) -> dict[Device, Bounds]:
    return {d: box for box, devices in layout_of(sharding, shape).holders.items() for d in devices}


@functools.lru_cache(maxsize=256)
def _copy_to(want: NamedSharding) -> Callable[..., Any]:
    return jax.jit(jnp.copy, out_shardings=want)


@functools.lru_cache(maxsize=256)
def _steps(change: Change) -> list["_Step"]:
    """Each writes into what those before it have written."""
    plan = rounds.plan_between(change.have, change.want, change.shape, change.dtype.itemsize)
    return [_Step(change, plan, groups) for groups in plan.steps]


class _Blocks:
    """Arrays of a number of dimensions with one block on each of some devices of a plan."""

    def __init__(self, plan: rounds.Plan, devices: Collection[Device], ndim: int):
        self.positions = [i for i, d in enumerate(plan.devices) if d in devices]
        self.devices = [plan.devices[i] for i in self.positions]
        self.here = any(d.process_index == jax.process_index() for d in self.devices)
        # Scalars can't be split: each device's own is called the same.
        self._spec = PartitionSpec(AXIS) if ndim else PartitionSpec()

    @functools.cached_property
    def sharding(self) -> NamedSharding:
        """One block of the first dimension on each device."""
        return NamedSharding(Mesh(np.array(self.devices), (AXIS,)), self._spec)

    def label(self, shards: Iterable[jax.Array]) -> jax.Array:
        """The shards that are on these devices as one array; nothing is copied."""
        held = [shard for shard in shards if shard.device in self.devices]
        shape = self._shape(held[0].shape)
        return jax.make_array_from_single_device_arrays(shape, self.sharding, held, dtype=held[0].dtype)

    def struct(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        """What `label` makes of shards of a shape."""
        return jax.ShapeDtypeStruct(self._shape(shape), dtype, sharding=self.sharding)

    def _shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[0] * len(self.devices), *shape[1:]) if shape else ()

    def compile(self, function: Callable[..., Any], numbers: int = 0, donate: tuple[int, ...] = ()) -> Any:
        """A function of numbers and of blocks as a program for these devices."""
        spec, mesh = self._spec, self.sharding.mesh

        def run(*args: Any) -> Any:
            specs = (*(PartitionSpec(),) * numbers, *(spec,) * (len(args) - numbers))
            return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=spec, check_vma=False)(*args)

        return jax.jit(run, donate_argnums=donate)


class _Step:
    """The programs that send one chunk of every piece of some groups of a change."""

    def __init__(self, change: Change, plan: rounds.Plan, groups: Sequence[rounds.Group]):
        ndim = len(change.shape)
        sources, targets = change.have.device_set, change.want.device_set
        self.chunks = math.prod(groups[0].counts)
        self.bytes = rounds.transient_bytes(change.have, change.want, change.shape, change.dtype.itemsize)
        self._change, self._whole, self._bits = change, plan.whole, _bits_of(change.dtype, plan.devices[0].platform)
        self._rounds = [(group, r) for group in groups for r in group.rounds]
        self._all = _Blocks(plan, plan.devices, ndim)
        self._sources, self._targets = _Blocks(plan, sources, ndim), _Blocks(plan, targets, ndim)
        self._idle = _Blocks(plan, set(plan.devices) - sources, ndim)
        self._on_same = sources == targets
        if self._on_same:
            self._move = self._all.compile(self._moved, numbers=1, donate=(2,))
        else:
            self._cut = self._sources.compile(self._slots, numbers=1)
            self._fill = self._idle.compile(self._empty_slots)
            self._send = self._all.compile(self._sent)
            self._write = self._targets.compile(self._written, numbers=1, donate=(1,))

    def __call__(self, chunk: int, x: jax.Array, out: jax.Array | None) -> jax.Array | None:
        """The result with one more chunk written to it; no ``out`` makes a new one, and gives up the one given."""
        shards = compat.shards_of(x)
        if self._on_same:
            return self._move(chunk, self._all.label(shards), out)
        cut = self._cut(chunk, self._sources.label(shards)) if shards else ()
        # Programs over all devices need something of the others, too.
        empty = self._fill() if self._idle.here else ()
        slots = [[*map(compat.shards_of, made)] for made in (cut, empty)]
        outgoing = itertools.zip_longest(*slots, fillvalue=())
        sent = self._send(*(self._all.label([*mine, *others]) for mine, others in outgoing))
        if not self._targets.here:
            return None
        return self._write(chunk, out, *(self._targets.label(compat.shards_of(slot)) for slot in sent))

    def lowered(self) -> list[Any]:
        """The programs, for devices that needn't be attached."""
        change = self._change
        block = self._sources.struct(change.have.shard_shape(change.shape), change.dtype)
        out = None if self.chunks == 1 else self._targets.struct(change.want.shard_shape(change.shape), change.dtype)
        if self._on_same:
            return [self._move.lower(0, block, out)]
        sent = [self._all.struct(group.chunk, self._bits) for group, _ in self._rounds]
        arrived = [self._targets.struct(group.chunk, self._bits) for group, _ in self._rounds]
        return [self._cut.lower(0, block), self._send.lower(*sent), self._write.lower(0, out, *arrived)]

    # --- on each device ---

    def _moved(self, chunk: jax.Array, block: jax.Array, out: jax.Array | None) -> jax.Array:
        return self._written(chunk, out, *self._sent(*self._slots(chunk, block)))

    def _slots(self, chunk: jax.Array, block: jax.Array) -> tuple[jax.Array, ...]:
        """What this device sends in each round."""
        bits = _as_bits(block, self._bits)
        if self._whole:
            return (bits,)
        return tuple(
            jax.lax.dynamic_slice(bits, self._start(r.cut_at, group, chunk, self._sources), group.chunk)
            for group, r in self._rounds
        )

    def _empty_slots(self) -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros(group.chunk, self._bits) for group, _ in self._rounds)

    def _sent(self, *slots: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(
            slot if all(sender == receiver for sender, receiver in r.pairs) else jax.lax.ppermute(slot, AXIS, r.pairs)
            for slot, (_, r) in zip(slots, self._rounds, strict=True)
        )

    def _written(self, chunk: jax.Array, out: jax.Array | None, *slots: jax.Array) -> jax.Array:
        """The block of the result with what has come in each round."""
        if self._whole:
            return _of_bits(slots[0], self._change.dtype)
        shape = self._change.want.shard_shape(self._change.shape)
        bits = jnp.zeros(shape, self._bits) if out is None else _as_bits(out, self._bits)
        for slot, (group, r) in zip(slots, self._rounds, strict=True):
            start = self._start(r.write_at, group, chunk, self._targets)
            receives = [position in r.write_at for position in self._targets.positions]
            if not all(receives):
                here = jnp.asarray(receives)[jax.lax.axis_index(AXIS)]
                slot = jnp.where(here, slot, jax.lax.dynamic_slice(bits, start, group.chunk))
            bits = jax.lax.dynamic_update_slice(bits, slot, start)
        return _of_bits(bits, self._change.dtype)

    def _start(
        self, starts: Mapping[int, rounds.Start], group: rounds.Group, chunk: jax.Array, on: _Blocks
    ) -> list[jax.Array]:
        """Where on this device a chunk of a piece starts."""
        nowhere = (0,) * len(group.piece)
        table = np.array([starts.get(position, nowhere) for position in on.positions], np.uint32)
        me = jax.lax.axis_index(AXIS)
        numbers = jnp.unravel_index(chunk.astype(jnp.uint32), group.counts) if group.piece else ()
        out: list[jax.Array] = []
        for d, (size, piece, number) in enumerate(zip(group.chunk, group.piece, numbers, strict=True)):
            # TPUs copy the whole array unless they see that this is a multiple of what they keep together.
            unit = int(np.gcd.reduce([size, piece, *table[:, d]]))
            first = jnp.minimum(number * (size // unit), (piece - size) // unit)
            out.append((jnp.asarray(table[:, d] // unit)[me] + first) * unit)
        return out


def _bits_of(dtype: Any, platform: str) -> Any:
    """The type in which values are moved: most compilers convert narrow ones on the way, and lose bits of NaNs.

    Those for TPUs don't, and would copy the whole array to change its type.
    """
    if platform == "tpu":
        return dtype
    if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4:
        return jnp.dtype(jnp.uint8 if dtype.itemsize == 1 else jnp.uint16)
    return jnp.dtype(jnp.int8) if dtype in (jnp.bool_, jnp.int2, jnp.uint2, jnp.int4, jnp.uint4) else dtype


def _as_bits(x: jax.Array, bits: Any) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype != bits:
        x = jax.lax.bitcast_convert_type(x, f"uint{jnp.finfo(x.dtype).bits}")
    return x.astype(bits)


def _of_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    if jnp.issubdtype(dtype, jnp.floating) and bits.dtype != dtype:
        return jax.lax.bitcast_convert_type(bits.astype(f"uint{jnp.finfo(dtype).bits}"), dtype)
    return bits.astype(dtype)
