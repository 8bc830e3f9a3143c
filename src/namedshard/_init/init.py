"""`init`: creates a model already sharded, compiling each distinct initializer once."""

import dataclasses
import time
from collections.abc import Callable, Hashable
from typing import Any, Literal, TypeVar, overload

import jax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import PyTree

from namedshard import _jaxcompat as compat
from namedshard._cache import BoundedCache
from namedshard._errors import NoMeshError, message
from namedshard._init.programs import finish, submit
from namedshard._init.run import ProgramReport, Recipe, Run, bytes_per_device, make_recipe, move, temporary_bytes
from namedshard._init.trace import Place, Request, mesh_of, trace
from namedshard._place.local import change_memory
from namedshard._place.shard import check_memory_kind, shard
from namedshard._plan.leaves import named_leaves
from namedshard._plan.mapping import AxisMapping, MappingLike, Unmatched, resolve_mapping, thread_hint
from namedshard._plan.mesh import MeshLike, is_unattached, require_attached, resolve_mesh
from namedshard._plan.names import AxesLike
from namedshard._plan.plan import with_policy
from namedshard._processes.coordination import refuse_compiled
from namedshard._types import Tracer


@dataclasses.dataclass(frozen=True, slots=True)
class InitReport:
    """What an `init` did.

    Attributes:
        leaves: Arrays in the result.
        bytes: Bytes of all of them.
        bytes_per_device: Bytes of their shards on each device.
        programs: The distinct programs; compile time grows with their number.
        calls: How many times one of them ran, without those that derive keys.
        local: Leaves computed on one device and then sharded (``exact=True``).
        peak_temporary_bytes: The most that one program allocates on each device beside its inputs and results.
        trace_seconds: Time to trace the function and split it into programs; 0 if an earlier call had done so.
        compile_seconds: Time spent waiting for compilations.
        total_seconds: Time of the whole call; on asynchronous devices results may not be ready yet.
    """

    leaves: int = 0
    bytes: int = 0
    bytes_per_device: int = 0
    programs: tuple[ProgramReport, ...] = ()
    calls: int = 0
    local: int = 0
    peak_temporary_bytes: int = 0
    trace_seconds: float = 0.0
    compile_seconds: float = 0.0
    total_seconds: float = 0.0


_recipes: BoundedCache[Recipe] = BoundedCache(16)
compat.clear_with_jax(_recipes)


def _recipe_for(request: Request, *where: Any) -> tuple[Recipe, bool]:
    """The recipe of a call, and whether it is new.

    A recipe holds what the function closes over, so it is forgotten with the function.
    """
    held: list[Hashable] = []

    def forget(_: Any) -> None:
        for one in held:
            _recipes.remove(one)

    key = request.key(forget), where
    recipe = _recipes.get(key)
    if recipe is not None:
        return recipe, False
    held.append(key)
    return _recipes.put(key, make_recipe(request, *where)), True


R = TypeVar("R")


@overload
def init(
    fn: Callable[..., R],
    *args: Any,
    mapping: MappingLike | None = None,
    mesh: MeshLike | None = None,
    memory_kind: str | None = None,
    exact: bool = False,
    report: Literal[False] = False,
    axes: AxesLike | None = None,
    unmatched: Unmatched | None = None,
    **kwargs: Any,
) -> R: ...
@overload
def init(
    fn: Callable[..., R],
    *args: Any,
    mapping: MappingLike | None = None,
    mesh: MeshLike | None = None,
    memory_kind: str | None = None,
    exact: bool = False,
    report: Literal[True],
    axes: AxesLike | None = None,
    unmatched: Unmatched | None = None,
    **kwargs: Any,
) -> tuple[R, InitReport]: ...
def init(
    fn: Callable[..., R],
    *args: Any,
    mapping: MappingLike | None = None,
    mesh: MeshLike | None = None,
    memory_kind: str | None = None,
    exact: bool = False,
    report: bool = False,
    axes: AxesLike | None = None,
    unmatched: Unmatched | None = None,
    **kwargs: Any,
) -> Any:
    """Creates a tree already sharded: calls a function, with each array of its result created in its shards.

    The function is traced once and split into programs, one for each distinct leaf: equal ones are compiled once, so
    compile time grows with the number of *distinct* initializers, not with the depth of the model.

    Values are those of ``jax.jit`` applied to each leaf. They are the same on every mesh, except where a reduction is
    sharded: then the last bits can differ, and the report marks the program ``inexact``.

    Args:
        fn: Any function that returns a tree: ``Model.init``, the ``init`` of an optimizer. JAX arrays among its
            arguments (keys, parameters, of any shape and dtype) are traced; everything else is static. It must be
            possible to ``jit`` it.
        *args: Its arguments. With a ``jax.ShapeDtypeStruct`` among them nothing is computed.
        mapping: Named axis → mesh axes; defaults to the one in context (`axis_mapping`).
        mesh: A ``jax.sharding.Mesh``; defaults to the one in context, else that of the arguments. With an
            ``AbstractMesh`` or a `topology_mesh` nothing is computed.
        memory_kind: The memory kind of all arrays: ``"device"``, ``"pinned_host"``, ...; with None each has the one
            that ``fn`` gives it.
        exact: Run ``fn`` eagerly on one device and shard the result leaf by leaf.
        report: Also return an `InitReport`.
        axes: Names for arrays that carry none, by leaf path of the result; see `AxisMapping`.
        unmatched: As `shard` takes it.
        **kwargs: Keyword arguments of ``fn``.

    Returns:
        What ``fn`` returns. Named leaves are where the mapping says. Other arrays, and all without a mapping, are
        sharded as ``fn`` shards them over Explicit axes, else like the argument with the same shape whose path is a
        suffix of theirs (an optimizer's moments like its parameters), else replicated; without a mesh they are on the
        default device. Arrays that ``fn`` passes through and everything that isn't an array are returned as they are.
        When nothing is computed, arrays are ``jax.ShapeDtypeStruct``s with their shardings. Under ``jit`` and other
        transformations, ``fn`` is called and its result sharded by `shard`. With ``report=True``, the pair of that and
        the `InitReport`.

    Raises:
        NoMeshError: There is a mapping or a ``memory_kind``, but no mesh.
        AxisNamesError: ``axes`` do not fit the arrays, or nothing matches and ``unmatched="error"``.
        MeshAxisNotFoundError: A leaf's axis is mapped to a mesh axis that the mesh lacks.
        MeshAxisConflictError: Two axes of one leaf are mapped to one mesh axis.
        IndivisibleAxisError: A leaf's axis does not divide and the mapping's policy is ``"error"``.
        NoCandidateError: No candidate of a `first` rule fits a leaf.
        MemoryKindError: The mesh's devices do not offer the memory kind.
        DeletedArrayError: An argument was donated or deleted.

    Examples:
        >>> import haliax as hax, jax, namedshard as ns
        >>> Vocab, Embed = hax.Axis("vocab", 64), hax.Axis("embed", 32)
        >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
        >>> key = jax.random.key(0)
        >>> table = ns.init(hax.random.normal, key, (Vocab, Embed), mapping={"embed": "data"}, mesh=mesh)
        >>> tuple(table.array.sharding.spec)
        (None, 'data')
        >>> bool((table.array == hax.random.normal(key, (Vocab, Embed)).array).all())
        True
    """
    started = time.perf_counter()
    request = Request.of(fn, args, kwargs)
    found, where = _mapping_and_mesh("init", request, resolve_mapping(mapping, axes), mesh, memory_kind)
    found = None if found is None else with_policy(found, None, unmatched)
    extra: Callable[[], dict[str, Any]] = dict
    if any(isinstance(x, Tracer) for x in request.arrays) or not compat.nothing_traced() or jax.config.jax_disable_jit:
        tree = _traced(request, found, where, memory_kind)
    else:
        request.check()
        refuse_compiled("init", request.arrays, where)
        if isinstance(where, Mesh) and memory_kind is not None:
            check_memory_kind(where, memory_kind)
        structs = isinstance(where, AbstractMesh) or is_unattached(where)
        if structs or any(isinstance(x, jax.ShapeDtypeStruct) for x in request.arrays):
            tree = _described(request, found, where, memory_kind)
        elif exact:
            tree, extra = _eager(request, found, where, memory_kind)
        else:
            tree, extra = _by_programs(request, found, where, memory_kind)
    if not report:
        return tree
    return tree, dataclasses.replace(_measured(tree, started), **extra())


def _mapping_and_mesh(
    what: str, request: Request, mapping: MappingLike | None, mesh: MeshLike | None, memory_kind: str | None
) -> tuple[AxisMapping | None, MeshLike | None]:
    """The mapping given or in context, and the mesh given, in context, or of the arguments."""
    found = resolve_mapping(mapping)
    where = resolve_mesh(mesh) or mesh_of(request)
    if where is None and (found is not None or memory_kind is not None):
        have = "an axis mapping" if found is not None else "a memory kind"
        raise NoMeshError(
            f"{what}: there is {have}, but no mesh was given and none is in force" + thread_hint(),
            fix="pass mesh=, or enter jax.set_mesh",
        )
    return found, where


@compat.explicit_transfers()
def _traced(request: Request, mapping: AxisMapping | None, mesh: MeshLike | None, memory_kind: str | None) -> PyTree:
    tree = request.run(request.arrays)
    if mesh is None or (mapping is None and not any(leaf.own is not None for leaf in named_leaves(tree))):
        return tree
    return shard(tree, mapping or AxisMapping(), mesh, memory_kind=memory_kind)


def _by_programs(
    request: Request, mapping: AxisMapping | None, mesh: MeshLike | None, memory_kind: str | None
) -> tuple[PyTree, Callable[[], dict[str, Any]]]:
    """Compiles and runs the programs; also returns a function for what only they can report."""
    started = time.perf_counter()
    recipe, new = _recipe_for(request, mapping, mesh, memory_kind)
    trace_seconds = time.perf_counter() - started if new else 0.0
    compilations = recipe.compile()
    fresh = {key for key, compilation in compilations.items() if not compilation.done()}
    run = Run(recipe, request.arrays)
    waiting = time.perf_counter()
    programs = finish(compilations)
    compile_seconds = time.perf_counter() - waiting + run.keys_seconds
    tree = jax.tree_util.tree_unflatten(recipe.traced.treedef, run.leaves(programs))
    return tree, lambda: {
        "programs": run.reports(compilations, fresh),
        "calls": sum(len(step.tails) for step in recipe.steps),
        "peak_temporary_bytes": max(map(temporary_bytes, programs.values()), default=0),
        "trace_seconds": trace_seconds,
        "compile_seconds": compile_seconds,
    }


def _described(request: Request, mapping: AxisMapping | None, mesh: MeshLike | None, memory_kind: str | None) -> PyTree:
    traced = trace(request, mapping, mesh, memory_kind)
    if isinstance(mesh, Mesh):
        for kind in {output.kind for output in traced.outputs if output.kind is not None}:
            check_memory_kind(mesh, kind)
    leaves = [x.value if x.slot is None else _struct_at(x.value, x.place) for x in traced.outputs]
    return jax.tree_util.tree_unflatten(traced.treedef, leaves)


def _struct_at(struct: jax.ShapeDtypeStruct, place: Place) -> jax.ShapeDtypeStruct:
    if isinstance(place, str):
        return change_memory([struct], place)[0]
    return struct if place is None else struct.update(sharding=place)


@compat.explicit_transfers()
def _eager(
    request: Request, mapping: AxisMapping | None, mesh: MeshLike | None, memory_kind: str | None
) -> tuple[PyTree, Callable[[], dict[str, Any]]]:
    """Runs the function eagerly, then moves its results one by one, each released once it is sharded."""
    traced = trace(request, mapping, mesh, memory_kind)
    leaves, treedef = jax.tree_util.tree_flatten(request.run(request.arrays))
    inputs = {id(x) for x in request.arrays}
    moved: dict[Any, Any] = {}
    for i, (x, output) in enumerate(zip(leaves, traced.outputs, strict=True)):
        passed = id(x) in inputs or not isinstance(x, jax.Array)
        want = output.kind if passed and not output.named else output.place
        if (id(x), want) not in moved:
            # The original stays referenced as long as another leaf may be the same array.
            moved[id(x), want] = x, (x if want is None else move({0: (x, want)}, [output.path])[0])
        leaves[i] = moved[id(x), want][1]
    local = sum(isinstance(x, jax.Array) for x in leaves)
    return jax.tree_util.tree_unflatten(treedef, leaves), lambda: {"local": local}


def _measured(tree: PyTree, started: float) -> InitReport:
    leaves = [x for x in jax.tree_util.tree_leaves(tree) if isinstance(x, jax.Array | jax.ShapeDtypeStruct)]
    shardings = [None if isinstance(x, Tracer) else x.sharding for x in leaves]
    return InitReport(
        len(leaves),
        bytes_per_device(leaves, [None] * len(leaves)),
        bytes_per_device(leaves, shardings),
        total_seconds=time.perf_counter() - started,
    )


# --- compiled ahead of time -------------------------------------------------------------------------------------------

_ABSENT = object()


class CompiledInit:
    """A compiled `init`, called with arguments of the types that it was lowered for.

    Attributes:
        programs: The distinct programs, without those that derive keys.
    """

    def __init__(self, fn: Callable[..., Any], request: Request, recipe: Recipe, programs: dict[Hashable, Any]):
        self.programs: tuple[jax.stages.Compiled, ...] = tuple(programs.values())
        self._fn = fn
        self._types = request.types()
        self._recipe = recipe
        self._by_key = programs

    def __call__(self, *args: Any, **kwargs: Any) -> PyTree:
        """Creates the result, as `init` does.

        Raises:
            TypeError: The arguments have another structure or other types than those it was lowered for.
            DeletedArrayError: An argument was donated or deleted.
            UnattachedDevicesError: It was compiled for a `topology_mesh`.
        """
        request = Request.of(self._fn, args, kwargs)
        was, now = self._types, request.types()
        if was != now:
            differing = [path for path in was | now if was.get(path, _ABSENT) != now.get(path, _ABSENT)]
            lines = [f"{path}: {now.get(path, 'missing')}, not {was.get(path, 'expected')}" for path in differing]
            fix = "pass arguments of the same types, or lower again"
            raise TypeError(message("init: the arguments differ from those it was lowered for", lines, fix=fix))
        request.check()
        require_attached("init", self._recipe.mesh)
        refuse_compiled("init", request.arrays, self._recipe.mesh)
        run = Run(self._recipe, request.arrays)
        return jax.tree_util.tree_unflatten(self._recipe.traced.treedef, run.leaves(self._by_key))


class LoweredInit:
    """A lowered `init`; `compile` compiles its distinct programs side by side."""

    def __init__(self, fn: Callable[..., Any], request: Request, recipe: Recipe):
        self._fn = fn
        self._request = request
        self._recipe = recipe
        self._lowered = {key: recipe.lower(step) for key, step in recipe.distinct().items()}

    def compile(self) -> CompiledInit:
        """Compiles the programs, for the mesh's devices, whether or not they're attached."""
        programs = finish({key: submit(one) for key, one in self._lowered.items()})
        return CompiledInit(self._fn, self._request, self._recipe, programs)


def lower_init(
    fn: Callable[..., PyTree],
    *args: Any,
    mapping: MappingLike | None = None,
    mesh: MeshLike | None = None,
    memory_kind: str | None = None,
    axes: AxesLike | None = None,
    **kwargs: Any,
) -> LoweredInit:
    """Lowers `init` of a function, as ``jax.jit(fn).lower(*args)`` does, without computing anything.

    Args:
        fn: Any function that returns a tree.
        *args: Its arguments; arrays may be ``jax.ShapeDtypeStruct``s.
        mapping: Named axis → mesh axes; defaults to the one in context (`axis_mapping`).
        mesh: A ``jax.sharding.Mesh``, whose devices needn't be attached; defaults to the one in context, else that of
            the arguments.
        memory_kind: As for `init`.
        axes: As `init` takes them.
        **kwargs: Keyword arguments of ``fn``.

    Returns:
        An object whose ``compile()`` returns the compiled init: ``programs`` holds its ``jax.stages.Compiled``, and it
        is called with arguments of the same types.

    Raises:
        NoMeshError: There is a mapping or a ``memory_kind`` but no mesh, or the mesh is an ``AbstractMesh``.
        PlanError: A leaf can't be sharded by the mapping; see `init`.
        MemoryKindError: The mesh's devices don't offer the memory kind.

    Examples:
        >>> import haliax as hax, jax, namedshard as ns
        >>> Vocab, Embed = hax.Axis("vocab", 64), hax.Axis("embed", 32)
        >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
        >>> key = jax.ShapeDtypeStruct((2,), "uint32")
        >>> lowered = ns.lower_init(hax.random.normal, key, (Vocab, Embed), mapping={"embed": "data"}, mesh=mesh)
        >>> compiled = lowered.compile()
        >>> len(compiled.programs)
        1
        >>> compiled(jax.random.PRNGKey(0), (Vocab, Embed)).array.shape
        (64, 32)
    """
    request = Request.of(fn, args, kwargs)
    found, where = _mapping_and_mesh("lower_init", request, resolve_mapping(mapping, axes), mesh, memory_kind)
    if isinstance(where, AbstractMesh):
        fix = "pass a jax.sharding.Mesh; init itself plans for an AbstractMesh"
        raise NoMeshError("lower_init: an AbstractMesh has no devices to compile for", fix=fix)
    if where is not None and memory_kind is not None:
        check_memory_kind(where, memory_kind)
    return LoweredInit(fn, request, make_recipe(request, found, where, memory_kind, in_batches=False))
