"""PURE. Transfers in traced code that the compiler will ignore, found in the jaxpr."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding

from namedshard import _jaxcompat as compat
from namedshard._types import Device


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
    """A ``device_put`` that will do nothing, with where it stands in the user's code."""

    source: str
    target: str


Known = dict[Any, Sharding]
"""The shardings of a jaxpr's variables, as far as they are certain."""


def _transfers(jaxpr: Any, known: Known) -> Iterator[tuple[Any, Any, Known]]:
    """Every ``device_put`` and each of its targets, nested ones included."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "sharding_constraint":
            known[eqn.outvars[0]] = eqn.params["sharding"]
        elif name == "device_put":
            for n in range(len(eqn.params["devices"])):
                yield eqn, n, known
        for inner in compat.inner_jaxprs(eqn.params):
            passed: Known = {}
            if name in ("jit", "pjit") and len(inner.invars) == len(eqn.invars):
                outer = ((v, known.get(o)) for v, o in zip(inner.invars, map(_hashable, eqn.invars), strict=True))
                passed = {v: s for v, s in outer if s is not None}
            yield from _transfers(inner, passed)


def _hashable(atom: Any) -> Any:
    """Literals are operands too, and some of them cannot be looked up."""
    return None if hasattr(atom, "val") else atom


def _found(jaxpr: Any, known: Known, check: Callable[[Any, int, Known], str | None]) -> list[Transfer]:
    found: dict[Transfer, None] = {}
    for eqn, n, here in _transfers(jaxpr, known):
        target = check(eqn, n, here)
        if target is not None:
            found[Transfer(compat.user_source(eqn), target)] = None
    return list(found)


def _platform_and_ids(devices: Sequence[Device]) -> str:
    return f"{devices[0].platform} devices {[d.id for d in devices]}"


def ignored_transfers(jaxpr: Any, traced: Sequence[Device], fixed: bool) -> list[Transfer]:
    """All ``device_put``s, nested ones included, to a device, order or platform outside of the traced devices.

    Transfers between memory spaces, which do work, pass. ``fixed``: some argument or the mesh decides the devices; if
    nothing does, a sharding in the traced code decides, and only a bare device is ignored.
    """

    def check(eqn: Any, n: int, _: Known) -> str | None:
        target = eqn.params["devices"][n]
        if isinstance(target, jax.Device):
            return None if tuple(traced) == (target,) else _platform_and_ids([target])
        if not (fixed and isinstance(target, Sharding)):
            return None
        if isinstance(target, NamedSharding) and not isinstance(target.mesh, Mesh):
            return None
        devices = compat.device_order(target)
        return None if devices == tuple(traced) else _platform_and_ids(devices)

    return _found(jaxpr, {}, check)


def _auto_entries(target: NamedSharding) -> bool:
    """Whether the target says something about Auto axes; on Explicit ones a ``device_put`` does move."""
    types = dict(zip(target.mesh.axis_names, target.mesh.axis_types, strict=True))
    if all(t == AxisType.Auto for t in types.values()):
        return True
    named = (n for e in target.spec for n in ((e,) if isinstance(e, str) else (e or ())))
    return any(types.get(n) == AxisType.Auto for n in named)


def _trimmed(spec: Iterable[Any]) -> list[Any]:
    """The entries without a tail of None, and with tuples of one name as that name."""
    entries = [e[0] if isinstance(e, tuple) and len(e) == 1 else e or None for e in spec]
    while entries and entries[-1] is None:
        entries.pop()
    return entries


def _is_there(have: Sharding | None, target: NamedSharding) -> bool:
    if not isinstance(have, NamedSharding):
        return False
    return have.mesh.shape == target.mesh.shape and _trimmed(have.spec) == _trimmed(target.spec)


def ignored_specs(jaxpr: Any, given: Sequence[Sharding | None]) -> list[Transfer]:
    """All ``device_put``s that ask for another spec within the same memory space, which Auto axes leave undone.

    Those whose operand is known to be there already pass. ``given`` holds the arguments' shardings.
    """

    def check(eqn: Any, n: int, known: Known) -> str | None:
        target = eqn.params["devices"][n]
        if not isinstance(target, NamedSharding) or target.mesh.size == 1 or not _auto_entries(target):
            return None
        before, after = eqn.invars[n].aval, eqn.outvars[n].aval
        if compat.space_of_type(before) != compat.space_of_type(after):
            return None
        if _is_there(known.get(_hashable(eqn.invars[n])), target):
            return None
        return f"P({', '.join(map(repr, target.spec))})"

    # What the function closes over comes before its arguments.
    arguments = jaxpr.invars[len(jaxpr.invars) - len(given) :]
    known = {v: s for v, s in zip(arguments, given, strict=True) if s is not None}
    return _found(jaxpr, known, check)
