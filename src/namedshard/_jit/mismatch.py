"""PURE. How an argument's sharding differs from what a compiled function needs, in words and with the fix."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from namedshard import _jaxcompat as compat
from namedshard._errors import human_bytes, message
from namedshard._plan.mesh import describe
from namedshard._types import Device


@dataclasses.dataclass(frozen=True, slots=True)
class Mismatch:
    """One argument leaf that is not where it must be.

    Attributes:
        path: The user's argument name with the leaf path.
        classes: What differs: ``"axis names"``, ``"axis sizes"``, ``"axis types"``, ``"device order"``,
            ``"device set"``, ``"spec"``, ``"memory kind"``, ``"committed to one device"``, ``"process set"``.
        text: What is, and what was expected.
        moved_bytes: What a move would cost.
    """

    path: str
    classes: tuple[str, ...]
    text: str
    moved_bytes: int


def _ids(devices: Sequence[Device]) -> str:
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


def compare(path: str, x: Any, want: NamedSharding | None, mesh: Mesh, place: NamedSharding) -> Mismatch | None:
    """How a committed array differs from what a call needs; None if it fits.

    Args:
        path: Its leaf path.
        x: The array, or a struct with a sharding.
        want: The sharding it must have; None: any spec on the mesh will do.
        mesh: The mesh of the call.
        place: Where it would be moved.
    """
    have = x.sharding
    found = [*_devices(have, mesh), *_axes(have, mesh)]
    if want is not None and not found and not have.is_equivalent_to(want, len(x.shape)):
        if have.memory_kind != want.memory_kind:
            found.append(("memory kind", f"memory kind {have.memory_kind!r}, but expected {want.memory_kind!r}"))
        if not have.is_equivalent_to(want.with_memory_kind(have.memory_kind), len(x.shape)):
            found.append(("spec", f"spec {_spec(have)}, but expected {_spec(want)}"))
    if not found:
        return None
    classes = tuple(kind for kind, _ in found)
    cost = _cost(x, place)
    text = f"[{', '.join(classes)}] {'; '.join(part for _, part in found)}; a move costs {human_bytes(cost)}"
    return Mismatch(path, classes, text, cost)


def _devices(have: Sharding, mesh: Mesh) -> Iterator[tuple[str, str]]:
    present, expected = compat.device_order(have), tuple(mesh.devices.flat)
    if isinstance(have, SingleDeviceSharding) and len(expected) > 1:
        text = f"committed to one device, {present[0].id}, but expected on {_ids(expected)}"
        yield "committed to one device", text
    elif set(present) != set(expected):
        processes, wanted = (sorted({d.process_index for d in devices}) for devices in (present, expected))
        if processes != wanted:
            yield "process set", f"spread over processes {processes}, but expected {wanted}"
        relation = _set_relation(set(present), set(expected))
        yield "device set", f"device set {_ids(present)}, but expected {_ids(expected)} (it is {relation})"
    elif present != expected:
        yield "device order", f"device order {_ids(present)}, but expected {_ids(expected)}"


def _axes(have: Sharding, mesh: Mesh) -> Iterator[tuple[str, str]]:
    if not isinstance(have, NamedSharding):
        return
    if tuple(have.mesh.shape.items()) != tuple(mesh.shape.items()):
        kind = "axis sizes" if have.mesh.axis_names == mesh.axis_names else "axis names"
        yield kind, f"mesh axes ({describe(have.mesh)}), but expected ({describe(mesh)})"
    elif have.mesh.axis_types != mesh.axis_types:
        present, expected = (", ".join(t.name for t in m.axis_types) for m in (have.mesh, mesh))
        yield "axis types", f"axis types ({present}), but expected ({expected})"


def _spec(sharding: Sharding) -> PartitionSpec | str:
    if isinstance(sharding, NamedSharding):
        return sharding.spec
    return "one device" if isinstance(sharding, SingleDeviceSharding) else type(sharding).__name__


def _cost(x: Any, place: NamedSharding) -> int:
    """Bytes to move: none where only names change, else all."""
    shape, have = tuple(x.shape), x.sharding
    stays = (
        compat.device_order(have) == compat.device_order(place)
        and have.memory_kind == place.memory_kind
        and have.devices_indices_map(shape) == place.devices_indices_map(shape)
    )
    return 0 if stays else math.prod(shape) * x.dtype.itemsize


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
    noun = f"argument {'leaf' if total == 1 else 'leaves'} {'is' if len(found) == 1 else 'are'}"
    headline = f"{name}: {len(found)} of {total} {noun} not placed as the call needs"
    return message(headline, [f"{m.path}: {m.text}" for m in found], fix="\n  fix: ".join(fixes))
