"""EFFECTS. Splits a call of an initializer into programs, runs them, and reports what was done."""

import collections
import dataclasses
import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
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
from namedshard._init.trace import Destination, Request, Traced, trace
from namedshard._place.local import change_memory, on_cpus
from namedshard._place.route import unreduced_axes
from namedshard._place.shard import place_leaves
from namedshard._place.traced import scrambled
from namedshard._plan.mapping import AxisMapping, plain_spec
from namedshard._plan.mesh import MeshLike

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


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A program with the shardings of its results and inputs.

    Attributes:
        tail: The program.
        shardings: Those of its results, in the devices' own memory; None for what the compiler chooses.
        placements: The shardings of its inputs; None for uncommitted ones and host values.
        inexact: Whether its results can depend on the mesh.
        repeatable: Whether it may run together with equal ones.
    """

    tail: Tail
    shardings: tuple[NamedSharding | None, ...]
    placements: tuple[Any, ...]
    inexact: bool
    repeatable: bool


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A step, or up to `_AT_ONCE` equal ones that run as one. Batches with equal keys run the same executable."""

    key: Hashable
    steps: tuple[Step, ...]
    repeated: bool


@dataclasses.dataclass(slots=True, eq=False)
class Recipe:
    """All that is known of a call before the values of its arguments are.

    Attributes:
        refs: For each output leaf its value, or None for those that aren't traced.
        mesh: The mesh of the results, if there is one.
        moves: Inputs that are on devices other than the mesh's, and move to it first.
        wants: Where each computed value goes, once for each leaf that it is.
    """

    graph: Graph
    traced: Traced
    mesh: MeshLike | None
    refs: list[Ref | None]
    keys: KeySchedule
    batches: list[Batch]
    moves: dict[int, NamedSharding]
    wants: Mapping[int, list[Destination]]

    def lower(self, batch: Batch) -> Any:
        """Lowers the program of a batch."""
        step = batch.steps[0]
        structs: list[jax.ShapeDtypeStruct] = []
        for ref, placement in zip(step.tail.inputs, step.placements, strict=True):
            aval = self.graph.aval(ref)
            struct = data_struct(aval) if isinstance(ref, int) and ref in self.keys.values else aval
            shape = (_AT_ONCE, *struct.shape) if batch.repeated else struct.shape
            structs.append(jax.ShapeDtypeStruct(shape, struct.dtype, sharding=placement))
        manual_mesh = self.traced.mesh if isinstance(self.traced.mesh, Mesh) else self.mesh
        function, shardings = function_of(step.tail, self.graph, self.keys.values, manual_mesh), step.shardings
        if batch.repeated:
            function, shardings = repeated(function, _AT_ONCE), shardings * _AT_ONCE
        with compat.no_context_mesh():
            return jax.jit(function, out_shardings=shardings).lower(*structs)

    def distinct(self) -> dict[Hashable, Batch]:
        """One batch for each distinct program."""
        return dict(reversed([(batch.key, batch) for batch in reversed(self.batches)]))

    def compile(self) -> dict[Hashable, Compilation]:
        """Starts the compilation of each distinct program that isn't compiled yet."""
        found: dict[Hashable, Compilation] = {}
        for key, batch in self.distinct().items():
            found[key] = compilations.get(key) or compilations.put(key, submit(self.lower(batch)))
        return found


# --- planning ---------------------------------------------------------------------------------------------------------


def make_recipe(
    request: Request,
    mapping: AxisMapping | None,
    mesh: MeshLike | None,
    memory_kind: str | None,
    *,
    in_batches: bool = True,
) -> Recipe:
    """Traces a call and splits it into programs; ``in_batches``: equal ones may run as one."""
    traced = trace(request, mapping, mesh, memory_kind)
    graph = flatten(traced.closed)
    refs: list[Ref | None] = [None if output.slot is None else graph.outputs[output.slot] for output in traced.outputs]
    inputs: dict[int, Any] = dict(zip(graph.inputs, request.arrays, strict=True)) | graph.consts
    keys = schedule(graph, [v for v, x in inputs.items() if _is_readable(x)])
    wants: dict[int, list[Destination]] = collections.defaultdict(list)
    for ref, output in zip(refs, traced.outputs, strict=True):
        if isinstance(ref, int) and ref not in inputs:
            wants[ref].append(output.place)
    everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    moves = {
        v: everywhere
        for v, x in inputs.items()
        if v not in keys.values and everywhere is not None and _is_foreign(x, everywhere.mesh)
    }
    placements: dict[int, Any] = {
        v: _on_auto_axes(moves.get(v) or _committed_sharding(x)) for v, x in inputs.items() if v not in keys.values
    }
    on_cpu = on_cpus(mesh if isinstance(mesh, Mesh) else None)
    steps: list[Step] = []
    for ops, results in split(graph, keys.values, [*wants]):
        tail = tail_of(graph, keys.values, ops, results)
        targets = [wants[v][0] if v in wants else everywhere for v in results]
        at = tuple(placements.get(ref) if isinstance(ref, int) else None for ref in tail.inputs)
        steps.append(_step(tail, graph, keys, targets, at, on_cpu))
        placements.update(zip(results, map(_on_auto_axes, steps[-1].shardings), strict=True))
    return Recipe(graph, traced, mesh, refs, keys, _batches_of(steps, in_batches), moves, wants)


def _step(
    tail: Tail, graph: Graph, keys: KeySchedule, targets: Sequence[Any], at: tuple[Any, ...], on_cpu: bool
) -> Step:
    """A program with the shardings of its results, which are moved from there to other memory kinds.

    Functions that compilers approximate must come out the same on every mesh, so small results that would be cut into
    short rows are computed whole on CPUs.
    """
    avals = [graph.avals[v] for v in tail.results]
    short = on_cpu and tail.approximates and any(map(_has_short_rows, avals, targets))
    whole = short and bytes_per_device(avals, [None] * len(avals)) <= _SMALL_BYTES
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
    plain = not any(compat.is_key_array(aval) or aval.weak_type for aval in avals)
    alone = manual or not tail.inputs or any(_is_array(ref, keys) for ref in tail.inputs)
    effects = any(op.eqn.effects for op in tail.ops)
    fits = _AT_ONCE * bytes_per_device(avals, shardings) <= _SMALL_BYTES
    return Step(tail, shardings, at, inexact, on_cpu and plain and fits and not alone and not effects)


def _batches_of(steps: Sequence[Step], together: bool) -> list[Batch]:
    """The steps, equal ones ``together`` where they may be."""
    with compat.no_context_mesh():
        settings = compat.trace_key()
    equal: dict[tuple[Hashable, int | None], list[Step]] = collections.defaultdict(list)
    for step in steps:
        key = step.tail.key, step.shardings, step.placements, settings
        equal[key, None if together and step.repeatable else id(step)].append(step)
    batches: dict[int, Batch] = {}
    for (key, _), same in equal.items():
        size = _AT_ONCE if len(same) > _AT_ONCE // 2 else 1
        for i in range(0, len(same), size):
            batches[id(same[i])] = Batch((key, size), tuple(same[i : i + size]), size > 1)
    return [batches[id(step)] for step in steps if id(step) in batches]


def _is_array(ref: Ref, keys: KeySchedule) -> bool:
    """Whether a program's input is an array on devices: neither a literal, nor a key or a small integer."""
    return isinstance(ref, int) and ref not in keys.values


def _is_readable(x: Any) -> bool:
    return not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated


def _committed_sharding(x: Any) -> Any:
    return x.sharding if getattr(x, "committed", isinstance(x, jax.ShapeDtypeStruct)) else None


def _is_foreign(x: Any, mesh: MeshLike) -> bool:
    sharding = _committed_sharding(x) if isinstance(x, jax.Array) else None
    if sharding is None or not isinstance(mesh, Mesh):
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
    """Whether a sharding cuts an array into short rows, or would if it were transposed."""
    if not isinstance(want, NamedSharding) or not _is_split(want, aval):
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
        values = {v: x for v, x in self._inputs.items() if v not in self._small}
        values |= move({v: (values[v], sharding) for v, sharding in recipe.moves.items()})
        shared = {ref for batch in recipe.batches for step in batch.steps for ref in values_of(step.tail.inputs)}
        there: dict[Any, Any] = {}
        for batch in recipe.batches:
            made = programs[batch.key](*self._inputs_of(batch, values))
            owners = [value for step in batch.steps for value in step.tail.results]
            # A batch that isn't full computes some results that nothing needs.
            for value, x in zip(owners, made, strict=False):
                if value in shared:
                    values[value] = x
                for want in recipe.wants.get(value, ()):
                    is_there = want is None or x.sharding == want
                    there[value, want] = x if is_there else move({value: (x, want)})[value]
        return self._deliver(there)

    def _inputs_of(self, batch: Batch, values: Mapping[int, Any]) -> list[Any]:
        if not batch.repeated:
            refs = batch.steps[0].tail.inputs
            return [values[ref] if isinstance(ref, int) and ref in values else self._data(ref) for ref in refs]
        full = (*batch.steps, *batch.steps[-1:] * (_AT_ONCE - len(batch.steps)))
        rows = [map(self._data, step.tail.inputs) for step in full]
        return [np.stack(column) for column in zip(*rows, strict=True)]

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
        recipe = self._recipe
        calls = collections.Counter(batch.key for batch in recipe.batches for _ in batch.steps)
        loops = recipe.keys.loops
        out = [ProgramReport("init_keys", loops, self.keys_seconds, 0, 0, False)] if loops else []
        for key, batch in recipe.distinct().items():
            compiled, seconds = pending[key].result()
            tail, shardings = batch.steps[0].tail, batch.steps[0].shardings
            size = bytes_per_device([recipe.graph.avals[v] for v in tail.results], shardings)
            seconds = seconds if key in fresh else 0.0
            inexact = batch.steps[0].inexact
            out.append(ProgramReport(tail.name, calls[key], seconds, size, temporary_bytes(compiled), inexact))
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
