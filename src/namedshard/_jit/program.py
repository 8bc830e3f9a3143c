"""One flat ``jax.jit`` per signature of a compiled function, and what is known once it is traced."""

import contextlib
import dataclasses
import functools
import inspect
import threading
import types
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from namedshard import _jaxcompat as compat
from namedshard._errors import OffloadError, count_of, message, warn_user
from namedshard._jit.arguments import Arguments
from namedshard._jit.signature import Held
from namedshard._jit.transfers import check_closed_over, check_constraints, check_transfers, elementwise_sources
from namedshard._jit.unflatten import Builder, filled, unflattener
from namedshard._place.shard import place_leaves
from namedshard._place.traced import scrambled
from namedshard._plan.leaves import Leaf, named_leaves
from namedshard._plan.mapping import AxisMapping, axis_mapping
from namedshard._plan.mesh import MeshLike, manual_axes, resolve_mesh
from namedshard._plan.plan import plan_leaves
from namedshard._types import PyTreeDef, Tracer

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
    """One array output: its path, what the mapping asks for (None: whatever the compiler chose), and its type.

    ``got`` is the sharding it comes out with, once that is known; ``sources``, if any are donated, are the numbers of
    the arguments that it is computed from element by element.
    """

    path: str
    asked: NamedSharding | None
    aval: Any
    memory_kind: str
    got: Any = None
    sources: frozenset[int] = frozenset()


@dataclasses.dataclass(slots=True, eq=False)
class Counts:
    """Runs of the function's body for a program, and executables made of it."""

    traces: int = 0
    compiles: int = 0


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
        self.jitted: Any = None
        self.outputs: Sequence[Output] = ()
        # Outputs without elements that a mapping places: the compiler forgets where these belong.
        self.empty: Sequence[tuple[int, NamedSharding]] = ()
        self.build: Builder
        self._mapping, self._out_mapping = mappings
        self._lock = threading.Lock()
        # Without compilation JAX ignores `out_shardings`, so that they can't replace constraints.
        compiled = not jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]
        self._outermost = compiled and compat.nothing_traced() and not any(isinstance(x, Tracer) for x in arrays)
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
        return self.build(out)

    def trace(self, values: Sequence[Any]) -> None:
        """Trace, once, and find what the compiler would silently get wrong: raises, or warns."""
        with self._one_thread():
            if self.jitted is not None:
                return
            jaxpr = jax.jit(self._flat).trace(*values).jaxpr
            get = self._function.get
            check_closed_over(self.name, get and get(), jaxpr.consts)
            warning = check_transfers(self.name, jaxpr.jaxpr, values, self.mesh)
            check_constraints(self.name, jaxpr.jaxpr, values, self.mesh, [o.path for o in self.outputs])
            if self.donate:
                skipped = len(jaxpr.jaxpr.invars) - len(values)
                sources = [frozenset(n - skipped for n in found) for found in elementwise_sources(jaxpr.jaxpr)]
                pairs = zip(self.outputs, sources, strict=True)
                self.outputs = [dataclasses.replace(o, sources=found) for o, found in pairs]
            # `out_shardings` are known only now. JAX shares the trace.
            asked = {} if all(s is None for s in self._out_shardings) else {"out_shardings": self._out_shardings}
            donate = tuple(n for n in self.donate if n not in self.delete_after)
            self.jitted = jax.jit(self._flat, **asked, **self._function.jit_kwargs, donate_argnums=donate)
        if warning is not None:
            self._function.warn(warning)

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

    def _place_outputs(self, out: Any) -> tuple[Any, ...]:
        """Constrain the outputs, and note their structure and what was asked of them."""
        leaves, treedef = jax.tree_util.tree_flatten(out)
        walked = named_leaves(out)
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
        """Constrain what is not left to ``out_shardings``; returns all leaves, and the numbers of those that are.

        Constraints cost more, and on mixed meshes they don't keep a result in host memory.
        """
        by_jit = {i for i, want in asked.items() if self._outermost and _left_to_jit(leaves[i], want)}
        if constrained := [(i, want) for i, want in asked.items() if i not in by_jit]:
            leaves = place_leaves(paths, leaves, constrained)
        return leaves, by_jit | {i for i, want in constrained if self._outermost and _kept_in_memory(leaves[i], want)}

    def _choose_builder(self, treedef: PyTreeDef, statics: Sequence[Any], indices: Sequence[int]) -> None:
        """The faster way to build the result is prepared at its second use: many functions are called once."""

        def first(arrays: Sequence[Any]) -> Any:
            self.build = second
            return treedef.unflatten(filled(statics, indices, arrays))

        def second(arrays: Sequence[Any]) -> Any:
            self.build = unflattener(treedef, statics, indices)
            return self.build(arrays)

        self.build = first

    def check_memory(self, values: Sequence[Any]) -> None:
        """Raise `OffloadError` if a result that was traced into host memory would come out of it elsewhere."""
        outputs = enumerate(self.outputs)
        meant = [(n, o) for n, o in outputs if o.memory_kind != "device" and not compat.is_key_array(o.aval)]
        if not meant or any(isinstance(x, Tracer) for x in values):
            return
        compiled = self.jitted.lower(*values).compile()
        got = jax.tree_util.tree_leaves(compiled.output_shardings)
        # A compiler that ignores host memory still reports the shardings that it was asked for.
        in_hlo = compat.HOST_IN_HLO in (compiled.as_text() or "")
        kinds = [(o, got[n].memory_kind if in_hlo else "device") for n, o in meant]
        wrong = [f"{o.path}: in {kind!r}, wanted in {o.memory_kind!r}" for o, kind in kinds if kind != o.memory_kind]
        if wrong:
            raise OffloadError(
                f"{self.name}: {count_of(len(wrong), len(self.outputs))} traced into host memory would come out of the"
                " compiled program elsewhere",
                wrong,
                fix=_lost_memory_fix(self.mesh),
            )

    def check_places(self, out: Sequence[Any]) -> None:
        """Warn if the outputs of a run have other shardings than their mapping asks for."""
        lines: list[str] = []
        for x, output in zip(out, self.outputs, strict=True):
            asked = output.asked
            if asked is None or not x.size or isinstance(x, Tracer) or not isinstance(asked.mesh, Mesh):
                continue
            have = x.sharding
            if have.memory_kind != asked.memory_kind:
                lines.append(f"{output.path}: in memory {have.memory_kind!r}, but {asked.memory_kind!r} was asked for")
            elif not have.is_equivalent_to(asked, x.ndim):
                lines.append(f"{output.path}: {getattr(have, 'spec', have)}, but its mapping asks for {asked.spec}")
        if lines:
            self._function.warn(
                f"{self.name}: the compiler placed {len(lines)} of {len(out)} outputs otherwise than asked",
                lines,
                fix="move the result after the call with ns.shard",
            )


def _lost_memory_fix(mesh: MeshLike | None) -> str:
    if mesh is not None and {AxisType.Explicit, AxisType.Auto} <= set(mesh.axis_types):
        return (
            "name their axes in a mapping: on a mesh of Explicit and Auto axes, JAX forgets the memory of results that"
            " no Auto axis splits"
        )
    return "use a newer jaxlib, or do not offload on this backend"


class _Path(str):
    """A leaf path, which JAX then calls an argument by."""

    __slots__ = ()

    def isidentifier(self) -> bool:
        return True


def _is_output_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic)


def _left_to_jit(x: Any, want: NamedSharding) -> bool:
    """Whether ``out_shardings`` do what a constraint would; they cost less to trace and to compile."""
    odd = isinstance(x, Tracer) and (not x.size or compat.is_key_array(x) or scrambled(x.dtype))
    if not isinstance(x, Tracer) or odd or want.memory_kind not in (None, "device"):
        return False
    typed_for = jax.typeof(x).sharding.mesh
    meshes = (want.mesh, typed_for, *filter(None, [compat.abstract_context_mesh()]))
    return isinstance(want.mesh, Mesh) and all(set(m.axis_types) <= {AxisType.Auto} for m in meshes)


def _kept_in_memory(x: Any, want: NamedSharding) -> bool:
    """Whether only ``out_shardings`` keep a result in host memory: one that is split over no Auto axis of the mesh.

    JAX makes the sharding of such a result from its type, and forgets the memory.
    """
    on_host = isinstance(x, Tracer) and want.memory_kind not in (None, "device")
    return on_host and isinstance(want.mesh, Mesh) and compat.any_explicit(want.mesh)


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
