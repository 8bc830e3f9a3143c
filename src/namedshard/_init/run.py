"""EFFECTS. From a traced initialiser to a recipe that is followed again for other keys, and following it."""

import collections
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from namedshard import _jaxcompat as compat
from namedshard._init.jaxpr import Constant, Graph, Ref, flatten
from namedshard._init.programs import (
    Program,
    ProgramReport,
    eager_op,
    program_for,
    run_tape,
    tape_program,
    typed,
    wait_for,
)
from namedshard._init.split import Call, Terms, batches, nbytes, shard_bytes, split
from namedshard._init.tape import Recording, Tape, host_value, key_impl, word_count
from namedshard._init.trace import Place, Request, Traced, Wanted, plan_outputs, trace
from namedshard._place.moves import change_memory
from namedshard._place.shard import place_leaves
from namedshard._plan.mapping import AxisMapping

_MOST_HERE = 1 << 20
"""Bytes that wait on one device to be distributed together."""


@dataclasses.dataclass(slots=True, eq=False)
class _Step:
    """A call, or some equal ones, with what running it needs.

    ``index`` has the places of the words, one row for each call; ``release`` the values not needed afterwards.
    ``program`` runs it whole, ``ops`` one operation after the other.
    """

    calls: tuple[Call, ...]
    index: np.ndarray
    program: Program | None
    ops: tuple[Callable[..., list[Any]], ...]
    release: tuple[int, ...] = ()

    @property
    def call(self) -> Call:
        """The first, which stands for all that are equal."""
        return self.calls[0]

    @property
    def outputs(self) -> list[int]:
        """All values it makes."""
        return [v for call in self.calls for v in call.outputs]


@dataclasses.dataclass(slots=True, eq=False)
class Recipe:
    """All that is known about an initialiser before the values of its arguments are.

    Attributes:
        refs: For each output leaf the value that it is, or None for those that tracing left alone.
        places: The shardings in which programs deliver their results.
        elsewhere: Where outputs are wanted that programs deliver to another place.
        to_mesh: Inputs that have to move to the mesh first.
        fresh: Identities of the programs that making this recipe compiled.
    """

    graph: Graph
    traced: Traced
    wanted: Wanted
    refs: list[Ref | None]
    places: dict[int, NamedSharding | None]
    elsewhere: dict[int, list[NamedSharding | str]]
    to_mesh: dict[int, NamedSharding]
    tape: Recording
    tape_places: dict[int, int]
    tape_program: Program | None
    steps: list[_Step]
    fresh: frozenset[int]

    @property
    def programs(self) -> list[Program]:
        """The distinct programs."""
        found = [s.program for s in self.steps if s.program is not None]
        return list(dict.fromkeys([*([] if self.tape_program is None else [self.tape_program]), *found]))

    @property
    def local_leaves(self) -> int:
        """Outputs made whole on one device."""
        return sum(len(step.outputs) for step in self.steps if step.program is None)

    @property
    def peak_temporary_bytes(self) -> int:
        """The most that one program holds on each device beside its inputs and results."""
        return max((p.temporary_bytes for p in self.programs), default=0)

    def reports(self, fresh: frozenset[int]) -> tuple[ProgramReport, ...]:
        """One report per distinct program; ``fresh`` are those that were compiled for this call."""
        calls = collections.Counter(s.program for s in self.steps for _ in s.calls)
        first = {s.program: s.call for s in reversed(self.steps)}
        out: list[ProgramReport] = []
        for program in self.programs:
            call = first.get(program)
            size = 0 if call is None else call.shard_bytes(self.graph)
            out.append(
                ProgramReport(
                    program.name,
                    calls.get(program, 1),
                    program.seconds if id(program) in fresh else 0.0,
                    size,
                    program.temporary_bytes,
                    call is not None and call.inexact,
                )
            )
        return tuple(out)


# --- making one -------------------------------------------------------------------------------------------------------


def _word_index(call: Call, tape: Tape, graph: Graph) -> np.ndarray:
    """Where a program's words are on the tape, the zero first."""
    parts = [np.array([Tape.ZERO])]
    for ref in call.words:
        place = tape.place(ref)
        parts.append(np.arange(place, place + word_count(ref.aval if isinstance(ref, Constant) else graph.avals[ref])))
    return np.concatenate(parts)


def _schedule_releases(steps: Sequence[_Step], kept: set[int]) -> None:
    """Let go of values between programs as soon as the last that needs them has run."""
    seen = set(kept)
    for step in reversed(steps):
        last = {v for v in (*step.call.arrays, *step.outputs) if v not in seen}
        seen |= last
        step.release = tuple(last)


def _foreign(x: Any, mesh: Mesh | None) -> bool:
    return (
        mesh is not None
        and isinstance(x, jax.Array)
        and x.committed
        and compat.device_order(x.sharding) != tuple(mesh.devices.flat)
    )


def make_recipe(
    request: Request, mapping: AxisMapping | None, mesh: Mesh | None, memory_kind: str | None, exact: bool
) -> Recipe:
    """Trace a call, cut it up, and start the compilations."""
    traced = trace(request)
    wanted = plan_outputs(traced, request, mapping, mesh, memory_kind)
    over = traced.mesh if isinstance(traced.mesh, Mesh) else None
    graph = flatten(traced.closed, keep_jits=exact, mesh=over)
    refs = [None if slot is None else graph.outputs[slot] for slot in traced.slots]
    given: dict[int, Any] = dict(zip(graph.inputs, request.arrays, strict=True)) | graph.consts
    born: dict[int, NamedSharding | None] = {}
    elsewhere: dict[int, list[NamedSharding | str]] = {}
    kept = set(given)
    for ref, want in zip(refs, wanted.places, strict=True):
        if isinstance(ref, int) and ref not in given:
            # Programs deliver to the devices' own memory; another kind is one more move.
            born.setdefault(ref, NamedSharding(want.mesh, want.spec) if isinstance(want, NamedSharding) else None)
            if want == born[ref]:
                kept.add(ref)
            elif want is not None:
                elsewhere.setdefault(ref, []).append(want)
    tape, calls = split(
        graph,
        [v for v in graph.inputs if given[v].is_fully_addressable or given[v].is_fully_replicated],
        born,
        Terms(
            mesh,
            exact,
            on_cpu=(jax.default_backend() if mesh is None else mesh.devices.flat[0].platform) == "cpu",
            can_gather=jax.process_count() == 1,
            largest_shard=max((shard_bytes(graph.avals[v], s) for v, s in born.items()), default=0),
        ),
    )
    placements: dict[int, Any] = {}
    to_mesh: dict[int, NamedSharding] = {}
    for value, x in given.items():
        placements[value] = x.sharding if isinstance(x, jax.Array) and x.committed else None
    places: dict[int, NamedSharding | None] = {}
    steps: list[_Step] = []
    fresh: set[int] = set()
    for batch in batches(calls, graph, elsewhere):
        call = batch[0]
        index = np.stack([_word_index(c, tape, graph) for c in batch])
        for each in batch:
            for value, sharding in zip(each.outputs, each.shardings, strict=True):
                places[value] = placements[value] = sharding
        if call.local:
            steps.append(_Step(batch, index, None, tuple(eager_op(op) for op in call.ops)))
            continue
        for value in call.arrays:
            if value in given and mesh is not None and _foreign(given[value], mesh):
                placements[value] = to_mesh[value] = NamedSharding(mesh, PartitionSpec())
        program, new = program_for(call, len(batch), graph.avals, [placements[v] for v in call.arrays])
        fresh |= {id(program)} if new else set()
        steps.append(_Step(batch, index, program, ()))
    recording = tape.finish()
    keys = tape_program(recording)
    fresh |= {id(keys[0])} if keys is not None and keys[1] else set()
    _schedule_releases(steps, kept)
    return Recipe(
        graph,
        traced,
        wanted,
        refs,
        places,
        elsewhere,
        to_mesh,
        recording,
        tape.places,
        None if keys is None else keys[0],
        steps,
        frozenset(fresh),
    )


# --- following it -----------------------------------------------------------------------------------------------------


class Run:
    """One execution of a recipe.

    ``values`` are in place; ``here`` are those that were made whole on one device, until they are distributed.
    """

    def __init__(self, recipe: Recipe, arguments: Sequence[Any]):
        self._recipe = recipe
        self._values: dict[int, Any] = dict(zip(recipe.graph.inputs, arguments, strict=True)) | recipe.graph.consts
        self._given = set(self._values)
        self._arguments = dict(self._values)
        self._here: dict[int, Any] = {}
        self._moved: dict[Any, Any] = {}
        self.compile_seconds = 0.0

    def run(self) -> list[Any]:
        """The output leaves."""
        recipe = self._recipe
        started = time.perf_counter()
        wait_for(recipe.programs)
        self.compile_seconds = time.perf_counter() - started
        if recipe.to_mesh:
            self._values.update(_move({v: (self._values[v], s) for v, s in recipe.to_mesh.items()}))
        self._words = run_tape(recipe.tape, recipe.tape_program, self._arguments)
        for step in recipe.steps:
            if step.program is None:
                self._run_local(step)
            else:
                self._distribute(step.call.arrays)
                index = step.index if len(step.calls) > 1 else step.index[0]
                made = step.program.compiled(self._words[index], *(self._values[v] for v in step.call.arrays))
                self._values.update(zip(step.outputs, made, strict=True))
            self._move_out(step.outputs)
            for value in step.release:
                self._values.pop(value, None)
                self._here.pop(value, None)
        return self._deliver()

    def _run_local(self, step: _Step) -> None:
        call, avals = step.call, self._recipe.graph.avals
        with compat.no_context_mesh():
            at = 1
            made: dict[Ref, Any] = {}
            for ref in call.words:
                aval = ref.aval if isinstance(ref, Constant) else avals[ref]
                words = self._words[step.index[0, at : at + word_count(aval)]]
                made[ref] = _small(words, aval)
                at += len(words)
            made |= {v: self._gathered(v) for v in call.arrays}
            for op, run in zip(call.ops, step.ops, strict=True):
                inputs = [made[ref] if isinstance(ref, int) else made.get(ref, ref.value) for ref in op.inputs]
                made.update(zip(op.outputs, run(*inputs), strict=True))
            for value in call.outputs:
                self._here[value] = typed(made[value], avals[value])
        if sum(nbytes(avals[v]) for v in self._here) > _MOST_HERE:
            self._distribute(tuple(self._here))
            self._here = {v: x for v, x in self._here.items() if v not in self._values}

    def _gathered(self, value: int) -> Any:
        """A value as eager execution would have it: what a program made in shards comes together on one device."""
        if value in self._here:
            return self._here[value]
        x = self._values[value]
        if value in self._given or len(x.sharding.device_set) == 1:
            return x
        if compat.is_key_array(x):
            return jax.random.wrap_key_data(jnp.asarray(np.asarray(jax.random.key_data(x))), impl=key_impl(x.dtype))
        return jnp.asarray(np.asarray(x))

    def _distribute(self, values: Sequence[int]) -> None:
        """Bring values that are here to where programs expect them."""
        missing = [v for v in values if v not in self._values]
        if missing:
            wanted = {v: self._recipe.places[v] for v in missing}
            self._values.update({v: self._here[v] for v in missing if wanted[v] is None})
            self._values.update(_move({v: (self._here[v], s) for v, s in wanted.items() if s is not None}))

    def _move_out(self, values: Sequence[int]) -> None:
        """Move results that live in another memory there at once, so that they do not pile up on the devices."""
        for value in values:
            for want in self._recipe.elsewhere.get(value, ()):
                x = self._here[value] if value in self._here else self._values[value]
                self._moved[value, want] = _move({value: (x, want)})[value]

    def _deliver(self) -> list[Any]:
        """The output leaves, in one batch of moves for those that are not in place. Equal values stay one array."""
        recipe, wanted = self._recipe, self._recipe.wanted
        pending: dict[Any, tuple[Any, NamedSharding | str]] = {}
        paths: list[str] = []
        keys: list[Any] = []
        for i, (ref, want) in enumerate(zip(recipe.refs, wanted.places, strict=True)):
            static = recipe.traced.statics[i] if ref is None else None
            given = isinstance(ref, int) and ref in self._given
            if (ref is None or given) and not wanted.planned[i]:
                want = wanted.kinds[i]
            key = (("static", id(static)) if ref is None else ref, want)
            keys.append(key)
            if key in self._moved or key in pending:
                continue
            if ref is None:
                x = static
            else:
                x = self._arguments[ref] if given and isinstance(ref, int) else self._output(ref, want)
            if want is None or (isinstance(ref, int) and self._in_place(ref, want)):
                self._moved[key] = x
            else:
                pending[key] = (x, want)
                paths.append(wanted.paths[i])
        self._moved |= _move(pending, paths)
        return [self._moved[key] for key in keys]

    def _in_place(self, value: int, want: Place) -> bool:
        return value in self._values and value in self._recipe.places and self._recipe.places[value] == want

    def _output(self, ref: Ref, want: Place) -> Any:
        avals = self._recipe.graph.avals
        if isinstance(ref, Constant):
            with compat.no_context_mesh():
                return typed(jnp.asarray(ref.value, ref.aval.dtype), ref.aval)
        if ref in self._here and not self._in_place(ref, want):
            return self._here[ref]
        if ref in self._values:
            return self._values[ref]
        place = self._recipe.tape_places[ref]
        x = _small(self._words[place : place + word_count(avals[ref])], avals[ref])
        with compat.no_context_mesh():
            return typed(jnp.asarray(x), avals[ref])


def _small(words: np.ndarray, aval: Any) -> Any:
    if not compat.is_key_array(aval):
        return host_value(words, aval)
    return jax.random.wrap_key_data(jnp.asarray(words.reshape(*aval.shape, -1)), impl=key_impl(aval.dtype))


def _move(work: Mapping[Any, tuple[Any, NamedSharding | str]], paths: Sequence[str] | None = None) -> dict[Any, Any]:
    values = [x for x, _ in work.values()]
    wanted = [(i, to) for i, (_, to) in enumerate(work.values()) if not isinstance(to, str)]
    moved = place_leaves(paths or list(map(str, work)), values, wanted)
    for i, (x, to) in enumerate(work.values()):
        if isinstance(to, str):
            (moved[i],) = change_memory([x], to)
    return dict(zip(work, moved, strict=True))
