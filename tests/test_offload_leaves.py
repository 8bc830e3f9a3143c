"""`offload` and `change_memory`: every kind of leaf that may go to host memory."""

from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from offloading import MAPPING, assert_same, kinds, message_of
from support import M8, M42, bits, na

import namedshard as ns


def test_offload_keeps_values_shards_and_what_is_not_chosen() -> None:
    with jax.set_mesh(M42):
        tree = ns.shard({"w": na(jnp.arange(32.0).reshape(8, 4), "embed mlp"), "n": jnp.int32(3), "s": "x"}, MAPPING)
    out = ns.offload(tree, "w")
    assert out["w"].array.sharding == tree["w"].array.sharding.with_memory_kind("pinned_host")
    assert bits(out["w"].array) == bits(tree["w"].array)
    assert (out["n"] is tree["n"], out["s"]) == (True, "x")
    again = ns.offload(out, "w")
    assert again["w"].array is out["w"].array
    in_jit = jax.jit(lambda t: ns.offload(t, "w"))({"w": tree["w"]})
    assert in_jit["w"].array.sharding.memory_kind == "pinned_host"
    back = ns.shard(out, MAPPING, M42, memory_kind="device")
    assert back["w"].array.sharding == tree["w"].array.sharding
    assert isinstance(out["w"], hax.NamedArray)


@pytest.mark.parametrize("kind", ["device", "pinned_host", "unpinned_host"])
def test_numpy_leaves_go_where_jax_would_put_them(kind: str) -> None:
    source = np.arange(12, dtype=">f4").reshape(3, 4)
    out = ns.offload(
        {"w": source, "n": np.float32(1), "text": np.array(["x"]), "long": np.ones(3, np.longdouble)}, memory_kind=kind
    )
    assert out["w"].sharding == SingleDeviceSharding(jax.devices()[0], memory_kind=kind)
    assert (out["w"].dtype, np.asarray(out["w"]).tolist()) == (jnp.float32, source.tolist())
    assert [type(out[k]) for k in ("n", "text", "long")] == [np.float32, np.ndarray, np.ndarray]
    source[...] = 0
    assert float(np.asarray(out["w"])[2, 3]) == 11
    with jax.set_mesh(M42):
        on_mesh = ns.offload(np.arange(3.0), memory_kind=kind)
    assert on_mesh.sharding == NamedSharding(M42, PartitionSpec(), memory_kind=kind)
    assert (on_mesh.dtype, np.asarray(on_mesh).tolist()) == (jnp.float32, [0, 1, 2])


def test_numpy_leaves_in_compiled_code() -> None:
    out = jax.jit(lambda: ns.offload({"w": np.arange(3.0)}))()["w"]
    assert (out.sharding.memory_kind, out.dtype, np.asarray(out).tolist()) == ("pinned_host", jnp.float32, [0, 1, 2])


def test_numpy_leaves_are_not_wrapped() -> None:
    assert message_of(lambda: ns.offload({"w": np.array([2**40]), "x": jnp.ones(2)}), ns.NarrowingError) == (
        "1 of 2 leaves would be narrowed to wrong values\n"
        "  ['w']: int64 values from 1099511627776 to 1099511627776 do not fit int32\n"
        '  fix: enable 64-bit types (jax.config.update("jax_enable_x64", True)), or cast them first'
    )
    assert message_of(lambda: ns.offload({"s": np.array(["x"]), "x": jnp.ones(2)}, "s"), ns.OffloadError) == (
        "where='s' selects no leaf for host memory: nothing matches; the arrays are\n  ['x'] (8 bytes)"
    )


def test_structs_get_their_sharding_with_the_memory_kind() -> None:
    place = NamedSharding(M42, PartitionSpec("data"))
    tree = {"a": jax.ShapeDtypeStruct((4, 4), jnp.float32, sharding=place), "b": jax.ShapeDtypeStruct((4,), jnp.int8)}
    traced: list[Any] = []
    jax.jit(lambda: traced.append(ns.offload(tree)))()
    for out in (ns.offload(tree), *traced):
        assert out["a"].sharding == place.with_memory_kind("pinned_host")
        assert out["b"].sharding == SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
        assert [(x.shape, x.dtype) for x in out.values()] == [((4, 4), jnp.float32), ((4,), jnp.int8)]


def test_tied_leaves_stay_one_array() -> None:
    x, y = jnp.arange(8.0), np.arange(8.0)
    out = ns.offload({"a": x, "b": x, "c": y, "d": y, "e": jnp.arange(8.0)})
    assert out["a"] is out["b"] and out["c"] is out["d"] and out["a"] is not out["e"]
    assert {k.sharding.memory_kind for k in out.values()} == {"pinned_host"}
    inside: list[bool] = []

    def in_jit(x: Any) -> Any:
        tree = ns.offload((x, x))
        inside.append(tree[0] is tree[1])
        return tree

    jax.jit(in_jit)(x)
    assert inside == [True]


def test_deleted_leaves_are_named() -> None:
    x = jnp.arange(8.0)
    x.delete()
    assert message_of(lambda: ns.offload({"w": x, "v": jnp.ones(2)}), ns.DeletedArrayError) == (
        "offload: 1 of 2 leaves donated or deleted\n"
        "  ['w']\n"
        "  fix: keep the result of the call that the array was donated to, and use that"
    )
    assert ns.offload({"w": x, "v": jnp.ones(2)}, "v")["w"] is x
    params = {"w": jnp.ones((4, 4))}
    optimizer = ns.offload_optimizer(optax.adam(1e-3))
    state = optimizer.init(params)
    state[0].mu["w"].delete()
    assert message_of(lambda: optimizer.update(params, state), ns.DeletedArrayError) == (
        "offload: 1 of 3 leaves donated or deleted\n"
        "  [0].mu['w']\n"
        "  fix: keep the result of the call that the array was donated to, and use that"
    )


@pytest.mark.parametrize("budget", [None, 64])
def test_states_of_numpy_arrays_end_in_host_memory(budget: int | None) -> None:
    params = {"w": jnp.linspace(0, 1, 16).reshape(4, 4), "b": jnp.ones(4)}
    plain = optax.adamw(1e-2)
    optimizer = ns.offload_optimizer(plain, budget=budget)
    _, state = plain.update(params, plain.init(params), params)
    state = jax.tree.map(np.asarray, state)
    expected, got = plain.update(params, state, params), optimizer.update(params, state, params)
    assert_same(got, expected)
    found = kinds(got[1])
    assert {path: kind for path, kind in found.items() if kind == "device"} == {"[0].count": "device"}
    assert len(found) == 5
    closed_over = jax.jit(lambda p: optimizer.update(p, state, p))(params)
    assert_same(closed_over, jax.jit(lambda p: plain.update(p, state, p))(params))
    assert kinds(closed_over[1]) == found


@pytest.mark.parametrize("budget", [None, 64])
@pytest.mark.parametrize("wrong", ["numpy", "device", "structs"])
def test_states_that_come_to_a_compiled_update_in_device_memory_are_named(wrong: str, budget: int | None) -> None:
    params = {"w": jnp.ones((4, 4))}
    optimizer = ns.offload_optimizer(optax.adam(1e-2), budget=budget)
    right = optimizer.init(params)
    state = {
        "numpy": lambda: jax.tree.map(np.asarray, right),
        "device": lambda: jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), right),
        "structs": lambda: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), right),
    }[wrong]()
    step = ns.named_jit(optimizer.update, donate_args=(False, True))
    text = (
        "2 of 3 leaves that belong in host memory are in device memory at the update\n"
        "  [0].mu['w']\n"
        "  [0].nu['w']\n"
        "  fix: create the state, or its structs, with ns.init(tx.init, params), since jax.eval_shape forgets"
        " memory kinds; move a state that was loaded with ns.offload"
    )
    assert message_of(lambda: step.lower(params, state), ns.OffloadError) == text
    assert message_of(lambda: jax.jit(optimizer.update).lower(params, state), ns.OffloadError) == text
    if wrong != "structs":
        assert message_of(lambda: step(params, state), ns.OffloadError) == text
        assert_same(step(params, ns.offload(state)), optimizer.update(params, right))
    structs = ns.init(optimizer.init, jax.eval_shape(lambda: params))
    assert kinds(step.lower(params, structs).compile()(params, right)[1]) == kinds(right)


@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_states_that_would_not_fit_are_named(run: Any) -> None:
    params = {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}
    optimizer = ns.offload_optimizer(optax.adam(1e-2), fit="1KiB")
    state = optimizer.init(params)
    assert kinds(run(optimizer.update)(params, state)[1]) == kinds(state)
    lost = jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), state)
    assert message_of(lambda: run(optimizer.update)(params, lost), ns.OffloadError) == (
        "4 of 5 leaves that belong in host memory are in device memory at the update\n"
        "  [0].mu['b']\n"
        "  [0].mu['w']\n"
        "  [0].nu['b']\n"
        "  [0].nu['w']\n"
        "  fix: create the state, or its structs, with ns.init(tx.init, params), since jax.eval_shape forgets"
        " memory kinds; move a state that was loaded with ns.offload"
    )


def test_kinds_that_compiled_code_has_no_word_for() -> None:
    text = (
        "compiled code cannot place arrays in memory kind 'unpinned_host'\n"
        "  fix: use 'device' or 'pinned_host', or move the arrays with shard before or after the compiled call"
    )
    x = jnp.ones((4, 4))
    assert ns.offload(x, memory_kind="unpinned_host").sharding.memory_kind == "unpinned_host"
    assert (
        message_of(lambda: jax.jit(lambda x: ns.offload(x, memory_kind="unpinned_host"))(x), ns.MemoryKindError) == text
    )
    assert message_of(lambda: jax.jit(lambda: ns.offload(x, memory_kind="unpinned_host"))(), ns.MemoryKindError) == text
    optimizer = ns.offload_optimizer(optax.adam(1e-3), memory_kind="unpinned_host")
    state = optimizer.init({"w": x})
    assert kinds(optimizer.update({"w": x}, state)[1])["[0].mu['w']"] == "unpinned_host"
    assert message_of(lambda: jax.jit(optimizer.update)({"w": x}, state), ns.MemoryKindError) == text


def test_offloading_to_the_device_is_refused() -> None:
    assert message_of(lambda: ns.offload_optimizer(optax.adam(1e-3), memory_kind="device"), ns.MemoryKindError) == (
        "offload_optimizer cannot offload to memory kind 'device', where the state is without it\n"
        "  fix: use 'pinned_host', or the optimizer as it is"
    )


def test_structs_of_eval_shape_keep_their_memory() -> None:
    params = ns.shard({"w": na(jnp.ones((8, 4)), "embed mlp"), "b": jnp.ones(4)}, {"embed": "data"}, M8)
    optimizer = ns.offload_optimizer(optax.adam(1e-2))
    right = ns.init(optimizer.init, params, mapping={"embed": "data"}, mesh=M8)
    structs = jax.eval_shape(optimizer.init, params)
    with jax.set_mesh(M8):
        step = ns.named_jit(optimizer.update, {"embed": "data"}, donate_args=(False, True))
        for state in (structs, eqx.filter_eval_shape(optimizer.init, params), ns.shard(structs, {"embed": "data"})):
            if "_memory_space" not in jax.ShapeDtypeStruct.__slots__:
                # jax 0.10 forgets where it traced a result to.
                assert "4 of 5 leaves" in message_of(lambda state=state: step.lower(params, state), ns.OffloadError)
                continue
            compiled = step.lower(params, state).compile()
            given = jax.tree.map(lambda x: jax.device_put(x, x.sharding, may_alias=False), right)
            # Donated host memory isn't for the updates, which have the same shapes.
            assert kinds(compiled(params, given)[1]) == kinds(right)
