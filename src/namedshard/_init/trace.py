"""Traces a call of an initializer, and plans where each of its outputs goes."""

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
from namedshard._plan.leaves import is_array_like, named_leaves
from namedshard._plan.mapping import AxisMapping, current_mapping, plain_spec
from namedshard._plan.mesh import MeshLike, context_mesh
from namedshard._plan.plan import check_unmatched, output_places, plan_leaves
from namedshard._types import PyTreeDef, Tracer

_KEYED_BYTES = 4096


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

    @property
    def arrays(self) -> list[Any]:
        """The inputs."""
        return [self.leaves[i] for i in self.dynamic]

    def run(self, arrays: Sequence[Any]) -> PyTree:
        """Calls the function with these inputs."""
        leaves = list(self.leaves)
        for i, x in zip(self.dynamic, arrays, strict=True):
            leaves[i] = x
        fn, args, kwargs = jax.tree_util.tree_unflatten(self.treedef, leaves)
        return fn(*args, **kwargs)

    def paths(self) -> list[tuple[Any, ...]]:
        """Each leaf's path within (function, arguments, keyword arguments)."""
        whole = jax.tree_util.tree_unflatten(self.treedef, self.leaves)
        return [path for path, _ in jax.tree_util.tree_flatten_with_path(whole)[0]]

    def types(self) -> dict[str, Any]:
        """Each leaf by its path: arrays by shape, dtype and weak type, everything else by value."""
        dynamic = set(self.dynamic)
        found = [array_type(x) if i in dynamic else x for i, x in enumerate(self.leaves)]
        return dict(zip(map(_argument_path, self.paths()), found, strict=True))

    def check(self) -> None:
        """Raises `DeletedArrayError` for inputs that were donated or deleted."""
        gone = [i for i in self.dynamic if isinstance(x := self.leaves[i], compat.ArrayImpl) and x.is_deleted()]
        if gone:
            paths = self.paths()
            raise deleted_arrays("init", [_argument_path(paths[i]) for i in gone], len(self.dynamic))

    def key(self, forget: Callable[[Any], None]) -> Hashable:
        """What tracing depends on; it can't be hashed if an argument is known by its identity only.

        Functions aren't kept alive by the key: ``forget`` is called when one is gone.
        """
        dynamic = set(self.dynamic)
        parts: list[Any] = []
        for i, leaf in enumerate(self.leaves):
            if i in dynamic:
                parts.append((*array_type(leaf), leaf.sharding if getattr(leaf, "committed", True) else None))
            elif isinstance(leaf, np.ndarray) and leaf.nbytes <= _KEYED_BYTES and not leaf.dtype.hasobject:
                parts.append((leaf.dtype, leaf.shape, leaf.tobytes()))
            else:
                parts.append(weakref.ref(leaf, forget) if isinstance(leaf, types.FunctionType) else static_key(leaf))
        numbers = number_types(held_values(self.treedef))
        return self.treedef, numbers, tuple(parts), current_mapping(), compat.trace_key()


def _argument_path(path: tuple[Any, ...]) -> str:
    """``"args[0]['w']"``: a path within (function, args, kwargs)."""
    return ("fn", "args", "kwargs")[path[0].idx] + jax.tree_util.keystr(path[1:])


# --- tracing ----------------------------------------------------------------------------------------------------------

Place: TypeAlias = NamedSharding | str | None
"""A sharding; or the device that computes the value: in its own memory (None) or in the memory kind named."""


@dataclasses.dataclass(slots=True, eq=False)
class OutputLeaf:
    """A leaf of the result: its type, or the leaf itself if it isn't traced, and where it goes.

    ``slot`` is its position among the jaxpr's outputs, None if it isn't traced; ``named``: its names and the mapping
    say where it goes; ``kind`` is the memory kind that the function itself puts it in, unless another is asked for.
    """

    path: str
    value: Any
    slot: int | None
    place: Place
    named: bool
    kind: str | None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Traced:
    """A traced call: its jaxpr, the structure and the leaves of its result, and the mesh in context."""

    closed: ClosedJaxpr
    treedef: PyTreeDef
    outputs: list[OutputLeaf]
    mesh: MeshLike | None


_TRACED = object()


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


def trace(request: Request, mapping: AxisMapping | None, mesh: MeshLike | None, memory_kind: str | None) -> Traced:
    """Traces a call and plans where its outputs go. Nothing is computed.

    Named leaves: where the mapping says. Others, and all without a mapping: as the function itself shards them over
    Explicit axes, else like the input that has their path and shape (an optimizer's moments follow the parameters),
    else replicated. What the function puts into host memory stays there.
    """
    context = context_mesh()
    explicit = context is not None and compat.any_explicit(context)
    auto: Any = None
    typed: Any = None

    def places(tree: PyTree) -> list[NamedSharding | None]:
        return [sharding for sharding, _ in _places(request, mapping, mesh, tree)]

    # A function that asks for shardings over Explicit axes can't be traced over Auto ones. It may also fail for other
    # reasons: then the error to raise is that of the user's own context.
    with output_places(places):
        with contextlib.suppress(Exception) if explicit else contextlib.nullcontext(), _auto_context():
            auto = _jaxpr_of(request)
        if auto is None:
            auto = typed = _jaxpr_of(request, context)
        elif explicit and "sharding" in placed_by(auto[0].jaxpr):
            with contextlib.suppress(Exception):
                typed = _jaxpr_of(request, context)
    closed, treedef, leaves = auto
    slots = itertools.count()
    outputs: list[OutputLeaf] = []
    for leaf in leaves:
        slot = next(slots) if leaf is _TRACED else None
        aval = None if slot is None else closed.out_avals[slot]
        on_host = compat.space_of_type(aval) == compat.space_of_kind("pinned_host")
        kind = "pinned_host" if on_host and memory_kind is None else None
        value = leaf if aval is None else struct_of(aval)
        outputs.append(OutputLeaf("", value, slot, memory_kind or kind, False, kind))
    # A spec for one mesh means the same on another of the same shape.
    same = mesh is not None and context is not None and dict(mesh.shape) == dict(context.shape)
    own_specs = [_spec_of(aval) for aval in typed[0].out_avals] if typed is not None and same else []
    _plan(Traced(closed, treedef, outputs, context), request, mapping, mesh, own_specs)
    return Traced(closed, treedef, outputs, context)


def _spec_of(aval: Any) -> PartitionSpec | None:
    spec = plain_spec(getattr(getattr(aval, "sharding", None), "spec", PartitionSpec()))
    return spec if any(entry is not None for entry in spec) else None


# --- where outputs go -------------------------------------------------------------------------------------------------


def _plan(
    traced: Traced,
    request: Request,
    mapping: AxisMapping | None,
    mesh: MeshLike | None,
    own_specs: Sequence[PartitionSpec | None],
) -> None:
    """Sets where each output goes; so far that's a memory kind, or nowhere in particular."""
    tree = jax.tree_util.tree_unflatten(traced.treedef, [output.value for output in traced.outputs])
    own = [None if output.slot is None or not own_specs else own_specs[output.slot] for output in traced.outputs]
    leaves, places = named_leaves(tree, mapping, beside=_arrays(request)), _places(request, mapping, mesh, tree, own)
    # What is made of sharded arrays, such as an optimizer's states, follows them.
    if mapping is not None and not any(isinstance(getattr(x, "sharding", None), NamedSharding) for x in request.arrays):
        check_unmatched("init", leaves, mapping)
    for output, leaf, (sharding, named) in zip(traced.outputs, leaves, places, strict=True):
        output.path = leaf.path
        output.named = named
        if sharding is not None and (named or output.slot is not None):
            kind = output.place
            output.place = sharding.with_memory_kind(kind) if isinstance(kind, str) else sharding


def _arrays(request: Request) -> list[tuple[str, tuple[int, ...]]]:
    """The paths and shapes of the arguments."""
    paths = request.paths()
    return [(jax.tree_util.keystr(paths[i]), tuple(request.leaves[i].shape)) for i in request.dynamic]


def _places(
    request: Request,
    mapping: AxisMapping | None,
    mesh: MeshLike | None,
    tree: PyTree,
    own_specs: Sequence[PartitionSpec | None] = (),
) -> list[tuple[NamedSharding | None, bool]]:
    """Where each leaf of a result (or of a part of it) goes, and whether its names say so."""
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    leaves = named_leaves(tree, mapping, beside=_arrays(request))
    by_name: list[NamedSharding | None] = [None] * len(paths)
    if mesh is not None:
        given, treedef = mapping or AxisMapping(), jax.tree_util.tree_structure(tree)
        plan = plan_leaves(leaves, treedef, given, mesh, memory_kind=None, manual=frozenset())
        sharded = zip(leaves, map(plan.sharding_of, plan.leaves), strict=True)
        by_name = [sharding if mapping is not None or leaf.own is not None else None for leaf, sharding in sharded]
    arguments = request.paths()
    inputs = [
        (arguments[i][2:], tuple(request.leaves[i].shape), sharding.update(spec=plain_spec(sharding.spec)))
        for i in request.dynamic
        if isinstance(sharding := getattr(request.leaves[i], "sharding", None), NamedSharding)
        and (mesh is None or sharding.mesh == mesh)
    ]
    places: list[tuple[NamedSharding | None, bool]] = []
    for n, (leaf, path, sharding) in enumerate(zip(leaves, paths, by_name, strict=True)):
        named, spec = sharding is not None, own_specs[n] if own_specs else None
        if sharding is None and is_array_like(leaf.value):
            sharding = _sharding_like(path, tuple(leaf.value.shape), inputs) if spec is None else None
            if sharding is None and mesh is not None:
                sharding = NamedSharding(mesh, spec or PartitionSpec())
        places.append((sharding, named))
    return places


def _sharding_like(path: tuple[Any, ...], shape: tuple[int, ...], inputs: Any) -> NamedSharding | None:
    """The sharding of the input with this shape whose path is the longest suffix of this path."""
    best: dict[int, list[NamedSharding]] = {}
    for suffix, its_shape, sharding in inputs:
        if its_shape == shape and path[len(path) - len(suffix) :] == suffix:
            best.setdefault(len(suffix), []).append(sharding)
    longest = best[max(best)] if best else []
    return longest[0] if longest and all(s.is_equivalent_to(longest[0], len(shape)) for s in longest) else None


def mesh_of(request: Request) -> MeshLike | None:
    """The mesh that all sharded inputs are on, if it is one and the same."""
    meshes = {
        s.mesh
        for x in request.arrays
        if isinstance(s := getattr(x, "sharding", None), NamedSharding) and getattr(x, "committed", True)
    }
    return meshes.pop() if len(meshes) == 1 else None
