"""Flax models are planned, sharded, trained, saved and loaded by the names that their variables carry."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from support import AUTO, M42, assert_exactly, bits, mesh

import namedshard as ns

with warnings.catch_warnings():
    # Flax uses names that JAX deprecates.
    warnings.simplefilter("ignore", DeprecationWarning)
    import flax.linen as nn
    from flax import nnx

M24 = mesh((2, 4), "data model", AUTO)
EMBED, MLP, HEADS, VOCAB = 16, 32, 4, 64
MAPPING = {"mlp": "model", "heads": "model", "embed": "data"}
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (8, 12)).astype(np.int32)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        def dense(size: Any, *names: str) -> Any:
            initializer = nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)
            return nn.DenseGeneral(size, use_bias=False, kernel_init=initializer)

        q, k, v = (dense((HEADS, EMBED // HEADS), "embed", "heads", "head_size")(nn.LayerNorm()(x)) for _ in range(3))
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
        x = x + dense(EMBED, "heads", "embed")(mixed)
        return x + dense(EMBED, "mlp", "embed")(jax.nn.relu(dense(MLP, "embed", "mlp")(nn.LayerNorm()(x))))


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        table = nn.with_logical_partitioning(nn.initializers.normal(0.1), ("vocab", "embed"))
        embed = nn.Embed(VOCAB, EMBED, embedding_init=table)
        return embed.attend(LinenBlock()(embed(tokens)))


class NnxModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        def dense(rows: int, columns: int, *names: str) -> Any:
            initializer = nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
            return nnx.Linear(rows, columns, use_bias=False, kernel_init=initializer, rngs=rngs)

        self.embed = nnx.Embed(VOCAB, EMBED, rngs=rngs)
        self.qkv = nnx.List([dense(EMBED, EMBED, "embed", "heads") for _ in range(3)])
        self.out = dense(EMBED, EMBED, "heads", "embed")
        self.norm = nnx.LayerNorm(EMBED, rngs=rngs)
        self.up, self.down = dense(EMBED, MLP, "embed", "mlp"), dense(MLP, EMBED, "mlp", "embed")

    def __call__(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        q, k, v = (layer(self.norm(x)).reshape(*x.shape[:2], HEADS, -1) for layer in self.qkv)
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        x = x + self.out(jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape))
        return self.embed.attend(x + self.down(jax.nn.relu(self.up(x))))


def linen() -> tuple[Any, Callable[..., Any]]:
    """Boxed parameters, and the function that applies them."""
    model = LinenModel()
    return model.init(jax.random.key(0), TOKENS), lambda variables, x: model.apply(nn.meta.unbox(variables), x)


def of_nnx() -> tuple[Any, Callable[..., Any]]:
    nnx.use_eager_sharding(False)
    graph, state = nnx.split(NnxModel(nnx.Rngs(0)))
    return state, lambda state, x: nnx.merge(graph, state)(x)


MODELS: dict[str, tuple[Callable[[], Any], dict[str, P]]] = {
    "linen": (
        linen,
        {
            "['params']['Embed_0']['embedding'].value": P(None, "data"),
            "['params']['LinenBlock_0']['DenseGeneral_0']['kernel'].value": P("data", "model", None),
            "['params']['LinenBlock_0']['DenseGeneral_4']['kernel'].value": P("model", "data"),
            "['params']['LinenBlock_0']['LayerNorm_0']['bias']": None,
        },
    ),
    "nnx": (
        of_nnx,
        {
            "['qkv'][0]['kernel'].value": P("data", "model"),
            "['down']['kernel'].value": P("model", "data"),
            "['embed']['embedding'].value": None,
            "['norm']['bias'].value": None,
        },
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_transformer_is_sharded_trained_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    make, expected = MODELS[kind]
    variables, apply = make()
    plan = ns.plan(variables, MAPPING, M24)
    assert {path: plan[path].spec for path in expected} == expected
    optimizer = optax.adamw(1e-2)

    @ns.named_jit(donate_args=(True, True, False))
    def step(variables: Any, state: Any, tokens: Any) -> Any:
        def loss(variables: Any) -> Any:
            logits = apply(variables, tokens)
            return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

        value, grads = jax.value_and_grad(loss)(variables)
        updates, state = optimizer.update(grads, state, variables)
        return optax.apply_updates(variables, updates), state, value

    reference = float(jax.jit(apply)(variables, TOKENS).sum())
    with jax.set_mesh(M24), ns.axis_mapping(MAPPING):
        placed = ns.shard(variables)
        ns.testing.assert_placed(placed)
        assert np.isclose(float(ns.named_jit(apply)(placed, TOKENS).sum()), reference, rtol=1e-4)
        state = ns.init(optimizer.init, placed)
        ns.testing.assert_placed(state[0].mu)
        losses = []
        for _ in range(5):
            placed, state, loss = step(placed, state, TOKENS)
            losses.append(float(loss))
        ns.testing.assert_placed(placed)
    assert losses[-1] < losses[0] and step.report().traces == 1
    ns.save_safetensors(placed, tmp_path / "model.safetensors")
    loaded = ns.load_safetensors(tmp_path / "model.safetensors", placed, MAPPING, M42)
    ns.testing.assert_placed(loaded, MAPPING, M42)
    for x, y in zip(jax.tree.leaves(loaded), jax.tree.leaves(placed), strict=True):
        assert bits(x) == bits(y)


def test_names_that_are_mesh_axes_mean_these() -> None:
    initializer = nn.with_partitioning(nn.initializers.lecun_normal(), (("data", "model"), "mlp"))
    box = nn.Dense(8, kernel_init=initializer).init(jax.random.key(0), jnp.ones((2, 16)))["params"]["kernel"]
    abstract = AbstractMesh((2, 4), ("data", "model"))
    assert ns.plan(box, {}, abstract).leaves[0].spec == P(("data", "model"), None)
    # A rule for the name comes before.
    assert ns.plan(box, {"mlp": "data", "data+model": None}, abstract).leaves[0].spec == P(None, "data")
    placed = ns.shard(box, {}, M24)
    assert_exactly(placed.value, M24, P(("data", "model"), None))
    assert type(placed) is type(box) and placed.names == box.names


def test_patterns_name_what_flax_does_not() -> None:
    state, _ = of_nnx()
    plan = ns.plan(state, MAPPING, M24, axes={"embedding": "vocab embed", "kernel": "embed mlp"})
    assert plan["['embed']['embedding'].value"].spec == P(None, "data")
    assert plan["['up']['kernel'].value"].spec == P("data", "model")
    assert plan["['out']['kernel'].value"].spec == P("model", "data")
