"""Haliax's helpers, answered by the planner: specs and shardings of trees and of axes, and sizes to round axes to."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import jax
from haliax import Axis, NamedArray
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from namedshard._errors import AxisNamesError, MeshAxisNotFoundError, NoMeshError
from namedshard._plan.leaves import Leaf, axis_name, is_array_like, named_leaves
from namedshard._plan.mapping import (
    AxisMapping,
    First,
    MappingLike,
    MeshAxes,
    axis_names,
    mesh_axes_of,
    resolve_mapping,
)
from namedshard._plan.mesh import MeshLike, manual_axes, require_mesh, resolve_mesh
from namedshard._plan.names import UNNAMED, AxesLike
from namedshard._plan.plan import FIXES, Problem, absent_text, plan, plan_leaves, raise_problems

AxisLike: TypeAlias = Axis | str
"""A named axis, or its name where the size does not matter."""


def _as_axes(value: Any) -> tuple[AxisLike, ...] | None:
    """The axes, if a value is one axis or a sequence of them and no tree."""
    if isinstance(value, Axis | str):
        return (value,)
    if isinstance(value, tuple | list) and all(isinstance(v, Axis | str) for v in cast("list[Any]", value)):
        return tuple(cast("list[AxisLike]", value))
    return None


def _mesh_of_names(leaves: Sequence[Leaf], mapping: AxisMapping) -> AbstractMesh:
    """Stands in where there is no mesh: it has every mesh axis that is spoken of, and all divide."""
    used = {name for leaf in leaves for name in leaf.names or ()}
    rules = [m.rules for m in (mapping, *(leaf.own for leaf in leaves)) if m is not None]
    choosing = sorted({axis for r in rules for axis, rule in r.items() if axis in used and isinstance(rule, First)})
    if choosing:
        raise NoMeshError(
            f"no mesh: the first(...) rules of {', '.join(choosing)} need one to choose by",
            fix="pass mesh=, or enter jax.set_mesh",
        )
    names = dict.fromkeys(n for r in rules for rule in r.values() for n in mesh_axes_of(rule))
    return AbstractMesh((1,) * len(names), tuple(names))


def _spec_of_axes(axes: Sequence[AxisLike], mapping: AxisMapping, mesh: MeshLike | None) -> PartitionSpec | None:
    names = tuple(map(axis_name, axes))
    path = f"({', '.join(names)})"
    where = mesh or _mesh_of_names([Leaf(path, None, names)], mapping)
    # Every mesh axis divides the size of the whole mesh: what an axis without a size gets does not depend on its size.
    sizes = [where.size if isinstance(axis, str) else axis.size for axis in axes]
    leaf = Leaf(path, jax.ShapeDtypeStruct(sizes, "float32"), names)
    problems: list[Problem] = []
    treedef = jax.tree_util.tree_structure(0)
    manual = manual_axes()
    planned = plan_leaves([leaf], treedef, mapping, where, memory_kind=None, manual=manual, collect=problems)
    if problems:
        for i, p in enumerate(problems):
            if p.axis in axes:  # a name alone
                text = p.text.replace(f"axis {p.axis}={p.size}", f"axis {p.axis}")
                problems[i] = dataclasses.replace(p, text=text)
        raise_problems(problems, 1, where, manual)
    return planned.leaves[0].spec


def _specs_of_tree(tree: PyTree, mapping: MappingLike | None, mesh: MeshLike | None, axes: AxesLike | None) -> PyTree:
    found = resolve_mapping(mapping, axes)
    where = mesh or _mesh_of_names(named_leaves(tree, found), found or AxisMapping())
    planned = iter(plan(tree, found, where).leaves)

    def spec(node: Any) -> PartitionSpec | None:
        specs = [next(planned).spec for _ in jax.tree_util.tree_leaves(node)]
        if len(specs) == 1 and specs[0] is not None:
            return specs[0]
        if not isinstance(node, NamedArray) and is_array_like(node):
            # Of a plain array, what JAX's own type says.
            return jax.typeof(node).sharding.spec
        return PartitionSpec() if isinstance(node, bool | int | float | complex) else None

    return jax.tree_util.tree_map(spec, tree, is_leaf=lambda x: isinstance(x, NamedArray))


def pspec_for(
    tree_or_axes: PyTree,
    mapping: MappingLike | None = None,
    mesh: MeshLike | None = None,
    *,
    axes: AxesLike | None = None,
    shape: Sequence[int] | None = None,
) -> PyTree:
    """The ``PartitionSpec`` of each array of a tree, or of an array with the given axes.

    Args:
        tree_or_axes: Any pytree; or an `haliax.Axis`, an axis name, or a sequence of them. A name alone stands for an
            axis that divides evenly. With a ``shape``, the names of its dimensions as `AxisMapping` takes them:
            ``"batch ... embed"``.
        mapping: Named axis → mesh axes; the context's (`axis_mapping`) by default.
        mesh: A mesh; the context's by default. Without one the mapping is taken by its word: no axis can be absent or
            indivisible, and a `first` rule is an error.
        axes: Names for arrays that carry none, by leaf path; see `AxisMapping`.
        shape: The shape of an array with the given axes.

    Returns:
        For a tree: the tree with a spec in place of each array with names (of any shape and dtype) and plain array
        (which keeps the spec of its own type), ``PartitionSpec()`` for numbers and None for other leaves. For axes: one
        spec; with no mapping anywhere it is unsharded.

    Raises:
        NoMappingError: For a tree, no mapping given and none in the context.
        NoMeshError: A `first` rule applies, and there is no mesh to choose by.
        AxisNamesError: The names do not fit the shape.
        PlanError: As `plan` does.

    Examples:
        >>> import haliax as hax, namedshard as ns
        >>> print(ns.pspec_for("batch ... embed", {"batch": "data"}, shape=(8, 128, 16)))
        P('data', None, None)
        >>> print(ns.pspec_for((hax.Axis("mlp", 512), "embed"), {"mlp": "model"}))
        P('model', None)
    """
    where = resolve_mesh(mesh)
    given = _as_axes(tree_or_axes)
    if given is None:
        return _specs_of_tree(tree_or_axes, mapping, where, axes)
    found = resolve_mapping(mapping)
    if shape is None and not any(isinstance(axis, str) and _is_notation(axis) for axis in given):
        return PartitionSpec(*(None for _ in given)) if found is None else _spec_of_axes(given, found, where)
    text = " ".join(map(axis_name, given))
    if shape is None:
        raise AxisNamesError(f"{text!r} needs a shape", fix="pass shape=, or one axis for each dimension")
    if found is None:
        return PartitionSpec(*(None for _ in shape))
    struct = jax.ShapeDtypeStruct(tuple(shape), "float32")
    return _specs_of_tree(struct, found, where, text)


def _is_notation(name: str) -> bool:
    """Whether a string is more than the name of one axis."""
    return any(c in name for c in " ,(") or name in (UNNAMED, "...")


def sharding_for(
    tree_or_axes: PyTree,
    mapping: MappingLike | None = None,
    mesh: MeshLike | None = None,
    *,
    axes: AxesLike | None = None,
    shape: Sequence[int] | None = None,
) -> PyTree:
    """The ``NamedSharding`` of each array of a tree, or of an array with the given axes.

    Args:
        tree_or_axes: Any pytree, or axes; see `pspec_for`.
        mapping: Named axis → mesh axes; the context's (`axis_mapping`) by default.
        mesh: A mesh; the context's by default.
        axes: As `pspec_for` takes them.
        shape: As `pspec_for` takes it.

    Returns:
        As `pspec_for`, with the sharding on the mesh in place of each spec.

    Raises:
        NoMeshError: No mesh given and none in the context.
        NoMappingError: For a tree, no mapping given and none in the context.
        PlanError: As `plan` does.

    Examples:
        >>> import haliax as hax, jax, namedshard as ns
        >>> mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
        >>> print(ns.sharding_for(hax.Axis("mlp", 512), {"mlp": "model"}, mesh).spec)
        P('model',)
    """
    where = require_mesh(mesh)
    return jax.tree_util.tree_map(
        lambda spec: NamedSharding(where, spec) if isinstance(spec, PartitionSpec) else spec,
        pspec_for(tree_or_axes, mapping, where, axes=axes, shape=shape),
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def physical_axis_size(axis: AxisLike, mapping: MappingLike | None = None, mesh: MeshLike | None = None) -> int | None:
    """How many pieces a named axis is split into: the product of its mesh axes' sizes.

    Args:
        axis: An axis, or its name. Whether it divides does not matter, save that a `first` rule chooses by it.
        mapping: Named axis → mesh axes; the context's (`axis_mapping`) by default.
        mesh: A mesh; the context's by default.

    Returns:
        The number of pieces; None for an axis that is not mapped, or where there is no mapping at all. Where no
        candidate of a `first` rule divides, and None is not among them, that of the first one the mesh has.

    Raises:
        NoMeshError: The axis is mapped, and there is no mesh given and none in the context.
        MeshAxisNotFoundError: The mesh lacks the mesh axis.

    Examples:
        >>> import jax, namedshard as ns
        >>> mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
        >>> ns.physical_axis_size("mlp", {"mlp": ("data", "model")}, mesh)
        8
    """
    found = resolve_mapping(mapping)
    rule = None if found is None else found.rules.get(axis_name(axis))
    if found is None or rule is None:
        return None
    where = require_mesh(mesh)
    if isinstance(rule, First):
        there = tuple(c for c in rule.candidates if all(n in where.shape for n in axis_names(c)))
        dividing = (c for c in there if isinstance(axis, str) or axis.size % _pieces(c, where) == 0)
        rule = next(dividing, there[0] if there else rule)
    names = mesh_axes_of(rule)
    if any(n not in where.shape for n in names):
        text = absent_text(axis_name(axis), names, where)
        raise MeshAxisNotFoundError(text, fix=FIXES[MeshAxisNotFoundError])
    return None if rule is None or isinstance(rule, First) else _pieces(rule, where)


def _pieces(axes: MeshAxes, mesh: MeshLike) -> int:
    return math.prod(mesh.shape[n] for n in axis_names(axes))


def round_axis_for_partitioning(axis: Axis, mapping: MappingLike | None = None, mesh: MeshLike | None = None) -> Axis:
    """An axis made large enough to be split evenly.

    Args:
        axis: An axis.
        mapping: Named axis → mesh axes; the context's (`axis_mapping`) by default.
        mesh: A mesh; the context's by default.

    Returns:
        The axis with its size rounded up to a multiple of `physical_axis_size`; the same axis if it is not mapped.

    Raises:
        NoMeshError: The axis is mapped, and there is no mesh given and none in the context.
        MeshAxisNotFoundError: The mesh lacks the mesh axis.

    Examples:
        >>> import haliax as hax, jax, namedshard as ns
        >>> mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
        >>> ns.round_axis_for_partitioning(hax.Axis("vocab", 30522), {"vocab": "model"}, mesh).size
        30524
    """
    pieces = physical_axis_size(axis, mapping, mesh)
    return axis if pieces is None else axis.resize(-(-axis.size // pieces) * pieces)
