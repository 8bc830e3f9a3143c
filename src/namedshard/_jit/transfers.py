"""PURE. What a jaxpr tells before it runs: transfers and constraints that can't be done, constants, updated inputs."""

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding

from namedshard import _jaxcompat as compat
from namedshard._errors import IgnoredTransferError, MismatchError, TracedMoveError, message
from namedshard._jit.arguments import leaves_under
from namedshard._plan.mapping import axis_names, spec_entries
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


def check_constraints(
    name: str, jaxpr: Any, values: Sequence[Any], mesh: MeshLike | None, outputs: Sequence[str]
) -> None:
    """Raise `TracedMoveError` if arrays are constrained to several sets of devices, or orders; names ``outputs``."""
    devices, fixed = _traced_devices(values, mesh)
    paths = dict(zip(map(id, jaxpr.outvars), outputs, strict=True))
    found = [
        (paths.get(id(eqn.outvars[0])) or compat.user_source(eqn), compat.device_order(target))
        for eqn in _constraints(jaxpr)
        if isinstance(target := eqn.params["sharding"], NamedSharding) and isinstance(target.mesh, Mesh)
    ]
    if found and not (fixed and devices):
        devices = found[0][1]
    lines = [f"{path}: to {_platform_and_ids(order)}" for path, order in found if order != devices]
    if lines and devices:
        noun = "array is" if len(lines) == 1 else "arrays are"
        raise TracedMoveError(
            f"{name}: {len(lines)} {noun} constrained to other devices than the compiled function runs on,"
            f" {_platform_and_ids(devices)}",
            dict.fromkeys(lines),
            fix="place all results on one mesh, and move the others after the call with ns.shard",
        )


def _constraints(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "sharding_constraint":
            yield eqn
        for inner in compat.inner_jaxprs(eqn.params):
            yield from _constraints(inner)


def check_closed_over(name: str, fn: Callable[..., Any] | None, constants: Sequence[Any]) -> None:
    """Raise `MismatchError` if constants of a trace are global arrays, of which this process has a part only."""
    arrays = [x for x in constants if isinstance(x, jax.Array) and not isinstance(x, Tracer)]
    if lines := [_closed_over_path(fn, x) for x in arrays if not x.is_fully_addressable]:
        noun = "array that spans several processes is" if len(lines) == 1 else "arrays that span several processes are"
        raise MismatchError(
            f"{name}: {len(lines)} {noun} closed over by the function",
            lines,
            fix="pass them to the function as arguments",
        )


def _closed_over_path(fn: Any, x: jax.Array) -> str:
    """The variable of a function, or the attribute of its object, that holds an array, and the array's type."""
    scope: dict[str, Any] = {f"self.{k}": v for k, v in getattr(getattr(fn, "__self__", None), "__dict__", {}).items()}
    with contextlib.suppress(TypeError, ValueError):
        used = inspect.getclosurevars(inspect.unwrap(getattr(fn, "__func__", fn)))
        scope |= {**used.globals, **used.nonlocals}
    leaves = (leaf for variable, value in scope.items() for leaf in leaves_under(variable, value))
    path = next((leaf.path for leaf in leaves if leaf.value is x), "an array")
    return f"{path}: {jax.typeof(x).str_short()} over {len(x.sharding.device_set)} devices"


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
        and all(a == b for a, b in itertools.zip_longest(spec_entries(have.spec), spec_entries(target.spec)))
    )
    return None if is_there else f"P({', '.join(map(repr, spec_entries(target.spec)))})"


def _has_auto_entries(target: NamedSharding) -> bool:
    """Whether the target says something about Auto axes; on Explicit ones a ``device_put`` does move."""
    types = dict(zip(target.mesh.axis_names, target.mesh.axis_types, strict=True))
    named = (types.get(n) for e in spec_entries(target.spec) for n in axis_names(e))
    return AxisType.Auto in named or set(types.values()) <= {AxisType.Auto}


# What mixes the elements of its operands: the result isn't a new version of one of them.
_MIXING = ("conv_general_dilated", "dot_general", "gather", "ragged_dot_general", "rev", "sort", "transpose")


def _is_constraint(eqn: Any) -> bool:
    to_sharding = any(isinstance(target, Sharding) for target in eqn.params.get("devices", ()))
    return to_sharding or eqn.primitive.name in ("sharding_constraint", "reshard")


def elementwise_sources(jaxpr: Any, constrained: bool = True) -> list[frozenset[int]]:
    """For each output of a jaxpr, the numbers of the inputs of its shape that it's computed from element by element.

    ``constrained``: also by way of sharding constraints.
    """
    sources = {v: frozenset([n]) for n, v in enumerate(jaxpr.invars)}

    def of(atom: Any) -> frozenset[int]:
        # Literals are operands too, and some of them cannot be hashed.
        return frozenset() if hasattr(atom, "val") else sources.get(atom, frozenset())

    for eqn in jaxpr.eqns:
        inner = compat.called(eqn)
        if inner is not None:
            through = elementwise_sources(getattr(inner, "jaxpr", inner), constrained)
            found = [frozenset[int]().union(*(of(eqn.invars[i]) for i in numbers)) for numbers in through]
        else:
            stops = eqn.primitive.name in _MIXING or (not constrained and _is_constraint(eqn))
            passed = [] if stops else eqn.invars
            found = [
                frozenset[int]().union(*(of(v) for v in passed if v.aval.shape == o.aval.shape)) for o in eqn.outvars
            ]
        sources |= zip(eqn.outvars, found, strict=True)
    return [of(v) for v in jaxpr.outvars]
