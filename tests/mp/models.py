"""Whole models across processes: made, compiled, trained, re-meshed, brought to the host."""

from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import namedshard as ns
from mp.tools import DEVICES, check, equal, interleaved, mesh, message_of, named, same_bits, values

N = len(DEVICES)
GRID = mesh((N // 2, 2), "data model")
TURNED = mesh((2, N // 2), "model data", devices=interleaved())
MAPPING = {"embed": "data", "mlp": "model"}
EMBED, MLP, BATCH = hax.Axis("embed", 24), hax.Axis("mlp", 48), hax.Axis("batch", 8 * N)


class Model(eqx.Module):
    """Two layers, and the statistics of the inputs as a plain array."""

    up: hax.nn.Linear
    down: hax.nn.Linear
    seen: jax.Array

    @staticmethod
    def init(key: jax.Array) -> "Model":
        up, down = jax.random.split(key)
        return Model(hax.nn.Linear.init(EMBED, MLP, key=up), hax.nn.Linear.init(MLP, EMBED, key=down), jnp.zeros(()))

    def __call__(self, x: hax.NamedArray) -> hax.NamedArray:
        return self.down(hax.nn.relu(self.up(x)))


def leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(eqx.filter(tree, eqx.is_array))


def specs(tree: Any) -> list[tuple[Any, ...]]:
    return [tuple(x.sharding.spec) + (None,) * (x.ndim - len(x.sharding.spec)) for x in leaves(tree)]


def loss(model: Model, x: hax.NamedArray) -> jax.Array:
    return ((model(x) - x) ** 2).mean().scalar()


def case_models_are_made_in_place() -> None:
    made = ns.init(Model.init, jax.random.key(0), mapping=MAPPING, mesh=GRID)
    plain = Model.init(jax.random.key(0))
    for x, y in zip(leaves(made), leaves(plain), strict=True):
        equal(x.is_fully_addressable, False)
        for shard in x.addressable_shards:
            equal(same_bits(shard.data, np.asarray(y)[shard.index]), True)
    planned = [s for s in jax.tree.leaves(ns.plan(made, MAPPING, GRID).specs) if s is not None]
    equal(specs(made)[: len(planned)], [tuple(s) for s in planned])


def case_models_move_to_other_orders_and_back() -> None:
    made = ns.init(Model.init, jax.random.key(1), mapping=MAPPING, mesh=GRID)
    turned = ns.shard(made, MAPPING, TURNED)
    back = ns.shard(turned, MAPPING, GRID)
    for x, y, z in zip(leaves(ns.to_host(made)), leaves(ns.to_host(turned)), leaves(ns.to_host(back)), strict=True):
        equal(same_bits(x, y) and same_bits(x, z), True)
    equal(specs(back), specs(made))


def case_training_steps() -> None:
    """The same as on one device, but for the order of sums."""
    optimizer = optax.adam(1e-2)

    def step(model: Model, state: Any, x: hax.NamedArray) -> tuple[Model, Any, jax.Array]:
        value, grads = eqx.filter_value_and_grad(loss)(model, x)
        updates, state = optimizer.update(grads, state, model)
        return eqx.apply_updates(model, updates), state, value

    value = np.random.default_rng(0).standard_normal((BATCH.size, EMBED.size)).astype(np.float32)
    compiled = ns.named_jit(step, axis_resources=MAPPING)
    model = ns.init(Model.init, jax.random.key(2), mapping=MAPPING, mesh=GRID)
    state = ns.init(optimizer.init, eqx.filter(model, eqx.is_array), mapping=MAPPING, mesh=GRID)
    x = ns.shard(hax.named(value, (BATCH, EMBED)), {"batch": "data"}, GRID)
    with jax.set_mesh(GRID):
        losses = []
        for _ in range(3):
            model, state, value_of = compiled(model, state, x)
            losses.append(float(np.asarray(value_of.addressable_shards[0].data)))
    equal(losses[2] < losses[1] < losses[0], True)
    equal([x.sharding.mesh is GRID for x in leaves(model)], [True] * len(leaves(model)))
    got = ns.to_host(model)
    reference = Model.init(jax.random.key(2))
    its_state = optimizer.init(eqx.filter(reference, eqx.is_array))
    for _ in range(3):
        reference, its_state, _ = jax.jit(step)(reference, its_state, hax.named(value, (BATCH, EMBED)))
    for a, b in zip(leaves(got), leaves(reference), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def case_compiled_functions_name_what_is_elsewhere() -> None:
    f = ns.named_jit(lambda w: w * 2, axis_resources=MAPPING)
    value = values(np.int32, (24, 48))
    w = ns.shard(named(value, "embed mlp"), MAPPING, TURNED)
    with jax.set_mesh(GRID):
        said = message_of(ns.MismatchError, lambda: f(w))
        equal("w" in said, True)
        moved = f(ns.shard(w, MAPPING, GRID))
    check(moved.array, value * 2, GRID, P("data", "model"))


def case_a_host_array_in_a_compiled_function() -> None:
    f = ns.named_jit(lambda w: w * 2, axis_resources=MAPPING)
    value = values(np.int32, (24, 48))
    with jax.set_mesh(GRID):
        check(f(named(value, "embed mlp")).array, value * 2, GRID, P("data", "model"))


def _trained(optimizer: Any, steps: int) -> tuple[Any, Any]:
    with jax.set_mesh(GRID), ns.axis_mapping(MAPPING):
        numbers = np.random.default_rng(0).standard_normal((24, 48), np.float32)
        params = ns.shard({"w": named(numbers, "embed mlp"), "b": named(numbers[0], "mlp")})
        state = ns.init(optimizer.init, params)

        @ns.named_jit
        def step(params: Any, state: Any, number: Any) -> Any:
            grads = jax.tree.map(lambda p: jnp.cos(p * 3 + number), params)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        for number in range(steps):
            params, state = step(params, state, np.float32(number))
    return params, state


def case_states_live_in_host_memory() -> None:
    optimizer = optax.adamw(1e-2)
    params, state = _trained(ns.offload_optimizer(optimizer, r"\.(mu|nu)\b"), 5)
    expected, on_device = _trained(optimizer, 5)
    for x, y in zip(leaves((params, state)), leaves((expected, on_device)), strict=True):
        equal(
            all(same_bits(a.data, b.data) for a, b in zip(x.addressable_shards, y.addressable_shards, strict=True)),
            True,
        )
    equal({x.sharding.memory_kind for x in leaves((state[0].mu, state[0].nu))}, {"pinned_host"})
    equal({x.sharding.memory_kind for x in leaves(on_device)}, {"device"})
    equal(state[0].count.sharding.memory_kind, "device")
    equal(specs(state[0].mu), specs(params))
    turned = ns.shard(state, MAPPING, TURNED)
    equal({x.sharding.memory_kind for x in leaves((turned[0].mu, turned[0].nu))}, {"pinned_host"})
    whole, moved = ns.to_host(on_device[0].mu), ns.to_host(turned[0].mu)
    equal([same_bits(a, b) for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(moved), strict=True)], [True, True])
