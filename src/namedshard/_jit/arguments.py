"""PURE. What each argument of a compiled function must be, and what to do where it is not."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from namedshard import _jaxcompat as compat
from namedshard._errors import PlanError
from namedshard._jit.mismatch import Mismatch, compare, compare_devices, mismatch_message
from namedshard._place.route import placement_of, wanted_memory_kind
from namedshard._plan.leaves import Leaf, is_array_like, named_leaves
from namedshard._plan.mapping import AxisMapping, First
from namedshard._plan.mesh import MeshLike, manual_axes
from namedshard._plan.plan import LeafPlan, plan_leaves
from namedshard._types import Device, Tracer


@dataclasses.dataclass(frozen=True, slots=True)
class Expectation:
    """What to do with one argument leaf before a call.

    Attributes:
        place: Where to put it first; None where it may stay.
        mismatch: How a committed array differs from what the call needs.
    """

    place: NamedSharding | None = None
    mismatch: Mismatch | None = None


_FINE = Expectation()


def holder_of(fn: Any) -> Any:
    """A function that holds arrays as a tree of them; None for any other function."""
    bound = getattr(fn, "__self__", None) if hasattr(fn, "__func__") else None
    if bound is not None and not jax.tree_util.all_leaves([bound]):
        return jax.tree_util.Partial(fn.__func__, bound)
    if isinstance(fn, functools.partial):
        held = jax.tree_util.Partial(fn.func, *fn.args, **fn.keywords)
        inside = any(is_array_like(x) for x in jax.tree_util.tree_leaves((fn.args, fn.keywords)))
        return held if inside else None
    return None if jax.tree_util.all_leaves([fn]) else fn


def argument_leaves(
    fn: Callable[..., Any], holders: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Leaf]:
    """The argument leaves under the user's own names: ``model.layers[0].weight``, not ``[0][1]``.

    ``holders`` is the function itself where it holds arrays.
    """
    named: list[Leaf] = []
    for holder in holders:
        if isinstance(holder, jax.tree_util.Partial):
            named += argument_leaves(holder.func, (), holder.args, holder.keywords)
        else:
            named += _renamed(named_leaves(holder), "fn")
    for name, value in zip(_positional_names(fn, len(args)), args, strict=True):
        named += _renamed(named_leaves(value), name)
    for name in sorted(kwargs):
        named += _renamed(named_leaves(kwargs[name]), name)
    return named


def _positional_names(fn: Callable[..., Any], count: int) -> list[str]:
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names: list[str] = []
    for p in parameters:
        if p.kind is p.VAR_POSITIONAL:
            names += [f"{p.name}[{n}]" for n in range(count - len(names))]
        elif p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            names.append(p.name)
    names += [f"args[{n}]" for n in range(len(names), count)]
    return names[:count]


def _renamed(leaves: Sequence[Leaf], name: str) -> list[Leaf]:
    def join(path: str) -> str:
        return name + path if not path or path.startswith("[") else f"{name}.{path}"

    return [dataclasses.replace(leaf, path=join(leaf.path)) for leaf in leaves]


def _planned(
    walked: Sequence[Leaf], in_mapping: AxisMapping | None, mapping: AxisMapping | None, mesh: MeshLike
) -> Sequence[LeafPlan] | None:
    wanted = in_mapping if in_mapping is not None else mapping
    if wanted is None:
        return None
    structure = jax.tree_util.tree_structure([0] * len(walked))
    try:
        return plan_leaves(walked, structure, wanted, mesh, memory_kind=None, manual=manual_axes()).leaves
    except PlanError:
        # The compute mapping need not fit the arguments: only in_axis_resources speaks of them.
        if in_mapping is not None:
            raise
        return None


def _same_spec(x: Any, mesh: Mesh) -> NamedSharding:
    """A plain array's own spec on another mesh where that makes sense, else replicated."""
    spec = getattr(x.sharding, "spec", PartitionSpec())
    try:
        wanted = NamedSharding(mesh, spec, memory_kind=x.sharding.memory_kind)
        wanted.shard_shape(x.shape)
    except ValueError:
        return NamedSharding(mesh, PartitionSpec(), memory_kind=x.sharding.memory_kind)
    return wanted


def _expect(leaf: Leaf, planned: LeafPlan | None, explicit: bool, mesh: MeshLike) -> Expectation:
    x = leaf.value
    if isinstance(x, jax.Ref) or x.dtype == jax.dtypes.float0:
        # One is changed where it is, the other has no bytes: nothing to move.
        return _FINE
    spec = None if planned is None else planned.spec
    now = placement_of(x, staging=False)
    want = None if spec is None else NamedSharding(mesh, spec, memory_kind=wanted_memory_kind(now, None))
    if now.kind == "traced":
        return Expectation(want) if explicit else _FINE
    if not isinstance(mesh, Mesh):
        return Expectation(want) if now.kind == "abstract" and x.sharding is None else _FINE
    if x.sharding is None if now.kind == "abstract" else not now.committed:
        # Replicated where nothing else is said, as jit would do; done here, numpy and JAX arrays have one trace.
        return Expectation(want or NamedSharding(mesh, PartitionSpec()))
    place = want or _same_spec(x, mesh)
    mismatch = compare(leaf.path, x, want if explicit else None, mesh, place)
    return _FINE if mismatch is None else Expectation(place, mismatch)


def _is_on(x: Any, mesh: MeshLike) -> bool:
    """The common case, told at a glance: committed, on this very mesh."""
    return type(x) is compat.ArrayImpl and x.committed and getattr(x.sharding, "mesh", None) is mesh


def _without_mesh(walked: Sequence[Leaf]) -> list[Expectation]:
    committed = [is_array_like(leaf.value) and placement_of(leaf.value, staging=False).committed for leaf in walked]
    if not any(committed):
        return [_FINE] * len(walked)
    judged = [leaf for leaf, is_committed in zip(walked, committed, strict=True) if is_committed]
    reference = max(judged, key=lambda leaf: len(leaf.value.sharding.device_set))
    out: list[Expectation] = []
    for leaf, is_committed in zip(walked, committed, strict=True):
        found = compare_devices(leaf.path, leaf.value, reference.path, reference.value) if is_committed else None
        out.append(Expectation(None, found) if found else _FINE)
    return out


def expectations(
    walked: Sequence[Leaf], in_mapping: AxisMapping | None, mapping: AxisMapping | None, mesh: MeshLike | None
) -> list[Expectation]:
    """For each argument leaf, what must happen before the call.

    With ``in_mapping`` each named leaf must have the sharding that it gives; otherwise committed arrays must be on the
    context mesh, in whatever spec. Host and uncommitted arrays are placed: by ``in_mapping``, else by ``mapping``.
    """
    if mesh is None:
        return _without_mesh(walked)
    if in_mapping is None and all(_is_on(leaf.value, mesh) for leaf in walked if is_array_like(leaf.value)):
        return [_FINE] * len(walked)
    planned = _planned(walked, in_mapping, mapping, mesh)
    out: list[Expectation] = []
    for i, leaf in enumerate(walked):
        if not is_array_like(leaf.value):
            out.append(_FINE)
        else:
            out.append(_expect(leaf, planned[i] if planned else None, in_mapping is not None, mesh))
    return out


def _root(path: str) -> str:
    for i, char in enumerate(path):
        if char in ".[":
            return path[:i]
    return path


def _sharding_text(want: NamedSharding) -> str:
    kind = "" if want.memory_kind in (None, "device") else f", memory_kind={want.memory_kind!r}"
    return f"jax.NamedSharding(mesh, jax.P({', '.join(map(repr, want.spec))}){kind})"


def _put(paths: Sequence[str], want: NamedSharding) -> str:
    """An assignment that can be copied; modules are frozen, so a leaf in a tree is replaced by ``eqx.tree_at``."""
    root, sharding = _root(paths[0]), _sharding_text(want)
    inner = [path.removeprefix(root) for path in paths]
    if inner == [""]:
        return f"{root} = jax.device_put({root}, {sharding})"
    picked = f"t{inner[0]}" if len(inner) == 1 else f"[{', '.join(f't{p}' for p in inner)}]"
    return f"{root} = eqx.tree_at(lambda t: {picked}, {root}, replace_fn=lambda x: jax.device_put(x, {sharding}))"


def mismatch_text(
    name: str, bad: Sequence[tuple[Leaf, Expectation]], total: int, mapping_text: str | None, mesh: MeshLike | None
) -> str:
    """The whole message, with the exact calls that put things right.

    ``mapping_text`` is how a call of `shard` spells the mapping: see `mapping_in_fix`.
    """
    fixes: dict[str, None] = {}
    puts: dict[tuple[str, NamedSharding], list[str]] = {}
    for leaf, expectation in bad:
        if leaf.names is not None and mapping_text is not None:
            fixes[f"{_root(leaf.path)} = ns.shard({_root(leaf.path)}{mapping_text})"] = None
        elif expectation.place is not None:
            puts.setdefault((_root(leaf.path), expectation.place), []).append(leaf.path)
        else:
            fixes["put all arguments on one mesh with ns.shard(..., mesh=mesh), and call under jax.set_mesh(mesh)"] = (
                None
            )
    lines = [*fixes, *(_put(paths, want) for (_, want), paths in puts.items())]
    if mesh is not None:
        if puts:
            lines[-1] += "  # mesh: the one in force"
        lines.append('or pass on_mismatch="reshard" to move them at each call')
    found = [e.mismatch for _, e in bad if e.mismatch is not None]
    return mismatch_message(name, found, total, lines)


def _rule_text(rule: Any) -> str:
    return f"ns.{rule!r}" if isinstance(rule, First) else repr(rule)


def mapping_in_fix(in_mapping: AxisMapping | None, own: AxisMapping | None, mapping: AxisMapping | None) -> str | None:
    """How the fix spells the mapping: not at all where it is in force; None where there is none."""
    given = in_mapping if in_mapping is not None else own
    if given is None:
        return None if mapping is None else ""
    rules = ", ".join(f"{axis!r}: {_rule_text(rule)}" for axis, rule in given.rules.items())
    policy = "" if given.indivisible == "error" else f", indivisible={given.indivisible!r}"
    return f", {{{rules}}}{policy}"


def traced_devices(values: Sequence[Any], mesh: MeshLike | None) -> tuple[tuple[Device, ...] | None, bool]:
    """The devices that a call is traced for, as far as is known before lowering, and whether something fixes them.

    Nothing does where no mesh is in force and no argument is committed: then the traced code may still decide.
    """
    if mesh is not None:
        return (tuple(mesh.devices.flat), True) if isinstance(mesh, Mesh) else (None, False)
    if any(isinstance(x, Tracer) for x in values):
        return None, False
    shardings = [x.sharding for x in values if getattr(x, "sharding", None) is not None]
    committed = [x.sharding for x in values if getattr(x, "committed", False) or isinstance(x, jax.ShapeDtypeStruct)]
    fixed = [s for s in committed if s is not None]
    if fixed:
        return compat.device_order(fixed[0]), True
    return (compat.device_order(shardings[0]) if shardings else None), False
