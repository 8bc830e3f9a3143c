"""EFFECTS. Compiles the distinct programs of an initialiser, each once in the life of a process, several at a time."""

import collections
import concurrent.futures
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jaxtyping import Array
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from namedshard import _jaxcompat as compat
from namedshard._init.bits import bits_maker
from namedshard._init.jaxpr import Constant, Op, Ref, apply, fence, freeze_op
from namedshard._init.split import Call
from namedshard._init.tape import Recording, decode, word_count
from namedshard._init.traits import MOVEMENT

_QUIET_SECONDS = 1.0


class Program:
    """One compiled program, or one on its way."""

    __slots__ = ("future", "name", "seconds")

    def __init__(
        self, name: str, lowered: Any, pool: concurrent.futures.Executor, options: dict[str, Any] | None = None
    ):
        self.name = name
        self.seconds = 0.0
        self.future: concurrent.futures.Future[Any] = pool.submit(self._compile, lowered, options)

    def _compile(self, lowered: Any, options: dict[str, Any] | None) -> Any:
        start = time.perf_counter()
        compiled = lowered.compile(compiler_options=options)
        self.seconds = time.perf_counter() - start
        return compiled

    @property
    def compiled(self) -> Any:
        """The executable; waits for it."""
        return self.future.result()

    @property
    def temporary_bytes(self) -> int:
        """Bytes it holds on each device while it runs, beside its inputs and results."""
        analysis = self.compiled.memory_analysis()
        return 0 if analysis is None else int(analysis.temp_size_in_bytes)


class _Cache:
    def __init__(self, size: int):
        self._size = size
        self._programs: collections.OrderedDict[Hashable, Any] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._pool: concurrent.futures.Executor | None = None

    def get(self, key: Hashable, make: Callable[[concurrent.futures.Executor], Any]) -> tuple[Any, bool]:
        """The program of a key, and whether it was new."""
        with self._lock:
            found = self._programs.get(key)
            if found is not None:
                self._programs.move_to_end(key)
                return found, False
            if self._pool is None:
                # The compiler lets go of the interpreter lock, and is only partly parallel by itself.
                workers = max(2, min(8, os.cpu_count() or 1))
                self._pool = concurrent.futures.ThreadPoolExecutor(workers, thread_name_prefix="namedshard-compile")
            made = self._programs[key] = make(self._pool)
            while len(self._programs) > self._size:
                self._programs.popitem(last=False)
            return made, True

    def clear(self) -> None:
        with self._lock:
            self._programs.clear()


_cache = _Cache(1024)


def clear_programs() -> None:
    """Forget all compiled programs."""
    _cache.clear()


def _settings() -> Hashable:
    with compat.no_context_mesh():
        return compat.trace_key()


def run_ops(call: Call, avals: Sequence[Any]) -> Callable[..., tuple[Array, ...]]:
    """The function to compile for a call: from words ``uint32[1 + n]``, the first one zero, and arrays to outputs."""
    targets = [(avals[v].shape, s) for v, s in zip(call.outputs, call.shardings, strict=True)]
    sizes = [word_count(ref.aval if isinstance(ref, Constant) else avals[ref]) for ref in call.words]
    ends = np.cumsum([1, *sizes]).tolist()

    def program(words: Array, *arrays: Array) -> tuple[Array, ...]:
        zero = words[0]
        bits = bits_maker(targets)
        given = [
            decode(words[a:b], ref.aval if isinstance(ref, Constant) else avals[ref])
            for ref, a, b in zip(call.words, ends[:-1], ends[1:], strict=True)
        ]
        values: dict[Ref, Any] = dict(zip(call.words, given, strict=True)) | dict(zip(call.arrays, arrays, strict=True))
        made: dict[int, Any] = {}

        def read(ref: Ref, apart: bool) -> Any:
            if isinstance(ref, Constant):
                return values.get(ref, ref.value)
            if ref not in made:
                return values[ref]
            return fence(made[ref], zero) if apart else made[ref]

        for op in call.ops:
            inputs = [read(ref, op.primitive.name not in MOVEMENT) for ref in op.inputs]
            made.update(zip(op.outputs, apply(op, inputs, bits, op.mesh), strict=True))
        return tuple(typed(made[v], avals[v]) for v in call.outputs)

    program.__name__ = program.__qualname__ = call.name
    return program


def _repeated(
    program: Callable[..., tuple[Array, ...]], times: int, avals: Sequence[Any]
) -> Callable[..., tuple[Array, ...]]:
    """A program run some times over, from words ``uint32[times, 1 + n]`` to all outputs in a row.

    It is compiled once and needs the temporaries of one run: each turn of a loop writes its own outputs only.
    """

    def repeated(words: Array) -> tuple[Array, ...]:
        def turn(i: Array, outputs: tuple[Array, ...]) -> tuple[Array, ...]:
            made = program(words[i])
            return tuple(
                jax.lax.cond(i == n // len(made), lambda _, new: new, lambda old, _: old, old, made[n % len(made)])
                for n, old in enumerate(outputs)
            )

        empty = tuple(jnp.zeros(aval.shape, aval.dtype) for _ in range(times) for aval in avals)
        return jax.lax.fori_loop(0, times, turn, empty)

    repeated.__name__ = repeated.__qualname__ = program.__name__
    return repeated


def typed(x: Array, aval: Any) -> Array:
    """The array with the weak type that tracing found."""
    if not getattr(aval, "weak_type", False):
        return x
    return jax.lax.convert_element_type_p.bind(x, new_dtype=aval.dtype, weak_type=True, sharding=None)


def program_for(call: Call, times: int, avals: Sequence[Any], placements: Sequence[Any]) -> tuple[Program, bool]:
    """The program of a call, or of some equal ones, whose arrays have these shardings (None: on no device)."""

    def make(pool: concurrent.futures.Executor) -> Program:
        total = 1 + sum(word_count(ref.aval if isinstance(ref, Constant) else avals[ref]) for ref in call.words)
        inputs = [
            jax.ShapeDtypeStruct(avals[v].shape, avals[v].dtype, sharding=_untyped(s))
            for v, s in zip(call.arrays, placements, strict=True)
        ]
        program, shape = run_ops(call, avals), (total,)
        if times > 1:
            program, shape = _repeated(program, times, [avals[v] for v in call.outputs]), (times, total)
        with compat.no_context_mesh():
            jitted = jax.jit(program, out_shardings=call.shardings * times)
            lowered = jitted.lower(jax.ShapeDtypeStruct(shape, np.uint32), *inputs)
        return Program(call.name, lowered, pool)

    return _cache.get((call.key, times, tuple(placements), _settings()), make)


def _untyped(sharding: Any) -> Any:
    """Explicit axes would put shardings into the types of all that is computed from an array."""
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return NamedSharding(compat.twin(sharding.mesh, AxisType.Auto), sharding.spec, memory_kind=sharding.memory_kind)
    return sharding


def tape_program(tape: Recording) -> tuple[Program, bool] | None:
    """The program that runs a tape, on the default device; None for a tape without steps."""

    def make(pool: concurrent.futures.Executor) -> Program:
        # Integers come out the same however little they are optimised, and the loop runs for microseconds.
        hasty = tape.keys_only and jax.default_backend() == "cpu"
        options = {"xla_backend_optimization_level": 0} if hasty else None
        with compat.no_context_mesh():
            lowered = jax.jit(tape.loop()).lower(tape.initial, tape.kinds, tape.places)
        return Program("init_keys", lowered, pool, options)

    return _cache.get(("tape", tape.key, _settings()), make) if tape.length else None


def run_tape(tape: Recording, program: Program | None, arguments: dict[int, Any]) -> np.ndarray:
    """All small values, given the arguments."""
    with compat.no_context_mesh():
        words = tape.load(arguments)
        return words if program is None else np.asarray(program.compiled(words, tape.kinds, tape.places))


def eager_op(op: Op) -> Callable[..., list[Any]]:
    """One operation compiled by itself for one device, which is what eager execution runs."""

    def make(_: concurrent.futures.Executor) -> Callable[..., list[Any]]:
        def run(*inputs: Any) -> list[Any]:
            return apply(op, inputs, None, op.mesh)

        run.__name__ = run.__qualname__ = f"init_{str(op.params.get('name', op.primitive.name)).strip('_')}"
        return jax.jit(run)

    return _cache.get(("op", freeze_op(op), _settings()), make)[0]


def wait_for(programs: Sequence[Program]) -> None:
    """Wait until all are compiled; on a terminal, what takes long shows how far it is."""
    pending = {p.future for p in programs if not p.future.done()}
    if pending and (console := Console(stderr=True)).is_terminal:
        _, pending = concurrent.futures.wait(pending, _QUIET_SECONDS)
        if pending:
            _show(pending, len(programs), console)
    for program in programs:
        program.future.result()


def _show(pending: set[concurrent.futures.Future[Any]], total: int, console: Console) -> None:
    columns = (TextColumn("init: compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=total)
        while pending:
            progress.update(task, completed=total - len(pending))
            _, pending = concurrent.futures.wait(pending, 0.1)


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramReport:
    """One distinct program of an `init`.

    Attributes:
        name: What it was named after: its first jit, such as that of ``jax.random.normal``, else its last operation.
        calls: How many times it ran; several of these runs may be started as one.
        compile_seconds: Time that its compilation took; 0 if it was compiled before this call.
        bytes_per_device: Bytes of one call's results on each device.
        temporary_bytes: Bytes that one call holds on each device beside its inputs and results.
        inexact: Its values could differ from eager ones in the last bit, since a sum or an approximated function in it
            is split over devices or shares a program with other operations; ``exact=True`` keeps them apart and whole.
    """

    name: str
    calls: int
    compile_seconds: float
    bytes_per_device: int
    temporary_bytes: int
    inexact: bool
