"""`topology_mesh`: a mesh of devices that aren't attached, to compile for."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils, topologies
from jax.sharding import AxisType, Mesh

from namedshard._errors import TopologyError
from namedshard._types import Device

# What XLA's compiler needs to know of a GPU: a GpuTargetConfigProto.
_H100 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
dnn_version_info { major: 9 minor: 12 patch: 0 }
gpu_device_info {
  name: "NVIDIA H100 80GB HBM3"
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability 9.0"
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  device_memory_size: 84942979072
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  pcie_bandwidth: 34359738368
  device_address_bits: 64
  ecc_enabled: true
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.12.0"
}
"""
_KNOWN = (
    "name the chips in each direction (v3:4x4, v4:2x2x4, v5e:16x16, v5p:2x2x4, v6e:4x4, tpu7x:2x2x1), or GPUs (h100:8;"
    " h100:32x8 for 32 hosts; others take target_config=)"
)


_LIBTPU = "the TPU compiler", "pip install 'namedshard[tpu-compiler]'"
_CUDA = "JAX's CUDA plugin", "pip install 'jax[cuda13]'"
_TWO_CORES = "TPU v4"


def topology_mesh(
    topology: str,
    axes: Mapping[str, int],
    *,
    axis_types: AxisType | Sequence[AxisType] | None = None,
    num_slices: int = 1,
    **options: Any,
) -> Mesh:
    """Creates a mesh of devices that aren't attached, to plan and compile for them on any Linux machine.

    Mesh axes follow the torus of the chips, as ``jax.experimental.mesh_utils`` lays them out: name the axis that
    communicates most last. Whatever would run on the devices or move data to them raises `UnattachedDevicesError`.

    Args:
        topology: A kind and the chips in each direction of a slice (``"v5e:4x4"``, ``"v5p:2x2x4"``), for TPUs that
            ``libtpu`` can compile for; or ``"h100:8"`` and ``"h100:32x8"``, one host and 32 hosts of 8 GPUs, where
            JAX's CUDA plugin is installed.
        axes: Size of each mesh axis by name. The sizes multiply to the number of devices.
        axis_types: The type of every axis, or one for each; Auto by default.
        num_slices: Number of such slices. They are the outermost part of the mesh: the first axis is divisible by it,
            or is one of the first axes that multiply to it.
        **options: For ``jax.experimental.topologies.get_topology_desc``: ``chip_config_name="megacore"`` makes the two
            cores of a v4 chip one device, ``chips_per_host_bounds=(2, 4, 1)`` says which chips share a host. For other
            GPUs than the H100, ``target_config`` is the text of XLA's ``GpuTargetConfigProto``.

    Returns:
        The mesh.

    Raises:
        TopologyError: The topology is unknown, its compiler isn't installed, or the axes don't fit its devices.

    Examples:
        >>> import haliax as hax, jax, namedshard as ns
        >>> Embed, Mlp = hax.make_axes(embed=1024, mlp=4096)
        >>> mapping, key = {"embed": "data", "mlp": "model"}, jax.random.key(0)
        >>> mesh = ns.topology_mesh("v5e:4x4", {"data": 4, "model": 4})  # doctest: +SKIP
        >>> w = ns.init(hax.random.normal, key, (Embed, Mlp), mapping=mapping, mesh=mesh)  # doctest: +SKIP
        >>> with jax.set_mesh(mesh):  # doctest: +SKIP
        ...     compiled = ns.named_jit(lambda w: 2 * w, mapping).lower(w).compile()
        >>> compiled.memory_analysis().argument_size_in_bytes  # doctest: +SKIP
        1048576
    """
    names, sizes = tuple(axes), tuple(axes.values())
    what = f"topology {topology!r}" + (f" in {num_slices} slices" if num_slices != 1 else "")
    where = f"{what}: the axes ({', '.join(f'{name!r}={size}' for name, size in axes.items())})"
    if num_slices < 1:
        raise TopologyError(f"{what}: there is at least one", fix="pass num_slices=1 or more")
    if not names or not all(isinstance(size, int | np.integer) and size >= 1 for size in sizes):
        raise TopologyError(f"{where} need sizes, which are whole numbers from 1", fix="pass {'data': 4, 'model': 4}")
    one = AxisType.Auto if axis_types is None else axis_types
    types = tuple(one) if isinstance(one, Sequence) else (one,) * len(names)
    if len(types) != len(names):
        raise TopologyError(f"{where} have {len(types)} types", fix="pass one type for each axis, or one for all")
    devices = _devices(topology, num_slices, options)
    if math.prod(sizes) != len(devices):
        raise TopologyError(
            f"{where} take {math.prod(sizes)} devices, but there are {len(devices)}",
            fix=f"pass {dict(zip(names, _fitting(sizes, len(devices)), strict=True))}{_megacore(devices)}",
        )
    inner = _in_one_slice(sizes, num_slices)
    if math.prod(inner) * num_slices != len(devices):
        raise TopologyError(
            f"{where} can't have the slices as their outermost part",
            fix=f"name an axis first that {num_slices} divides, or axes that multiply to {num_slices}",
        )
    slices = [devices[i : i + math.prod(inner)] for i in range(0, len(devices), math.prod(inner))]
    return Mesh(np.stack([_laid_out(inner, d) for d in slices]).reshape(sizes), names, axis_types=types)


def _devices(topology: str, num_slices: int, options: dict[str, Any]) -> list[Device]:
    """The devices of a topology, slice by slice."""
    gpus = re.fullmatch(r"(\w+):(?:([1-9]\d*)x)?([1-9]\d*)", topology, re.ASCII)
    on_gpus = gpus is not None and ("target_config" in options or gpus[1].lower() == "h100")
    given = "".join(f", {name}={value!r}" for name, value in options.items() if name != "target_config")
    try:
        if gpus is not None and on_gpus:
            options = {"target_config": _H100, "topology": f"{num_slices}x{gpus[2] or 1}x{gpus[3]}"} | options
            if options.keys() != {"target_config", "topology"}:
                raise TopologyError(f"unknown topology {topology!r}{given}", fix="GPUs take target_config only")
            return topologies.get_topology_desc(platform="cuda", **options).devices
        # libtpu takes an empty name for a topology of its own choice, and crashes on sizes of zero.
        if not re.fullmatch(r"[\w ]+[:=_][1-9]\d*(x[1-9]\d*)*(_(un)?twisted)?", topology, re.ASCII):
            raise TopologyError(f"unknown topology {topology!r}", fix=_KNOWN)
        # Read when libtpu is loaded. JAX itself tells libtpu not to look for TPUs on machines without any.
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        slices = {"num_slices": num_slices} if num_slices > 1 else {}
        return topologies.get_topology_desc(topology, "tpu", **slices, **options).devices
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).partition(": ")[2].partition("\n")[0]
        raise TopologyError(f"unknown topology {topology!r}{given}: {reason}", fix=_KNOWN) from error
    except RuntimeError as error:
        compiler, fix = _CUDA if on_gpus else _LIBTPU
        raise TopologyError(f"topology {topology!r} needs {compiler}, which isn't installed", fix=fix) from error


def _fitting(sizes: Sequence[int], count: int) -> list[int]:
    """Sizes that multiply to a count: the last ones as they are where they divide it, the first is the rest."""
    found: list[int] = []
    for size in reversed(sizes[1:]):
        found.insert(0, math.gcd(size, count))
        count //= found[0]
    return [count, *found]


def _megacore(devices: Sequence[Any]) -> str:
    if devices[0].device_kind != _TWO_CORES or not devices[-1].core_on_chip:
        return ""
    return ", or chip_config_name='megacore', by which the two cores of a chip are one device"


def _in_one_slice(sizes: Sequence[int], num_slices: int) -> list[int]:
    """The sizes of the axes in one slice, if the slices are the outermost part of the axes."""
    inner: list[int] = []
    for size in sizes:
        over_slices = math.gcd(size, num_slices) if math.prod(inner) == 1 else 1
        num_slices //= over_slices
        inner.append(size // over_slices)
    return inner


def _laid_out(sizes: Sequence[int], devices: list[Any]) -> np.ndarray:
    """The devices of one slice in the shape of a mesh."""
    if devices[0].device_kind != _TWO_CORES or not devices[-1].core_on_chip:
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    # JAX lays out chips only. The cores of a chip are next to each other along the last axis of even size.
    axis = max(i for i, size in enumerate(sizes) if size % 2 == 0)
    chips = [d for d in devices if not d.core_on_chip]
    by_place = {(*d.coords, d.core_on_chip): d for d in devices}
    mesh = _laid_out([size // 2 if i == axis else size for i, size in enumerate(sizes)], chips)
    pairs = [by_place[(*d.coords, core)] for d in mesh.flat for core in (0, 1)]
    return np.moveaxis(np.array(pairs).reshape(*mesh.shape, 2), -1, axis + 1).reshape(sizes)
