"""Helpers for testing your own models: virtual devices, placement, exact values, checkpoint round trips.

Examples:
    >>> import haliax as hax, namedshard as ns
    >>> mesh = ns.testing.virtual_mesh((1,), ("data",))
    >>> x = ns.shard(hax.zeros(hax.Axis("batch", 4)), {"batch": "data"}, mesh)
    >>> ns.testing.assert_placed(x, {"batch": "data"}, mesh)
"""

import contextlib
import math
import os
import re
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, Sharding
from jaxtyping import PyTree

from namedshard._errors import at, count_of, message
from namedshard._place import route
from namedshard._place.gather import to_host
from namedshard._plan.leaves import is_array_like, named_leaves
from namedshard._plan.mapping import MappingLike
from namedshard._plan.mesh import MeshLike
from namedshard._plan.names import AxesLike
from namedshard._plan.plan import plan
from namedshard._safetensors.load import load_safetensors
from namedshard._safetensors.save import save_safetensors

_FLAG = "--xla_force_host_platform_device_count"


def use_virtual_devices(count: int) -> None:
    """Give this process so many CPU devices, whatever platform ``JAX_PLATFORMS`` names.

    Call it before anything uses JAX, e.g. at the top of ``conftest.py``; JAX may have been imported.

    Args:
        count: Number of devices.

    Raises:
        RuntimeError: JAX has started already, with another number of devices or on another platform.

    Examples:
        >>> import jax
        >>> from namedshard.testing import use_virtual_devices
        >>> use_virtual_devices(jax.device_count())
    """
    rest = re.sub(rf"{_FLAG}=\d+", "", os.environ.get("XLA_FLAGS", "")).split()
    os.environ["XLA_FLAGS"] = " ".join([*rest, f"{_FLAG}={count}"])
    os.environ["JAX_PLATFORMS"] = "cpu"
    # JAX read the environment when it was imported. Once it has started, the first of these raises.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count)
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_platform_name", "cpu")
    devices = jax.local_devices()
    if len(devices) != count or devices[0].platform != "cpu":
        kind = "" if devices[0].platform == "cpu" else f"{devices[0].platform} "
        raise RuntimeError(
            f"JAX has started with {len(devices)} {kind}devices: call use_virtual_devices({count}) before"
            " anything uses JAX"
        )


def accelerator_routes() -> contextlib.AbstractContextManager[None]:
    """Move arrays between CPU devices as between accelerators: from device to device, not through the host's memory.

    So moves that accelerators make can be tested on virtual devices. The environment variable
    ``NAMEDSHARD_ACCELERATOR_ROUTES=1`` does the same for a whole process.

    Returns:
        A context manager, for all threads.

    Examples:
        >>> import haliax as hax, namedshard as ns
        >>> mesh = ns.testing.virtual_mesh((1,), ("data",))
        >>> with ns.testing.accelerator_routes():
        ...     x = ns.shard(hax.zeros(hax.Axis("batch", 4)), {"batch": "data"}, mesh)
    """
    return route.accelerator_routes()


def virtual_mesh(
    shape: Sequence[int],
    axis_names: Sequence[str],
    *,
    axis_type: AxisType = AxisType.Auto,
    order: Sequence[int] | None = None,
) -> Mesh:
    """A mesh over the first devices of this job, in a given order.

    Args:
        shape: Size of each mesh axis.
        axis_names: Name of each mesh axis.
        axis_type: The type of every axis.
        order: Positions in ``jax.devices()``; the first ones by default.

    Returns:
        The mesh.

    Raises:
        ValueError: There are too few devices.

    Examples:
        >>> from namedshard.testing import virtual_mesh
        >>> virtual_mesh((1,), ("data",)).shape["data"]
        1
    """
    need = math.prod(shape)
    devices = jax.devices()
    if need > len(devices) or (order is not None and len(order) != need):
        raise ValueError(f"a mesh of shape {tuple(shape)} takes {need} devices; there are {len(order or devices)}")
    chosen = [devices[i] for i in (range(need) if order is None else order)]
    return Mesh(np.array(chosen).reshape(tuple(shape)), tuple(axis_names), axis_types=(axis_type,) * len(axis_names))


def assert_placed(
    tree: PyTree,
    mapping: MappingLike | None = None,
    mesh: MeshLike | None = None,
    *,
    memory_kind: str | None = None,
    axes: AxesLike | None = None,
) -> None:
    """Assert that every named array of a tree is where a mapping wants it.

    Args:
        tree: Any pytree.
        mapping: Named axis → mesh axes; the context's by default.
        mesh: A mesh; the context's by default.
        memory_kind: The memory kind that all of them must be in; None accepts any.
        axes: Names for arrays that carry none, by leaf path.

    Raises:
        AssertionError: Some are not; lists all of them.
        PlanError: The tree cannot be placed by the mapping.

    Examples:
        >>> import haliax as hax, jax.numpy as jnp, namedshard as ns
        >>> from namedshard.testing import assert_placed, virtual_mesh
        >>> mesh = virtual_mesh((1,), ("data",))
        >>> x = ns.shard(hax.named(jnp.zeros(4), "batch"), {"batch": "data"}, mesh)
        >>> assert_placed(x, {"batch": "data"}, mesh)
    """
    planned = plan(tree, mapping, mesh, axes=axes)
    lines: list[str] = []
    named = [(leaf, p) for leaf, p in zip(named_leaves(tree), planned.leaves, strict=True) if p.spec is not None]
    for leaf, leaf_plan in named:
        x, want = leaf.value, planned.sharding_of(leaf_plan)
        have = getattr(x, "sharding", None)
        if have is None or want is None:
            lines.append(f"{at(leaf.path)}: not an array on a device, but {type(x).__name__}")
            continue
        # Shardings over devices that tell no memories have None.
        kind = memory_kind or have.memory_kind
        if (have.memory_kind or "device") != (kind or "device"):
            lines.append(f"{at(leaf.path)}: in {have.memory_kind!r}, wanted in {kind!r}")
        elif not have.is_equivalent_to(want.with_memory_kind(kind), len(x.shape)):
            # Without its devices, a spec on another mesh reads as the one that is wanted.
            here, there = (f" on devices {_order(s)}" if _order(have) != _order(want) else "" for s in (have, want))
            lines.append(f"{at(leaf.path)}: {getattr(have, 'spec', have)}{here}, wanted {want.spec}{there}")
    if lines:
        raise AssertionError(message(f"{count_of(len(lines), len(named))} not where the mapping wants it", lines))


def _order(sharding: Sharding) -> list[int]:
    mesh = getattr(sharding, "mesh", None)
    return [d.id for d in (mesh.devices.flat if isinstance(mesh, Mesh) else sharding.device_set)]


def assert_equal_bits(actual: PyTree, expected: PyTree) -> None:
    """Assert that two trees have the same structure, and arrays of the same dtypes, shapes and bits, wherever they are.

    Args:
        actual: Any pytree.
        expected: The same structure.

    Raises:
        AssertionError: They differ; lists all leaves that do.

    Examples:
        >>> import jax.numpy as jnp
        >>> from namedshard.testing import assert_equal_bits
        >>> assert_equal_bits({"a": jnp.ones(2)}, {"a": jnp.ones(2)})
    """
    structures = [jax.tree_util.tree_structure(t) for t in (actual, expected)]
    if structures[0] != structures[1]:
        raise AssertionError(message("the trees have different structures", map(str, structures)))
    types = [[getattr(leaf.value, "dtype", None) for leaf in named_leaves(tree)] for tree in (actual, expected)]
    left, right = named_leaves(to_host(actual)), named_leaves(to_host(expected))
    lines: list[str] = []
    for a, b, was, should in zip(left, right, *types, strict=True):
        if not is_array_like(a.value) or not is_array_like(b.value):
            if type(a.value) is not type(b.value) or a.value != b.value:
                lines.append(f"{at(a.path)}: {a.value!r}, expected {b.value!r}")
            continue
        x, y = np.asarray(a.value), np.asarray(b.value)
        if (was, x.shape) != (should, y.shape):
            lines.append(f"{at(a.path)}: {was}{list(x.shape)}, expected {should}{list(y.shape)}")
        elif x.tobytes() != y.tobytes():
            count = int(np.sum(np.any(_bytes_of(x) != _bytes_of(y), axis=-1)))
            lines.append(f"{at(a.path)}: {count} of {x.size} elements differ")
    if lines:
        raise AssertionError(message(f"{count_of(len(lines), len(left))} different", lines))


def _bytes_of(x: np.ndarray) -> np.ndarray:
    return np.frombuffer(x.tobytes(), np.uint8).reshape(x.size, x.dtype.itemsize)


def assert_round_trip(
    model: PyTree,
    folder: str | os.PathLike[str],
    *,
    mapping: MappingLike | None = None,
    meshes: Sequence[Mesh] = (),
    **options: Any,
) -> None:
    """Assert that a model saved as safetensors comes back bit-equal and in place, on each of several meshes.

    Args:
        model: A module or tree of arrays, on any mesh.
        folder: An empty folder to save in.
        mapping: Named axis → mesh axes for loading; the context's by default.
        meshes: The meshes to load onto; without any, loading uses the context's mesh, or none.
        **options: For both `save_safetensors` and `load_safetensors`, e.g. ``names=``.

    Raises:
        AssertionError: An array came back different, or elsewhere.
        CheckpointError: As saving and loading do.

    Examples:
        >>> import haliax as hax, jax.numpy as jnp, tempfile
        >>> from namedshard.testing import assert_round_trip, virtual_mesh
        >>> model = {"w": hax.named(jnp.arange(4.0), "embed")}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     assert_round_trip(model, folder, mapping={"embed": "data"}, meshes=[virtual_mesh((1,), ("data",))])
    """
    target = os.path.join(os.fspath(folder), "round_trip.safetensors")
    save_safetensors(model, target, progress=False, **options)
    like = eqx.filter_eval_shape(lambda tree: tree, model)
    for mesh in meshes or (None,):
        loaded = load_safetensors(target, like, mapping=mapping, mesh=mesh, progress=False, **options)
        assert_equal_bits(eqx.filter(loaded, eqx.is_array), eqx.filter(model, eqx.is_array))
        if mesh is not None:
            assert_placed(loaded, mapping, mesh)
