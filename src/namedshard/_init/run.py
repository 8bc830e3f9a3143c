"""EFFECTS. Compiles an initializer's distinct programs side by side, runs them, and reports what was done."""

import collections
import concurrent.futures
import dataclasses
import math
import os
import time
from collections.abc import Callable, Collection, Container, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from namedshard import _jaxcompat as compat
from namedshard._cache import BoundedCache
from namedshard._init.keys import KeySchedule, schedule
from namedshard._init.tails import (
    Graph,
    Op,
    Ref,
    Tail,
    flatten,
    is_manual,
    literal_data,
    placed_by,
    split,
    tail_of,
)
from namedshard._init.trace import Destination, Destinations, Request, Traced, plan_outputs, struct_of, trace
from namedshard._place.local import change_memory, on_cpus
from namedshard._place.shard import place_leaves
from namedshard._plan.mapping import AxisMapping
from namedshard._plan.mesh import MeshLike

_QUIET_SECONDS = 1.0
_SHORT_ROW = 16
"""CPUs compute rows with fewer elements by other instructions, which round approximated functions otherwise."""
_SMALL_BYTES = 1 << 20
"""Bytes of results that a program may compute whole on each device to avoid short rows, or several times at once."""
_AT_ONCE = 4
"""How many equal programs run as one on CPUs, where each run costs about half a millisecond."""


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramReport:
    """One distinct program of an `init`.

    Attributes:
        name: Its first ``jit``, such as that of ``jax.random.normal``, or else its last operation. ``init_keys`` stands
            for all the small loops that derive keys.
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


Compilation: TypeAlias = "concurrent.futures.Future[tuple[Any, float]]"
"""An executable and the seconds that it took to compile, once that's done."""

_compilations: BoundedCache[Compilation] = BoundedCache(1024)
compat.clear_with_jax(_compilations)
# The compiler releases the interpreter lock, and is only partly parallel by itself.
_pool = concurrent.futures.ThreadPoolExecutor(max(2, min(8, os.cpu_count() or 1)), "namedshard-compile")


def _compile(lowered: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    return lowered.compile(), time.perf_counter() - start


def wait_for(compilations: Collection[Compilation]) -> None:
    """Waits until all are compiled; on a terminal, shows progress if that takes long."""
    pending = {c for c in compilations if not c.done()}
    if pending and (console := Console(stderr=True)).is_terminal:
        _, pending = concurrent.futures.wait(pending, _QUIET_SECONDS)
        if pending:
            columns = (TextColumn("init: compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            with Progress(*columns, console=console, transient=True) as progress:
                task = progress.add_task("", total=len(compilations))
                while pending:
                    progress.update(task, completed=len(compilations) - len(pending))
                    _, pending = concurrent.futures.wait(pending, 0.1)
    for compilation in compilations:
        compilation.result()


# --- one program ------------------------------------------------------------------------------------------------------


def _run_op(op: Op, values: Sequence[Any], mesh: MeshLike | None) -> list[Any]:
    """Runs one operation under the options that it was traced under, but without the shardings of the trace."""
    params = op.eqn.params
    if is_manual(op.eqn):
        if isinstance(mesh, Mesh) and not isinstance(params["mesh"], Mesh):
            params = params | {"mesh": compat.twin(mesh, AxisType.Auto)}
    else:
        params = _without_shardings(params)
    return compat.run_equation(op.eqn, values, params)


def _without_shardings(value: Any) -> Any:
    """Parameters without the shardings and memory spaces of the trace: the plan alone decides where results go."""
    if isinstance(value, dict):
        return {k: None if k in ("out_sharding", "sharding") else _without_shardings(v) for k, v in value.items()}
    if isinstance(value, tuple | list) and any(True for _ in compat.inner_jaxprs(value)):
        return type(value)(map(_without_shardings, value))
    if not isinstance(value, compat.ClosedJaxpr) or not placed_by(value.jaxpr):
        return value
    graph = flatten(value)

    def run(*inputs: Any) -> list[Any]:
        values: dict[int, Any] = dict(zip(graph.inputs, inputs, strict=True)) | graph.consts
        _run_ops(graph.ops, values, None)
        return [ref.val if isinstance(ref, Literal) else values[ref] for ref in graph.outputs]

    return jax.make_jaxpr(run)(*(struct_of(graph.avals[v]) for v in graph.inputs))


def _function_of(tail: Tail, graph: Graph, small: Container[int], mesh: MeshLike | None) -> Callable[..., Any]:
    """The function to compile, from inputs to results; keys that are small values come as their data."""

    def program(*inputs: Any) -> tuple[Any, ...]:
        values: dict[int, Any] = {}
        for n, (x, ref) in enumerate(zip(inputs, tail.inputs, strict=True)):
            aval = graph.aval(ref)
            is_data = isinstance(ref, int) and ref in small and compat.is_key_array(aval)
            values[-1 - n] = jax.random.wrap_key_data(x, impl=compat.key_impl(aval)) if is_data else x
        _run_ops(tail.ops, values, mesh)
        return tuple(_typed(values[v], graph.avals[v]) for v in tail.results)

    program.__name__ = program.__qualname__ = tail.name
    return program


def _run_ops(ops: Sequence[Op], values: dict[int, Any], mesh: MeshLike | None) -> None:
    for op in ops:
        inputs = [ref.val if isinstance(ref, Literal) else values[ref] for ref in op.inputs]
        values.update(zip(op.outputs, _run_op(op, inputs, mesh), strict=True))


def _typed(x: Any, aval: Any) -> Any:
    """The array with the weak type that tracing found."""
    if not getattr(aval, "weak_type", False):
        return x
    return jax.lax.convert_element_type_p.bind(x, new_dtype=aval.dtype, weak_type=True, sharding=None)


def _has_short_rows(aval: Any, want: Any) -> bool:
    """Whether a sharding cuts an array into short rows on CPUs, which compute those by other instructions."""
    if not isinstance(want, NamedSharding) or not isinstance(want.mesh, Mesh):
        return False
    shard = want.shard_shape(aval.shape)
    cut = any(part < size and part < _SHORT_ROW for part, size in zip(shard, aval.shape, strict=True))
    return want.mesh.devices.flat[0].platform == "cpu" and (cut or (shard != aval.shape and shard[-1] < _SHORT_ROW))


def _is_split(sharding: Any, aval: Any) -> bool:
    return sharding is not None and sharding.shard_shape(aval.shape) != aval.shape


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A program, with how its results are sharded and where its arrays are.

    ``inexact``: its results can depend on the mesh. ``key`` is equal for steps that run the same executable.
    """

    tail: Tail
    shardings: tuple[NamedSharding | None, ...]
    placements: tuple[Any, ...]
    key: Hashable
    inexact: bool

    def bytes_per_device(self, graph: Graph) -> int:
        """Bytes of its results on each device."""
        avals = [graph.avals[v] for v in self.tail.results]
        shapes = [s.shard_shape(a.shape) if s else a.shape for a, s in zip(avals, self.shardings, strict=True)]
        return sum(math.prod(shape) * a.dtype.itemsize for shape, a in zip(shapes, avals, strict=True))


class Batch(NamedTuple):
    """A step, or up to `_AT_ONCE` equal ones that run as one."""

    steps: tuple[Step, ...]
    at_once: bool

    @property
    def key(self) -> Hashable:
        """Equal for batches that run the same executable."""
        return self.steps[0].key, self.at_once


# --- a whole initializer ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True, eq=False)
class Recipe:
    """All that is known of a call before the values of its arguments are.

    Attributes:
        refs: For each output leaf its value, or None for those that aren't traced.
        mesh: The mesh of the results, if there is one.
        moves: Inputs that are on devices other than the mesh's, and move to it first.
        wants: Where each computed value goes, once for each leaf that it is.
        shared: Values that some program is given.
    """

    graph: Graph
    traced: Traced
    destinations: Destinations
    mesh: MeshLike | None
    refs: list[Ref | None]
    keys: KeySchedule
    batches: list[Batch]
    moves: dict[int, NamedSharding]
    wants: Mapping[int, list[Destination]]
    shared: frozenset[int]

    def lower(self, batch: Batch) -> Any:
        """Lowers the program of a step, or of some equal ones."""
        step = batch.steps[0]
        structs: list[jax.ShapeDtypeStruct] = []
        for ref, placement in zip(step.tail.inputs, step.placements, strict=True):
            aval = self.graph.aval(ref)
            if compat.is_key_array(aval) and ref in self.keys.values:
                aval = jax.ShapeDtypeStruct(compat.key_data_shape(aval), np.uint32)
            shape = (_AT_ONCE, *aval.shape) if batch.at_once else aval.shape
            structs.append(jax.ShapeDtypeStruct(shape, aval.dtype, sharding=placement))
        manual_mesh = self.traced.mesh if isinstance(self.traced.mesh, Mesh) else self.mesh
        function = _function_of(step.tail, self.graph, self.keys.values, manual_mesh)
        with compat.no_context_mesh():
            if batch.at_once:
                return jax.jit(_repeated(function), out_shardings=step.shardings * _AT_ONCE).lower(*structs)
            return jax.jit(function, out_shardings=step.shardings).lower(*structs)

    def distinct(self) -> dict[Hashable, Batch]:
        """One batch for each distinct program."""
        found: dict[Hashable, Batch] = {}
        for batch in self.batches:
            found.setdefault(batch.key, batch)
        return found


def _repeated(function: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """A program run for each row of its inputs, compiled once."""

    def repeated(*inputs: Any) -> tuple[Any, ...]:
        rows = jax.lax.map(lambda row: function(*row), inputs)
        return tuple(result[n] for n in range(_AT_ONCE) for result in rows)

    repeated.__name__ = repeated.__qualname__ = function.__name__
    return repeated


def _in_batches(steps: Sequence[Step], graph: Graph, small: Container[int], on_cpu: bool) -> list[Batch]:
    """Equal steps together, where that's cheaper than running each by itself."""
    equal: dict[Hashable, list[Step]] = collections.defaultdict(list)
    for step in steps:
        avals = [graph.avals[v] for v in step.tail.results]
        plain = not any(compat.is_key_array(a) or a.weak_type for a in avals)
        alone = any(op.eqn.effects or is_manual(op.eqn) for op in step.tail.ops)
        given = step.tail.inputs and not any(isinstance(ref, int) and ref not in small for ref in step.tail.inputs)
        together = on_cpu and plain and given and not alone and step.bytes_per_device(graph) * _AT_ONCE <= _SMALL_BYTES
        equal[step.key if together else id(step)].append(step)
    batches: dict[int, Batch] = {}
    for same in equal.values():
        at_once = len(same) > _AT_ONCE // 2
        size = _AT_ONCE if at_once else 1
        batches |= {id(same[i]): Batch(tuple(same[i : i + size]), at_once) for i in range(0, len(same), size)}
    return [batches[id(step)] for step in steps if id(step) in batches]


def make_recipe(
    request: Request, mapping: AxisMapping | None, mesh: MeshLike | None, memory_kind: str | None
) -> Recipe:
    """Traces a call and splits it into programs."""
    traced = trace(request)
    destinations = plan_outputs(traced, request, mapping, mesh, memory_kind)
    graph = flatten(traced.closed)
    refs: list[Ref | None] = [None if slot is None else graph.outputs[slot] for slot in traced.slots]
    inputs: dict[int, Any] = dict(zip(graph.inputs, request.arrays, strict=True)) | graph.consts
    keys = schedule(graph, [v for v, x in inputs.items() if _is_readable(x)])
    wants: dict[int, list[Destination]] = collections.defaultdict(list)
    for ref, place in zip(refs, destinations.places, strict=True):
        if isinstance(ref, int) and ref not in inputs:
            wants[ref].append(place)
    everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    moves = {v: everywhere for v, x in inputs.items() if everywhere is not None and _is_foreign(x, everywhere.mesh)}
    placements: dict[int, Any] = {
        v: _auto(moves.get(v) or _committed_sharding(x)) for v, x in inputs.items() if v not in keys.values
    }
    steps: list[Step] = []
    settings = _settings()
    for ops, results in split(graph, keys.values, [*wants]):
        tail = tail_of(graph, keys.values, ops, results)
        targets = [wants[v][0] if v in wants else everywhere for v in results]
        avals = [graph.avals[v] for v in results]
        # Functions that compilers approximate must come out the same on every mesh.
        short = tail.approximates and any(map(_has_short_rows, avals, targets))
        whole = short and sum(a.size * a.dtype.itemsize for a in avals) <= _SMALL_BYTES
        manual = any(is_manual(op.eqn) for op in ops)
        # Programs return results in the devices' own memory, from where they are moved if need be.
        shardings = tuple(
            NamedSharding(want.mesh, PartitionSpec() if whole and _is_split(want, aval) else want.spec)
            if isinstance(want, NamedSharding) and not manual
            else None
            for want, aval in zip(targets, avals, strict=True)
        )
        at = tuple(placements.get(ref) if isinstance(ref, int) else None for ref in tail.inputs)
        placements.update(zip(results, map(_auto, shardings), strict=True))
        sharded = manual or any(_is_split(s, a) for s, a in zip(shardings, avals, strict=True))
        sharded = sharded or any(_is_split(s, graph.aval(ref)) for s, ref in zip(at, tail.inputs, strict=True))
        inexact = sharded and (tail.reduces or (short and not whole))
        steps.append(Step(tail, shardings, at, (tail.key, shardings, at, settings), inexact))
    shared = frozenset(ref for step in steps for ref in step.tail.inputs if isinstance(ref, int))
    batches = _in_batches(steps, graph, keys.values, on_cpus(mesh if isinstance(mesh, Mesh) else None))
    return Recipe(graph, traced, destinations, mesh, refs, keys, batches, moves, wants, shared)


def _settings() -> Hashable:
    with compat.no_context_mesh():
        return compat.trace_key()


def _is_readable(x: Any) -> bool:
    return not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated


def _committed_sharding(x: Any) -> Any:
    return x.sharding if getattr(x, "committed", isinstance(x, jax.ShapeDtypeStruct)) else None


def _is_foreign(x: Any, mesh: MeshLike) -> bool:
    if not (isinstance(mesh, Mesh) and isinstance(x, jax.Array) and x.committed):
        return False
    return compat.device_order(x.sharding) != tuple(mesh.devices.flat)


def _auto(sharding: Any) -> Any:
    """The sharding over Auto axes: Explicit ones would be part of the type of all that is computed from an array."""
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        mesh = compat.twin(sharding.mesh, AxisType.Auto)
        return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
    return sharding


def submit(lowered: Mapping[Hashable, Any]) -> dict[Hashable, Compilation]:
    """Starts compilations."""
    return {key: _pool.submit(_compile, one) for key, one in lowered.items()}


def compile_programs(recipe: Recipe) -> dict[Hashable, Compilation]:
    """Starts the compilation of each distinct program that isn't compiled yet."""
    found: dict[Hashable, Compilation] = {}
    for key, batch in recipe.distinct().items():
        compilation = _compilations.get(key)
        found[key] = compilation or _compilations.put(key, submit({key: recipe.lower(batch)})[key])
    return found


def finish(compilations: Mapping[Hashable, Compilation]) -> dict[Hashable, Any]:
    """The executables, once they're compiled. Those that fail are forgotten, so that another call tries again."""
    try:
        wait_for(compilations.values())
    except BaseException:
        for key, compilation in compilations.items():
            if compilation.done() and compilation.exception() is not None:
                _compilations.remove(key)
        raise
    return {key: compilation.result()[0] for key, compilation in compilations.items()}


class Run:
    """One execution of a recipe. Keys are computed at once, while programs may still be compiling."""

    def __init__(self, recipe: Recipe, arrays: Sequence[Any]):
        self._recipe = recipe
        self._inputs: dict[int, Any] = dict(zip(recipe.graph.inputs, arrays, strict=True)) | recipe.graph.consts
        started = time.perf_counter()
        with compat.count_compiles() as compiles:
            self._small = recipe.keys.run(self._inputs)
        self.keys_seconds = time.perf_counter() - started if compiles[0] else 0.0

    def leaves(self, programs: Mapping[Hashable, Callable[..., Any]]) -> list[Any]:
        """Runs the programs and returns the output leaves. Each result is moved at once if it's wanted elsewhere."""
        recipe = self._recipe
        values = {v: x for v, x in self._inputs.items() if v not in self._small}
        values |= move({v: (values[v], s) for v, s in recipe.moves.items() if v in values})
        there: dict[Any, Any] = {}
        for batch in recipe.batches:
            made = programs[batch.key](*self._inputs_of(batch, values))
            owners = [value for step in batch.steps for value in step.tail.results]
            # A batch that isn't full computes some results that nothing needs.
            for value, x in zip(owners, made, strict=False):
                if value in recipe.shared:
                    values[value] = x
                for want in recipe.wants.get(value, ()):
                    is_there = want is None or x.sharding == want
                    there[value, want] = x if is_there else move({value: (x, want)})[value]
        return self._deliver(there)

    def _deliver(self, there: dict[Any, Any]) -> list[Any]:
        """The output leaves, with one batch of moves for those that no program computed. Tied leaves stay one array."""
        recipe, to = self._recipe, self._recipe.destinations
        pending: dict[Any, tuple[Any, Any]] = {}
        keys: list[Any] = []
        paths: list[str] = []
        for i, (ref, want) in enumerate(zip(recipe.refs, to.places, strict=True)):
            x: Any = recipe.traced.statics[i]
            passed = ref is None or (isinstance(ref, int) and ref in self._inputs)
            if passed and not to.planned[i]:
                want = to.kinds[i]
            key = ("static", id(x)) if ref is None else ref if isinstance(ref, int) else ("literal", i), want
            keys.append(key)
            if key in there or key in pending:
                continue
            if ref is not None:
                x = self._inputs[ref] if isinstance(ref, int) and passed else self._array(ref)
            if want is None:
                there[key] = x
            else:
                pending[key] = x, want
                paths.append(to.paths[i])
        there |= move(pending, paths)
        return [there[key] for key in keys]

    def _inputs_of(self, batch: Batch, values: Mapping[int, Any]) -> list[Any]:
        if not batch.at_once:
            refs = batch.steps[0].tail.inputs
            return [values[ref] if isinstance(ref, int) and ref in values else self._data(ref) for ref in refs]
        full = (*batch.steps, *batch.steps[-1:] * (_AT_ONCE - len(batch.steps)))
        rows = [[self._data(ref) for ref in step.tail.inputs] for step in full]
        return [np.stack(column) for column in zip(*rows, strict=True)]

    def _data(self, ref: Ref) -> np.ndarray:
        """A literal, a small integer or the data of a key."""
        return literal_data(ref) if isinstance(ref, Literal) else self._small[ref]

    def _array(self, ref: Ref) -> Any:
        aval = self._recipe.graph.aval(ref)
        with compat.no_context_mesh():
            if compat.is_key_array(aval):
                return jax.random.wrap_key_data(jnp.asarray(self._data(ref)), impl=compat.key_impl(aval))
            return _typed(jnp.asarray(self._data(ref), aval.dtype), aval)

    def reports(self, compilations: Mapping[Hashable, Compilation], fresh: set[Hashable]) -> tuple[ProgramReport, ...]:
        """One report for each distinct program; ``fresh`` are the keys of those compiled for this call."""
        recipe = self._recipe
        calls = collections.Counter(batch.key for batch in recipe.batches for _ in batch.steps)
        loops = recipe.keys.loops
        out = [ProgramReport("init_keys", loops, self.keys_seconds, 0, 0, False)] if loops else []
        for key, batch in recipe.distinct().items():
            step = batch.steps[0]
            compiled, seconds = compilations[key].result()
            sizes = step.bytes_per_device(recipe.graph), temporary_bytes(compiled)
            out.append(
                ProgramReport(step.tail.name, calls[key], seconds if key in fresh else 0.0, *sizes, step.inexact)
            )
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
