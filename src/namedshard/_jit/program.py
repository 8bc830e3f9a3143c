"""One flat ``jax.jit`` per signature of a compiled function, and what is known once it is traced."""

import contextlib
import dataclasses
import functools
import inspect
import threading
import types
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from namedshard import _jaxcompat as compat
from namedshard._errors import OffloadError, count_of, message, warn_user
from namedshard._jit.arguments import Arguments
from namedshard._jit.signature import Held
from namedshard._jit.transfers import check_closed_over, check_constraints, check_transfers, elementwise_sources
from namedshard._jit.unflatten import Builder, filled, unflattener
from namedshard._place.local import relabelled
from namedshard._place.route import placement_of, same_place, unreduced_axes
from namedshard._place.shard import place_leaves
from namedshard._place.traced import scrambled
from namedshard._plan.leaves import Leaf, named_leaves
from namedshard._plan.mapping import AxisMapping, axis_mapping, axis_names, spec_entries, spec_entry
from namedshard._plan.mesh import MeshLike, manual_axes, resolve_mesh
from namedshard._plan.plan import output_places, plan_leaves
from namedshard._types import PyTree, PyTreeDef, Tracer

WRAPPED = ".__wrapped__"
"""Ends the qualified name of a decorated function that was pickled; see `make_importable`."""


class Function:
    """The user's function, for programs that don't keep it alive. Warns of what was done with it.

    ``get`` returns it; None where it is the first of the arguments.
    """

    def __init__(
        self, fn: Callable[..., Any], get: Callable[[], Callable[..., Any]] | None, jit_kwargs: Mapping[str, Any]
    ):
        named = fn.func if isinstance(fn, functools.partial) else fn
        plain = inspect.unwrap(named)
        name: str = getattr(named, "__qualname__", type(named).__qualname__).rpartition("<locals>.")[2]
        self.name = name.removesuffix(WRAPPED)
        # Its code object, which JAX's messages name it by.
        self.code = getattr(plain, "__code__", None) or getattr(type(plain).__call__, "__code__", None)
        self.get = get
        self.jit_kwargs = jit_kwargs
        self._warned: set[str] = set()

    def warn(self, headline: str, lines: Iterable[str] = (), fix: str | None = None) -> None:
        """Warn with a `message`, once."""
        text = message(headline, lines, fix)
        if text not in self._warned:
            self._warned.add(text)
            warn_user(text)


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """One array output: its path, what the mapping asks for (None: no mapping does), and its type.

    ``got`` is the sharding it comes out with, and ``by`` what decided that, once they are known. ``sources`` are the
    numbers of the arguments that it is computed from element by element, ``unplaced_sources`` those of them that no
    constraint lies behind.
    """

    path: str
    asked: NamedSharding | None
    aval: Any
    memory_kind: str
    got: Any = None
    by: str = ""
    sources: frozenset[int] = frozenset()
    unplaced_sources: frozenset[int] = frozenset()


@dataclasses.dataclass(slots=True, eq=False)
class Counts:
    """Runs of the function's body for a program, and executables made of it."""

    traces: int = 0
    compiles: int = 0


CHOSEN = "chosen by the compiler"
"""Who places outputs that nothing else places."""

_tracing = threading.local()


class Program:
    """One structure, one set of statics and avals, one mapping, one mesh; traced at its first use."""

    def __init__(
        self,
        function: Function,
        arguments: Arguments,
        donated: Sequence[bool],
        mappings: tuple[AxisMapping | None, AxisMapping | None],
        mesh: MeshLike | None,
        held: Held | None,
    ):
        """``donated`` has an entry for each leaf; the mappings are those for the function's body and its results."""
        arrays = [leaf.value for leaf in arguments.arrays]
        self.name = function.name
        self.treedef = arguments.treedef
        # The structure's `held_numbers`.
        self.held = held
        self.names = tuple(leaf.path for leaf in arguments.leaves)
        self.statics = arguments.statics
        # The numbers of the argument leaves that are passed; None means all of them.
        self.indices = None if len(arrays) == len(self.statics) else arguments.indices
        self.paths = tuple(leaf.path for leaf in arguments.arrays)
        self.donate = tuple(n for n, i in enumerate(arguments.indices) if donated[i])
        # Deleted after a run: on one device JAX may give a donated array's host memory to a result that belongs in
        # device memory, and then ends the process.
        shardings = [(n, getattr(arrays[n], "sharding", None)) for n in self.donate if mesh is None or mesh.size == 1]
        self.delete_after = tuple(n for n, s in shardings if s is not None and s.memory_kind == "pinned_host")
        self.mesh = mesh
        # None until it is traced, and its trace checked.
        self._jaxpr: Any = None
        self._variants: dict[Hashable, Any] = {}
        # Outputs that are arguments, and which.
        self._passed: dict[int, int] = {}
        self.outputs: Sequence[Output] = ()
        # Outputs without elements that a mapping places: the compiler forgets where these belong.
        self.empty: Sequence[tuple[int, NamedSharding]] = ()
        # Outputs in host memory that JAX says to be on the device, as it does on meshes with Explicit and Auto axes.
        self.mislabelled: frozenset[int] = frozenset()
        self.build: Builder
        self._mapping, self._out_mapping = mappings
        self._lock = threading.Lock()
        # Without compilation JAX ignores `out_shardings`, so that they can't replace constraints.
        compiled = not jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]
        self._outermost = compiled and compat.nothing_traced() and not any(isinstance(x, Tracer) for x in arrays)
        # Where only some outputs have `out_shardings`, JAX gives donated host memory to results of the same shape on
        # the device, which then can't run.
        kinds = [placement_of(arrays[n], staging=False).memory_kind for n in self.donate]
        self._may_leave_to_jit = self._outermost and "pinned_host" not in kinds
        self._out_shardings: tuple[NamedSharding | None, ...] = ()
        self.counts = Counts()
        self._function = function
        self._flat = self._flat_function(arguments)

    def select(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """The leaves that are passed."""
        return leaves if self.indices is None else [leaves[i] for i in self.indices]

    @contextlib.contextmanager
    def counting(self) -> Generator[None, None, None]:
        """Count the executables made in the block, also when it fails: the next call finds them in JAX's cache."""
        with compat.count_compiles() as made:
            try:
                yield
            finally:
                self.counts.compiles += made[0]

    def finish(self, arrays: Sequence[Any], out: Sequence[Any]) -> Any:
        """The function's result from the flat arguments and outputs."""
        if not any(isinstance(x, Tracer) for x in out):
            for n in self.delete_after:
                arrays[n].delete()
            if self.empty:
                out = place_leaves([o.path for o in self.outputs], out, self.empty)
            if self.mislabelled:
                out = [relabelled(x, "pinned_host") if n in self.mislabelled else x for n, x in enumerate(out)]
        return self.build(out)

    @property
    def has_host_outputs(self) -> bool:
        """Whether something was traced into host memory."""
        return any(o.memory_kind != "device" for o in self.outputs)

    def trace(self, values: Sequence[Any]) -> None:
        """Trace, once, and find what the compiler would silently get wrong: raises, or warns."""
        with self._one_thread():
            if self._jaxpr is not None:
                return
            try:
                jaxpr = jax.jit(self._flat).trace(*values).jaxpr
            except compat.ShardingTypeError as error:
                error.add_note(
                    f"{self.name} is traced on a mesh with Explicit axes, on which JAX asks for the sharding of results"
                    " that it can't derive: give out_sharding=, for which ns.pspec_for makes specs, or use a mesh of"
                    " Auto axes, jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(shape))"
                )
                raise
            get = self._function.get
            check_closed_over(self.name, get and get(), jaxpr.consts)
            warning = check_transfers(self.name, jaxpr.jaxpr, values, self.mesh)
            check_constraints(self.name, jaxpr.jaxpr, values, self.mesh, [o.path for o in self.outputs])
            skipped = len(jaxpr.jaxpr.invars) - len(values)
            needed = bool(self.donate), any(o.asked is None for o in self.outputs)
            of, unplaced = (
                [frozenset(n - skipped for n in found) for found in elementwise_sources(jaxpr.jaxpr, constrained)]
                if need
                else [frozenset[int]()] * len(self.outputs)
                for need, constrained in zip(needed, (True, False), strict=True)
            )
            found = zip(self.outputs, of, unplaced, strict=True)
            self.outputs = [dataclasses.replace(o, sources=s, unplaced_sources=u) for o, s, u in found]
            numbers = {v: n - skipped for n, v in enumerate(jaxpr.jaxpr.invars) if n >= skipped}
            results = ((n, v) for n, v in enumerate(jaxpr.jaxpr.outvars) if not hasattr(v, "val"))
            self._passed = {n: numbers[v] for n, v in results if v in numbers}
            self._jaxpr = jaxpr
        if warning is not None:
            self._function.warn(warning)

    def jitted_for(self, like: Mapping[int, NamedSharding]) -> Any:
        """The traced function for ``jax.jit`` to run, with `places_of_arguments` for some outputs."""
        wanted = {n: want for n, want in like.items() if self._has_to_be_placed(n, want)}
        key = tuple(wanted.items())
        with self._one_thread():
            if key not in self._variants:
                by_jit = {n: want for n, want in wanted.items() if self._left_to_jit(self.outputs[n].aval, want)}
                rest = [(n, want) for n, want in wanted.items() if n not in by_jit]
                placed = [by_jit.get(n, want) for n, want in enumerate(self._out_shardings)]
                # `out_shardings` are known only now. JAX shares the trace.
                asked = {} if all(s is None for s in placed) else {"out_shardings": tuple(placed)}
                donate = tuple(n for n in self.donate if n not in self.delete_after)
                flat = self._constrained(rest) if rest else self._flat
                self._variants[key] = jax.jit(flat, **asked, **self._function.jit_kwargs, donate_argnums=donate)
            return self._variants[key]

    def places_of_arguments(self, values: Sequence[Any]) -> dict[int, NamedSharding]:
        """Where outputs go for these arguments' sake, by number.

        One that no mapping places comes out like the argument that it replaces: of its type, and the only such one (or
        the only donated one) that it is computed from element by element. Else a step whose arguments are its own
        results would compile twice. An argument in host memory that is itself a result is moved only if it has to be.
        """
        if not self._outermost:
            return {}
        found: dict[int, NamedSharding] = {}
        for n, o in enumerate(self.outputs):
            passed = getattr(values[self._passed[n]], "sharding", None) if n in self._passed else None
            if o.asked is None:
                want = passed if n in self._passed else self._place_replaced(o, values)
            elif n in self._passed and o.memory_kind != "device":
                want = None if passed is not None and same_place(passed, o.asked, o.aval.ndim) else o.asked
            else:
                continue
            if isinstance(want, NamedSharding):
                found[n] = want
        return found

    def _has_to_be_placed(self, n: int, want: Any) -> bool:
        """Whether an output that `places_of_arguments` tells of would come out otherwise if nothing were done."""
        o = self.outputs[n]
        return o.asked is not None or not (n in self._passed or _is_typed(o.aval, want))

    def placed_by(self, n: int, like: Mapping[int, NamedSharding]) -> str:
        """What decides where an output goes, in words."""
        o = self.outputs[n]
        if o.asked is not None:
            return "as mapped"
        if n in like:
            return "as the argument that it replaces"
        return "by its type" if self.known_place(n, like) is not None else CHOSEN

    def known_place(self, n: int, like: Mapping[int, NamedSharding]) -> NamedSharding | None:
        """Where an output goes, as far as it is known without compiling."""
        o = self.outputs[n]
        typed, mesh = o.aval.sharding, self.mesh
        if mesh is not None and typed.mesh.shape == mesh.shape and set(mesh.axis_types) == {AxisType.Explicit}:
            by_type = NamedSharding(mesh, typed.spec, memory_kind=None if o.memory_kind == "device" else o.memory_kind)
        else:
            by_type = None
        return o.asked or like.get(n) or by_type

    def _place_replaced(self, o: Output, values: Sequence[Any]) -> NamedSharding | None:
        if not o.aval.size or compat.is_key_array(o.aval):
            return None
        same = [n for n in o.unplaced_sources if n >= 0 and has_type(values[n], o)]
        places = {_one_form(values[n].sharding) for n in [n for n in same if n in self.donate] or same}
        want = places.pop() if len(places) == 1 else None
        if not isinstance(want, NamedSharding) or not isinstance(want.mesh, Mesh) or unreduced_axes(want):
            return None
        return want if want.mesh.size > 1 and self.mesh in (None, want.mesh) else None

    def _constrained(self, wanted: Sequence[tuple[int, NamedSharding]]) -> Callable[..., tuple[Any, ...]]:
        """The flat function, as traced, with constraints on some of its outputs."""
        closed, paths = self._jaxpr, [o.path for o in self.outputs]
        run = jaxpr_as_fun(closed)

        def flat(*values: Any) -> tuple[Any, ...]:
            return tuple(place_leaves(paths, run(*values), wanted))

        for name in ("__name__", "__qualname__", "__signature__", "__wrapped__"):
            if hasattr(self._flat, name):
                setattr(flat, name, getattr(self._flat, name))
        return flat

    @contextlib.contextmanager
    def _one_thread(self) -> Generator[None, None, None]:
        """Let one thread trace while others wait, except those that are tracing another program.

        Else two functions that call each other, traced in two threads, would deadlock.
        """
        nested = getattr(_tracing, "depth", 0)
        with contextlib.nullcontext() if nested else self._lock:
            _tracing.depth = nested + 1
            try:
                yield
            finally:
                _tracing.depth = nested

    def _flat_function(self, arguments: Arguments) -> Callable[..., tuple[Any, ...]]:
        """From array arguments to array outputs, under the name, code and argument names of the user's function."""
        # Nothing here may keep the arguments' values alive.
        function, mapping, indices, counts = self._function, self._mapping, arguments.indices, self.counts

        def flat(*values: Any) -> tuple[Any, ...]:
            counts.traces += 1
            whole = jax.tree_util.tree_unflatten(self.treedef, filled(self.statics, indices, values))
            fn, args, kwargs = whole if function.get is None else (function.get(), *whole)
            with output_places(self._output_places):
                if mapping is None:
                    return self._place_outputs(fn(*args, **kwargs))
                with axis_mapping(mapping):
                    return self._place_outputs(fn(*args, **kwargs))

        flat.__name__ = self.name.rsplit(".", 1)[-1]
        flat.__qualname__ = self.name
        named: Any = flat
        only = inspect.Parameter.POSITIONAL_ONLY
        named.__signature__ = inspect.Signature([inspect.Parameter(_Path(x.path), only) for x in arguments.arrays])
        if self._function.code is not None:
            # JAX's messages take a function's code from what it wraps.
            named.__wrapped__ = types.SimpleNamespace(__name__=flat.__name__, __code__=self._function.code)
        return flat

    def _output_places(self, tree: PyTree) -> list[NamedSharding | None]:
        leaves, treedef = named_leaves(tree, self._out_mapping, lenient=True), jax.tree_util.tree_structure(tree)
        asked = _asked(leaves, treedef, self._out_mapping)
        return [asked.get(i) for i in range(len(leaves))]

    def _place_outputs(self, out: Any) -> tuple[Any, ...]:
        """Constrain the outputs, and note their structure and what was asked of them."""
        leaves, treedef = jax.tree_util.tree_flatten(out)
        walked = named_leaves(out, self._out_mapping, lenient=True)
        asked = _asked(walked, treedef, self._out_mapping)
        leaves, by_jit = self._constrain([leaf.path for leaf in walked], leaves, asked)
        arrays = {
            i: x if isinstance(x, jax.Array) else jnp.asarray(x) for i, x in enumerate(leaves) if _is_output_array(x)
        }
        self._out_shardings = tuple(asked[i] if i in by_jit else None for i in arrays)
        self.outputs = [
            Output(walked[i].path or "the result", asked.get(i), jax.typeof(x), compat.memory_kind_of_traced(x))
            for i, x in arrays.items()
        ]
        placed = [(n, o.asked) for n, o in enumerate(self.outputs) if 0 in o.aval.shape]
        self.empty = [(n, want) for n, want in placed if want is not None and isinstance(want.mesh, Mesh)]
        self._choose_builder(treedef, [None if i in arrays else x for i, x in enumerate(leaves)], list(arrays))
        return tuple(arrays.values())

    def _constrain(
        self, paths: Sequence[str], leaves: list[Any], asked: dict[int, NamedSharding]
    ) -> tuple[list[Any], set[int]]:
        """Constrain what is not left to ``out_shardings``, which cost less; returns all leaves, and those left to it.

        Arguments in host memory wait until it is known where they are.
        """
        traced = {i: jax.typeof(leaves[i]) for i in asked if self._outermost and isinstance(leaves[i], Tracer)}
        by_jit = {i for i, aval in traced.items() if self._left_to_jit(aval, asked[i])}
        later = {i for i in traced if asked[i].memory_kind == "pinned_host" and compat.is_argument(leaves[i])}
        constrained = [(i, want) for i, want in asked.items() if i not in by_jit | later]
        return place_leaves(paths, leaves, constrained) if constrained else leaves, by_jit

    def _left_to_jit(self, aval: Any, want: NamedSharding) -> bool:
        """Whether ``out_shardings`` do what a constraint would; they cost less to trace and to compile."""
        if not (self._may_leave_to_jit and aval.size) or compat.is_key_array(aval) or scrambled(aval.dtype):
            return False
        if want.memory_kind not in (None, "device"):
            # XLA would let the hosts exchange shards.
            return False
        meshes = (want.mesh, aval.sharding.mesh, *filter(None, [compat.abstract_context_mesh()]))
        return isinstance(want.mesh, Mesh) and all(set(m.axis_types) <= {AxisType.Auto} for m in meshes)

    def _choose_builder(self, treedef: PyTreeDef, statics: Sequence[Any], indices: Sequence[int]) -> None:
        """The faster way to build the result is prepared at its second use: many functions are called once."""

        def first(arrays: Sequence[Any]) -> Any:
            self.build = second
            return treedef.unflatten(filled(statics, indices, arrays))

        def second(arrays: Sequence[Any]) -> Any:
            self.build = unflattener(treedef, statics, indices)
            return self.build(arrays)

        self.build = first

    def check_memory(self, compiled: Any) -> None:
        """Raise `OffloadError` if a result that was traced into host memory would come out of it elsewhere."""
        meant = [(n, o) for n, o in enumerate(self.outputs) if o.memory_kind != "device"]
        # What JAX says of outputs is what was asked for, or, on meshes with Explicit and Auto axes, forgotten.
        kinds, said = compat.output_memory_kinds(compiled), jax.tree_util.tree_leaves(compiled.output_shardings)
        self.mislabelled = frozenset(n for n, o in meant if kinds[n] == o.memory_kind != said[n].memory_kind)
        wrong = [
            f"{o.path}: in {kinds[n]!r}, wanted in {o.memory_kind!r}" for n, o in meant if kinds[n] != o.memory_kind
        ]
        if wrong:
            raise OffloadError(
                f"{self.name}: {count_of(len(wrong), len(self.outputs))} traced into host memory would come out of the"
                " compiled program elsewhere",
                wrong,
                fix="use a newer jaxlib, or do not offload on this backend",
            )

    def check_places(self, out: Sequence[Any]) -> None:
        """Warn if the outputs of a run have other shardings than their mapping asks for."""
        lines: list[str] = []
        for n, (x, output) in enumerate(zip(out, self.outputs, strict=True)):
            asked = output.asked
            if asked is None or not x.size or isinstance(x, Tracer) or not isinstance(asked.mesh, Mesh):
                continue
            have = x.sharding.with_memory_kind("pinned_host") if n in self.mislabelled else x.sharding
            if not have.is_equivalent_to(asked, x.ndim):
                lines.append(f"{output.path}: {getattr(have, 'spec', have)}, but its mapping asks for {asked.spec}")
        if lines:
            self._function.warn(
                f"{self.name}: the compiler placed {len(lines)} of {len(out)} outputs otherwise than asked",
                lines,
                fix="move the result after the call with ns.shard",
            )


class _Path(str):
    """A leaf path, which JAX then calls an argument by."""

    __slots__ = ()

    def isidentifier(self) -> bool:
        return True


def _is_output_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic)


def _one_form(sharding: Any) -> Any:
    """A sharding whose spec ends with no None: equal ones are then the same."""
    if not isinstance(sharding, NamedSharding) or unreduced_axes(sharding):
        return sharding
    entries = [spec_entry(axis_names(entry)) for entry in spec_entries(sharding.spec)]
    while entries and entries[-1] is None:
        entries.pop()
    return sharding.update(spec=PartitionSpec(*entries))


def _is_typed(aval: Any, want: NamedSharding) -> bool:
    """Whether an array's type has this sharding already, on Explicit axes only."""
    explicit = set(want.mesh.axis_types) == {AxisType.Explicit}
    return (
        explicit
        and not aval.sharding.mesh.empty
        and aval.sharding.is_equivalent_to(NamedSharding(aval.sharding.mesh, want.spec), aval.ndim)
    )


def has_type(x: Any, o: Output) -> bool:
    """Whether an argument that is placed has an output's shape, dtype and memory kind; tracers are placed nowhere."""
    have = getattr(x, "sharding", None)
    same = (x.shape, x.dtype) == (o.aval.shape, o.aval.dtype)
    return same and have is not None and (have.memory_kind or "device") == o.memory_kind


def _asked(leaves: Sequence[Leaf], treedef: PyTreeDef, out_mapping: AxisMapping | None) -> dict[int, NamedSharding]:
    """The shardings that the mapping asks for, by the number of the leaf in the result."""
    mesh = resolve_mesh(None)
    if mesh is None or (out_mapping is None and all(leaf.own is None for leaf in leaves)):
        return {}
    mapping = out_mapping if out_mapping is not None else AxisMapping()
    plan = plan_leaves(leaves, treedef, mapping, mesh, memory_kind=None, manual=manual_axes())
    asked: dict[int, NamedSharding] = {}
    for i, leaf in enumerate(leaves):
        want = plan.sharding_of(plan.leaves[i])
        if want is None or not _is_output_array(leaf.value):
            continue
        kind = compat.memory_kind_of_traced(leaf.value) if isinstance(leaf.value, jax.Array) else "device"
        asked[i] = want if kind == "device" else want.with_memory_kind(kind)
    return asked
