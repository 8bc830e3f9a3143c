"""PURE. Transfers in traced code that the compiler will ignore, found in the jaxpr."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, Sharding

from namedshard import _jaxcompat as compat


@dataclasses.dataclass(frozen=True, slots=True)
class IgnoredTransfer:
    """A ``device_put`` that will do nothing, with where it stands in the user's code."""

    source: str
    target: str


def _sub_jaxprs(value: Any) -> Iterator[Any]:
    if hasattr(value, "eqns"):
        yield value
    elif hasattr(value, "jaxpr"):
        yield from _sub_jaxprs(value.jaxpr)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _sub_jaxprs(item)


def _platform_and_ids(devices: Sequence[jax.Device]) -> str:
    return f"{devices[0].platform} devices {[d.id for d in devices]}"


def _check(target: Any, traced: Sequence[jax.Device] | None, source: str) -> IgnoredTransfer | None:
    if isinstance(target, jax.Device):
        if traced is not None and tuple(traced) == (target,):
            return None
        return IgnoredTransfer(source, _platform_and_ids([target]))
    if not isinstance(target, Sharding):
        return None
    if isinstance(target, NamedSharding) and isinstance(target.mesh, jax.sharding.AbstractMesh):
        return None
    devices = compat.device_order(target)
    if traced is not None and devices != tuple(traced):
        return IgnoredTransfer(source, _platform_and_ids(devices))
    return None


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in _sub_jaxprs(value):
                yield from _equations(inner)


def ignored_transfers(jaxpr: Any, traced: Sequence[jax.Device] | None) -> list[IgnoredTransfer]:
    """All ``device_put``s, nested ones included, to a device, order or platform outside of the traced devices.

    Transfers between memory spaces, which do work, pass.
    """
    found: list[IgnoredTransfer] = []
    for eqn in _equations(jaxpr):
        if eqn.primitive.name == "device_put":
            for target in eqn.params["devices"]:
                bad = _check(target, traced, compat.user_source(eqn))
                if bad is not None and bad not in found:
                    found.append(bad)
    return found
