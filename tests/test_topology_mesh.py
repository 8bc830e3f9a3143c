"""Meshes of devices that aren't attached, as far as no compiler for them is needed; the rest is in tests/tpu."""

import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from support import AUTO, DEVICES, EXPLICIT, M42, na

import namedshard as ns
from namedshard._jit.donation import check_donatable
from namedshard._jit.program import Output, Program
from namedshard._place.shard import check_memory_of

KNOWN = (
    "\n  fix: name the chips in each direction (v3:4x4, v4:2x2x4, v5e:16x16, v5p:2x2x4, v6e:4x4, tpu7x:2x2x1), or GPUs"
    " (h100:8; h100:32x8 for 32 hosts; others take target_config=)"
)
AXES = "\n  fix: pass {'data': 4, 'model': 4}"


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """This process's devices stand for every topology; what was asked for is noted."""
    asked: list[dict[str, Any]] = []

    def describe(topology_name: str = "", platform: str | None = None, **options: Any) -> Any:
        asked.append({"topology_name": topology_name, "platform": platform} | options)
        return SimpleNamespace(devices=list(DEVICES))

    monkeypatch.setattr(topologies, "get_topology_desc", describe)
    monkeypatch.delenv("ALLOW_MULTIPLE_LIBTPU_LOAD", raising=False)
    return asked


def message(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(ns.TopologyError) as caught:
        ns.topology_mesh(*args, **kwargs)
    return str(caught.value)


@pytest.mark.parametrize(
    ("axes", "listed"), [({}, ""), ({"data": 0}, "'data'=0"), ({"a": 2, "b": -4}, "'a'=2, 'b'=-4")]
)
def test_axes_need_sizes(axes: dict[str, int], listed: str) -> None:
    text = message("v5e:4x4", axes)
    assert text == f"topology 'v5e:4x4': the axes ({listed}) need sizes, which are whole numbers from 1" + AXES


def test_there_is_at_least_one_slice() -> None:
    text = message("v5e:4x4", {"data": 16}, num_slices=0)
    assert text == "topology 'v5e:4x4' in 0 slices: there is at least one\n  fix: pass num_slices=1 or more"


def test_axis_types_are_for_each_axis_or_for_all(described: list[dict[str, Any]]) -> None:
    text = message("v5e:2x4", {"data": 2, "model": 4}, axis_types=[AUTO])
    fix = "\n  fix: pass one type for each axis, or one for all"
    assert text == "topology 'v5e:2x4': the axes ('data'=2, 'model'=4) have 1 types" + fix
    for given, types in ((None, (AUTO, AUTO)), (EXPLICIT, (EXPLICIT, EXPLICIT)), ((AUTO, EXPLICIT), (AUTO, EXPLICIT))):
        assert ns.topology_mesh("v5e:2x4", {"data": 2, "model": 4}, axis_types=given).axis_types == types


@pytest.mark.parametrize(
    "name",
    ["", "v5e", "v5e-256", "v5litepod-16", "v5e:", "v5e:0x4", "v5e:4x", "v5e:4x4x0", "h100", "h100:0", "h100:x8"],
)
def test_names_that_are_none_reach_no_compiler(name: str, described: list[dict[str, Any]]) -> None:
    assert message(name, {"data": 16}) == f"unknown topology {name!r}" + KNOWN
    assert not described


@pytest.mark.parametrize(
    ("axes", "listed", "takes", "fix"),
    [
        ({"data": 4, "model": 4}, "'data'=4, 'model'=4", 16, {"data": 2, "model": 4}),
        ({"data": 4}, "'data'=4", 4, {"data": 8}),
        ({"data": 3, "model": 5}, "'data'=3, 'model'=5", 15, {"data": 8, "model": 1}),
        ({"a": 2, "b": 4, "c": 6}, "'a'=2, 'b'=4, 'c'=6", 48, {"a": 1, "b": 4, "c": 2}),
    ],
)
def test_sizes_multiply_to_the_devices(
    axes: dict[str, int], listed: str, takes: int, fix: dict[str, int], described: list[dict[str, Any]]
) -> None:
    text = message("v5e:2x4", axes)
    wanted = f"topology 'v5e:2x4': the axes ({listed}) take {takes} devices, but there are 8\n  fix: pass {fix}"
    assert text == wanted
    assert ns.topology_mesh("v5e:2x4", fix).shape == fix


def test_a_missing_compiler_for_tpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "libtpu", None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    wanted = "topology 'v5e:4x4' needs the TPU compiler, which isn't installed\n"
    assert message("v5e:4x4", {"data": 16}) == wanted + "  fix: pip install 'namedshard[tpu-compiler]'"


def test_a_missing_compiler_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(topologies, "get_topology_desc", missing)
    wanted = "topology 'h100:8' needs JAX's CUDA plugin, which isn't installed\n  fix: pip install 'jax[cuda13]'"
    assert message("h100:8", {"data": 8}) == wanted


@pytest.mark.parametrize(
    ("name", "slices", "shape"), [("h100:8", 1, "1x1x8"), ("H100:2x4", 1, "1x2x4"), ("h100:4", 2, "2x1x4")]
)
def test_gpus_are_described_by_host(name: str, slices: int, shape: str, described: list[dict[str, Any]]) -> None:
    mesh = ns.topology_mesh(name, {"data": 8}, num_slices=slices)
    (asked,) = described
    assert 'name: "NVIDIA H100 80GB HBM3"' in asked.pop("target_config")
    assert asked == {"topology_name": "", "platform": "cuda", "topology": shape}
    assert mesh.devices.tolist() == DEVICES.tolist()


def test_other_gpus_are_described_by_their_configuration(described: list[dict[str, Any]]) -> None:
    ns.topology_mesh("b200:2x4", {"data": 8}, target_config="core_count: 148")
    asked = {"topology": "1x2x4", "target_config": "core_count: 148"}
    assert described == [{"topology_name": "", "platform": "cuda"} | asked]
    text = message("h100:8", {"data": 8}, megacore=True)
    assert text == "unknown topology 'h100:8', megacore=True\n  fix: GPUs take target_config only"


def test_options_are_passed_on(described: list[dict[str, Any]]) -> None:
    ns.topology_mesh("v4:2x2x2", {"data": 8}, chip_config_name="megacore")
    ns.topology_mesh("v4:2x2x1", {"data": 8}, num_slices=2)
    first, second = described
    assert first == {"topology_name": "v4:2x2x2", "platform": "tpu", "chip_config_name": "megacore"}
    assert second == {"topology_name": "v4:2x2x1", "platform": "tpu", "num_slices": 2}


@pytest.mark.parametrize("axes", [{"data": 8}, {"slice": 2, "data": 4}, {"a": 1, "b": 2, "c": 2, "d": 2}])
def test_slices_are_outermost(axes: dict[str, int], described: list[dict[str, Any]]) -> None:
    mesh = ns.topology_mesh("v5e:2x2", axes, num_slices=2)
    assert mesh.devices.flatten().tolist() == DEVICES.tolist()
    assert mesh.shape == axes


def test_slices_that_cannot_be_outermost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topologies, "get_topology_desc", lambda *_, **__: SimpleNamespace(devices=list(DEVICES[:6])))
    text = message("v5e:1x2", {"data": 2, "model": 3}, num_slices=3)
    wanted = "topology 'v5e:1x2' in 3 slices: the axes ('data'=2, 'model'=3) can't have the slices as their outermost"
    assert text == wanted + " part\n  fix: name an axis first that 3 divides, or axes that multiply to 3"


def test_an_attached_mesh_is_attached() -> None:
    assert ns.shard(na(jnp.ones(4), "batch"), {"batch": "data"}, M42).array.sharding.mesh == M42


# --- devices that tell no memories, as GPUs of a topology do ----------------------------------------------------------

SILENT = Mock(spec=jax.Device, platform="gpu", addressable_memories=list)


def test_devices_that_tell_no_memories_have_their_own_only() -> None:
    check_memory_of([SILENT], "device")
    with pytest.raises(ns.MemoryKindError) as caught:
        check_memory_of([SILENT], "pinned_host")
    wanted = (
        "memory kind 'pinned_host' can't be asked of gpu devices that aren't attached: JAX describes their arrays"
        ' without one\n  fix: use "device", or compile where these devices are attached'
    )
    assert str(caught.value) == wanted


@pytest.mark.parametrize(("kind", "fits"), [("device", True), ("pinned_host", False)])
def test_no_memory_kind_is_device_memory_when_donating(kind: str, fits: bool) -> None:
    asked = NamedSharding(M42, PartitionSpec("data"))
    silent = SimpleNamespace(memory_kind=None, shard_shape=asked.shard_shape)
    x: Any = SimpleNamespace(shape=(8,), dtype=jnp.dtype("float32"), sharding=silent)
    output = Output("result", asked, jax.ShapeDtypeStruct((8,), "float32"), kind, sources=frozenset({0}))
    program = Mock(spec=Program, donate=(0,), paths=["x"], outputs=[output])
    program.name = "step"
    if fits:
        check_donatable(program, [x])
        return
    with pytest.raises(ns.DonationError, match="x: memory kind 'device', but result is in 'pinned_host'"):
        check_donatable(program, [x])
