"""EFFECTS. Compiles an initializer's distinct programs, several at a time."""

import concurrent.futures
import os
import time
from collections.abc import Callable, Collection, Container, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.extend.core import Literal
from jax.sharding import AxisType, Mesh
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from namedshard import _jaxcompat as compat
from namedshard._cache import BoundedCache
from namedshard._init.keys import from_data
from namedshard._init.tails import Graph, Op, Tail, flatten, is_manual, placed_by
from namedshard._init.trace import struct_of
from namedshard._plan.mesh import MeshLike

_QUIET_SECONDS = 1.0

Compilation: TypeAlias = "concurrent.futures.Future[tuple[Any, float]]"
"""An executable and the seconds that it took to compile, once that's done."""

compilations: BoundedCache[Compilation] = BoundedCache(1024)
compat.clear_with_jax(compilations)
# The compiler releases the interpreter lock, and is only partly parallel by itself.
_pool = concurrent.futures.ThreadPoolExecutor(max(2, min(8, os.cpu_count() or 1)), "namedshard-compile")


def submit(lowered: Any) -> Compilation:
    """Starts a compilation in another thread."""

    def timed() -> tuple[Any, float]:
        start = time.perf_counter()
        return lowered.compile(), time.perf_counter() - start

    return _pool.submit(timed)


def finish(pending: Mapping[Hashable, Compilation]) -> dict[Hashable, Any]:
    """The executables, once they're compiled. Those that fail are forgotten, so that another call tries again."""
    try:
        _wait(pending.values())
        return {key: compilation.result()[0] for key, compilation in pending.items()}
    except BaseException:
        for key, compilation in pending.items():
            if compilation.done() and compilation.exception() is not None:
                compilations.remove(key)
        raise


def _wait(all_of: Collection[Compilation]) -> None:
    """Shows progress on a terminal if compiling takes long."""
    pending = {c for c in all_of if not c.done()}
    if not pending or not (console := Console(stderr=True)).is_terminal:
        return
    _, pending = concurrent.futures.wait(pending, _QUIET_SECONDS)
    if not pending:
        return
    columns = (TextColumn("init: compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(all_of))
        while pending:
            progress.update(task, completed=len(all_of) - len(pending))
            _, pending = concurrent.futures.wait(pending, 0.1)


# --- one program ------------------------------------------------------------------------------------------------------


def function_of(tail: Tail, graph: Graph, small: Container[int], mesh: MeshLike | None) -> Callable[..., Any]:
    """The function to compile, from inputs to results; keys that are small values come as their data."""

    def program(*inputs: Any) -> tuple[Any, ...]:
        values: dict[int, Any] = {}
        for n, (x, ref) in enumerate(zip(inputs, tail.inputs, strict=True)):
            values[-1 - n] = from_data(x, graph.aval(ref)) if isinstance(ref, int) and ref in small else x
        _run_ops(tail.ops, values, mesh)
        return tuple(as_typed(values[v], graph.avals[v]) for v in tail.results)

    program.__name__ = program.__qualname__ = tail.name
    return program


def repeated(function: Callable[..., tuple[Any, ...]], times: int) -> Callable[..., tuple[Any, ...]]:
    """The function run for each row of its inputs, compiled once; all results in a row."""
    if times == 1:
        return function

    def program(*inputs: Any) -> tuple[Any, ...]:
        rows = jax.lax.map(lambda row: function(*row), inputs)
        return tuple(result[n] for n in range(times) for result in rows)

    program.__name__ = program.__qualname__ = function.__name__
    return program


def as_typed(x: Any, aval: Any) -> Any:
    """The array with the weak type that tracing found."""
    if not getattr(aval, "weak_type", False):
        return x
    return jax.lax.convert_element_type_p.bind(x, new_dtype=aval.dtype, weak_type=True, sharding=None)


def _run_ops(ops: Sequence[Op], values: dict[int, Any], mesh: MeshLike | None) -> None:
    """Runs operations under the options that they were traced under, but without the shardings of the trace."""
    for op in ops:
        params = op.eqn.params
        if not is_manual(op.eqn):
            params = _without_shardings(params)
        elif isinstance(mesh, Mesh) and not isinstance(params["mesh"], Mesh):
            params = params | {"mesh": compat.twin(mesh, AxisType.Auto)}
        inputs = [ref.val if isinstance(ref, Literal) else values[ref] for ref in op.inputs]
        values.update(zip(op.outputs, compat.run_equation(op.eqn, inputs, params), strict=True))


def _without_shardings(value: Any) -> Any:
    """Parameters without the shardings and memory spaces of the trace: the plan alone decides where results go."""
    if isinstance(value, dict):
        return {k: None if k in ("out_sharding", "sharding") else _without_shardings(v) for k, v in value.items()}
    if isinstance(value, tuple | list) and any(True for _ in compat.inner_jaxprs(value)):
        return type(value)(map(_without_shardings, value))
    if not isinstance(value, compat.ClosedJaxpr) or placed_by(value.jaxpr) <= {"arrays"}:
        return value
    graph = flatten(value)

    def run(*inputs: Any) -> list[Any]:
        values: dict[int, Any] = dict(zip(graph.inputs, inputs, strict=True)) | graph.consts
        _run_ops(graph.ops, values, None)
        return [ref.val if isinstance(ref, Literal) else values[ref] for ref in graph.outputs]

    return jax.make_jaxpr(run)(*(struct_of(graph.avals[v]) for v in graph.inputs))
