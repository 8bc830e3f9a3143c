"""PURE. How an argument's sharding differs from what a compiled function needs, in words and with the fix."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from namedshard import _jaxcompat as compat
from namedshard._errors import human_bytes, message
from namedshard._mesh import describe


@dataclasses.dataclass(frozen=True, slots=True)
class Mismatch:
    """One argument leaf that is not where it must be.

    Attributes:
        path: The user's argument name with the leaf path.
        classes: What differs: ``"axis names"``, ``"axis types"``, ``"device order"``, ``"device set"``, ``"spec"``,
            ``"memory kind"``, ``"committed to one device"``, ``"process set"``.
        text: What is, and what was expected.
        moved_bytes: What a move would cost.
    """

    path: str
    classes: tuple[str, ...]
    text: str
    moved_bytes: int


def _ids(devices: Sequence[jax.Device]) -> str:
    ids = [d.id for d in devices]
    if len(ids) > 16:
        return f"[{', '.join(map(str, ids[:6]))}, ... {ids[-1]}] ({len(ids)} devices)"
    return str(ids)


def _set_relation(have: set[Any], want: set[Any]) -> str:
    if have < want:
        return "a subset"
    if have > want:
        return "a superset"
    return "disjoint" if not have & want else "overlapping"


def _where(sharding: Sharding) -> str:
    if isinstance(sharding, NamedSharding):
        return f"{sharding.spec} on mesh ({describe(sharding.mesh)})"
    if isinstance(sharding, SingleDeviceSharding):
        return "one device"
    return type(sharding).__name__


def compare(path: str, x: jax.Array, want: NamedSharding | None, mesh: Mesh) -> Mismatch | None:
    """How a committed array differs from a wanted sharding (None: any spec will do) on a mesh; None if it fits."""
    have = x.sharding
    have_devices, want_devices = compat.device_order(have), tuple(mesh.devices.flat)
    classes: list[str] = []
    parts: list[str] = []
    if isinstance(have, SingleDeviceSharding) and len(want_devices) > 1:
        classes.append("committed to one device")
        parts.append(f"committed to one device, {have_devices[0].id}, but expected on {_ids(want_devices)}")
    elif set(have_devices) != set(want_devices):
        have_processes = {d.process_index for d in have_devices}
        want_processes = {d.process_index for d in want_devices}
        if have_processes != want_processes:
            classes.append("process set")
            parts.append(f"spread over processes {sorted(have_processes)}, but expected {sorted(want_processes)}")
        relation = _set_relation(set(have_devices), set(want_devices))
        classes.append("device set")
        parts.append(f"device set {_ids(have_devices)}, but expected {_ids(want_devices)} (it is {relation})")
    elif have_devices != want_devices:
        classes.append("device order")
        parts.append(f"device order {_ids(have_devices)}, but expected {_ids(want_devices)}")
    if isinstance(have, NamedSharding):
        if tuple(have.mesh.shape.items()) != tuple(mesh.shape.items()):
            classes.append("axis names")
            parts.append(f"mesh axes ({describe(have.mesh)}), but expected ({describe(mesh)})")
        elif have.mesh.axis_types != mesh.axis_types:
            classes.append("axis types")
            types = ", ".join(t.name for t in have.mesh.axis_types)
            parts.append(f"axis types ({types}), but expected ({', '.join(t.name for t in mesh.axis_types)})")
    if want is not None and not classes and not have.is_equivalent_to(want, x.ndim):
        if have.memory_kind != want.memory_kind:
            classes.append("memory kind")
            parts.append(f"memory kind {have.memory_kind!r}, but expected {want.memory_kind!r}")
        if not have.is_equivalent_to(want.with_memory_kind(have.memory_kind), x.ndim):
            classes.append("spec")
            parts.append(f"spec {_spec(have)}, but expected {_spec(want)}")
    if not classes:
        return None
    text = f"[{', '.join(classes)}] {'; '.join(parts)}; a move costs {human_bytes(x.nbytes)}"
    return Mismatch(path, tuple(classes), text, x.nbytes)


def _spec(sharding: Sharding) -> PartitionSpec | str:
    return sharding.spec if isinstance(sharding, NamedSharding) else _where(sharding)


def compare_devices(path: str, x: jax.Array, reference_path: str, reference: jax.Array) -> Mismatch | None:
    """Without a mesh in force all committed arguments must at least share their devices, in one order."""
    have, want = compat.device_order(x.sharding), compat.device_order(reference.sharding)
    if have == want:
        return None
    same_set = set(have) == set(want)
    relation = "" if same_set else f" (it is {_set_relation(set(have), set(want))})"
    kind = "device order" if same_set else "device set"
    text = (
        f"[{kind}] {kind} {_ids(have)}, but {reference_path} is on {_ids(want)}{relation}; a move costs"
        f" {human_bytes(x.nbytes)}"
    )
    return Mismatch(path, (kind,), text, x.nbytes)


def mismatch_message(name: str, found: Sequence[Mismatch], total: int, fixes: Sequence[str]) -> str:
    """The whole message for all mismatching arguments of one call."""
    noun = "argument leaf is" if len(found) == 1 else "argument leaves are"
    headline = f"{name}: {len(found)} of {total} {noun} not placed as the call needs"
    return message(headline, [f"{m.path}: {m.text}" for m in found], fix="\n  fix: ".join(fixes))
