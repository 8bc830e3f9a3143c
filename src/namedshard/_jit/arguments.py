"""PURE. What the arguments of a compiled function are, where each must be placed, and how it differs from that."""

import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from namedshard import _jaxcompat as compat
from namedshard._errors import PlanError, human_bytes, message
from namedshard._place.route import placement_of, wanted_memory_kind
from namedshard._plan.leaves import Leaf, is_array_like, named_leaves, with_distinct_paths
from namedshard._plan.mapping import AxisMapping, First, plain_spec
from namedshard._plan.mesh import MeshLike, describe, manual_axes
from namedshard._plan.plan import plan_leaves
from namedshard._types import Device, PyTreeDef


class Arguments:
    """The flattened arguments of one call. Arrays are traced; all other leaves are static.

    ``indices`` tells which leaves are arrays, and ``statics`` has the values of all leaves, with None in their place.
    """

    def __init__(self, treedef: PyTreeDef, leaves: Sequence[Leaf]):
        self.treedef = treedef
        self.leaves = leaves
        self.indices = tuple(i for i, leaf in enumerate(leaves) if is_array_like(leaf.value))
        self.arrays = [leaves[i] for i in self.indices]
        self.statics = tuple(None if is_array_like(leaf.value) else leaf.value for leaf in leaves)


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
    fn: Callable[..., Any], holders: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> list[Leaf]:
    """The argument leaves under the user's own names: ``model.layers[0].weight``, not ``[0][1]``. No two have one path.

    ``holders`` is the function itself where it holds arrays.
    """
    return with_distinct_paths(_argument_leaves(fn, holders, args, kwargs))


def _argument_leaves(
    fn: Callable[..., Any], holders: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> list[Leaf]:
    named: list[Leaf] = []
    for holder in holders:
        if isinstance(holder, jax.tree_util.Partial):
            named += _argument_leaves(holder.func, (), holder.args, holder.keywords)
        else:
            named += leaves_under("fn", holder)
    for name, value in zip(_positional_names(fn, len(args)), args, strict=True):
        named += leaves_under(name, value)
    for name in sorted(kwargs):
        named += leaves_under(name if name.isidentifier() else f"kwargs[{name!r}]", kwargs[name])
    return named


def parameters_of(fn: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """The parameters of a function; None where Python doesn't know its signature."""
    try:
        return list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return None


def _positional_names(fn: Callable[..., Any], count: int) -> list[str]:
    names: list[str] = []
    for p in parameters_of(fn) or ():
        if p.kind is p.VAR_POSITIONAL:
            names += [f"{p.name}[{n}]" for n in range(count - len(names))]
        elif p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            names.append(p.name)
    names += [f"args[{n}]" for n in range(len(names), count)]
    return names[:count]


def leaves_under(name: str, tree: Any) -> list[Leaf]:
    """The leaves of a tree that a name stands for, with it in their paths."""

    def join(path: str) -> str:
        return name + path if not path or path.startswith("[") else f"{name}.{path}"

    return [dataclasses.replace(leaf, path=join(leaf.path)) for leaf in named_leaves(tree)]


def argument_name(path: str) -> str:
    """The name of the argument that a leaf path starts with."""
    return re.split(r"[.\[]", path, maxsplit=1)[0]


class ArgumentPlan(NamedTuple):
    """Where to put one array argument before a call (None: it may stay), and how it differs from what is needed."""

    place: NamedSharding | None = None
    mismatch: str | None = None


_STAYS = ArgumentPlan()


def plan_arguments(
    arrays: Sequence[Leaf],
    required: Sequence[AxisMapping | None],
    mapping: AxisMapping | None,
    mesh: MeshLike | None,
) -> list[ArgumentPlan]:
    """For each array argument, what must happen before the call.

    A named leaf must have the sharding that the mapping ``required`` of it gives; without one, a committed array must
    be on the context mesh, in whatever spec. Host and uncommitted arrays are placed: by ``required``, else ``mapping``.
    """
    if mesh is None:
        return _plan_without_mesh(arrays)
    if all(m is None for m in required) and all(_is_on(leaf.value, mesh) for leaf in arrays):
        return [_STAYS] * len(arrays)
    specs = _specs_of(arrays, required, mapping, mesh)
    planned = zip(arrays, specs, required, strict=True)
    return [_plan_argument(leaf, spec, wanted is not None, mesh) for leaf, spec, wanted in planned]


def _is_on(x: Any, mesh: MeshLike) -> bool:
    """The common case, found without any comparison: committed, on this very mesh object."""
    return type(x) is compat.ArrayImpl and x.committed and getattr(x.sharding, "mesh", None) is mesh


def _specs_of(
    arrays: Sequence[Leaf], required: Sequence[AxisMapping | None], mapping: AxisMapping | None, mesh: MeshLike
) -> list[PartitionSpec | None]:
    specs: list[PartitionSpec | None] = [None] * len(arrays)
    for wanted in dict.fromkeys(required):
        members = [i for i, m in enumerate(required) if m == wanted]
        using = mapping if wanted is None else wanted
        if using is None:
            continue
        leaves, structure = [arrays[i] for i in members], jax.tree_util.tree_structure([0] * len(members))
        try:
            plan = plan_leaves(leaves, structure, using, mesh, memory_kind=None, manual=manual_axes())
        except PlanError:
            # The compute mapping need not fit the arguments: only in_axis_resources is about them.
            if wanted is not None:
                raise
            continue
        for i, planned in zip(members, plan.leaves, strict=True):
            specs[i] = planned.spec
    return specs


def _plan_argument(leaf: Leaf, spec: PartitionSpec | None, explicit: bool, mesh: MeshLike) -> ArgumentPlan:
    x = leaf.value
    if isinstance(x, jax.Ref) or x.dtype == jax.dtypes.float0:
        # A ref is changed where it is, and float0 has no bytes: nothing to move.
        return _STAYS
    now = placement_of(x, staging=False)
    kind = wanted_memory_kind(now, None)
    want = None if spec is None else NamedSharding(mesh, spec, memory_kind=kind)
    if now.kind == "traced":
        return ArgumentPlan(want) if explicit else _STAYS
    if not isinstance(mesh, Mesh):
        return ArgumentPlan(want) if now.kind == "abstract" and x.sharding is None else _STAYS
    if x.sharding is None if now.kind == "abstract" else not now.committed:
        # Replicated where nothing else is said, as jit would do; done here, numpy and JAX arrays have one trace.
        return ArgumentPlan(want or NamedSharding(mesh, PartitionSpec(), memory_kind=kind))
    place = want or _same_spec(x, mesh)
    mismatch = compare(leaf.path, x, want if explicit else None, mesh, place)
    if mismatch is not None and want is not None and x.sharding == NamedSharding(mesh, PartitionSpec()):
        # So JAX makes every array under jax.set_mesh: nobody chose it.
        return ArgumentPlan(want)
    return _STAYS if mismatch is None else ArgumentPlan(place, mismatch)


def _same_spec(x: Any, mesh: Mesh) -> NamedSharding:
    """A plain array's own spec on another mesh where that makes sense, else replicated."""
    replicated = NamedSharding(mesh, PartitionSpec(), memory_kind=x.sharding.memory_kind)
    try:
        spec = plain_spec(getattr(x.sharding, "spec", PartitionSpec()))
        wanted = NamedSharding(mesh, spec, memory_kind=x.sharding.memory_kind)
        wanted.shard_shape(x.shape)
    except ValueError:
        return replicated
    return wanted


def _plan_without_mesh(arrays: Sequence[Leaf]) -> list[ArgumentPlan]:
    """Without a mesh in context, all committed arguments must at least share their devices, in one order."""
    orders = {
        n: compat.device_order(leaf.value.sharding)
        for n, leaf in enumerate(arrays)
        if placement_of(leaf.value, staging=False).committed
    }
    plans = [_STAYS] * len(arrays)
    reference = max(orders, key=lambda n: len(orders[n]), default=0)
    for n, devices in orders.items():
        found = _order_difference(devices, orders[reference], f"{arrays[reference].path} is on")
        plans[n] = ArgumentPlan(None, _difference_line(arrays[n].path, arrays[n].value, list(found)))
    return plans


def compare(path: str, x: Any, want: NamedSharding | None, mesh: Mesh, place: NamedSharding) -> str | None:
    """How a committed array differs from what a call needs, as a line of a message; None if it fits.

    It must have the sharding ``want`` (None: any spec on the mesh will do), and would be moved to ``place``.
    """
    have = x.sharding
    found = [*_device_differences(have, mesh), *_axis_differences(have, mesh)]
    if want is not None and not found and not have.is_equivalent_to(want, len(x.shape)):
        if have.memory_kind != want.memory_kind:
            found.append(("memory kind", f"memory kind {have.memory_kind!r}, but expected {want.memory_kind!r}"))
        if not have.is_equivalent_to(want.with_memory_kind(have.memory_kind), len(x.shape)):
            found.append(("spec", f"spec {_spec_text(have)}, but expected {_spec_text(want)}"))
    return _difference_line(path, x, found, place)


def _difference_line(
    path: str, x: Any, found: Sequence[tuple[str, str]], place: NamedSharding | None = None
) -> str | None:
    if not found:
        return None
    kinds, parts = zip(*found, strict=True)
    # Where only names change, no byte moves.
    stays = place is not None and x.sharding.is_equivalent_to(place, len(x.shape))
    moved = 0 if stays else math.prod(x.shape) * x.dtype.itemsize
    return f"{path}: [{', '.join(kinds)}] {'; '.join(parts)}; a move costs {human_bytes(moved)}"


def _device_differences(have: Sharding, mesh: Mesh) -> Iterator[tuple[str, str]]:
    present, expected = compat.device_order(have), tuple(mesh.devices.flat)
    if isinstance(have, SingleDeviceSharding) and len(expected) > 1:
        kind = "committed to one device"
        yield kind, f"{kind}, {present[0].id}, but expected on {_ids(expected)}"
        return
    processes, wanted = (sorted({d.process_index for d in devices}) for devices in (present, expected))
    if processes != wanted:
        yield "process set", f"spread over processes {processes}, but expected {wanted}"
    yield from _order_difference(present, expected, "expected")


def _order_difference(present: Sequence[Device], expected: Sequence[Device], what: str) -> Iterator[tuple[str, str]]:
    have, want = set(present), set(expected)
    if have != want:
        relation = "a subset" if have < want else "a superset" if have > want else "overlapping"
        relation = relation if have & want else "disjoint"
        yield "device set", f"device set {_ids(present)}, but {what} {_ids(expected)} (it is {relation})"
    elif present != expected:
        yield "device order", f"device order {_ids(present)}, but {what} {_ids(expected)}"


def _axis_differences(have: Sharding, mesh: Mesh) -> Iterator[tuple[str, str]]:
    if not isinstance(have, NamedSharding):
        return
    if tuple(have.mesh.shape.items()) != tuple(mesh.shape.items()):
        kind = "axis sizes" if have.mesh.axis_names == mesh.axis_names else "axis names"
        yield kind, f"mesh axes ({describe(have.mesh)}), but expected ({describe(mesh)})"
    elif have.mesh.axis_types != mesh.axis_types:
        present, expected = (", ".join(t.name for t in m.axis_types) for m in (have.mesh, mesh))
        yield "axis types", f"axis types ({present}), but expected ({expected})"


def _ids(devices: Sequence[Device]) -> str:
    ids = [d.id for d in devices]
    if len(ids) > 16:
        return f"[{', '.join(map(str, ids[:6]))}, ... {ids[-1]}] ({len(ids)} devices)"
    return str(ids)


def _spec_text(sharding: Sharding) -> str:
    if isinstance(sharding, NamedSharding):
        return str(sharding.spec)
    return "one device" if isinstance(sharding, SingleDeviceSharding) else type(sharding).__name__


def mismatch_message(name: str, found: Sequence[str], total: int, fixes: Sequence[str]) -> str:
    """The layout of the message for all mismatching arguments of one call."""
    noun = f"argument {'leaf' if total == 1 else 'leaves'} {'is' if len(found) == 1 else 'are'}"
    headline = f"{name}: {len(found)} of {total} {noun} not placed as the call needs"
    return message(headline, found, fix="\n  fix: ".join(fixes))


def mismatch_text(
    name: str,
    arrays: Sequence[Leaf],
    plans: Sequence[ArgumentPlan],
    given: Sequence[AxisMapping | None],
    mapping: AxisMapping | None,
    mesh: MeshLike | None,
) -> str:
    """The message for all mismatching arguments of a call, with the calls that place them, to be copied.

    A fix spells out the mapping ``given`` to the function for an argument; the one in force it needn't.
    """
    fixes: dict[str, None] = {}
    puts: dict[tuple[str, NamedSharding], list[str]] = {}
    for leaf, plan, own in zip(arrays, plans, given, strict=True):
        if plan.mismatch is None:
            continue
        root = argument_name(leaf.path)
        mapping_text = _mapping_in_fix(own if own is None else own.for_names(leaf.names or ()), mapping)
        if leaf.names is not None and mapping_text is not None:
            fixes[f"{root} = ns.shard({root}{mapping_text})"] = None
        elif plan.place is not None:
            puts.setdefault((root, plan.place), []).append(leaf.path)
        else:
            anywhere = "put all arguments on one mesh with ns.shard(..., mesh=mesh), and call under jax.set_mesh(mesh)"
            fixes[anywhere] = None
    lines = [*fixes, *(_put_text(root, paths, want) for (root, want), paths in puts.items())]
    if mesh is not None:
        if puts:
            lines[-1] += "  # mesh: the one in force"
        lines.append('or pass on_mismatch="reshard" to move them at each call')
    return mismatch_message(name, [p.mismatch for p in plans if p.mismatch is not None], len(arrays), lines)


def _mapping_in_fix(given: AxisMapping | None, mapping: AxisMapping | None) -> str | None:
    """How a fix spells the mapping: the ``given`` one in full, one in context not at all; None where there is none."""
    if given is None:
        return None if mapping is None else ""
    rules = ", ".join(
        f"{axis!r}: {f'ns.{rule!r}' if isinstance(rule, First) else repr(rule)}" for axis, rule in given.rules.items()
    )
    policy = "" if given.indivisible == "error" else f", indivisible={given.indivisible!r}"
    names = f", axes={given.axes!r}" if given.axes_items else ""
    return f", {{{rules}}}{policy}{names}"


def _put_text(root: str, paths: Sequence[str], want: NamedSharding) -> str:
    """An assignment that can be copied; modules are frozen, so a leaf in a tree is replaced by ``eqx.tree_at``."""
    kind = "" if want.memory_kind in (None, "device") else f", memory_kind={want.memory_kind!r}"
    sharding = f"jax.NamedSharding(mesh, jax.P({', '.join(map(repr, want.spec))}){kind})"
    inner = [path.removeprefix(root) for path in paths]
    if inner == [""]:
        return f"{root} = jax.device_put({root}, {sharding})"
    picked = f"t{inner[0]}" if len(inner) == 1 else f"[{', '.join(f't{p}' for p in inner)}]"
    return f"{root} = eqx.tree_at(lambda t: {picked}, {root}, replace_fn=lambda x: jax.device_put(x, {sharding}))"
