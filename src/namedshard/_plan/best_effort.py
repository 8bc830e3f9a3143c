"""PURE. A sharding for arrays that have no names: spread over the mesh as far as the shape divides."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from namedshard._plan.mapping import spec_entry
from namedshard._plan.mesh import MeshLike, resolve_mesh
from namedshard._types import Device


def best_effort_spec(shape: Sequence[int], mesh: MeshLike) -> PartitionSpec:
    """The spec of `best_effort_sharding` on a mesh."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    usable = [
        (name, size)
        for name, size in mesh.shape.items()
        if size > 1 and not name.startswith("replica") and types[name] != AxisType.Manual
    ]
    left = list(shape)
    chosen: list[list[str]] = [[] for _ in shape]
    # A mesh axis has one type, and a dimension split over both types is beyond what tracing can express.
    kinds: list[Any] = [None] * len(left)
    for name, size in sorted(usable, key=lambda item: -item[1]):
        fitting = [d for d, n in enumerate(left) if n and n % size == 0 and kinds[d] in (None, types[name])]
        if fitting:
            dim = max(fitting, key=lambda d: left[d])
            left[dim] //= size
            chosen[dim].append(name)
            kinds[dim] = types[name]
    return PartitionSpec(*map(spec_entry, chosen))


def best_effort_sharding(
    shape: Sequence[int] | Any,
    *,
    mesh: MeshLike | None = None,
    devices: Sequence[Device] | np.ndarray | None = None,
) -> NamedSharding | None:
    """A sharding for an array whose dimensions have no names.

    Every mesh axis, the largest first, splits the dimension that has most left and that it divides. Mesh axes whose
    names begin with ``replica`` are never used. It is a plan only: nothing is moved.

    Args:
        shape: A shape, or anything that has one (an array, a ``jax.ShapeDtypeStruct``).
        mesh: A ``jax.sharding.Mesh`` or ``AbstractMesh``; the context's by default.
        devices: Without ``mesh``, a mesh of one axis over these devices, whatever mesh is in force.

    Returns:
        A ``NamedSharding`` on that very mesh; None if no mesh and no devices are given and no mesh is in force.

    Raises:
        TypeError: ``mesh`` is no mesh, or both ``mesh`` and ``devices`` are given.

    Examples:
        >>> import jax, namedshard as ns
        >>> mesh = jax.sharding.AbstractMesh((2, 2, 4), ("replica", "data", "model"))
        >>> tuple(ns.best_effort_sharding((30522, 384), mesh=mesh).spec)
        ('data', 'model')
        >>> print(ns.best_effort_sharding((30522, 384)))
        None
    """
    if devices is not None:
        if mesh is not None:
            raise TypeError("best_effort_sharding takes a mesh or devices, not both")
        mesh = Mesh(np.array(list(devices)), ("devices",))
    where = resolve_mesh(mesh)
    if where is None:
        return None
    return NamedSharding(where, best_effort_spec(tuple(getattr(shape, "shape", shape)), where))
