"""A call of an initialiser, traced: what goes in, what comes out, and where each result is wanted."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from namedshard import _jaxcompat as compat
from namedshard._errors import DeletedArrayError, message
from namedshard._init.jaxpr import places_values
from namedshard._jit.signature import held_values, number_types, static_key
from namedshard._plan.leaves import named_leaves, path_string
from namedshard._plan.mapping import AxisMapping, current_mapping
from namedshard._plan.mesh import MeshLike, context_mesh
from namedshard._plan.plan import plan_leaves
from namedshard._types import PyTreeDef, Tracer

_KEYED_BYTES = 4096


class NotHashable(Exception):
    """The call has an argument that no cache can be keyed on."""


def _argument_path(path: tuple[Any, ...]) -> str:
    """``"args[0]['w']"``: a path within (function, args, kwargs)."""
    return ("fn", "args", "kwargs")[path[0].idx] + jax.tree_util.keystr(path[1:])


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """A function with its arguments, flattened. Arrays of JAX are inputs; all else is part of what is traced."""

    leaves: list[Any]
    treedef: PyTreeDef
    dynamic: list[int]

    @classmethod
    def of(cls, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Request":
        """Flatten a call. Partial applications are opened: made anew for each call, they are no new functions."""
        while isinstance(fn, functools.partial):
            fn, args, kwargs = fn.func, (*fn.args, *args), {**fn.keywords, **kwargs}
        leaves, treedef = jax.tree_util.tree_flatten((fn, args, kwargs))
        dynamic = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)]
        return cls(leaves, treedef, dynamic)

    def paths(self) -> list[tuple[Any, ...]]:
        """Each leaf's path within (function, arguments, keyword arguments)."""
        whole = jax.tree_util.tree_unflatten(self.treedef, self.leaves)
        return [path for path, _ in jax.tree_util.tree_flatten_with_path(whole)[0]]

    @property
    def arrays(self) -> list[Any]:
        """The inputs."""
        return [self.leaves[i] for i in self.dynamic]

    @property
    def traced(self) -> bool:
        """True if some input is a tracer."""
        return any(isinstance(x, Tracer) for x in self.arrays)

    @property
    def abstract(self) -> bool:
        """True if some input is only described."""
        return any(isinstance(x, jax.ShapeDtypeStruct) for x in self.arrays)

    def run(self, arrays: Sequence[Any]) -> PyTree:
        """Call the function with these inputs."""
        leaves = list(self.leaves)
        for i, x in zip(self.dynamic, arrays, strict=True):
            leaves[i] = x
        fn, args, kwargs = jax.tree_util.tree_unflatten(self.treedef, leaves)
        return fn(*args, **kwargs)

    def check(self) -> None:
        """Raise `DeletedArrayError` for inputs that are gone."""
        gone = [i for i in self.dynamic if isinstance(x := self.leaves[i], compat.ArrayImpl) and x.is_deleted()]
        if gone:
            paths = self.paths()
            total = len(self.dynamic)
            raise DeletedArrayError(
                message(
                    f"init: {len(gone)} of {total} {'argument' if total == 1 else 'arguments'} cannot be read:"
                    " the array was donated or deleted",
                    [_argument_path(paths[i]) for i in gone],
                    fix="pass an array that is still alive",
                )
            )

    def key(self) -> Hashable:
        """What tracing depends on.

        Raises:
            NotHashable: An argument can be told apart from others by identity only.
        """
        dynamic = set(self.dynamic)
        parts: list[Any] = []
        for i, leaf in enumerate(self.leaves):
            if i in dynamic:
                sharding = leaf.sharding if getattr(leaf, "committed", True) else None
                parts.append((tuple(leaf.shape), leaf.dtype, bool(getattr(leaf, "weak_type", False)), sharding))
            elif isinstance(leaf, np.ndarray | np.generic):
                if leaf.nbytes > _KEYED_BYTES or leaf.dtype.hasobject:
                    raise NotHashable
                parts.append((leaf.dtype, leaf.shape, leaf.tobytes()))
            else:
                parts.append(static_key(leaf))
        out = self.treedef, number_types(held_values(self.treedef)), tuple(parts)
        try:
            hash(out)
        except TypeError as error:
            raise NotHashable from error
        return out


def _auto_context() -> contextlib.AbstractContextManager[Any]:
    """The mesh in force with every axis Auto: with Explicit ones, each value would be traced as if replicated."""
    mesh = context_mesh()
    if mesh is None or not compat.any_explicit(mesh):
        return contextlib.nullcontext()
    auto = compat.twin(mesh, AxisType.Auto)
    return jax.set_mesh(auto) if isinstance(auto, Mesh) else jax.sharding.use_abstract_mesh(auto)


@dataclasses.dataclass(slots=True, eq=False)
class Traced:
    """A traced call.

    Attributes:
        closed: What was traced.
        treedef: The structure of the output.
        statics: The output's leaves that are not traced.
        slots: For each output leaf its place among the jaxpr's outputs, or None for a static.
        structs: The output's leaves, with arrays described.
        on_host: Whether the function itself leaves an output in host memory.
        specs: How the function itself splits an output over the Explicit axes in force, if it does.
        mesh: The mesh in force.
    """

    closed: ClosedJaxpr
    treedef: PyTreeDef
    statics: list[Any]
    slots: list[int | None]
    structs: list[Any]
    on_host: list[bool]
    specs: list[PartitionSpec | None]
    mesh: MeshLike | None

    @property
    def described(self) -> PyTree:
        """The output with arrays described by ``jax.ShapeDtypeStruct``."""
        return jax.tree_util.tree_unflatten(self.treedef, self.structs)


@dataclasses.dataclass(slots=True, eq=False)
class _Flat:
    """The function from flat arrays to flat arrays, and what its last call found beside them."""

    request: Request
    statics: list[Any] = dataclasses.field(default_factory=list[Any])
    slots: list[int | None] = dataclasses.field(default_factory=list[int | None])
    treedef: Any = None

    def jaxpr(self, *, typed: bool = False) -> ClosedJaxpr:
        """Trace it; ``typed``: with arguments that lie on the Explicit axes in force as they do."""
        mesh = context_mesh() if typed else None
        return jax.make_jaxpr(self._call)(*(_described(x, mesh) for x in self.request.arrays))

    def _call(self, *arrays: Any) -> list[Any]:
        with compat.keep_inlined_jits():
            leaves, self.treedef = jax.tree_util.tree_flatten(self.request.run(arrays))
        self.statics, self.slots, traced = [], [], list[Any]()
        for leaf in leaves:
            is_traced = isinstance(leaf, Tracer)
            self.slots.append(len(traced) if is_traced else None)
            self.statics.append(None if is_traced else leaf)
            if is_traced:
                traced.append(leaf)
        return traced


def _described(x: Any, mesh: MeshLike | None) -> jax.ShapeDtypeStruct:
    sharding = getattr(x, "sharding", None) if mesh is not None else None
    on_it = isinstance(sharding, NamedSharding) and sharding.mesh.axis_types and sharding.mesh == mesh
    weak = bool(getattr(x, "weak_type", False))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding if on_it else None, weak_type=weak)


def trace(request: Request) -> Traced:
    """Trace a call. Nothing is computed."""
    flat = _Flat(request)
    mesh = context_mesh()
    explicit = mesh is not None and compat.any_explicit(mesh)
    closed: Any = None
    typed: Any = None
    # What asks for a sharding by Explicit axes can't be traced on Auto ones. It fails for other reasons too; the error
    # to show is then that of the user's own context.
    with contextlib.suppress(Exception) if explicit else contextlib.nullcontext(), _auto_context():
        closed = flat.jaxpr()
    if closed is None:
        closed = typed = flat.jaxpr(typed=True)
    elif explicit and places_values(closed):
        with contextlib.suppress(Exception):
            typed = _Flat(request).jaxpr(typed=True)
    structs: list[Any] = []
    on_host: list[bool] = []
    specs: list[PartitionSpec | None] = []
    for static, slot in zip(flat.statics, flat.slots, strict=True):
        aval: Any = None if slot is None else closed.out_avals[slot]
        weak = bool(getattr(aval, "weak_type", False))
        structs.append(static if slot is None else jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak))
        on_host.append(slot is not None and compat.space_of_type(aval) == compat.space_of_kind("pinned_host"))
        specs.append(None if slot is None or typed is None else _spec_of(typed.out_avals[slot]))
    return Traced(closed, flat.treedef, flat.statics, flat.slots, structs, on_host, specs, mesh)


def _spec_of(aval: Any) -> PartitionSpec | None:
    spec = getattr(getattr(aval, "sharding", None), "spec", PartitionSpec())
    return spec if any(entry is not None for entry in spec) else None


# --- where results are wanted -----------------------------------------------------------------------------------------


def mesh_of(request: Request) -> MeshLike | None:
    """The one mesh that all sharded inputs are on, if there is one."""
    meshes = {
        s.mesh
        for x in request.arrays
        if isinstance(s := getattr(x, "sharding", None), NamedSharding) and getattr(x, "committed", True)
    }
    return meshes.pop() if len(meshes) == 1 else None


def _followed(request: Request, mesh: MeshLike | None) -> list[tuple[tuple[Any, ...], tuple[int, ...], NamedSharding]]:
    """Inputs that are sharded over the mesh, with their paths within the argument that has them."""
    found: list[tuple[tuple[Any, ...], tuple[int, ...], NamedSharding]] = []
    paths = request.paths()
    for i in request.dynamic:
        sharding = getattr(request.leaves[i], "sharding", None)
        if isinstance(sharding, NamedSharding) and (mesh is None or sharding.mesh == mesh):
            found.append((paths[i][2:], tuple(request.leaves[i].shape), sharding))
    return found


def _sharding_like(path: tuple[Any, ...], shape: tuple[int, ...], known: Any) -> NamedSharding | None:
    """The sharding of the input whose path ends this one's and whose shape is this one's; the longest path wins."""
    best: dict[int, list[NamedSharding]] = {}
    for tail, its_shape, sharding in known:
        if its_shape == shape and path[len(path) - len(tail) :] == tail:
            best.setdefault(len(tail), []).append(sharding)
    if not best:
        return None
    longest = best[max(best)]
    return longest[0] if all(s.is_equivalent_to(longest[0], len(shape)) for s in longest) else None


Place: TypeAlias = NamedSharding | str | None
"""A sharding; or the device that makes it, in its own memory (None) or in that of the memory kind named."""


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """For each output leaf where it is wanted and whether the mapping asked for that.

    ``kinds`` are the memory kinds that the function itself leaves outputs in, where no other was asked for.
    """

    places: list[Place]
    planned: list[bool]
    kinds: list[str | None]
    paths: list[str]


def plan_outputs(
    traced: Traced, request: Request, mapping: AxisMapping | None, mesh: MeshLike | None, memory_kind: str | None
) -> "Wanted":
    """Where each output leaf is wanted.

    Named leaves go where the mapping wants them. Others, and all without a mapping, follow the input that has their
    path and shape (the moments of an optimizer follow the parameters); the rest is replicated on the mesh. What the
    function splits over Explicit axes in force is split so, and what it leaves in host memory is wanted there.
    """
    kinds = [memory_kind or ("pinned_host" if on_host else None) for on_host in traced.on_host]
    shardings: list[NamedSharding | None] = [None] * len(traced.structs)
    if mesh is not None:
        leaves = named_leaves(traced.described)
        given = mapping or AxisMapping()
        plan = plan_leaves(leaves, traced.treedef, given, mesh, memory_kind=memory_kind, manual=frozenset())
        for i, (leaf, planned) in enumerate(zip(leaves, plan.leaves, strict=True)):
            sharding = plan.sharding_of(planned)
            if sharding is not None and (mapping is not None or leaf.own is not None):
                kind = kinds[i]
                shardings[i] = sharding if kind is None else sharding.with_memory_kind(kind)
    wanted: list[Place] = list(shardings)
    known = _followed(request, mesh)
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(traced.described)[0]]
    for i, (struct, slot) in enumerate(zip(traced.structs, traced.slots, strict=True)):
        if wanted[i] is not None or slot is None:
            continue
        kind, spec = kinds[i], traced.specs[i]
        found = _sharding_like(paths[i], tuple(struct.shape), known) if known else None
        if spec is not None and _alike(mesh, traced.mesh):
            assert mesh is not None
            wanted[i] = NamedSharding(mesh, spec, memory_kind=kind)
        elif found is not None:
            wanted[i] = found if kind is None else found.with_memory_kind(kind)
        elif mesh is not None:
            wanted[i] = NamedSharding(mesh, PartitionSpec(), memory_kind=kind)
        else:
            wanted[i] = kind
    own = [k if memory_kind is None else None for k in kinds]
    return Wanted(wanted, [s is not None for s in shardings], own, [path_string(p) for p in paths])


def _alike(a: MeshLike | None, b: MeshLike | None) -> bool:
    """Whether a spec for one mesh means the same on another."""
    return a is not None and b is not None and dict(a.shape) == dict(b.shape)


def surroundings() -> Hashable:
    """What tracing depends on beside the call itself."""
    return current_mapping(), compat.trace_key()
