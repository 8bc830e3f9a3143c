"""One flat ``jax.jit`` per signature of a compiled function, and what its trace tells."""

import contextlib
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from namedshard import _jaxcompat as compat
from namedshard._errors import IgnoredTransferError, OffloadError, count_of, message
from namedshard._jit.arguments import traced_devices
from namedshard._jit.signature import static_key
from namedshard._jit.transfers import Transfer, ignored_specs, ignored_transfers
from namedshard._jit.unflatten import Builder, unflattener
from namedshard._place.shard import place_leaves
from namedshard._plan.leaves import Leaf, is_array_like, named_leaves
from namedshard._plan.mapping import AxisMapping, axis_mapping
from namedshard._plan.mesh import MeshLike, manual_axes, resolve_mesh
from namedshard._plan.plan import plan_leaves
from namedshard._types import Device, PyTreeDef, Tracer


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """One array output: its path, what the mapping asks for (None: whatever the compiler chose), and its type."""

    path: str
    asked: NamedSharding | None
    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool
    memory_kind: str


_tracing = threading.local()


def _untraced(_: Sequence[Any]) -> Any:
    raise AssertionError("a program knows its results once it is traced")


@dataclasses.dataclass(slots=True, eq=False)
class Program:
    """One structure, one set of statics and avals, one mapping, one mesh.

    Attributes:
        name: The function's.
        treedef: Of the arguments.
        statics: The argument leaves that do not go in, None in place of those that do.
        arrays: The numbers of the argument leaves that go in; None means all of them.
        donate: Positions among these.
        surrender: Those of ``donate`` that are deleted after a run: on one device JAX may give a donated array's host
            memory to a result that belongs in device memory, and then ends the process.
        mesh: What it is traced under.
        outermost: Whether it is made outside of every transformation, for arrays, and is compiled.
        told: For ``jax.jit`` to name the user's function and arguments by.
        options: For ``jax.jit``.
        traced: The flat function, to be traced.
        jitted: The flat function, to be run; there once it is traced.
        traces: How often the function's body has run.
        compiles: Executables made.
        checked: Whether the trace was looked at.
        outputs: The array outputs, in order.
        out_shardings: Of those whose sharding ``jax.jit`` is asked for; None for the others.
        empty: Positions of outputs without elements that a mapping places: the compiler forgets where these belong.
        build: From flat outputs to the result; a faster one from the second use on.
    """

    name: str
    treedef: PyTreeDef
    statics: tuple[Any, ...]
    arrays: tuple[int, ...] | None
    donate: tuple[int, ...]
    surrender: tuple[int, ...]
    mesh: MeshLike | None
    outermost: bool
    told: "Told"
    options: dict[str, Any]
    lock: Any = dataclasses.field(default_factory=threading.Lock)
    traced: Any = None
    jitted: Any = None
    traces: int = 0
    compiles: int = 0
    checked: bool = False
    outputs: tuple[Output, ...] = ()
    out_shardings: tuple[NamedSharding | None, ...] = ()
    empty: tuple[tuple[int, NamedSharding], ...] = ()
    build: Builder = _untraced

    @contextlib.contextmanager
    def tracing(self) -> Generator[None, None, None]:
        """One thread traces it, and others wait; one that is tracing waits for nobody.

        Else two functions that call each other, traced in two threads, would wait for each other.
        """
        nested = getattr(_tracing, "depth", 0)
        with contextlib.nullcontext() if nested else self.lock:
            _tracing.depth = nested + 1
            try:
                yield
            finally:
                _tracing.depth = nested

    def picked(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """The leaves that go in."""
        return leaves if self.arrays is None else [leaves[i] for i in self.arrays]

    @contextlib.contextmanager
    def counting(self) -> Generator[None, None, None]:
        """Count the executables made in the block, also when it fails: the next call finds them in JAX's cache."""
        with compat.count_compiles() as made:
            try:
                yield
            finally:
                self.compiles += made[0]

    def finish(self, arrays: Sequence[Any], out: Sequence[Any]) -> Any:
        """The function's result from the flat arguments and outputs."""
        if not any(isinstance(x, Tracer) for x in out):
            for n in self.surrender:
                arrays[n].delete()
            if self.empty:
                out = place_leaves([o.path for o in self.outputs], out, self.empty)
        return self.build(out)


def _aval_key(x: Any, placed: NamedSharding | None) -> Hashable:
    if isinstance(x, Tracer | jax.Ref):
        return x.aval
    weak = bool(getattr(x, "weak_type", False))
    sharding = placed if placed is not None or isinstance(x, jax.Array) else getattr(x, "sharding", None)
    space, typed = compat.DEVICE_SPACE, None
    if sharding is not None:
        space = compat.space_of_kind(sharding.memory_kind)
        typed = _typed(sharding, len(x.shape)) if isinstance(sharding, NamedSharding) else None
    elif isinstance(x, jax.Array):
        space, typed = compat.space_of_type(x.aval), _typed(x.aval.sharding, x.ndim)
    return tuple(x.shape), jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True), weak, space, typed


def _typed(sharding: NamedSharding, ndim: int) -> Hashable:
    """The part of an array's type that depends on its sharding: what it says of Explicit axes; else None."""
    mesh = sharding.mesh
    if not compat.any_explicit(mesh):
        return None
    explicit = {n for n, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t == AxisType.Explicit}
    entries = [tuple(n for n in ((e,) if isinstance(e, str) else e or ()) if n in explicit) for e in sharding.spec]
    return mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh, (*entries, *[()] * (ndim - len(entries)))


def program_key(walked: Sequence[Leaf], placed: Sequence[NamedSharding | None]) -> tuple[Hashable, ...]:
    """What a trace depends on, leaf by leaf: numpy or jax, committed or not, makes no difference to it."""
    return tuple(
        _aval_key(leaf.value, want) if is_array_like(leaf.value) else static_key(leaf.value)
        for leaf, want in zip(walked, placed, strict=True)
    )


def _in_host_memory(x: Any) -> bool:
    sharding = None if isinstance(x, Tracer) else getattr(x, "sharding", None)
    return getattr(sharding, "memory_kind", None) == "pinned_host"


def make_program(
    name: str,
    fn: Callable[[], Callable[..., Any]] | None,
    told: "Told",
    treedef: PyTreeDef,
    leaves: Sequence[Any],
    donate_mask: Sequence[bool],
    mapping: AxisMapping | None,
    out_mapping: AxisMapping | None,
    mesh: MeshLike | None,
    jit_kwargs: dict[str, Any],
) -> Program:
    """A program that is traced at its first use. ``fn`` gives the function; None: it is part of the tree."""
    arrays = tuple(i for i, x in enumerate(leaves) if is_array_like(x))
    statics = tuple(None if is_array_like(x) else x for x in leaves)
    donate = tuple(n for n, i in enumerate(arrays) if donate_mask[i])
    alone = mesh is None or mesh.size == 1
    surrender = tuple(n for n in donate if alone and _in_host_memory(leaves[arrays[n]]))
    chosen = None if len(arrays) == len(leaves) else arrays
    # Without compilation nobody would heed what jit is asked for.
    compiled = not jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]
    outermost = compiled and compat.nothing_traced() and not any(isinstance(x, Tracer) for x in leaves)
    options = dict(jit_kwargs, donate_argnums=tuple(n for n in donate if n not in surrender))
    program = Program(name, treedef, statics, chosen, donate, surrender, mesh, outermost, told, options)

    def flat(*values: Any) -> tuple[Any, ...]:
        program.traces += 1
        full = list(statics)
        for i, x in zip(arrays, values, strict=True):
            full[i] = x
        whole = jax.tree_util.tree_unflatten(treedef, full)
        call, args, kwargs = whole if fn is None else (fn(), *whole)
        if mapping is None:
            return _record(program, call(*args, **kwargs), out_mapping)
        with axis_mapping(mapping):
            return _record(program, call(*args, **kwargs), out_mapping)

    program.traced = _jit(flat, program)
    return program


class _Path(str):
    """A leaf path, which JAX then calls an argument by."""

    __slots__ = ()

    def isidentifier(self) -> bool:
        return True


@dataclasses.dataclass(frozen=True, slots=True)
class Told:
    """What messages of JAX call a flat function and its arguments by: nothing that keeps the user's function alive."""

    code: Any
    signature: inspect.Signature


def told(fn: Callable[..., Any], paths: Sequence[str]) -> Told:
    """The user's function, and one parameter for each array among its arguments."""
    plain = inspect.unwrap(fn.func if isinstance(fn, functools.partial) else fn)
    code = getattr(plain, "__code__", None) or getattr(type(plain).__call__, "__code__", None)
    only = inspect.Parameter.POSITIONAL_ONLY
    return Told(code, inspect.Signature([inspect.Parameter(_Path(path), only) for path in paths]))


class _Coded:
    """Has the name and the code of a function, and holds nothing else of it."""

    def __init__(self, name: str, code: Any):
        self.__name__ = name
        self.__code__ = code


def _jit(flat: Any, program: Program, **options: Any) -> Any:
    name = program.name
    flat.__name__ = name.rsplit(".", 1)[-1]
    flat.__qualname__ = name
    flat.__signature__ = program.told.signature
    if program.told.code is not None:
        flat.__wrapped__ = _Coded(flat.__name__, program.told.code)
    return jax.jit(flat, **options)


def _to_run(program: Program) -> Any:
    """The function as it is to be compiled: ``out_shardings`` are known only after the trace, which JAX shares."""
    shardings = program.out_shardings
    asked = {} if all(s is None for s in shardings) else {"out_shardings": shardings}
    return _jit(program.traced.__wrapped__, program, **asked, **program.options)


def _left_to_jit(x: Any, want: NamedSharding) -> bool:
    """Whether ``out_shardings`` do what a constraint would; they cost less to trace and to compile."""
    if not isinstance(x, Tracer) or not x.size or compat.is_key_array(x) or want.memory_kind not in (None, "device"):
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


def _is_output_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic)


def _asked(leaves: Sequence[Leaf], treedef: Any, out_mapping: AxisMapping | None) -> list[NamedSharding | None]:
    mesh = resolve_mesh(None)
    if mesh is None or (out_mapping is None and all(leaf.own is None for leaf in leaves)):
        return [None] * len(leaves)
    mapping = out_mapping if out_mapping is not None else AxisMapping()
    plan = plan_leaves(leaves, treedef, mapping, mesh, memory_kind=None, manual=manual_axes())
    asked: list[NamedSharding | None] = []
    for leaf, planned in zip(leaves, plan.leaves, strict=True):
        want = plan.sharding_of(planned) if _is_output_array(leaf.value) else None
        if want is not None and isinstance(leaf.value, jax.Array):
            kind = compat.memory_kind_of_traced(leaf.value)
            want = want if kind == "device" else want.with_memory_kind(kind)
        asked.append(want)
    return asked


def _record(program: Program, out: Any, out_mapping: AxisMapping | None) -> tuple[Any, ...]:
    """Constrain the outputs, and note their structure and what was asked of them."""
    leaves, treedef = jax.tree_util.tree_flatten(out)
    walked = named_leaves(out)
    asked = _asked(walked, treedef, out_mapping)
    left = {i for i, w in enumerate(asked) if program.outermost and w is not None and _left_to_jit(leaves[i], w)}
    wanted = [(i, want) for i, want in enumerate(asked) if want is not None and i not in left]
    if wanted:
        leaves = place_leaves([leaf.path for leaf in walked], leaves, wanted)
    if program.outermost:
        left |= {i for i, want in wanted if _kept_in_memory(leaves[i], want)}
    picked = [i for i, x in enumerate(leaves) if _is_output_array(x)]
    values = tuple(leaves[i] if isinstance(leaves[i], jax.Array) else jnp.asarray(leaves[i]) for i in picked)
    program.outputs = tuple(
        Output(
            walked[i].path or "the result",
            asked[i],
            tuple(x.shape),
            x.dtype,
            bool(getattr(x, "weak_type", False)),
            compat.memory_kind_of_traced(x),
        )
        for i, x in zip(picked, values, strict=True)
    )
    program.out_shardings = tuple(asked[i] if i in left else None for i in picked)
    program.empty = tuple(
        (n, o.asked)
        for n, o in enumerate(program.outputs)
        if o.asked is not None and 0 in o.shape and isinstance(o.asked.mesh, Mesh)
    )
    program.build = _builder(program, treedef, [None if _is_output_array(x) else x for x in leaves], picked)
    return values


def _builder(program: Program, treedef: Any, statics: Sequence[Any], picked: Sequence[int]) -> Builder:
    """From flat outputs to the result. A structure is studied at its second use: many functions are called once."""

    def with_statics(build: Builder) -> Builder:
        if len(picked) == len(statics):
            return build

        def built(arrays: Sequence[Any]) -> Any:
            full = list(statics)
            for i, x in zip(picked, arrays, strict=True):
                full[i] = x
            return build(full)

        return built

    def first(arrays: Sequence[Any]) -> Any:
        program.build = second
        return with_statics(treedef.unflatten)(arrays)

    def second(arrays: Sequence[Any]) -> Any:
        program.build = with_statics(unflattener(treedef))
        return program.build(arrays)

    return first


def check_trace(program: Program, values: Sequence[Any]) -> str | None:
    """Trace, and find what the compiler would get wrong without a word: an error, or a warning to give."""
    with program.tracing():
        if program.checked:
            return None
        jaxpr = program.traced.trace(*values).jaxpr
        devices, fixed = traced_devices(values, program.mesh)
        if devices is not None:
            found = ignored_transfers(jaxpr.jaxpr, devices, fixed)
            if found:
                _raise_ignored(program.name, found, devices)
        program.jitted = _to_run(program)
        program.checked = True
    specs = ignored_specs(jaxpr.jaxpr, [getattr(x, "sharding", None) for x in values])
    if not specs:
        return None
    noun = "device_put asks" if len(specs) == 1 else "device_puts ask"
    return message(
        f"{program.name}: {len(specs)} {noun} for a spec in traced code, which the compiler ignores on Auto axes",
        [f"{t.source}: to {t.target}" for t in specs],
        fix="use ns.shard, or jax.lax.with_sharding_constraint",
    )


def _raise_ignored(name: str, found: Sequence[Transfer], devices: Sequence[Device]) -> None:
    noun = "device_put" if len(found) == 1 else "device_puts"
    raise IgnoredTransferError(
        message(
            f"{name}: {len(found)} {noun} in traced code would be ignored by the compiler, which runs on"
            f" {devices[0].platform} devices {[d.id for d in devices]}",
            [f"{t.source}: to {t.target}" for t in found],
            fix="move the result after the call; for host memory, use"
            ' ns.shard(..., memory_kind="pinned_host") or jax.device_put(x, jax.memory.Space.Host)',
        )
    )


_MIXED_FIX = (
    "name their axes in a mapping: on a mesh of Explicit and Auto axes, JAX forgets the memory of results that no Auto"
    " axis splits"
)


def check_host_outputs(program: Program, values: Sequence[Any]) -> None:
    """Results that were traced into host memory come out of the compiled program there; otherwise it does not run."""
    meant = [(n, o) for n, o in enumerate(program.outputs) if o.memory_kind != "device" and not compat.is_key_array(o)]
    if not meant or any(isinstance(x, Tracer) for x in values):
        return
    compiled = program.jitted.lower(*values).compile()
    got = jax.tree_util.tree_leaves(compiled.output_shardings)
    told = compat.HOST_IN_HLO in (compiled.as_text() or "")
    ends = [(o, got[n].memory_kind if told else "device") for n, o in meant]
    wrong = [(o, kind) for o, kind in ends if kind != o.memory_kind]
    if wrong:
        types = () if program.mesh is None else program.mesh.axis_types
        mixed = AxisType.Explicit in types and AxisType.Auto in types
        raise OffloadError(
            message(
                f"{program.name}: {count_of(len(wrong), len(program.outputs))} traced into host memory would come out"
                " of the compiled program elsewhere",
                [f"{o.path}: in {kind!r}, wanted in {o.memory_kind!r}" for o, kind in wrong],
                fix=_MIXED_FIX if mixed else "use a newer jaxlib, or do not offload on this backend",
            )
        )
