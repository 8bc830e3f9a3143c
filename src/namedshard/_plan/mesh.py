"""Which mesh: the one given, else the one in force."""

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from namedshard import _jaxcompat as compat
from namedshard._errors import AmbiguousMeshError, NoMeshError, UnattachedDevicesError
from namedshard._plan.mapping import thread_hint

MeshLike: TypeAlias = Mesh | AbstractMesh


def describe(mesh: MeshLike) -> str:
    """``"'data'=2, 'model'=4"``."""
    return ", ".join(f"{name!r}={size}" for name, size in mesh.shape.items()) or "no axes"


def manual_axes() -> frozenset[str]:
    """Mesh axes that an enclosing ``shard_map`` has taken: arrays in it are already local along them."""
    mesh = compat.abstract_context_mesh()
    if mesh is None:
        return frozenset()
    return frozenset(n for n, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t == AxisType.Manual)


def context_mesh() -> MeshLike | None:
    """The mesh in force: ``jax.set_mesh``, else ``with mesh:``, else an abstract one (while tracing), else None."""
    by_set_mesh, by_with = compat.context_meshes()
    if by_set_mesh is not None and by_with is not None and by_set_mesh != by_with:
        raise AmbiguousMeshError(
            f"two meshes are in force: jax.set_mesh gives ({describe(by_set_mesh)}) on devices"
            f" {device_ids(by_set_mesh)}, `with mesh:` gives ({describe(by_with)}) on devices"
            f" {device_ids(by_with)}",
            fix="leave one of the two contexts, or pass mesh=",
        )
    abstract = compat.abstract_context_mesh()
    concrete = by_set_mesh or by_with
    if concrete is None:
        return abstract
    if abstract is None or abstract.shape == concrete.abstract_mesh.shape:
        return concrete
    # A `use_abstract_mesh` block that lies inside the concrete context.
    return abstract


def resolve_mesh(mesh: MeshLike | None) -> MeshLike | None:
    """The mesh given, else the one in force, else None."""
    if mesh is None:
        return context_mesh()
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh or AbstractMesh, not {type(mesh).__name__}")
    return mesh


def require_mesh(mesh: MeshLike | None, what: str = "") -> MeshLike:
    """The mesh given, else the one in force, else an error; ``what`` is the function that has a mapping to apply."""
    where = resolve_mesh(mesh)
    if where is None:
        headline = "no mesh: none was given and none is in force"
        if what:
            headline = f"{what}: there is an axis mapping, but no mesh was given and none is in force" + thread_hint()
        raise NoMeshError(headline, fix="pass mesh=, or enter jax.set_mesh")
    return where


@functools.lru_cache(maxsize=256)
def is_unattached(mesh: MeshLike | None) -> bool:
    """Whether a mesh is over the devices of a topology, which are for compiling only."""
    return isinstance(mesh, Mesh) and not mesh.empty and not compat.is_attached(mesh.devices.flat[0])


def require_attached(what: str, *meshes: MeshLike | None) -> None:
    """Raise `UnattachedDevicesError` if the devices of a mesh aren't attached, unless this is being compiled."""
    for mesh in meshes:
        if isinstance(mesh, Mesh) and is_unattached(mesh) and not compat.staging():
            raise UnattachedDevicesError(
                f"{what}: the mesh ({describe(mesh)}) is a topology, for compiling only: its {mesh.size}"
                f" {mesh.devices.flat[0].device_kind} devices aren't attached",
                fix="pass jax.ShapeDtypeStructs, which ns.init creates here, and compile with f.lower(...).compile();"
                " to run, use a mesh of jax.devices()",
            )


def device_ids(mesh: Mesh) -> list[int]:
    """Device ids in the mesh's order."""
    return [d.id for d in mesh.devices.flat]


def reduce_mesh(mesh: MeshLike) -> tuple[Any, ...]:
    """Arguments of `restore_mesh`: JAX's devices can't be pickled."""
    if not isinstance(mesh, Mesh) or is_unattached(mesh):
        return getattr(mesh, "abstract_mesh", mesh), "", ()
    return mesh.abstract_mesh, mesh.devices.flat[0].platform, device_ids(mesh)


def restore_mesh(abstract: AbstractMesh, platform: str, ids: Sequence[int]) -> MeshLike:
    """The mesh over the devices with these ids, or the abstract one in a process that hasn't got them."""
    try:
        devices = {d.id: d for d in jax.devices(platform)} if ids else {}
    except RuntimeError:
        devices = {}
    if not ids or any(i not in devices for i in ids):
        return abstract
    array = np.array([devices[i] for i in ids]).reshape(abstract.axis_sizes)
    return Mesh(array, abstract.axis_names, axis_types=abstract.axis_types)
