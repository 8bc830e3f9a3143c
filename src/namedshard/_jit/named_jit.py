"""`named_jit`: compile functions of named arrays, by way of one flat ``jax.jit`` per signature.

A call flattens its arguments once, looks the program up by structure, avals and shardings, and unflattens once. All
checks happen when a signature is new.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast, overload, runtime_checkable

import jax
from jax.sharding import AbstractMesh

from namedshard import _jaxcompat as compat
from namedshard._errors import MappingError, MismatchError, NoMeshError, did_you_mean, human_bytes
from namedshard._jit.arguments import (
    ArgumentPlan,
    Arguments,
    argument_leaves,
    argument_name,
    holder_of,
    mismatch_text,
    plan_arguments,
)
from namedshard._jit.donation import check_donatable, check_not_deleted, check_shared, donation_mask, is_concrete
from namedshard._jit.program import Counts, Program
from namedshard._jit.signature import (
    check_hashable,
    differing_numbers,
    held_numbers,
    program_key,
    signature,
    static_key,
)
from namedshard._jit.stages import Lowered, mesh_of
from namedshard._jit.store import (
    CallPlan,
    OnMismatch,
    Options,
    Report,
    make_importable,
    store_of_function,
    store_of_structure,
)
from namedshard._place.shard import place_leaves
from namedshard._plan.leaves import Leaf, with_names
from namedshard._plan.mapping import (
    AxisMapping,
    FsdpMapping,
    MappingLike,
    Unmatched,
    as_mapping,
    thread_hint,
    with_context_names,
)
from namedshard._plan.mesh import MeshLike, context_mesh, describe, require_attached
from namedshard._plan.names import AxesLike, check_axes
from namedshard._plan.plan import check_unmatched
from namedshard._processes.coordination import EXCHANGE_FAILURE, refuse_compiled
from namedshard._types import PyTree, PyTreeDef, Tracer

_NOT_TAKEN = ("in_shardings", "out_shardings", "static_argnums", "static_argnames", "donate_argnums", "donate_argnames")


P = ParamSpec("P")
R = TypeVar("R")


@runtime_checkable
class Decorator(Protocol):
    """What turns a function into a compiled one with the same signature."""

    def __call__(self, fn: Callable[P, R], /) -> "NamedJit[P, R]":
        """The compiled function."""
        ...


class NamedJit(Generic[P, R]):
    """A compiled function of named arrays; made by `named_jit`."""

    def __init__(self, fn: Callable[P, R], options: Options):
        # Not its attributes: those of a module would hide this object's own.
        functools.update_wrapper(self, fn, updated=())
        self._fn = fn
        self._options = options
        # A function that holds arrays (a module, a method of one, a partial) is an argument like the others.
        holder = holder_of(fn)
        self._prefix: tuple[Any, ...] = () if holder is None else (holder,)
        self._store = store_of_function(fn, options) if holder is None else store_of_structure(fn, holder, options)
        self._function = self._store.function
        self._name = self._function.name
        # For its report: what others with the same store have done isn't its own.
        self._used: set[Counts] = set()
        self._calls = self._reshards = self._bytes_moved = 0
        self._last: tuple[Any, CallPlan | None] = (None, None)

    def __reduce__(self) -> tuple[Any, ...]:
        make_importable(self, self._fn)
        return NamedJit, (self._fn, self._options)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else _BoundNamedJit(self, instance)

    def __repr__(self) -> str:
        return f"named_jit({self._name})"

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the compiled function; traces and compiles when the signature is new."""
        store = self._store
        if EXCHANGE_FAILURE:
            refuse_compiled(self._name, jax.tree_util.tree_leaves((*self._prefix, args, kwargs)), context_mesh())
        call, leaves = self._find(args, kwargs, runs=True)
        program = call.program
        arrays = program.select(leaves)
        if compat.CRASHES_ON_DELETED or call.moves or not call.has_run:
            check_not_deleted(program, arrays, call.concrete)
        if program.donate:
            check_shared(program, arrays)
        if not call.has_run:
            require_attached(self._name, program.mesh, *map(mesh_of, arrays))
            self._require_devices(program.mesh)
            self._trace(call, arrays)
        if call.moves:
            arrays = self._place(arrays, call)
        try:
            out = call.jitted(*arrays) if call.has_run else self._first_run(call, arrays)
        except RuntimeError:
            check_not_deleted(program, arrays, call.concrete)
            raise
        store.runs = call.used = store.runs + 1
        self._calls += 1
        unfinished = program.empty or program.delete_after or program.mislabelled
        return program.finish(arrays, out) if unfinished else program.build(out)

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, runs: bool = False) -> tuple[CallPlan, list[Any]]:
        """What to do for these arguments, and their leaves."""
        store = self._store
        leaves, treedef = jax.tree_util.tree_flatten((*self._prefix, args, kwargs))
        mapping = self._options.mapping()
        context = compat.trace_key()
        seen, call = self._last
        now, same = None, False
        try:
            now = compat.placements(leaves), mapping, context, treedef
            # Mostly the same as in the last call, which comparing finds faster than hashing.
            same = now == seen
        except (AttributeError, ValueError):
            # Not all are arrays, or arrays in static fields, which have no truth value, are compared.
            pass
        key = None
        if not same:
            key = treedef, signature(leaves), mapping, context
            # None also where something cannot be hashed; planning finds out what.
            call = store.calls.get(key)
        if call is not None and call.held is not None and (numbers := differing_numbers(treedef, call.held)):
            # Structures are equal whose static fields are 1, 1.0 and True: the first has the key, others add to it.
            key = treedef, signature(leaves), mapping, context
            call = store.calls.get(key)
            if call is not None and call.held is not None and call.held.numbers != numbers[0]:
                key = (*key, *numbers)
                call = store.calls.get(key)
        if call is None:
            assert key is not None
            if runs:
                require_attached(self._name, context_mesh(), *map(mesh_of, leaves))
            call = self._plan(treedef, key, args, kwargs)
        if key is not None:
            self._last = now, call
            self._used.add(call.program.counts)
        return call, leaves

    def _plan(
        self, treedef: PyTreeDef, key: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> CallPlan:
        """Check the arguments of a new signature, decide where each goes, and find or make the program to run."""
        options, store, mapping = self._options, self._store, key[2]
        held = held_numbers(treedef)
        if held is not None and held.contents is not None:
            # A structure that can be changed in place is no key: it's kept by its contents alone.
            key = held.contents, *key[1:4]
            call = store.calls.get(key)
            if call is not None and call.held is not None and not differing_numbers(treedef, call.held):
                return call
        arguments = Arguments(treedef, self._named_arguments(args, kwargs, mapping))
        check_hashable(self._name, key, arguments.leaves)
        with store.lock:
            mesh = context_mesh()
            self._require_mesh(mapping, mesh)
            required = self._required(arguments.arrays, mapping)
            plans = plan_arguments(arguments.arrays, required, mapping, mesh)
            plans = self._check_mismatches(arguments.arrays, plans, required, mapping, mesh)
            # Several signatures can lead to one trace: it ignores what is committed, for example.
            places = [p.place for p in plans]
            full_key = (key[0], held and held.numbers, program_key(arguments, places), *key[2:])
            program = store.programs.get(full_key)
            if program is None or (program.held is not None and differing_numbers(treedef, program.held)):
                donated = donation_mask(self._name, self._fn, options, args, kwargs)
                donated = [False] * (len(arguments.leaves) - len(donated)) + donated
                out_mapping = (
                    mapping if options.out_axis_resources is None else self._named(options.out_axis_resources, mapping)
                )
                program = Program(self._function, arguments, donated, (mapping, out_mapping), mesh, held)
                store.programs[full_key] = program
            call = CallPlan(
                program,
                tuple(n for n, leaf in enumerate(arguments.arrays) if is_concrete(leaf.value)),
                tuple((n, p.place) for n, p in enumerate(plans) if p.place is not None),
                tuple(n for n, p in enumerate(plans) if p.mismatch is not None),
                program.held,
                used=store.runs,
            )
            self._hint_numbers(arguments.leaves)
            store.calls.remove(key)
            return store.calls.put(key, call)

    def _named(self, given: AxisMapping, mapping: AxisMapping | None) -> AxisMapping:
        """A mapping given to the function, with all names by leaf path."""
        return with_context_names(given, self._options.axes if mapping is None else mapping.axes_items)

    def _named_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], mapping: AxisMapping | None
    ) -> list[Leaf]:
        """The argument leaves, with their names by path."""
        leaves = argument_leaves(self._fn, self._prefix, args, kwargs)
        given = self._options.in_axis_resources
        if (default := dict(given).get("") if isinstance(given, tuple) else given) is not None:
            mapping = self._named(default, mapping)
        axes = self._options.axes
        # Names in context are for other calls, too: they need fit none of these arguments.
        return with_names(leaves, axes if mapping is None else mapping.axes_items, lenient=not axes)

    def _required(self, arrays: Sequence[Leaf], mapping: AxisMapping | None) -> list[AxisMapping | None]:
        """What each array argument must be sharded by, if anything says so."""
        given = self._options.in_axis_resources
        by_name = dict(given) if isinstance(given, tuple) else {}
        default = by_name.pop("", None) if isinstance(given, tuple) else given
        if isinstance(default, FsdpMapping) and not any(isinstance(leaf.value, Tracer) for leaf in arrays):
            check_unmatched(self._name, arrays, self._named(default, mapping))
        names = list(dict.fromkeys(argument_name(leaf.path) for leaf in arrays))
        if unknown := [name for name in by_name if name not in names]:
            raise MappingError(
                f"{self._name}: in_axis_resources names {', '.join(unknown)}, but the arguments with arrays are"
                f" {', '.join(names)}{did_you_mean(unknown[0], names)}",
                fix="use the names of the function's parameters",
            )
        return [by_name.get(argument_name(leaf.path), default) for leaf in arrays]

    def _check_mismatches(
        self,
        arrays: Sequence[Leaf],
        plans: Sequence[ArgumentPlan],
        required: Sequence[AxisMapping | None],
        mapping: AxisMapping | None,
        mesh: MeshLike | None,
    ) -> Sequence[ArgumentPlan]:
        """Raise, warn, or neither, as ``on_mismatch`` says, and return the plans that hold."""
        policy = self._options.on_mismatch
        mismatching = [p for p in plans if p.mismatch is not None]
        # An argument that has no place cannot be resharded.
        if not mismatching or (policy == "reshard" and all(p.place is not None for p in mismatching)):
            return plans
        options = self._options
        given = [options.axis_resources] * len(arrays) if options.in_axis_resources is None else required
        text = mismatch_text(self._name, arrays, plans, given, mapping, mesh)
        if policy != "warn":
            raise MismatchError(text)
        self._function.warn(text)
        return [p if p.mismatch is None else ArgumentPlan() for p in plans]

    def _require_mesh(self, mapping: AxisMapping | None, mesh: MeshLike | None) -> None:
        options = self._options
        if mesh is None and any((options.in_axis_resources, options.out_axis_resources, mapping)):
            raise NoMeshError(
                f"{self._name}: there is an axis mapping, but no mesh is in force",
                fix="enter jax.set_mesh(mesh) around the call (in each thread: contexts are thread-local)",
            )
        if mesh is None and mapping is None and (hint := thread_hint()):
            self._function.warn(
                f"{self._name}: no axis mapping and no mesh is in force{hint}",
                fix="enter ns.axis_mapping(mapping) and jax.set_mesh(mesh) in this thread",
            )

    def _require_devices(self, mesh: MeshLike | None) -> None:
        if isinstance(mesh, AbstractMesh) and compat.nothing_traced():
            raise NoMeshError(
                f"{self._name}: the mesh in force ({describe(mesh)}) is abstract and has no devices",
                fix="enter jax.set_mesh(mesh) around the call; an abstract mesh will do for eval_shape",
            )

    def _hint_numbers(self, leaves: Sequence[Leaf]) -> None:
        """Warn of a Python number that has had three values, each of which compiled the function again."""
        for leaf in leaves:
            if type(leaf.value) not in (bool, int, float, complex):
                continue
            seen = self._store.numbers_seen[leaf.path]
            if len(seen) < 3:
                seen.add(static_key(leaf.value))
                if len(seen) == 3:
                    self._function.warn(
                        f"{self._name}: argument {leaf.path} is a Python {type(leaf.value).__name__} and has had 3"
                        " distinct values; each of them compiles the function again",
                        fix=f"pass an array, e.g. jnp.asarray({leaf.path})",
                    )

    def _trace(self, call: CallPlan, arrays: Sequence[Any]) -> list[Any]:
        """Trace and check for the arguments as they will be placed, and return them, before anything moves or runs."""
        program, placed = call.program, list(arrays)
        for n, want in call.moves:
            x = placed[n]
            dtype = jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)
            weak = bool(getattr(x, "weak_type", False))
            placed[n] = jax.ShapeDtypeStruct(x.shape, dtype, sharding=want, weak_type=weak)
        placed = list(map(compat.typed_struct, placed))
        program.trace(placed)
        if program.donate:
            check_donatable(program, placed)
        call.like = program.places_of_arguments(placed)
        call.jitted = program.jitted_for(call.like)
        return placed

    def _place(self, arrays: Sequence[Any], call: CallPlan) -> list[Any]:
        store, paths = self._store, call.program.paths
        placed = place_leaves(paths, arrays, call.moves, call.program.donate)
        if call.reshards:
            moved = sum(arrays[n].nbytes for n in call.reshards)
            self._reshards += len(call.reshards)
            self._bytes_moved += moved
            call.streak = call.streak + 1 if call.used == store.runs else 1
            if call.streak == 3:
                self._function.warn(
                    f"{self._name}: 3 calls in a row moved the same arguments, {human_bytes(moved)} per call",
                    [f"{paths[n]}: {human_bytes(arrays[n].nbytes)}" for n in call.reshards],
                    fix="place them once, before the loop, with ns.shard",
                )
        return placed

    def _first_run(self, call: CallPlan, arrays: Sequence[Any]) -> Sequence[Any]:
        program = call.program
        with program.counting():
            if program.has_host_outputs and not any(isinstance(x, Tracer) for x in arrays):
                program.check_memory(call.jitted.lower(*arrays).compile())
            out = call.jitted(*arrays)
        call.has_run = True
        program.check_places(out)
        return out

    def lower(self, /, *args: P.args, **kwargs: P.kwargs) -> Lowered:
        """Lower for arguments (arrays or ``jax.ShapeDtypeStruct``s), as ``jax.jit(...).lower`` does.

        Returns:
            A `Lowered`, whose ``compile()`` gives a function that takes the same arguments.

        Raises:
            NamedShardError: As a call does.
        """
        return self.lower_bound((), args, kwargs)

    def lower_bound(self, bound: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lowered:
        """Lower with some leading arguments that the result does not ask for again."""
        call, leaves = self._find((*bound, *args), kwargs)
        arrays = self._trace(call, call.program.select(leaves))
        return Lowered(call.jitted.lower(*arrays), call, self._prefix, bound)

    def eval_shape(self, /, *args: Any, **kwargs: Any) -> PyTree:
        """The result's structure, shapes and dtypes, without running anything.

        Args:
            *args: Arrays or ``jax.ShapeDtypeStruct``s.
            **kwargs: The same.

        Returns:
            The result with a ``jax.ShapeDtypeStruct`` for each array. Its sharding is known, without compiling, where a
            mapping decides it, a type on Explicit axes, or the argument that it replaces; what was traced into host
            memory is compiled for where nothing else tells its sharding, so that no memory kind is lost.

        Raises:
            NamedShardError: As a call does.
        """
        call, leaves = self._find(args, kwargs)
        program = call.program
        arrays = self._trace(call, program.select(leaves))
        places = [program.known_place(n, call.like) for n in range(len(program.outputs))]
        unknown = [n for n, o in enumerate(program.outputs) if o.memory_kind != "device" and places[n] is None]
        if unknown and not isinstance(program.mesh, AbstractMesh) and compat.nothing_traced():
            got = Lowered(call.jitted.lower(*arrays), call, self._prefix, ()).compile().outputs()
            for n in unknown:
                places[n] = got[n].got
        typed = zip((o.aval for o in program.outputs), places, strict=True)
        return program.build(
            [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s, weak_type=x.weak_type) for x, s in typed]
        )

    def report(self) -> Report:
        """Counts of calls, traces, compiles, re-shards and bytes moved so far."""
        traces, compiles = (sum(getattr(c, kind) for c in self._used) for kind in ("traces", "compiles"))
        return Report(self._calls, traces, compiles, self._reshards, self._bytes_moved)


class _BoundNamedJit:
    """A `NamedJit` used as a method, with its instance; a tree, so that the instance's arrays are seen."""

    def __init__(self, jitted: NamedJit[..., Any], instance: Any):
        self.__func__ = self.__wrapped__ = jitted
        self.__self__ = instance
        self.report = jitted.report

    def __reduce__(self) -> tuple[Any, ...]:
        return _BoundNamedJit, (self.__func__, self.__self__)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    def lower(self, /, *args: Any, **kwargs: Any) -> Lowered:
        return self.__func__.lower_bound((self.__self__,), args, kwargs)

    def eval_shape(self, /, *args: Any, **kwargs: Any) -> PyTree:
        return self.__func__.eval_shape(self.__self__, *args, **kwargs)


jax.tree_util.register_pytree_node(
    _BoundNamedJit,
    lambda bound: ((bound.__self__,), bound.__func__),
    lambda jitted, instance: _BoundNamedJit(jitted, *instance),
)


@overload
def named_jit(
    fn: Callable[P, R],
    axis_resources: MappingLike | None = None,
    *,
    in_axis_resources: MappingLike | Mapping[str, MappingLike] | None = None,
    out_axis_resources: MappingLike | None = None,
    donate_args: Any = None,
    donate_kwargs: Any = None,
    on_mismatch: OnMismatch = "error",
    axes: AxesLike | None = None,
    **jit_kwargs: Any,
) -> NamedJit[P, R]: ...


@overload
def named_jit(
    fn: None = None,
    axis_resources: MappingLike | None = None,
    *,
    in_axis_resources: MappingLike | Mapping[str, MappingLike] | None = None,
    out_axis_resources: MappingLike | None = None,
    donate_args: Any = None,
    donate_kwargs: Any = None,
    on_mismatch: OnMismatch = "error",
    axes: AxesLike | None = None,
    **jit_kwargs: Any,
) -> Decorator: ...


def named_jit(
    fn: Callable[..., Any] | None = None,
    axis_resources: MappingLike | None = None,
    *,
    in_axis_resources: MappingLike | Mapping[str, MappingLike] | None = None,
    out_axis_resources: MappingLike | None = None,
    donate_args: Any = None,
    donate_kwargs: Any = None,
    on_mismatch: OnMismatch = "error",
    axes: AxesLike | None = None,
    **jit_kwargs: Any,
) -> NamedJit[..., Any] | Decorator:
    """Compile a function of named arrays, with Haliax's signature; a decorator or a call.

    Arrays (JAX's, numpy's and numpy scalars) are traced; every other leaf is static and keyed with its type, so that
    ``1``, ``1.0`` and ``True`` are three programs. Static values that can change in place (a dict, list, set or array
    in a static field) are compared by their contents at each call; objects that Python hashes by identity must not
    change, as for ``jax.jit``. The function's Python body runs once per distinct signature.
    Before a new signature runs, every argument is compared with what it must be, and all that do not fit are named at
    once. What a function holds (a module, a method of one, a partial) is an argument like the others; of a method, the
    instance is the first argument.

    Args:
        fn: The function; None to use this as a decorator.
        axis_resources: The mapping in force inside the function; the context's at the call by default.
        in_axis_resources: What each named argument must be sharded by, or argument name to such a mapping,
            ``{"x": {"batch": "data"}}``. By default an argument may have any spec, but must be on the context mesh.
            Host arrays, uncommitted ones, and those that JAX made replicated over that mesh are placed by this mapping;
            the first two else by ``axis_resources``.
        out_axis_resources: How named results are sharded; ``axis_resources`` by default. Plain results come out like
            the argument that they replace: of their type, and the only one (or the only donated one) that they are
            computed from element by element. Others are left to the compiler.
        donate_args: For each positional argument: True, False, a function of a leaf, or a tree of these that is a
            prefix of the argument.
        donate_kwargs: The same by name, however the argument is passed; True for all that are passed by keyword.
        on_mismatch: ``"error"``; ``"reshard"`` moves just the arguments that do not fit, in one batch, and warns at the
            third call in a row that moves the same ones; ``"warn"`` goes on with JAX's own behaviour.
        axes: Names for arrays that carry none, by leaf path, which starts with the argument's name; in results, by the
            path in the result. See `AxisMapping`.
        **jit_kwargs: For ``jax.jit``: ``keep_unused``, ``inline``, ``compiler_options``, ...

    Returns:
        The compiled function, with `NamedJit.lower`, `NamedJit.eval_shape` and `NamedJit.report`.

    Raises:
        TypeError: A keyword is not for this function.
        NoMeshError: (At a call.) There is a mapping, but no mesh in force.
        MismatchError: (At a call.) Committed arguments are not placed as needed.
        IgnoredTransferError: (At a call.) Traced code has a ``device_put`` that the compiler would ignore.
        DonationError: (At a call.) A donated argument cannot be donated, is passed twice, or was donated before.
        OffloadError: (At a call.) A result that was traced into host memory would come out of it elsewhere.
        StaticArgumentError: (At a call.) A leaf is neither an array nor hashable.
        UnattachedDevicesError: (At a call.) The mesh is a `topology_mesh`.

    Examples:
        >>> import haliax as hax, jax, jax.numpy as jnp, namedshard as ns
        >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
        >>> double = ns.named_jit(lambda x: x * 2, {"batch": "data"})
        >>> with jax.set_mesh(mesh):
        ...     y = double(hax.named(jnp.arange(4.0), "batch"))
        >>> y.array.tolist(), double.report().traces
        ([0.0, 2.0, 4.0, 6.0], 1)
    """
    for name in _NOT_TAKEN:
        if name in jit_kwargs:
            raise TypeError(
                f"named_jit takes no {name}: named arguments and results are placed by in_axis_resources and"
                " out_axis_resources, non-array arguments are static, and donate_args donates"
            )
    if on_mismatch not in ("error", "reshard", "warn"):
        raise TypeError(f"on_mismatch={on_mismatch!r}: use 'error', 'reshard' or 'warn'")
    options = Options(
        None if axis_resources is None else as_mapping(axis_resources),
        _argument_mappings(in_axis_resources),
        None if out_axis_resources is None else as_mapping(out_axis_resources),
        # In hashable forms, so that wrappings with equal specs share their programs.
        tuple(donate_args) if isinstance(donate_args, list) else donate_args,
        tuple(sorted(donate_kwargs.items())) if isinstance(donate_kwargs, dict) else donate_kwargs,
        on_mismatch,
        tuple(sorted(jit_kwargs.items())),
        check_axes(axes),
    )
    return functools.partial(NamedJit, options=options) if fn is None else NamedJit(fn, options)


def _argument_mappings(given: Any) -> AxisMapping | tuple[tuple[str, AxisMapping], ...] | None:
    """One mapping for all arguments, or each argument's own."""
    if given is None:
        return None
    by_name = cast("dict[str, Any]", given) if isinstance(given, Mapping) else {}
    if any(isinstance(m, Mapping) for m in by_name.values()):
        return tuple((name, as_mapping(mapping)) for name, mapping in by_name.items())
    return as_mapping(given)


@overload
def fsdp(
    fn: Callable[P, R],
    parameter_mapping: MappingLike,
    compute_mapping: MappingLike,
    *,
    in_axis_resources: Mapping[str, MappingLike] | None = None,
    axes: AxesLike | None = None,
    unmatched: Unmatched | None = None,
) -> NamedJit[P, R]: ...


@overload
def fsdp(
    fn: None = None,
    *,
    parameter_mapping: MappingLike,
    compute_mapping: MappingLike,
    in_axis_resources: Mapping[str, MappingLike] | None = None,
    axes: AxesLike | None = None,
    unmatched: Unmatched | None = None,
) -> Decorator: ...


@overload
def fsdp(
    fn: MappingLike,
    parameter_mapping: MappingLike,
    *,
    in_axis_resources: Mapping[str, MappingLike] | None = None,
    axes: AxesLike | None = None,
    unmatched: Unmatched | None = None,
) -> Decorator: ...


def fsdp(
    fn: Any = None,
    parameter_mapping: Any = None,
    compute_mapping: Any = None,
    *,
    in_axis_resources: Mapping[str, MappingLike] | None = None,
    axes: AxesLike | None = None,
    unmatched: Unmatched | None = None,
) -> NamedJit[..., Any] | Decorator:
    """Compile a step whose arguments and results are sharded one way and whose computation another.

    The pattern of fully sharded data parallelism (Rajbhandari et al., "ZeRO", 2020): parameters rest sharded over the
    data axis and are gathered where they are used. It is `named_jit` with the compute mapping as ``axis_resources``.
    Arguments and results are sharded by the parameter mapping; those with a batch axis by the compute mapping: an axis
    that only the latter places, over mesh axes that parameters are split over, or in an array without a parameter's
    axes.

    Args:
        fn: The function; leave it out to use this as a decorator: ``@fsdp(parameter_mapping, compute_mapping)``.
        parameter_mapping: For parameters, gradients and optimizer states.
        compute_mapping: In force inside the function, and for the batch.
        in_axis_resources: Argument name to mapping, for arguments that neither of the two is for.
        axes: Names for arrays that carry none, by leaf path; see `named_jit`.
        unmatched: What to do where no argument has names: ``"warn"``, once, ``"error"`` or ``"ignore"``.

    Returns:
        The compiled function, or a decorator.

    Raises:
        TypeError: A mapping is missing.
        AxisNamesError: (At a call.) ``axes`` do not fit the arrays, or no argument has names and
            ``unmatched="error"``.

    Examples:
        >>> import haliax as hax, jax, jax.numpy as jnp, namedshard as ns
        >>> step = ns.fsdp(lambda w: w * 2, {"embed": "data"}, {"batch": "data"})
        >>> with jax.set_mesh(jax.sharding.Mesh(jax.devices()[:1], ("data",))):
        ...     w = step(hax.named(jnp.arange(4.0), "embed"))
        >>> w.array.tolist()
        [0.0, 2.0, 4.0, 6.0]
    """
    if fn is not None and not callable(fn):
        fn, parameter_mapping, compute_mapping = None, fn, parameter_mapping
    if parameter_mapping is None or compute_mapping is None:
        raise TypeError("fsdp needs a parameter_mapping and a compute_mapping")
    compute = as_mapping(compute_mapping)
    places = FsdpMapping(AxisMapping(parameter_mapping, unmatched=unmatched), compute)
    given = {"": places, **(in_axis_resources or {})}
    return named_jit(fn, compute, in_axis_resources=given, out_axis_resources=places, axes=axes)
