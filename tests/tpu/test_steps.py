"""Whole steps: what is checked when they are lowered and compiled, as at a call."""

from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import MAPPING, compiled_step, structs, traffic

import namedshard as ns

A, E = AxisType.Auto, AxisType.Explicit


def kinds(tree: Any) -> list[str | None]:
    return [None if x.sharding is None else x.sharding.memory_kind for x in jax.tree.leaves(tree)]


def message_of(call: Any, kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def test_states_lost_to_the_device_are_named() -> None:
    mesh = ns.topology_mesh("v5e:2x4", {"data": 2, "model": 4})
    params = structs(mesh)
    tx = ns.offload_optimizer(optax.adam(1e-3), r"\.mu\b")

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    fn = ns.named_jit(step, MAPPING, donate_args=(True, True, False))
    state = ns.init(tx.init, params, mapping=MAPPING, mesh=mesh)
    lost = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    with jax.set_mesh(mesh):
        assert message_of(lambda: fn.lower(params, ns.shard(lost, MAPPING), params), ns.OffloadError) == (
            "4 of 9 leaves that belong in host memory are in device memory at the update\n"
            "  [0].mu['b']\n"
            "  [0].mu['table']\n"
            "  [0].mu['w0']\n"
            "  [0].mu['w1']\n"
            "  fix: create the state, or its structs, with ns.init(tx.init, params), since jax.eval_shape forgets"
            " memory kinds; move a state that was loaded with ns.offload"
        )
        kept = ns.shard(eqx.filter_eval_shape(tx.init, params), MAPPING)
        for right in (state, kept):
            memory = fn.lower(params, right, params).compile().memory_analysis()
            assert memory.host_argument_size_in_bytes == memory.host_alias_size_in_bytes > 0


@pytest.mark.parametrize("types", [A, E, (E, A), (A, E)], ids=str)
def test_results_in_host_memory_are_what_the_program_writes(types: Any) -> None:
    mesh = ns.topology_mesh("v5e:2x4", {"data": 2, "model": 4}, axis_types=types)
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    fn = ns.named_jit(lambda x: (ns.offload(x * 2), ns.offload(x @ x), x.sum()))
    with jax.set_mesh(mesh):
        compiled, shapes = fn.lower(x).compile(), fn.eval_shape(x)
    memory = compiled.memory_analysis()
    assert memory.host_output_size_in_bytes > 0 == memory.host_argument_size_in_bytes
    assert [o.got.memory_kind for o in compiled.outputs()] == ["pinned_host", "pinned_host", "device"]
    assert kinds(shapes)[:2] == ["pinned_host", "pinned_host"]
    assert shapes[0].sharding.is_equivalent_to(compiled.outputs()[0].got, 2)
    assert "output [0]: P('data'" in compiled.explain()
    assert "in 'pinned_host'" in compiled.explain()


@pytest.mark.parametrize("types", [A, E], ids=str)
def test_eval_shape_keeps_memory_kinds(types: Any) -> None:
    mesh = ns.topology_mesh("v5e:2x4", {"data": 2, "model": 4}, axis_types=types)
    tx = ns.offload_optimizer(optax.adam(1e-3), r"\.(mu|nu)\b")
    unnamed = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, P()))}
    with jax.set_mesh(mesh):
        for params, mapping in ((unnamed, None), (structs(mesh), MAPPING)):
            found = ns.named_jit(tx.init, mapping).eval_shape(params)
            right = ns.init(tx.init, params, mapping=mapping, mesh=mesh)
            assert kinds(found)[1:] == kinds(right)[1:] == ["pinned_host"] * (2 * len(params))
            for a, b in zip(jax.tree.leaves(found)[1:], jax.tree.leaves(right)[1:], strict=True):
                assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


@pytest.mark.parametrize("types", [A, E, (E, A)], ids=str)
@pytest.mark.parametrize("donate", [True, False])
def test_a_step_takes_its_own_results(donate: bool, types: Any) -> None:
    mesh = ns.topology_mesh("v5e:2x4", {"data": 2, "model": 4}, axis_types=types)
    params = structs(mesh)
    tx = optax.adafactor(1e-3, min_dim_size_to_factor=64, momentum=0.9)
    compiled, state = compiled_step(tx, mesh, params=params, donate=donate)
    given = jax.tree.leaves((params, state))
    for x, output in zip(given, compiled.outputs(), strict=True):
        assert output.got.is_equivalent_to(x.sharding, x.ndim), output.path
    # Only what stands for factors that there are not is made anew.
    assert all(o.aval.shape == (1,) for o in compiled.outputs() if o.by == "chosen by the compiler")


@pytest.mark.parametrize("size", [8, 100, 256, 1024])
def test_small_results_in_host_memory(size: int) -> None:
    # Gathered on its way to host memory, as jax.jit with out_shardings does it, a small vector does not compile.
    mesh = ns.topology_mesh("v5e:4x4", {"data": 4, "model": 4})
    x = ns.shard(hax.NamedArray(jax.ShapeDtypeStruct((size,), jnp.float32), hax.make_axes(a=size)), {"a": "data"}, mesh)
    with jax.set_mesh(mesh):
        compiled = ns.named_jit(lambda x: ns.offload(x * 2), {}).lower(x).compile()
    found = traffic(compiled)
    assert (found.to_host, found.host_collectives, found.host_programs) == (1, 0, 0)


def test_explain_counts_no_moves_for_what_stays() -> None:
    mesh = ns.topology_mesh("v5e:4x4", {"data": 4, "model": 4})
    assert len({d.process_index for d in mesh.devices.flat}) > 1
    assert "cross" not in str(ns.explain(structs(mesh), MAPPING, mesh))


def test_explain_of_a_compiled_step() -> None:
    mesh = ns.topology_mesh("v5e:2x2", {"data": 2, "model": 2})
    axes = hax.make_axes(inn=256, out=256)
    params = structs(mesh, {"out": "model"}, {"w": axes})
    compiled, _ = compiled_step(
        ns.offload_optimizer(optax.adam(1e-3), r"\.mu\b"), mesh, {"out": "model"}, params=params
    )
    assert compiled.explain().splitlines() == [
        "step: 0 of 4 outputs are placed by the compiler",
        "  argument params['w']: P(None, 'model') in 'device'",
        "  argument state[0].count: P() in 'device'",
        "  argument state[0].mu['w']: P(None, 'model') in 'pinned_host'",
        "  argument state[0].nu['w']: P(None, 'model') in 'device'",
        "  argument grads['w']: P(None, 'model') in 'device'",
        "  output [0]['w']: P(None, 'model') in 'device', as mapped",
        "  output [1][0].count: P() in 'device', as the argument that it replaces",
        "  output [1][0].mu['w']: P(None, 'model') in 'pinned_host', as mapped",
        "  output [1][0].nu['w']: P(None, 'model') in 'device', as mapped",
    ]
