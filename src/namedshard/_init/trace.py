"""Traces a call of an initializer: its inputs, its outputs, and the sharding that each output is to have."""

import contextlib
import dataclasses
import functools
import itertools
import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from namedshard import _jaxcompat as compat
from namedshard._errors import deleted_arrays
from namedshard._init.tails import array_type, placed_by
from namedshard._jit.signature import held_values, number_types, static_key
from namedshard._plan.leaves import named_leaves, path_string
from namedshard._plan.mapping import AxisMapping, current_mapping
from namedshard._plan.mesh import MeshLike, context_mesh
from namedshard._plan.plan import plan_leaves
from namedshard._types import PyTreeDef, Tracer

_KEYED_BYTES = 4096


class NotHashable(Exception):
    """The call has an argument that can't be part of a cache key."""


def _argument_path(path: tuple[Any, ...]) -> str:
    """``"args[0]['w']"``: a path within (function, args, kwargs)."""
    return ("fn", "args", "kwargs")[path[0].idx] + jax.tree_util.keystr(path[1:])


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """A function with its arguments, flattened. JAX arrays and structs are inputs, everything else is static."""

    leaves: list[Any]
    treedef: PyTreeDef
    dynamic: list[int]

    @classmethod
    def of(cls, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Request":
        """Flattens a call. A `functools.partial`, often created for one call only, counts as its function."""
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
    def function(self) -> Callable[..., Any]:
        """The function."""
        return jax.tree_util.tree_unflatten(self.treedef, self.leaves)[0]

    def types(self) -> dict[str, Any]:
        """Each leaf by its path: arrays by shape, dtype and weak type, everything else by value."""
        dynamic = set(self.dynamic)
        found = [array_type(x) if i in dynamic else x for i, x in enumerate(self.leaves)]
        return dict(zip(map(_argument_path, self.paths()), found, strict=True))

    @property
    def traced(self) -> bool:
        """True if some input is a tracer."""
        return any(isinstance(x, Tracer) for x in self.arrays)

    @property
    def abstract(self) -> bool:
        """True if some input is a struct."""
        return any(isinstance(x, jax.ShapeDtypeStruct) for x in self.arrays)

    def run(self, arrays: Sequence[Any]) -> PyTree:
        """Calls the function with these inputs."""
        leaves = list(self.leaves)
        for i, x in zip(self.dynamic, arrays, strict=True):
            leaves[i] = x
        fn, args, kwargs = jax.tree_util.tree_unflatten(self.treedef, leaves)
        return fn(*args, **kwargs)

    def check(self) -> None:
        """Raises `DeletedArrayError` for inputs that were donated or deleted."""
        gone = [i for i in self.dynamic if isinstance(x := self.leaves[i], compat.ArrayImpl) and x.is_deleted()]
        if gone:
            paths = self.paths()
            raise deleted_arrays("init", [_argument_path(paths[i]) for i in gone], len(self.dynamic))

    def key(self, forget: Callable[[Any], None]) -> Hashable:
        """What tracing depends on. Functions count by identity and aren't kept alive by the key.

        Args:
            forget: Called when one of these functions is gone.

        Raises:
            NotHashable: An argument can be told apart from others only by its identity.
        """
        dynamic = set(self.dynamic)
        parts: list[Hashable] = []
        for i, leaf in enumerate(self.leaves):
            if i in dynamic:
                parts.append((*array_type(leaf), leaf.sharding if getattr(leaf, "committed", True) else None))
            elif isinstance(leaf, np.ndarray | np.generic):
                if leaf.nbytes > _KEYED_BYTES or leaf.dtype.hasobject:
                    raise NotHashable
                parts.append((leaf.dtype, leaf.shape, leaf.tobytes()))
            elif isinstance(leaf, types.FunctionType):
                parts.append(weakref.ref(leaf, forget))
            else:
                parts.append(static_key(leaf))
        out = self.treedef, number_types(held_values(self.treedef)), tuple(parts)
        try:
            hash(out)
        except TypeError as error:
            raise NotHashable from error
        return out


def trace_context() -> Hashable:
    """What tracing depends on besides the call itself."""
    return current_mapping(), compat.trace_key()


# --- tracing ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True, eq=False)
class Traced:
    """A traced call.

    Attributes:
        closed: The jaxpr.
        treedef: The structure of the output.
        statics: The output's leaves that aren't traced.
        slots: For each output leaf its position among the jaxpr's outputs, or None for a static one.
        structs: The output's leaves, with structs for arrays.
        on_host: Whether the function itself puts an output into host memory.
        specs: The spec that the function itself gives an output over Explicit axes, if it does.
        mesh: The mesh in context.
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
        """The output with a ``jax.ShapeDtypeStruct`` for each array."""
        return jax.tree_util.tree_unflatten(self.treedef, self.structs)


def _auto_context() -> contextlib.AbstractContextManager[Any]:
    """The mesh in context with all axes Auto: over Explicit ones, values would be typed as replicated."""
    mesh = context_mesh()
    if mesh is None or not compat.any_explicit(mesh):
        return contextlib.nullcontext()
    auto = compat.twin(mesh, AxisType.Auto)
    return jax.set_mesh(auto) if isinstance(auto, Mesh) else jax.sharding.use_abstract_mesh(auto)


def struct_of(x: Any, mesh: MeshLike | None = None) -> jax.ShapeDtypeStruct:
    """Shape, dtype and weak type of an array or an aval, and its sharding if that's over this mesh."""
    sharding = getattr(x, "sharding", None) if mesh is not None else None
    on_it = isinstance(sharding, NamedSharding) and sharding.mesh.axis_types and sharding.mesh == mesh
    weak = bool(getattr(x, "weak_type", False))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding if on_it else None, weak_type=weak)


_TRACED = object()


def _jaxpr_of(request: Request, typed_for: MeshLike | None = None) -> tuple[ClosedJaxpr, PyTreeDef, list[Any]]:
    """The jaxpr, and the output's structure and leaves, with `_TRACED` for each traced one.

    ``typed_for``: the mesh whose Explicit axes are part of the inputs' types.
    """
    found: list[Any] = []

    def flat(*arrays: Any) -> list[Any]:
        leaves, treedef = jax.tree_util.tree_flatten(request.run(arrays))
        found[:] = treedef, [_TRACED if isinstance(x, Tracer) else x for x in leaves]
        return [x for x in leaves if isinstance(x, Tracer)]

    closed = jax.make_jaxpr(flat)(*(struct_of(x, typed_for) for x in request.arrays))
    return closed, *found


def trace(request: Request) -> Traced:
    """Traces a call. Nothing is computed."""
    mesh = context_mesh()
    explicit = mesh is not None and compat.any_explicit(mesh)
    auto: Any = None
    typed: Any = None
    # A function that asks for shardings over Explicit axes can't be traced over Auto ones. It may also fail for other
    # reasons: then the error to raise is that of the user's own context.
    with contextlib.suppress(Exception) if explicit else contextlib.nullcontext(), _auto_context():
        auto = _jaxpr_of(request)
    if auto is None:
        auto = typed = _jaxpr_of(request, mesh)
    elif explicit and "sharding" in placed_by(auto[0].jaxpr):
        with contextlib.suppress(Exception):
            typed = _jaxpr_of(request, mesh)
    closed, treedef, leaves = auto
    out = Traced(closed, treedef, [], [], [], [], [], mesh)
    slots = itertools.count()
    for leaf in leaves:
        slot = next(slots) if leaf is _TRACED else None
        aval = None if slot is None else closed.out_avals[slot]
        out.statics.append(None if slot is not None else leaf)
        out.slots.append(slot)
        out.structs.append(leaf if aval is None else struct_of(aval))
        out.on_host.append(compat.space_of_type(aval) == compat.space_of_kind("pinned_host"))
        out.specs.append(None if slot is None or typed is None else _spec_of(typed[0].out_avals[slot]))
    return out


def _spec_of(aval: Any) -> PartitionSpec | None:
    spec = getattr(getattr(aval, "sharding", None), "spec", PartitionSpec())
    return spec if any(entry is not None for entry in spec) else None


# --- where outputs go -------------------------------------------------------------------------------------------------


def mesh_of(request: Request) -> MeshLike | None:
    """The mesh that all sharded inputs are on, if it is one and the same."""
    meshes = {
        s.mesh
        for x in request.arrays
        if isinstance(s := getattr(x, "sharding", None), NamedSharding) and getattr(x, "committed", True)
    }
    return meshes.pop() if len(meshes) == 1 else None


def _sharding_like(path: tuple[Any, ...], shape: tuple[int, ...], inputs: Any) -> NamedSharding | None:
    """The sharding of the input with this shape whose path is the longest suffix of this path."""
    best: dict[int, list[NamedSharding]] = {}
    for suffix, its_shape, sharding in inputs:
        if its_shape == shape and path[len(path) - len(suffix) :] == suffix:
            best.setdefault(len(suffix), []).append(sharding)
    longest = best[max(best)] if best else []
    return longest[0] if longest and all(s.is_equivalent_to(longest[0], len(shape)) for s in longest) else None


Destination: TypeAlias = NamedSharding | str | None
"""A sharding; or the device that computes the value: in its own memory (None) or in the memory kind named."""


@dataclasses.dataclass(frozen=True, slots=True)
class Destinations:
    """Where each output leaf goes, and whether the mapping asked for that.

    ``kinds`` are the memory kinds in which the function itself leaves outputs, where no other was asked for.
    """

    places: list[Destination]
    planned: list[bool]
    kinds: list[str | None]
    paths: list[str]


def plan_outputs(
    traced: Traced, request: Request, mapping: AxisMapping | None, mesh: MeshLike | None, memory_kind: str | None
) -> Destinations:
    """Plans where each output leaf goes.

    Named leaves: where the mapping says. Others, and all without a mapping: as the function itself shards them over
    Explicit axes, else like the input that has their path and shape (an optimizer's moments follow the parameters),
    else replicated. What the function leaves in host memory stays there.
    """
    kinds = [memory_kind or ("pinned_host" if on_host else None) for on_host in traced.on_host]
    places: list[Destination] = [None] * len(traced.structs)
    if mesh is not None:
        leaves = named_leaves(traced.described)
        given = mapping or AxisMapping()
        plan = plan_leaves(leaves, traced.treedef, given, mesh, memory_kind=memory_kind, manual=frozenset())
        for i, (leaf, planned) in enumerate(zip(leaves, plan.leaves, strict=True)):
            if mapping is not None or leaf.own is not None:
                places[i] = _in_kind(plan.sharding_of(planned), kinds[i])
    planned = [place is not None for place in places]
    input_paths = request.paths()
    inputs = [
        (input_paths[i][2:], tuple(request.leaves[i].shape), sharding)
        for i in request.dynamic
        if isinstance(sharding := getattr(request.leaves[i], "sharding", None), NamedSharding)
        and (mesh is None or sharding.mesh == mesh)
    ]
    same_shape = mesh is not None and traced.mesh is not None and dict(mesh.shape) == dict(traced.mesh.shape)
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(traced.described)[0]]
    for i, (struct, slot, spec) in enumerate(zip(traced.structs, traced.slots, traced.specs, strict=True)):
        if places[i] is not None or slot is None:
            continue
        followed = _sharding_like(paths[i], tuple(struct.shape), inputs) if inputs else None
        if mesh is not None and spec is not None and same_shape:
            followed = NamedSharding(mesh, spec)
        elif mesh is not None and followed is None:
            followed = NamedSharding(mesh, PartitionSpec())
        places[i] = kinds[i] if followed is None else _in_kind(followed, kinds[i])
    own = [kind if memory_kind is None else None for kind in kinds]
    return Destinations(places, planned, own, [path_string(p) for p in paths])


def _in_kind(sharding: NamedSharding | None, kind: str | None) -> NamedSharding | None:
    return sharding if sharding is None or kind is None else sharding.with_memory_kind(kind)
