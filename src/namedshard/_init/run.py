"""EFFECTS. Splits a call of an initializer into programs, runs them, and reports what was done."""

import collections
import dataclasses
import math
import time
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from namedshard import _jaxcompat as compat
from namedshard._init.keys import KeySchedule, data_struct, schedule
from namedshard._init.programs import Compilation, as_typed, compilations, function_of, repeated, submit
from namedshard._init.tails import Graph, Ref, Tail, flatten, is_manual, literal_data, split, tail_of, values_of
from namedshard._init.trace import Place, Request, Traced, trace
from namedshard._place.local import change_memory
from namedshard._place.route import on_cpus, unreduced_axes
from namedshard._place.shard import place_leaves
from namedshard._place.traced import scrambled
from namedshard._plan.mapping import AxisMapping, plain_spec
from namedshard._plan.mesh import MeshLike

_SHORT_ROW = 16
"""CPUs compute rows with fewer elements by other instructions, which round approximated functions otherwise."""
_WHOLE_BYTES = 1 << 20
"""Bytes of results that a program may compute whole on each device to avoid short rows, or several times at once."""
_AT_ONCE = 4
"""How many equal small programs run as one on CPUs."""


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramReport:
    """One distinct program of an `init`.

    Attributes:
        name: Its first ``jit``, such as that of ``jax.random.normal``, or else its last operation.
        calls: How many times it ran; on CPUs some of these runs are one.
        compile_seconds: Time that its compilation took; 0 if an earlier call had compiled it.
        bytes_per_device: Bytes of one run's results on each device.
        temporary_bytes: Bytes that one run allocates on each device beside its inputs and results.
        inexact: Its last bits can depend on the mesh, since it combines floating elements (a sum, a matrix product, a
            decomposition) of sharded arrays.
    """

    name: str
    calls: int
    compile_seconds: float
    bytes_per_device: int
    temporary_bytes: int
    inexact: bool


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A call of a program: one tail, or up to ``at_once`` equal ones. Steps with equal keys run the same executable.

    It has the shardings of the results (None: the compiler chooses) and of the inputs (None: uncommitted).
    ``inexact``: the results can depend on the mesh.
    """

    key: Hashable
    tails: tuple[Tail, ...]
    shardings: tuple[NamedSharding | None, ...]
    placements: tuple[Any, ...]
    inexact: bool
    at_once: int


@dataclasses.dataclass(slots=True, eq=False)
class Recipe:
    """All that is known of a call before the values of its arguments are.

    ``refs`` has the value of each output leaf, or None for those that aren't traced; ``moves`` the inputs that move to
    the mesh first; ``wants`` where each computed value goes, once for each leaf that it is.
    """

    graph: Graph
    traced: Traced
    mesh: MeshLike | None
    refs: list[Ref | None]
    keys: KeySchedule
    steps: list[Step]
    moves: dict[int, NamedSharding]
    wants: Mapping[int, list[Place]]

    def lower(self, step: Step) -> Any:
        """Lowers a program."""
        structs: list[jax.ShapeDtypeStruct] = []
        rows = () if step.at_once == 1 else (step.at_once,)
        for ref, placement in zip(step.tails[0].inputs, step.placements, strict=True):
            aval = self.graph.aval(ref)
            struct = data_struct(aval) if isinstance(ref, int) and ref in self.keys.values else aval
            structs.append(jax.ShapeDtypeStruct((*rows, *struct.shape), struct.dtype, sharding=placement))
        manual_mesh = self.traced.mesh if isinstance(self.traced.mesh, Mesh) else self.mesh
        function = function_of(step.tails[0], self.graph, self.keys.values, manual_mesh)
        with compat.no_context_mesh():
            jitted = jax.jit(repeated(function, step.at_once), out_shardings=step.shardings * step.at_once)
            return jitted.lower(*structs)

    def distinct(self) -> dict[Hashable, Step]:
        """One step for each distinct program."""
        return dict(reversed([(step.key, step) for step in reversed(self.steps)]))

    def compile(self) -> dict[Hashable, Compilation]:
        """Starts the compilation of each distinct program that isn't compiled yet."""
        found: dict[Hashable, Compilation] = {}
        for key, step in self.distinct().items():
            found[key] = compilations.get(key) or compilations.put(key, submit(self.lower(step)))
        return found


# --- planning ---------------------------------------------------------------------------------------------------------


def make_recipe(
    request: Request, mapping: AxisMapping | None, mesh: MeshLike | None, kind: str | None, *, in_batches: bool = True
) -> Recipe:
    """Traces a call and splits it into programs; ``in_batches``: on CPUs several may run as one."""
    traced = trace(request, mapping, mesh, kind)
    graph = flatten(traced.closed)
    refs: list[Ref | None] = [None if output.slot is None else graph.outputs[output.slot] for output in traced.outputs]
    inputs: dict[int, Any] = dict(zip(graph.inputs, request.arrays, strict=True)) | graph.consts
    keys = schedule(graph, [v for v, x in inputs.items() if _is_readable(x)])
    wants: dict[int, list[Place]] = collections.defaultdict(list)
    for ref, output in zip(refs, traced.outputs, strict=True):
        if isinstance(ref, int) and ref not in inputs:
            wants[ref].append(output.place)
    arrays = {v: x for v, x in inputs.items() if v not in keys.values}
    moves: dict[int, NamedSharding] = {}
    if isinstance(mesh, Mesh):
        moves = {v: NamedSharding(mesh, PartitionSpec()) for v, x in arrays.items() if _is_foreign(x, mesh)}
    placements = {v: _on_auto_axes(moves.get(v) or _committed_sharding(x)) for v, x in arrays.items()}
    with compat.no_context_mesh():
        settings = compat.trace_key()
    equal: dict[Hashable, list[Step]] = collections.defaultdict(list)
    for ops, results in split(graph, keys.values, [*wants]):
        tail = tail_of(graph, keys.values, ops, results)
        at = tuple(placements.get(ref) if isinstance(ref, int) else None for ref in tail.inputs)
        step = _step(tail, graph, [wants[v][0] for v in results], at, settings)
        equal[step.key].append(step)
    on_cpu = in_batches and on_cpus(mesh if isinstance(mesh, Mesh) else None)
    steps = [step for same in equal.values() for step in (_together(same, graph, arrays) if on_cpu else same)]
    return Recipe(graph, traced, mesh, refs, keys, steps, moves, wants)


def _together(same: list[Step], graph: Graph, arrays: Container[int]) -> list[Step]:
    """Equal steps as fewer, if they're small and take nothing but keys and numbers: each costs half a millisecond."""
    first, avals = same[0], [graph.avals[v] for v in same[0].tails[0].results]
    plain = not any(compat.is_key_array(aval) or aval.weak_type for aval in avals)
    fits = _AT_ONCE * bytes_per_device(avals, first.shardings) <= _WHOLE_BYTES
    inputs = first.tails[0].inputs
    if len(same) <= _AT_ONCE // 2 or not (plain and fits and inputs) or any(v in arrays for v in values_of(inputs)):
        return same
    key = first.key, _AT_ONCE
    groups = (tuple(step.tails[0] for step in same[i : i + _AT_ONCE]) for i in range(0, len(same), _AT_ONCE))
    return [dataclasses.replace(first, key=key, tails=tails, at_once=_AT_ONCE) for tails in groups]


def _step(tail: Tail, graph: Graph, targets: Sequence[Place], at: tuple[Any, ...], settings: Hashable) -> Step:
    """A program with the shardings of its results, which are moved from there to other memory kinds.

    Functions that compilers approximate must come out the same on every mesh, so small results that would be cut into
    short rows are computed whole on CPUs.
    """
    avals = [graph.avals[v] for v in tail.results]
    short = tail.approximates and any(map(_has_short_rows, avals, targets))
    whole = short and bytes_per_device(avals, [None] * len(avals)) <= _WHOLE_BYTES
    manual = any(is_manual(op.eqn) for op in tail.ops)
    shardings = tuple(
        NamedSharding(want.mesh, PartitionSpec() if whole and _is_split(want, aval) else want.spec)
        if isinstance(want, NamedSharding) and not manual and not scrambled(aval.dtype)
        else None
        for want, aval in zip(targets, avals, strict=True)
    )
    everything = [*zip(shardings, avals, strict=True), *zip(at, map(graph.aval, tail.inputs), strict=True)]
    sharded = manual or any(_is_split(sharding, aval) for sharding, aval in everything)
    inexact = sharded and (tail.reduces or (short and not whole))
    return Step((tail.key, shardings, at, settings), (tail,), shardings, at, inexact, 1)


def _is_readable(x: Any) -> bool:
    return not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated


def _committed_sharding(x: Any) -> Any:
    return x.sharding if getattr(x, "committed", isinstance(x, jax.ShapeDtypeStruct)) else None


def _is_foreign(x: Any, mesh: Mesh) -> bool:
    sharding = _committed_sharding(x) if isinstance(x, jax.Array) else None
    if sharding is None:
        return False
    return bool(unreduced_axes(sharding)) or compat.device_order(sharding) != tuple(mesh.devices.flat)


def _on_auto_axes(sharding: Any) -> Any:
    """The sharding over Auto axes: Explicit ones would be part of the type of all that is computed from an array."""
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        mesh = compat.twin(sharding.mesh, AxisType.Auto)
        return NamedSharding(mesh, plain_spec(sharding.spec), memory_kind=sharding.memory_kind)
    return sharding


def _is_split(sharding: Any, aval: Any) -> bool:
    return sharding is not None and sharding.shard_shape(aval.shape) != aval.shape


def _has_short_rows(aval: Any, want: Any) -> bool:
    """Whether a sharding over CPUs cuts an array into short rows, or would if it were transposed."""
    if not isinstance(want, NamedSharding) or not _is_split(want, aval) or not on_cpus(want):
        return False
    shard = want.shard_shape(aval.shape)
    cut = [part for part, size in zip(shard, aval.shape, strict=True) if part < size]
    return min(*cut, shard[-1]) < _SHORT_ROW


def bytes_per_device(avals: Sequence[Any], shardings: Sequence[Any]) -> int:
    """Bytes of arrays of these types on each device, whole where there is no sharding."""
    shapes = [s.shard_shape(aval.shape) if s else aval.shape for aval, s in zip(avals, shardings, strict=True)]
    return sum(math.prod(shape) * aval.dtype.itemsize for shape, aval in zip(shapes, avals, strict=True))


# --- running ----------------------------------------------------------------------------------------------------------


class Run:
    """One execution of a recipe. Keys are computed at once, while programs may still be compiling."""

    @compat.explicit_transfers()
    def __init__(self, recipe: Recipe, arrays: Sequence[Any]):
        self._recipe = recipe
        self._inputs: dict[int, Any] = dict(zip(recipe.graph.inputs, arrays, strict=True)) | recipe.graph.consts
        started = time.perf_counter()
        with compat.count_compiles() as compiles:
            self._small = recipe.keys.run(self._inputs)
        self.keys_seconds = time.perf_counter() - started if compiles[0] else 0.0

    @compat.explicit_transfers()
    def leaves(self, programs: Mapping[Hashable, Callable[..., Any]]) -> list[Any]:
        """Runs the programs and returns the output leaves. Each result is moved at once if it's wanted elsewhere."""
        recipe = self._recipe
        arrays = {v: x for v, x in self._inputs.items() if v not in self._small}
        arrays |= move({v: (x, recipe.moves[v]) for v, x in arrays.items() if v in recipe.moves})

        def read(ref: Ref) -> Any:
            return arrays[ref] if isinstance(ref, int) and ref in arrays else self._data(ref)

        there: dict[Any, Any] = {}
        for step in recipe.steps:
            rows = [list(map(read, tail.inputs)) for tail in step.tails]
            # Those of a step that isn't full compute some results that nothing needs.
            rows += rows[-1:] * (step.at_once - len(rows))
            inputs = rows[0] if step.at_once == 1 else map(np.stack, zip(*rows, strict=True))
            values = [value for tail in step.tails for value in tail.results]
            for value, x in zip(values, programs[step.key](*inputs), strict=False):
                for want in recipe.wants[value]:
                    is_there = want is None or x.sharding == want
                    there[value, want] = x if is_there else move({value: (x, want)})[value]
        return self._deliver(there)

    def _data(self, ref: Ref) -> np.ndarray:
        """A literal, a small integer or the data of a key."""
        return literal_data(ref) if isinstance(ref, Literal) else self._small[ref]

    def _deliver(self, there: dict[Any, Any]) -> list[Any]:
        """The output leaves, with one batch of moves for those that no program computed. Tied leaves stay one array."""
        pending: dict[Any, tuple[Any, Any]] = {}
        keys: list[Any] = []
        paths: list[str] = []
        for i, (ref, output) in enumerate(zip(self._recipe.refs, self._recipe.traced.outputs, strict=True)):
            passed = ref is None or (isinstance(ref, int) and ref in self._inputs)
            want = output.kind if passed and not output.named else output.place
            source = ("static", id(output.value)) if ref is None else ref if isinstance(ref, int) else ("literal", i)
            keys.append((source, want))
            if keys[-1] in there or keys[-1] in pending:
                continue
            if ref is None:
                x = output.value
            else:
                x = self._inputs[ref] if isinstance(ref, int) and passed else self._array(ref)
            if want is None:
                there[keys[-1]] = x
            else:
                pending[keys[-1]] = x, want
                paths.append(output.path)
        there |= move(pending, paths)
        return [there[key] for key in keys]

    def _array(self, ref: Ref) -> Any:
        aval = self._recipe.graph.aval(ref)
        with compat.no_context_mesh():
            if compat.is_key_array(aval):
                return jax.random.wrap_key_data(jnp.asarray(self._data(ref)), impl=compat.key_impl(aval))
            return as_typed(jnp.asarray(self._data(ref), aval.dtype), aval)

    def reports(self, pending: Mapping[Hashable, Compilation], fresh: set[Hashable]) -> tuple[ProgramReport, ...]:
        """One report for each distinct program; ``fresh`` are the keys of those compiled for this call."""
        calls = collections.Counter(step.key for step in self._recipe.steps for _ in step.tails)
        out: list[ProgramReport] = []
        for key, step in self._recipe.distinct().items():
            tail, (compiled, seconds) = step.tails[0], pending[key].result()
            size = bytes_per_device([self._recipe.graph.avals[v] for v in tail.results], step.shardings)
            seconds = seconds if key in fresh else 0.0
            out.append(ProgramReport(tail.name, calls[key], seconds, size, temporary_bytes(compiled), step.inexact))
        return tuple(out)


def temporary_bytes(compiled: Any) -> int:
    """Bytes that a program allocates on each device beside its inputs and results."""
    analysis = compiled.memory_analysis()
    return 0 if analysis is None else int(analysis.temp_size_in_bytes)


def move(work: Mapping[Any, tuple[Any, Any]], paths: Sequence[str] | None = None) -> dict[Any, Any]:
    """Moves values to shardings, or to the memory kind named."""
    values = [x for x, _ in work.values()]
    wanted = [(i, to) for i, (_, to) in enumerate(work.values()) if not isinstance(to, str)]
    moved = place_leaves(paths or list(map(str, work)), values, wanted)
    for i, (x, to) in enumerate(work.values()):
        if isinstance(to, str):
            (moved[i],) = change_memory([x], to)
    return dict(zip(work, moved, strict=True))
