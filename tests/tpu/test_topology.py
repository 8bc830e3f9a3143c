"""`topology_mesh` over TPUs that aren't attached: the layout of the devices, and what works on such a mesh."""

import contextlib
import doctest
import functools
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from support import M42, nothing_compiled, nothing_moved

import namedshard as ns
from namedshard import _jaxcompat as compat
from namedshard._plan.mesh import reduce_mesh, restore_mesh
from namedshard._topology import topology_mesh

KNOWN = (
    "\n  fix: name the chips in each direction (v3:4x4, v4:2x2x4, v5e:16x16, v5p:2x2x4, v6e:4x4, tpu7x:2x2x1), or GPUs"
    " (h100:8; h100:32x8 for 32 hosts; others take target_config=)"
)
MEGACORE = {"chip_config_name": "megacore"}
# Each of 2 x 4 devices has 128 x 128 numbers, which a TPU doesn't pad.
In, Out = hax.make_axes(inn=256, out=512)
BYTES = 4 * 128 * 128
MAPPING = {"inn": "data", "out": "model"}


# --- layout -----------------------------------------------------------------------------------------------------------


def steps(mesh: Mesh, axis: int) -> set[int]:
    """How far apart neighbors along a mesh axis are, over the links of the torus."""
    coords = np.array([d.coords for d in mesh.devices.flat]).reshape(*mesh.devices.shape, 3)
    bounds = coords.reshape(-1, 3).max(0) + 1
    away = np.abs(np.diff(coords, axis=axis))
    return set(np.minimum(away, bounds - away).sum(-1).flat)


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("v5e:4x4", {"data": 4, "model": 4}),
        ("v5e:4x4", {"data": 16}),
        ("v6e:4x4", {"data": 16}),
        ("v6e:4x8", {"model": 8, "data": 4}),
        ("v5e:16x16", {"data": 16, "model": 16}),
        ("v5p:2x4x4", {"a": 2, "b": 4, "c": 4}),
        ("v5p:4x4x4", {"a": 4, "b": 4, "c": 4}),
    ],
)
def test_neighbors_along_an_axis_are_linked(name: str, axes: dict[str, int]) -> None:
    mesh = ns.topology_mesh(name, axes)
    assert mesh.shape == axes
    assert [steps(mesh, i) for i in range(len(axes))] == [{1}] * len(axes)


NAMES = [
    ("v2:2x2", {}, 8),
    ("v3:4x4", {}, 32),
    ("v4:2x2x2", {}, 16),
    ("v4:2x2x4", MEGACORE, 16),
    ("v5e:1x1", {}, 1),
    ("v5e:2x4", {}, 8),
    ("v5e:4x4", {"chips_per_host_bounds": (2, 4, 1)}, 16),
    ("v5e:3x4", {"chips_per_host_bounds": (1, 1, 1)}, 12),
    ("v5p:2x4x4", {}, 32),
    ("v6e:8x8", {}, 64),
    ("tpu7x:2x2x1", {}, 8),
    ("tpu7x:2x4x4", {}, 64),
]


@pytest.mark.parametrize(("name", "options", "count"), NAMES, ids=[name for name, *_ in NAMES])
def test_every_shape_that_fits_has_every_device_once(name: str, options: dict[str, Any], count: int) -> None:
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    for shape in itertools.product(divisors, repeat=3):
        if math.prod(shape) == count:
            mesh = ns.topology_mesh(name, dict(zip("abc", shape, strict=True)), **options)
            assert mesh.devices.shape == shape
            assert len({d.id for d in mesh.devices.flat}) == count
            assert NamedSharding(mesh, PartitionSpec(), memory_kind="pinned_host").memory_kind == "pinned_host"


def test_large_slices_take_no_time() -> None:
    mesh = ns.topology_mesh("v5p:16x20x28", {"data": 20, "model": 448})
    assert len({d.id for d in mesh.devices.flat}) == 8960


def test_an_axis_takes_chips_that_are_near_each_other() -> None:
    """A naive reshape of the devices of hosts with 4 chips doesn't."""
    mesh = ns.topology_mesh("v5e:4x4", {"data": 2, "model": 8})
    rows = [{tuple(d.coords[:2]) for d in row} for row in mesh.devices]
    assert all(len({x for x, _ in row}) * len({y for _, y in row}) == 8 for row in rows)


def test_the_two_cores_of_a_chip_are_neighbors() -> None:
    mesh = ns.topology_mesh("v4:2x2x2", {"data": 2, "model": 8})
    pairs = mesh.devices.reshape(-1, 2)
    assert all(a.coords == b.coords and a.core_on_chip != b.core_on_chip for a, b in pairs)
    mesh = ns.topology_mesh("v4:1x1x3", {"data": 2, "model": 3}, chips_per_host_bounds=(1, 1, 1))
    assert all(a.coords == b.coords for a, b in zip(*mesh.devices, strict=True))


@pytest.mark.parametrize("axes", [{"data": 8, "model": 4}, {"slice": 2, "data": 4, "model": 4}, {"a": 32}])
def test_slices_are_outermost(axes: dict[str, int]) -> None:
    mesh = ns.topology_mesh("v5e:4x4", axes, num_slices=2)
    first = next(iter(axes))
    inner = ns.topology_mesh("v5e:4x4", axes | {first: axes[first] // 2})
    slices = mesh.devices.reshape(2, -1)
    assert [{d.slice_index for d in devices} for devices in slices] == [{0}, {1}]
    for devices in slices:
        assert [d.coords for d in devices] == [d.coords for d in inner.devices.flat]


def test_chips_of_a_host_have_one_process() -> None:
    mesh = ns.topology_mesh("v5e:4x4", {"data": 16}, chips_per_host_bounds=(2, 4, 1))
    assert sorted({d.process_index for d in mesh.devices.flat}) == [0, 1]


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("v9:2x2", {}, "Invalid TPU external name: TPU v9"),
        ("a100:8", {}, "Invalid TPU external name: TPU a100"),
        ("v5e:4", {}, "Invalid topology layout for a single slice: 4"),
        (
            "v5e:3x3",
            {},
            'Topology layout "v5e:3x3" is not divisible by the given (or default) chips_per_host_bounds "2x2x1"',
        ),
        ("v5e:4x4", {"hosts": 4}, "Unexpected arguments: hosts"),
    ],
)
def test_what_the_compiler_does_not_know(name: str, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ns.TopologyError) as caught:
        ns.topology_mesh(name, {"data": 16}, **options)
    given = "".join(f", {key}={value!r}" for key, value in options.items())
    assert str(caught.value) == f"unknown topology {name!r}{given}: {reason}" + KNOWN


def test_the_devices_of_two_cores_are_counted() -> None:
    with pytest.raises(ns.TopologyError) as caught:
        ns.topology_mesh("v4:2x2x2", {"data": 8})
    wanted = "topology 'v4:2x2x2': the axes ('data'=8) take 8 devices, but there are 16\n  fix: pass {'data': 16}"
    assert str(caught.value) == (
        wanted + ", or chip_config_name='megacore', by which the two cores of a chip are one device"
    )
    assert ns.topology_mesh("v4:2x2x2", {"data": 8}, **MEGACORE).size == 8


# --- processes --------------------------------------------------------------------------------------------------------

LAPTOP = """
import jax, namedshard as ns
{before}
mesh = ns.topology_mesh("v5e:2x4", {{"data": 2, "model": 4}})
print("compiler ready", flush=True)
input()
w = jax.ShapeDtypeStruct((8,), "float32", sharding=jax.sharding.NamedSharding(mesh, jax.P("data")))
jax.jit(lambda w: 2 * w).lower(w).compile()
print(jax.devices()[0].platform, float(jax.numpy.ones(3).sum()))
"""


def test_processes_without_a_setting_share_the_compiler() -> None:
    """Two at once, one of which has used JAX before; JAX finds no TPU in either."""
    unset = ("JAX_PLATFORMS", "XLA_FLAGS", "TPU_SKIP_MDS_QUERY", "ALLOW_MULTIPLE_LIBTPU_LOAD")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    run = functools.partial(subprocess.Popen, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    both = [run([sys.executable, "-c", LAPTOP.format(before=before)]) for before in ("", "jax.numpy.ones(3)")]
    assert [p.stdout and p.stdout.readline() for p in both] == ["compiler ready\n"] * 2
    assert [p.communicate("\n", timeout=120)[0] for p in both] == ["cpu 3.0\n"] * 2


# --- what works -------------------------------------------------------------------------------------------------------


def struct() -> hax.NamedArray:
    return hax.NamedArray(jax.ShapeDtypeStruct((256, 512), jnp.float32), (In, Out))


@pytest.fixture(params=["auto", "explicit", "mixed"])
def mesh(request: pytest.FixtureRequest) -> Mesh:
    types = {"auto": AxisType.Auto, "explicit": AxisType.Explicit, "mixed": (AxisType.Auto, AxisType.Explicit)}
    return ns.topology_mesh("v5e:2x4", {"data": 2, "model": 4}, axis_types=types[request.param])


def test_devices_are_told_apart(mesh: Mesh) -> None:
    assert not compat.is_attached(mesh.devices.flat[0])
    assert compat.is_attached(jax.devices()[0])


def test_plans_and_structs(mesh: Mesh) -> None:
    wanted = NamedSharding(mesh, PartitionSpec("data", "model"))
    with nothing_compiled(), nothing_moved():
        assert ns.plan(struct(), MAPPING, mesh).leaves[0].spec == wanted.spec
        placed = ns.shard({"w": struct()}, MAPPING, mesh)
        assert placed["w"].array.sharding == wanted
        assert "64 KiB" in str(ns.explain({"w": struct()}, MAPPING, mesh))
        assert "keep" in str(ns.explain(placed, MAPPING, mesh))
        on_host = ns.shard(placed, MAPPING, mesh, memory_kind="pinned_host")["w"].array.sharding
        assert on_host == wanted.with_memory_kind("pinned_host")
        assert ns.offload(placed)["w"].array.sharding == on_host
        ns.testing.assert_placed(placed, MAPPING, mesh, memory_kind="device")
    with pytest.raises(ns.MemoryKindError, match="'fast' is not offered by tpu devices, which have 'device', 'pinned_"):
        ns.shard(placed, MAPPING, mesh, memory_kind="fast")


def test_memory_kinds_that_jax_would_forget() -> None:
    """Only devices of the first process tell their memories, and JAX asks the first device of a mesh."""
    devices = list(ns.topology_mesh("v5e:4x4", {"data": 4, "model": 4}).devices.flat)
    third = Mesh(np.array([d for d in devices if d.process_index == 3]).reshape(2, 2), ("data", "model"))
    for mesh in (third, Mesh(np.array(devices[::-1]).reshape(4, 4), ("data", "model"))):
        assert NamedSharding(mesh, PartitionSpec(), memory_kind="pinned_host").memory_kind is None
        assert ns.shard(struct(), MAPPING, mesh, memory_kind="device").array.sharding.mesh == mesh
        for kind in ("pinned_host", "fast"):
            with pytest.raises(ns.MemoryKindError, match=f"memory kind '{kind}' can't be asked of tpu devices"):
                ns.shard(struct(), MAPPING, mesh, memory_kind=kind)


def test_init_gives_structs(mesh: Mesh) -> None:
    key = jax.random.key(0)
    optimizer = ns.offload_optimizer(optax.adam(1e-3), where=r"\.(mu|nu)\b")

    def make(key: Any) -> dict[str, Any]:
        return {"w": hax.random.normal(key, (In, Out))}

    for exact in (False, True):
        with nothing_moved():
            params = ns.init(make, key, mapping=MAPPING, mesh=mesh, exact=exact)
        assert params["w"].array.sharding == NamedSharding(mesh, PartitionSpec("data", "model"))
    with jax.set_mesh(mesh):
        state = ns.init(optimizer.init, params)
    assert [x.sharding.memory_kind for x in jax.tree.leaves(state)] == ["device", "pinned_host", "pinned_host"]
    assert state[0].mu["w"].array.sharding.spec == PartitionSpec("data", "model")
    programs = ns.lower_init(make, key, mapping=MAPPING, mesh=mesh).compile().programs
    assert [p.memory_analysis().output_size_in_bytes for p in programs] == [BYTES]


def test_functions_compile(mesh: Mesh) -> None:
    placed = ns.shard(struct(), MAPPING, mesh)
    double = ns.named_jit(lambda w: w * 2, MAPPING)
    shared = ns.fsdp(lambda w: w * 2, MAPPING, {"out": "model"})
    on_host = hax.named(np.ones((256, 512), np.float32), ("inn", "out"))
    with jax.set_mesh(mesh):
        assert double.eval_shape(placed).array.sharding == placed.array.sharding
        for function in (double, shared):
            for argument in (placed, struct(), on_host):
                compiled = function.lower(argument).compile()
                assert jax.tree.leaves(compiled.output_shardings) == [placed.array.sharding]
                assert compiled.memory_analysis().argument_size_in_bytes == BYTES
    within = jax.jit(lambda x: double(hax.named(x, ("inn", "out"))).array)
    with jax.set_mesh(mesh):
        assert within.lower(placed.array).compile().memory_analysis().output_size_in_bytes == BYTES


@pytest.mark.parametrize(
    ("name", "options"),
    [("v3:2x2", {}), ("v4:2x2x1", {}), ("v4:2x2x2", MEGACORE), ("v5p:2x2x2", {}), ("v6e:2x4", {}), ("tpu7x:2x2x1", {})],
)
def test_every_kind_compiles(name: str, options: dict[str, Any]) -> None:
    mesh = ns.topology_mesh(name, {"data": 2, "model": 4}, **options)
    placed = ns.shard(struct(), MAPPING, mesh)
    with jax.set_mesh(mesh):
        compiled = ns.named_jit(lambda w: w / w.sum(In), MAPPING).lower(placed).compile()
    assert compiled.memory_analysis().argument_size_in_bytes == BYTES
    assert "all-reduce" in compiled.as_text()


def test_the_docstring_example() -> None:
    text = (topology_mesh.__doc__ or "").replace("  # doctest: +SKIP", "")
    test = doctest.DocTestParser().get_doctest(text, {}, "topology_mesh", None, None)
    assert doctest.DocTestRunner().run(test) == (0, len(test.examples))


# --- what would run, or move data -------------------------------------------------------------------------------------

FIX = (
    "\n  fix: pass jax.ShapeDtypeStructs, which ns.init creates here, and compile with f.lower(...).compile(); to run,"
    " use a mesh of jax.devices()"
)


def refused(what: str, call: Callable[[], Any], *, transformed: bool = False) -> None:
    """The call raises the one error, and nothing is compiled or moved: transformed, nothing for the mesh."""
    compiled = contextlib.nullcontext() if transformed else nothing_compiled()
    with nothing_moved(), compiled, pytest.raises(ns.UnattachedDevicesError) as caught:
        call()
    head = "the mesh ('data'=2, 'model'=4) is a topology, for compiling only: its 8 TPU v5 lite devices aren't attached"
    assert str(caught.value) == f"{what}: {head}{FIX}"


def test_values_go_nowhere(mesh: Mesh) -> None:
    x, y, one = hax.ones((In, Out)), np.ones((256, 512), np.float32), jnp.ones(1)
    far = ns.shard(x, MAPPING, M42)
    many = jnp.ones((3, 256, 512))
    for value in (x, hax.NamedArray(y, (In, Out)), far, (struct(), x)):
        refused("shard", lambda value=value: ns.shard(value, MAPPING, mesh, donate=True))
    with jax.set_mesh(mesh), ns.axis_mapping(MAPPING):
        refused("shard", lambda: ns.auto_sharded(x))
        refused(
            "shard", lambda: jax.vmap(lambda a: ns.shard(hax.NamedArray(a, (In, Out))).array)(many), transformed=True
        )
        refused("shard", lambda: jax.grad(lambda _: ns.shard(x).array.sum())(one), transformed=True)
        refused("offload", lambda: ns.offload({"w": y}))
        refused("offload", lambda: ns.offload({"w": x}))
        optimizer = ns.offload_optimizer(optax.adam(1e-3), where="mu")
        refused("offload_optimizer: init", lambda: optimizer.init({"w": x}))
        refused("offload_optimizer: update", lambda: optimizer.update({"w": x}, None))
    assert not far.array.is_deleted()


def test_nothing_runs(mesh: Mesh) -> None:
    x, key = hax.ones((In, Out)), jax.random.key(0)
    far = ns.shard(x, MAPPING, M42)
    placed = ns.shard(struct(), MAPPING, mesh)

    def double(w: Any) -> Any:
        return w * 2

    function, shared = ns.named_jit(double, MAPPING), ns.fsdp(double, MAPPING, MAPPING)
    name = "double"
    with jax.set_mesh(mesh):
        for value in (x, far, placed, struct()):
            refused(name, lambda value=value: function(value))
            refused(name, lambda value=value: shared(value))
        compiled = function.lower(placed).compile()
        refused(name, lambda: function(placed))
        total = jax.grad(lambda a: function(hax.NamedArray(a, (In, Out))).array.sum())
        refused(name, lambda: total(x.array), transformed=True)
    bare = ns.named_jit(double)
    without_context = bare.lower(placed).compile()
    refused(name, lambda: bare(placed))
    for program in (compiled, without_context):
        for value in (x, far, placed):
            refused(name, lambda program=program, value=value: program(value))
    made = ns.lower_init(hax.random.normal, key, (In, Out), mapping=MAPPING, mesh=mesh).compile()
    refused("init", lambda: made(key, (In, Out)))


def test_no_checkpoint_is_read(mesh: Mesh) -> None:
    """The file isn't even there."""
    like = {"w": struct()}
    placed = ns.shard(like, MAPPING, mesh)
    load = functools.partial(ns.load_safetensors, "nowhere.safetensors", progress=False)
    refused("load_safetensors", lambda: load(like, mapping=MAPPING, mesh=mesh))
    refused("load_safetensors", lambda: load(placed))
    with jax.set_mesh(mesh):
        refused("load_safetensors", lambda: load(like, mapping=MAPPING))


def test_structs_of_a_topology_can_be_loaded_onto_attached_devices(mesh: Mesh, tmp_path: Any) -> None:
    values = {"w": hax.ones((In, Out)), "v": jnp.arange(8.0)}
    ns.save_safetensors(values, tmp_path / "m.safetensors", progress=False)
    like = ns.init(lambda: values, mapping=MAPPING, mesh=mesh)
    loaded = ns.load_safetensors(tmp_path / "m.safetensors", like, mapping=MAPPING, mesh=M42, progress=False)
    assert loaded["w"].array.sharding.mesh == loaded["v"].sharding.mesh == M42


def test_devices_differ_in_other_processes(mesh: Mesh) -> None:
    """A mesh is pickled as its shape: devices with the same numbers may be attached there."""
    assert restore_mesh(*reduce_mesh(mesh)) == mesh.abstract_mesh
