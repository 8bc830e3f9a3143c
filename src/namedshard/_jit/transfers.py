"""PURE. Transfers in traced code that the compiler will ignore, found in the jaxpr."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding

from namedshard import _jaxcompat as compat
from namedshard._errors import IgnoredTransferError, message
from namedshard._plan.mesh import MeshLike
from namedshard._types import Device, Tracer

KnownShardings = dict[Any, Sharding]
"""The shardings of a jaxpr's variables, as far as they are certain."""


def check_transfers(name: str, jaxpr: Any, values: Sequence[Any], mesh: MeshLike | None) -> str | None:
    """Find every ``device_put`` in a function's jaxpr that the compiler ignores.

    ``values`` are the arguments that it was traced for, under ``mesh``. Returns a warning if some ask for another spec.

    Raises:
        IgnoredTransferError: Some go to a device, order or platform that the compiled function doesn't run on.
    """
    # What the function closes over comes before its arguments.
    inputs = zip(jaxpr.invars[len(jaxpr.invars) - len(values) :], values, strict=True)
    given = {v: x.sharding for v, x in inputs if getattr(x, "sharding", None) is not None}
    devices, fixed = _traced_devices(values, mesh)
    transfers: dict[str, None] = {}
    specs: dict[str, None] = {}
    for eqn, n, known in _device_puts(jaxpr, given):
        if target := _ignored_devices(eqn.params["devices"][n], devices, fixed):
            transfers[f"{compat.user_source(eqn)}: to {target}"] = None
        if target := _ignored_spec(eqn, n, known):
            specs[f"{compat.user_source(eqn)}: to {target}"] = None
    if transfers and devices:
        noun = "device_put" if len(transfers) == 1 else "device_puts"
        raise IgnoredTransferError(
            f"{name}: {len(transfers)} {noun} in traced code would be ignored by the compiler, which runs on"
            f" {_platform_and_ids(devices)}",
            transfers,
            fix="move the result after the call; for host memory, use"
            ' ns.shard(..., memory_kind="pinned_host") or jax.device_put(x, jax.memory.Space.Host)',
        )
    if not specs:
        return None
    noun = "device_put asks" if len(specs) == 1 else "device_puts ask"
    return message(
        f"{name}: {len(specs)} {noun} for a spec in traced code, which the compiler ignores on Auto axes",
        specs,
        fix="use ns.shard, or jax.lax.with_sharding_constraint",
    )


def _traced_devices(values: Sequence[Any], mesh: MeshLike | None) -> tuple[tuple[Device, ...] | None, bool]:
    """The devices that a call is traced for, as far as is known before lowering, and whether something fixes them.

    Nothing does where no mesh is in context and no argument is committed: then the traced code may still decide.
    """
    if mesh is not None:
        return (tuple(mesh.devices.flat), True) if isinstance(mesh, Mesh) else (None, False)
    if any(isinstance(x, Tracer) for x in values):
        return None, False
    placed = [x for x in values if getattr(x, "sharding", None) is not None]
    committed = [x for x in placed if getattr(x, "committed", False) or isinstance(x, jax.ShapeDtypeStruct)]
    deciding = committed or placed
    return compat.device_order(deciding[0].sharding) if deciding else None, bool(committed)


def _device_puts(jaxpr: Any, known: KnownShardings) -> Iterator[tuple[Any, int, KnownShardings]]:
    """Every ``device_put`` and the number of each of its targets, nested ones included."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "sharding_constraint":
            known[eqn.outvars[0]] = eqn.params["sharding"]
        elif name == "device_put":
            for n in range(len(eqn.params["devices"])):
                yield eqn, n, known
        for inner in compat.inner_jaxprs(eqn.params):
            passed: KnownShardings = {}
            if name in ("jit", "pjit") and len(inner.invars) == len(eqn.invars):
                outer = zip(inner.invars, eqn.invars, strict=True)
                passed = {v: s for v, o in outer if (s := _known_sharding(o, known)) is not None}
            yield from _device_puts(inner, passed)


def _known_sharding(atom: Any, known: KnownShardings) -> Sharding | None:
    # Literals are operands too, and some of them cannot be hashed.
    return None if hasattr(atom, "val") else known.get(atom)


def _platform_and_ids(devices: Sequence[Device]) -> str:
    return f"{devices[0].platform} devices {[d.id for d in devices]}"


def _ignored_devices(target: Any, traced: tuple[Device, ...] | None, fixed: bool) -> str | None:
    """The target's devices, if they or their order or platform differ from the traced ones; else None.

    Transfers between memory spaces, which do work, pass. ``fixed``: some argument or the mesh decides the devices; if
    nothing does, a sharding in the traced code decides, and only a bare device is ignored.
    """
    if isinstance(target, jax.Device) and traced is not None:
        return None if traced == (target,) else _platform_and_ids([target])
    if not (traced and fixed and isinstance(target, Sharding)):
        return None
    if isinstance(target, NamedSharding) and not isinstance(target.mesh, Mesh):
        return None
    devices = compat.device_order(target)
    return None if devices == traced else _platform_and_ids(devices)


def _ignored_spec(eqn: Any, n: int, known: KnownShardings) -> str | None:
    """The spec that a ``device_put`` asks for within the same memory space, which Auto axes leave undone; else None."""
    target = eqn.params["devices"][n]
    if not isinstance(target, NamedSharding) or target.mesh.size == 1 or not _has_auto_entries(target):
        return None
    if compat.space_of_type(eqn.invars[n].aval) != compat.space_of_type(eqn.outvars[n].aval):
        return None
    have = _known_sharding(eqn.invars[n], known)
    is_there = (
        isinstance(have, NamedSharding)
        and have.mesh.shape == target.mesh.shape
        # One of two equal specs may be padded with None.
        and all(a == b for a, b in itertools.zip_longest(have.spec, target.spec))
    )
    return None if is_there else f"P({', '.join(map(repr, target.spec))})"


def _has_auto_entries(target: NamedSharding) -> bool:
    """Whether the target says something about Auto axes; on Explicit ones a ``device_put`` does move."""
    types = dict(zip(target.mesh.axis_names, target.mesh.axis_types, strict=True))
    named = (types.get(n) for e in target.spec for n in ((e,) if isinstance(e, str) else (e or ())))
    return AxisType.Auto in named or set(types.values()) <= {AxisType.Auto}
