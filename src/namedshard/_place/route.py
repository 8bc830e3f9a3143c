"""PURE. Which way an array takes from where it is to where it is wanted.

The table is in ``docs/routes.md``; `local`, `traced` and `transfer` carry it out.
"""

import contextlib
import dataclasses
import enum
import functools
import math
import os
from collections.abc import Generator, Iterable
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from namedshard import _jaxcompat as compat
from namedshard._errors import UnsupportedArrayError, at, count_of
from namedshard._place import rounds
from namedshard._place.boxes import layout_of
from namedshard._types import Tracer


class Route(enum.Enum):
    """How `shard` moves a leaf. The values are what `explain` prints."""

    LEFT = "left"
    ANNOTATE = "annotate"
    KEEP = "keep"
    TRACED = "traced"
    FROM_HOST = "from host"
    CONSTRAIN = "constrain"
    CONSTRAIN_JIT = "constrain in jit"
    PERMUTE = "permute"
    DEVICE_PUT = "device_put"
    COLLECTIVE = "collective"


class _Routes:
    """Whether CPU devices are moved between like accelerators; for tests."""

    as_accelerators = os.environ.get("NAMEDSHARD_ACCELERATOR_ROUTES") == "1"


@contextlib.contextmanager
def accelerator_routes() -> Generator[None, None, None]:
    """In this block, move arrays between CPU devices as between accelerators, in every thread."""
    before, _Routes.as_accelerators = _Routes.as_accelerators, True
    try:
        yield
    finally:
        _Routes.as_accelerators = before


def on_cpus(where: Sharding | Mesh | None) -> bool:
    """True if all devices of a sharding or mesh (None: the default device) are CPUs, whose memory numpy sees."""
    return not _Routes.as_accelerators and _are_cpus(where)


@functools.lru_cache(maxsize=4096)
def _are_cpus(where: Sharding | Mesh | None) -> bool:
    if where is None:
        return jax.local_devices()[0].platform == "cpu"
    return all(d.platform == "cpu" for d in (where.devices.flat if isinstance(where, Mesh) else where.device_set))


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """Where a leaf is now.

    ``kind`` is ``"abstract"``, ``"traced"``, ``"host"`` (numpy) or ``"array"``; the rest is set for arrays.
    """

    kind: Literal["abstract", "traced", "host", "array"]
    sharding: Sharding | None = None
    committed: bool = False
    addressable: bool = True
    memory_kind: str | None = None


@dataclasses.dataclass(slots=True, eq=False)
class Move:
    """One array to move, and the result once that is done.

    ``donate`` lets the move consume its source, which then nothing else may need.
    """

    path: str
    value: Any
    now: Placement
    want: NamedSharding
    route: Route
    donate: bool = False
    result: Any = None


def placement_of(x: Any, staging: bool) -> Placement:
    """Where a leaf is now. ``staging``: operations are being recorded for a compiler, also those on concrete arrays."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return Placement("abstract", x.sharding, memory_kind=compat.memory_kind_of_struct(x))
    if isinstance(x, Tracer):
        return Placement("traced", memory_kind=compat.memory_kind_of_traced(x))
    if staging:
        return Placement("traced", memory_kind="device")
    if isinstance(x, jax.Array):
        return Placement("array", x.sharding, x.committed, x.is_fully_addressable, x.sharding.memory_kind)
    return Placement("host")


def unreduced_axes(sharding: Sharding | None) -> list[str]:
    """The mesh axes that an array with this sharding is still to be summed over."""
    return sorted(sharding.spec.unreduced) if isinstance(sharding, NamedSharding) else []


def obstacle(x: Any, now: Placement) -> str:
    """Why an array can't be moved; empty if it can."""
    if isinstance(x, np.ma.MaskedArray) and np.ma.getmask(x) is not np.ma.nomask:
        return "a masked array, whose mask would be lost"
    if now.kind == "array" and not now.addressable and (axes := unreduced_axes(now.sharding)):
        return f"still to be summed over mesh axes {', '.join(map(repr, axes))}, with other processes"
    return ""


def check_movable(what: str, leaves: Iterable[tuple[str, Any, Placement]], total: int) -> None:
    """Raise `UnsupportedArrayError` for (path, value, placement)s that can't be moved."""
    if lines := [f"{at(path)}: {reason}" for path, x, now in leaves if (reason := obstacle(x, now))]:
        raise UnsupportedArrayError(
            f"{what}: {count_of(len(lines), total)} cannot be moved",
            lines,
            fix="fill masked arrays (x.filled(...)), sum others by jax.sharding.reshard to a spec without unreduced",
        )


def wanted_memory_kind(now: Placement, asked: str | None) -> str | None:
    """The kind asked for, else the kind the array has (None: the devices' own)."""
    if asked is not None:
        return asked
    if now.kind == "abstract" or (now.kind == "array" and now.committed):
        return now.memory_kind
    return now.memory_kind if now.kind == "traced" and now.memory_kind != "device" else None


def same_place(have: Sharding, want: NamedSharding, ndim: int) -> bool:
    """Equivalent sharding on the same mesh: axis names and axis types count, since tracing looks at them."""
    if have is want:
        return True
    if not isinstance(have, NamedSharding) or have.mesh != want.mesh:
        return False
    return have == want or have.is_equivalent_to(want, ndim)


def route_for(now: Placement, want: NamedSharding, shape: tuple[int, ...]) -> Route:
    """The route from a placement to a wanted sharding."""
    if now.kind == "abstract":
        return Route.KEEP if now.sharding == want else Route.ANNOTATE
    if now.kind == "traced":
        return Route.TRACED
    if now.kind == "host" or now.sharding is None:
        return Route.FROM_HOST
    if now.committed and same_place(now.sharding, want, len(shape)):
        return Route.KEEP
    if not now.committed and now.addressable:
        return Route.FROM_HOST
    same_devices = compat.device_order(now.sharding) == compat.device_order(want)
    if same_devices and now.memory_kind == want.memory_kind:
        return Route.CONSTRAIN if now.addressable else Route.CONSTRAIN_JIT
    if not same_devices and isinstance(now.sharding, NamedSharding) and now.sharding.device_set == want.device_set:
        return Route.PERMUTE if math.prod(shape) else Route.DEVICE_PUT
    if now.addressable and want.is_fully_addressable:
        return Route.DEVICE_PUT
    if not now.addressable and now.sharding.device_set == want.device_set:
        return Route.DEVICE_PUT
    return Route.COLLECTIVE


def stays_on_devices(now: Placement, want: NamedSharding, shape: tuple[int, ...], route: Route) -> bool:
    """Whether accelerators move an array among themselves by compiled programs."""
    have = now.sharding
    if have is None or route in (Route.KEEP, Route.FROM_HOST) or not math.prod(shape) or on_cpus(want):
        return False
    if len({device.platform for device in have.device_set | want.device_set}) > 1:
        return False
    if have.device_set != want.device_set:
        # ``device_put`` copies shards that are wanted as they are.
        return (
            route is Route.COLLECTIVE
            or not layout_of(want, shape).holders.keys() <= layout_of(have, shape).holders.keys()
        )
    only_relabelled = have.with_memory_kind(want.memory_kind or "device").is_equivalent_to(want, len(shape))
    return not (now.addressable and only_relabelled)


def transient_bytes(now: Placement, want: NamedSharding, shape: tuple[int, ...], itemsize: int) -> int:
    """The most bytes that a leaf takes on one device while it moves, its source and target shards included."""
    route = route_for(now, want, shape)
    if route in (Route.ANNOTATE, Route.KEEP, Route.TRACED):
        return 0
    target = math.prod(want.shard_shape(shape)) * itemsize
    if route is Route.FROM_HOST or now.sharding is None:
        return target
    source = math.prod(now.sharding.shard_shape(shape)) * itemsize
    if on_cpus(want):
        processes = {d.process_index for d in now.sharding.device_set | want.device_set}
        return source + target + (rounds.CHUNK_BYTES if len(processes) > 1 else 0)
    if stays_on_devices(now, want, shape, route):
        return source + target + rounds.transient_bytes(now.sharding, want, shape, itemsize)
    return source + target + (rounds.CHUNK_BYTES if route is Route.COLLECTIVE else 0)
