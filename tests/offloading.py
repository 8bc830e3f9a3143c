"""What the tests of offloaded optimizer states share: optimizers, a model, and steps on three meshes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import E42, M8, M42, bits, na

import namedshard as ns
from namedshard._plan.leaves import named_leaves

MAPPING = {"embed": "data", "mlp": "model"}
MESHES = {"flat": (M8, {"embed": "data"}), "auto": (M42, MAPPING), "explicit": (E42, MAPPING)}
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: optax.adamw(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lion": lambda: optax.lion(1e-2),
    "clip then adam": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
    "adam then clip": lambda: optax.chain(optax.adam(1e-2), optax.clip_by_global_norm(0.1)),
    "masked": lambda: optax.masked(optax.adam(1e-2), {"w": True, "b": False, "plain": True}),
    "multi_transform": lambda: optax.multi_transform(
        {"a": optax.adam(1e-2), "s": optax.sgd(1e-1, momentum=0.9)}, {"w": "a", "b": "s", "plain": "a"}
    ),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
    "extra args": lambda: optax.contrib.reduce_on_plateau(),
}
STATEFUL = [name for name in OPTIMIZERS if name != "extra args"]


def parameters() -> dict[str, Any]:
    random = np.random.default_rng(0)
    return {
        "w": na(jnp.asarray(random.standard_normal((8, 16)), jnp.float32), "embed mlp"),
        "b": na(jnp.asarray(random.standard_normal(16), jnp.float32), "mlp"),
        "plain": jnp.asarray(random.standard_normal(4), jnp.float32),
    }


def gradients(params: Any, step: Any) -> Any:
    return jax.tree.map(lambda p: jnp.cos(p * 3 + step), params)


def train(optimizer: Any, where: str, compile_step: Callable[[Any], Any], steps: int) -> tuple[Any, Any]:
    mesh, mapping = MESHES[where]
    with jax.set_mesh(mesh), ns.axis_mapping(mapping):
        params = ns.shard(parameters())
        state = optimizer.init(params)

        def step(params: Any, state: Any, number: Any) -> tuple[Any, Any]:
            updates, state = optimizer.update(gradients(params, number), state, params)
            return optax.apply_updates(params, updates), state

        compiled = compile_step(step)
        for number in range(steps):
            # XLA on CPUs takes 32 programs per device in flight: up to jax 0.10, with more queued, a step's collective
            # can wait forever for a device whose turn comes after the steps that wait for it.
            params, state = jax.block_until_ready(compiled(params, state, jnp.float32(number)))
    return params, state


def kinds(state: Any) -> dict[str, str]:
    return {x.path: x.value.sharding.memory_kind for x in named_leaves(state) if isinstance(x.value, jax.Array)}


def assert_same(a: Any, b: Any) -> None:
    left, right = jax.tree.leaves(a), jax.tree.leaves(b)
    assert [bits(x) for x in left] == [bits(x) for x in right]


def message_of(call: Callable[[], Any], kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)
