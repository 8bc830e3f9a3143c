"""What the TPU compiler makes of states in host memory."""

import itertools
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import SHAPES, Traffic, compiled_step, device_collectives, in_host_memory, structs, traffic

import namedshard as ns

A, E = AxisType.Auto, AxisType.Explicit
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda: optax.adamw(1e-3),
    "lion": lambda: optax.lion(1e-3),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(1e-3),
    "MultiSteps": lambda: optax.MultiSteps(optax.adamw(1e-3), 4),
    "muon": lambda: optax.contrib.muon(1e-3),
    "masked": lambda: optax.masked(optax.adamw(1e-3), lambda p: jax.tree.map(lambda _: True, p)),
}
MOMENTS = r"\.(mu|nu|acc_grads)\b"


def mesh_of(topology: str = "v5e:2x4", shape: tuple[int, int] = (2, 4), types: Any = A) -> Any:
    return ns.topology_mesh(topology, dict(zip(("data", "model"), shape, strict=True)), axis_types=types)


@pytest.mark.parametrize("budget", [None, "1MiB"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_state_is_transferred_once_each_way(name: str, budget: str | None) -> None:
    tx = ns.offload_optimizer(OPTIMIZERS[name](), budget=budget)
    compiled, state = compiled_step(tx, mesh_of())
    count = in_host_memory(state)
    assert count >= 4
    assert traffic(compiled) == Traffic(count, count)
    memory = compiled.memory_analysis()
    # The states' memory is used again, on the host and on the device.
    assert memory.host_alias_size_in_bytes == memory.host_output_size_in_bytes == memory.host_argument_size_in_bytes
    assert memory.host_temp_size_in_bytes == 0


@pytest.mark.parametrize(
    ("topology", "types"),
    [("v5e:2x4", E), ("v5e:2x4", (E, A)), ("v5e:2x4", (A, E)), ("v5p:2x2x2", A), ("v5p:2x2x2", E), ("v6e:2x4", A)],
    ids=str,
)
@pytest.mark.parametrize("donate", [True, False])
def test_on_every_kind_of_tpu_and_of_axes(topology: str, types: Any, donate: bool) -> None:
    mesh = mesh_of(topology, types=types)
    compiled, state = compiled_step(ns.offload_optimizer(optax.adamw(1e-3)), mesh, donate=donate)
    assert in_host_memory(state) == 2 * len(SHAPES)
    assert traffic(compiled) == Traffic(2 * len(SHAPES), 2 * len(SHAPES))
    # It takes its own results.
    given = jax.tree.leaves((structs(mesh), state))
    for x, output in zip(given, compiled.outputs(), strict=True):
        assert output.got.is_equivalent_to(x.sharding, x.ndim), output.path


@pytest.mark.parametrize("types", [A, E, (E, A)], ids=str)
@pytest.mark.parametrize("momentum", [None, 0.9])
def test_states_without_names_come_out_as_they_went_in(momentum: float | None, types: Any) -> None:
    mesh = mesh_of(types=types)
    tx = ns.offload_optimizer(optax.adafactor(1e-3, min_dim_size_to_factor=128, momentum=momentum))
    compiled, state = compiled_step(tx, mesh)
    found = traffic(compiled)
    # The factored states of each shape; what stands for those there are not is only sent back.
    assert found.to_device <= in_host_memory(state) == found.to_host
    assert (found.host_collectives, found.host_programs) == (0, 0)
    given = jax.tree.leaves((structs(mesh), state))
    for x, output in zip(given, compiled.outputs(), strict=True):
        assert output.got.is_equivalent_to(x.sharding, x.ndim), output.path


@pytest.mark.parametrize("types", [A, E], ids=str)
@pytest.mark.parametrize("budget", [8, 16, 48])
def test_a_budget_bounds_what_is_on_the_device(types: Any, budget: int) -> None:
    mesh = mesh_of(types=types)
    axes = hax.make_axes(inn=1024, out=1024)
    params = structs(mesh, {"out": "model"}, {f"w{n}": axes for n in range(24)})
    tx = ns.offload_optimizer(optax.adamw(1e-3), budget=f"{budget}MiB")
    compiled, _ = compiled_step(tx, mesh, {"out": "model"}, params=params)
    assert traffic(compiled) == Traffic(48, 48)
    assert compiled.memory_analysis().temp_size_in_bytes <= 2 * budget * 2**20


@pytest.mark.parametrize("types", [A, E, (E, A)], ids=str)
@pytest.mark.parametrize("size", [16, 256, 1024, 4096])
def test_states_sharded_otherwise_than_results(size: int, types: Any) -> None:
    mesh = mesh_of("v5e:4x4", (4, 4), types)
    shapes = {"b": hax.make_axes(embed=size), "w": hax.make_axes(embed=size, mlp=128)}
    tx = ns.offload_optimizer(optax.adam(1e-3))
    for states, results in (({"embed": "data"}, {}), ({}, {"embed": "data"}), ({"embed": "data"}, {"embed": "model"})):
        compiled, _ = compiled_step(
            tx, mesh, {}, states=states, out_mapping=results, params=structs(mesh, {}, shapes), donate=False
        )
        assert traffic(compiled) == Traffic(4, 4)


@pytest.mark.parametrize("jit", [ns.named_jit, jax.jit])
@pytest.mark.parametrize("types", [A, E, (E, A), (A, E)], ids=str)
@pytest.mark.parametrize("shape", [(16,), (256, 256)])
def test_what_comes_from_the_host_is_gathered_on_the_device(shape: tuple[int, ...], types: Any, jit: Any) -> None:
    mesh = mesh_of("v5e:4x4", (4, 4), types)
    names = ("a", "b")[: len(shape)]
    mappings = [{}, {"a": "data"}, {"a": "model"}, {names[-1]: "model"}, {"a": "data", names[-1]: "model"}]
    mappings = mappings if len(shape) > 1 else mappings[:3]
    struct = hax.NamedArray(
        jax.ShapeDtypeStruct(shape, jnp.float32), tuple(hax.Axis(n, s) for n, s in zip(names, shape, strict=True))
    )
    for source, target in itertools.permutations(mappings, 2):
        x = ns.shard(struct, source, mesh, memory_kind="pinned_host")
        with jax.set_mesh(mesh):
            # Where it comes in, it is used on the device.
            used = jit(lambda x, target=target: (ns.shard(x, target, memory_kind="device") * 2).sum().array)
            assert traffic(used.lower(x).compile()).host_collectives == 0
            # On the host it comes in, is moved, and goes back.
            kept = jit(lambda x, target=target: ns.shard(x, target)).lower(x).compile()
            assert traffic(kept) == Traffic(1, 1)


def test_arguments_that_are_results_stay_in_host_memory() -> None:
    mesh = mesh_of()
    x = ns.shard(structs(mesh)["w0"], {"out": "model"}, mesh, memory_kind="pinned_host")
    for mapping, moved in (({"out": "model"}, False), (None, False), ({"out": "data"}, True)):
        fn = ns.named_jit(lambda x, y: (x, y + 1), mapping)
        with jax.set_mesh(mesh):
            compiled = fn.lower(x, structs(mesh)["w1"]).compile()
        # The host copies what isn't donated.
        assert traffic(compiled) == (Traffic(1, 1) if moved else Traffic(0, 0, host_programs=1))
        assert [o.got.memory_kind for o in compiled.outputs()] == ["pinned_host", "device"]
        assert (device_collectives(compiled) > 0) is moved


def test_a_whole_step_of_a_sharded_model() -> None:
    mesh = mesh_of("v5e:4x4", (4, 4))
    mapping = {"out": "model", "inn": "data", "batch": "data"}
    params = structs(mesh, mapping, {name: SHAPES[name] for name in ("w0", "w1", "b")})
    x = hax.NamedArray(jax.ShapeDtypeStruct((64, 1024), jnp.float32), hax.make_axes(batch=64, feature=1024))
    tx = ns.offload_optimizer(optax.adamw(1e-3), r"\.(mu|nu)\b", budget="4MiB")
    state = ns.init(tx.init, params, mapping=mapping, mesh=mesh)

    def loss(params: Any, x: Any) -> Any:
        hidden = hax.dot(x.rename({"feature": "inn"}), params["w0"], axis="inn") + params["b"]
        return (hax.dot(hax.tanh(hidden).rename({"out": "inn"}), params["w1"], axis="inn") ** 2).mean().scalar()

    @ns.fsdp(mapping, {"batch": "data", "out": "model"})
    def step(params: Any, state: Any, x: Any) -> Any:
        updates, state = tx.update(jax.grad(loss)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    with jax.set_mesh(mesh):
        compiled = step.lower(params, state, ns.shard(x, mapping)).compile()
    assert traffic(compiled) == Traffic(6, 6)
    assert device_collectives(compiled) > 0


def test_a_budget_and_a_fit_count_the_devices_of_the_mesh() -> None:
    assert jax.device_count() != 16
    for types in (A, E):
        mesh = mesh_of("v5e:4x4", (4, 4), types)
        params = structs(mesh, {"out": "model", "inn": "data"}, {f"w{n}": SHAPES["w0"] for n in range(3)})
        # 256 KiB of each moment on a device.
        tx = ns.offload_optimizer(optax.adam(1e-3), fit="1MiB")
        mapping = {"out": "model", "inn": "data"}
        assert in_host_memory(ns.init(tx.init, params, mapping=mapping, mesh=mesh)) == 3
        with jax.set_mesh(mesh):
            state = ns.named_jit(tx.init, mapping).eval_shape(params)
        assert (
            sum(x.sharding is not None and x.sharding.memory_kind == "pinned_host" for x in jax.tree.leaves(state)) == 3
        )
    unnamed = jax.ShapeDtypeStruct(
        (1024, 1024), np.float32, sharding=NamedSharding(mesh_of("v5e:4x4", (4, 4)), P("data"))
    )
    state = ns.init(ns.offload_optimizer(optax.adam(1e-3), fit="1100KiB").init, {"w": unnamed})
    assert in_host_memory(state) == 1
