"""Initialise a model with every leaf born in its shards, compiling what is distinct once: `init`."""

import collections
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Hashable
from typing import Any, Literal, overload

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import PyTree

from namedshard import _jaxcompat as compat
from namedshard._errors import NoMeshError, message
from namedshard._init.programs import ProgramReport
from namedshard._init.run import Recipe, Run, make_recipe
from namedshard._init.trace import NotHashable, Request, mesh_of, plan_outputs, surroundings, trace
from namedshard._place.shard import check_memory_kind, shard
from namedshard._plan.leaves import named_leaves
from namedshard._plan.mapping import AxisMapping, MappingLike, resolve_mapping, thread_hint
from namedshard._plan.mesh import MeshLike, resolve_mesh
from namedshard._processes.coordination import refuse_compiled
from namedshard._types import Tracer


@dataclasses.dataclass(frozen=True, slots=True)
class InitReport:
    """What an `init` did.

    Attributes:
        leaves: Arrays in the result.
        bytes: Bytes of all of them.
        bytes_per_device: Bytes of their shards on each device.
        programs: The distinct programs; their number is what compile time grows with.
        calls: How many times one of them ran.
        local: Leaves made whole on one device and then distributed, so that their values do not depend on the mesh.
        peak_temporary_bytes: The most that one program holds on each device beside its inputs and results.
        trace_seconds: Time to trace the function and to cut it up; 0 if an earlier call had done so.
        compile_seconds: Time spent waiting for compilations.
        total_seconds: Time of the whole call; on asynchronous devices results may still be on their way.
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


class _Recipes:
    """Recently used recipes, which hold their programs."""

    def __init__(self, size: int):
        self._size = size
        self._entries: collections.OrderedDict[Hashable, Recipe] = collections.OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Recipe | None:
        with self._lock:
            found = self._entries.get(key)
            if found is not None:
                self._entries.move_to_end(key)
            return found

    def put(self, key: Hashable, recipe: Recipe) -> None:
        with self._lock:
            self._entries[key] = recipe
            while len(self._entries) > self._size:
                self._entries.popitem(last=False)


_recipes = _Recipes(16)


def _recipe_for(
    request: Request, mapping: AxisMapping | None, mesh: Mesh | None, memory_kind: str | None, exact: bool
) -> tuple[Recipe, bool]:
    try:
        key = request.key(), mapping, mesh, memory_kind, exact, surroundings()
    except NotHashable:
        return make_recipe(request, mapping, mesh, memory_kind, exact), True
    recipe = _recipes.get(key)
    if recipe is not None:
        return recipe, False
    recipe = make_recipe(request, mapping, mesh, memory_kind, exact)
    _recipes.put(key, recipe)
    return recipe, True


@overload
def init(
    fn: Callable[..., PyTree],
    *args: Any,
    mapping: MappingLike | None = None,
    mesh: MeshLike | None = None,
    memory_kind: str | None = None,
    exact: bool = False,
    report: Literal[False] = False,
    **kwargs: Any,
) -> PyTree: ...
@overload
def init(
    fn: Callable[..., PyTree],
    *args: Any,
    mapping: MappingLike | None = None,
    mesh: MeshLike | None = None,
    memory_kind: str | None = None,
    exact: bool = False,
    report: Literal[True],
    **kwargs: Any,
) -> tuple[PyTree, InitReport]: ...
def init(
    fn: Callable[..., PyTree],
    *args: Any,
    mapping: MappingLike | None = None,
    mesh: MeshLike | None = None,
    memory_kind: str | None = None,
    exact: bool = False,
    report: bool = False,
    **kwargs: Any,
) -> Any:
    """Call an initialiser, with every array of its result made where the mapping wants it.

    The function is traced once and cut up: small values, keys above all, are worked out by one small loop, and each
    leaf by a program of its own. Equal programs are compiled once, so the time to compile grows with the number of
    *distinct* initialisers, not with the depth of the model. No array is ever whole on one device unless it is small.

    The values are bitwise those of ``fn(*args, **kwargs)`` run eagerly, on any mesh. The exceptions are large leaves
    (over 256 KiB, and over half the largest shard of the model) in the making of which there is a sum, a matrix product
    or a decomposition; an approximated function of a floating array, such as ``erf``; within one jit the sum of two
    products; or, on CPUs, an approximated function such as that of ``jax.random.normal`` where rows or their shards are
    no multiple of 16 elements. These can differ in the last bit, as can what a jit with more than 8 results makes, and
    the report marks them ``inexact``; with ``exact=True`` they are made whole on one device instead.

    Args:
        fn: Any function that returns a tree: ``Model.init``, the ``init`` of an optimizer. JAX arrays among its
            arguments (keys, parameters, of any shape and dtype) are traced; all else is not. It must be possible to
            ``jit`` it.
        *args: Its arguments. With a ``jax.ShapeDtypeStruct`` among them nothing is computed.
        mapping: Named axis → mesh axes; the context's (`axis_mapping`) by default.
        mesh: A ``jax.sharding.Mesh``; by default the context's, else that of the arguments. With an ``AbstractMesh``
            nothing is computed.
        memory_kind: Where all arrays are to live: ``"device"``, ``"pinned_host"``, ...; None leaves each in the memory
            that ``fn`` leaves it in.
        exact: Never differ from the eager values, at the cost of memory for the leaves named above. Also keeps large
            jits within ``fn``, or ``fn`` itself if it is one, whole: without it those with more than 8 results are
            opened, and their values are those of their operations run one by one.
        report: Return an `InitReport` along.
        **kwargs: Keyword arguments of ``fn``.

    Returns:
        What ``fn`` returns. Named leaves are where the mapping wants them. Other arrays, and all without a mapping, are
        sharded as ``fn`` splits them over the Explicit axes in force, else as the argument whose leaf path ends theirs
        and whose shape is theirs (the moments of an optimizer as its parameters), else replicated on the mesh; without
        a mesh they stay on the default device. Arrays that ``fn`` passes through and everything that is no array are
        left as they are. When nothing is computed, arrays are ``jax.ShapeDtypeStruct``s with their shardings. Under
        ``jit`` and other transformations, ``fn`` is called and its result given to `shard`. With ``report=True``, the
        pair of that and the `InitReport`.

    Raises:
        NoMeshError: There is a mapping or a ``memory_kind``, but no mesh.
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
    found = resolve_mapping(mapping)
    where = resolve_mesh(mesh) or mesh_of(request)
    if where is None and (found is not None or memory_kind is not None):
        have = "an axis mapping" if found is not None else "a memory kind"
        raise NoMeshError(
            message(
                f"init: there is {have}, but no mesh was given and none is in force" + thread_hint(),
                fix="pass mesh=, or enter jax.set_mesh",
            )
        )
    if request.traced or not compat.nothing_traced():
        tree = _traced(request, found, where, memory_kind)
        return (tree, _measured(tree, started)) if report else tree
    request.check()
    refuse_compiled("init", request.arrays, where)
    if isinstance(where, Mesh) and memory_kind is not None:
        check_memory_kind(where, memory_kind)
    if request.abstract or isinstance(where, AbstractMesh):
        tree = _described(request, found, where, memory_kind)
        return (tree, _measured(tree, started)) if report else tree
    recipe, new = _recipe_for(request, found, where, memory_kind, exact)
    traced_at = time.perf_counter()
    run = Run(recipe, request.arrays)
    tree = jax.tree_util.tree_unflatten(recipe.traced.treedef, run.run())
    if not report:
        return tree
    fresh = recipe.fresh if new else frozenset[int]()
    return tree, dataclasses.replace(
        _measured(tree, started),
        programs=recipe.reports(fresh),
        calls=sum(len(step.calls) for step in recipe.steps),
        local=recipe.local_leaves,
        peak_temporary_bytes=recipe.peak_temporary_bytes,
        trace_seconds=traced_at - started if new else 0.0,
        compile_seconds=run.compile_seconds,
    )


def _traced(request: Request, mapping: AxisMapping | None, mesh: MeshLike | None, memory_kind: str | None) -> PyTree:
    tree = request.run(request.arrays)
    if mesh is None or (mapping is None and not any(leaf.own is not None for leaf in named_leaves(tree))):
        return tree
    return shard(tree, mapping or AxisMapping(), mesh, memory_kind=memory_kind)


def _described(request: Request, mapping: AxisMapping | None, mesh: MeshLike | None, memory_kind: str | None) -> PyTree:
    traced = trace(request)
    wanted = plan_outputs(traced, request, mapping, mesh, memory_kind)
    leaves: list[Any] = []
    for struct, slot, sharding in zip(traced.structs, traced.slots, wanted.places, strict=True):
        if isinstance(sharding, NamedSharding) and slot is not None:
            struct = jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding, weak_type=struct.weak_type)
        leaves.append(struct)
    return jax.tree_util.tree_unflatten(traced.treedef, leaves)


def _measured(tree: PyTree, started: float) -> InitReport:
    leaves = [x for x in jax.tree_util.tree_leaves(tree) if isinstance(x, jax.Array | jax.ShapeDtypeStruct)]
    whole = [math.prod(x.shape) * x.dtype.itemsize for x in leaves]
    on_device = 0
    for x, size in zip(leaves, whole, strict=True):
        sharding = None if isinstance(x, Tracer) else x.sharding
        if isinstance(sharding, NamedSharding) and size:
            size = size * math.prod(sharding.shard_shape(x.shape)) // math.prod(x.shape)
        on_device += size
    return InitReport(len(leaves), sum(whole), on_device, total_seconds=time.perf_counter() - started)
