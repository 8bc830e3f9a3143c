"""A catalogue of initialisers, each a function of nothing that gives (function, arguments)."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from haliax import Axis

Embed, Mlp, Vocab = Axis("embed", 64), Axis("mlp", 128), Axis("vocab", 96)
Heads, HeadSize, Expert, Rank = Axis("heads", 8), Axis("head_size", 16), Axis("expert", 8), Axis("rank", 4)
Layers = Axis("layers", 3)

CATALOGUE: dict[str, Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]] = {}


def model(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Enter a function of one key into the catalogue, under its own name."""
    CATALOGUE[fn.__name__] = lambda: (fn, (jr.PRNGKey(7),))
    return fn


class Block(eqx.Module):
    up: hnn.Linear
    down: hnn.Linear
    norm: hnn.LayerNorm
    scale: float

    @staticmethod
    def init(*, key: Any) -> "Block":
        k1, k2 = jr.split(key)
        up, down = hnn.Linear.init(Embed, Mlp, key=k1), hnn.Linear.init(Mlp, Embed, key=k2)
        return Block(up, down, hnn.LayerNorm.init(Embed), 0.5)


@model
def dense(key: Any) -> Any:
    k_embed, *keys = jr.split(key, 3)
    return hnn.Embedding.init(Vocab, Embed, key=k_embed), [Block.init(key=k) for k in keys]


@model
def attention(key: Any) -> Any:
    keys = jr.split(key, 4)
    qkv = {n: hnn.Linear.init(Embed, (Heads, HeadSize), key=k) for n, k in zip("qkv", keys[:3], strict=True)}
    return qkv, hnn.Linear.init((Heads, HeadSize), Embed, key=keys[3], use_bias=False)


@model
def mixture_of_experts(key: Any) -> Any:
    k_router, k_up, k_down = jr.split(key, 3)
    return {
        "router": hax.random.normal(k_router, (Embed, Expert)) * 0.02,
        "up": hax.random.truncated_normal(k_up, (Expert, Embed, Mlp), -2, 2) * Embed.size**-0.5,
        "down": hax.random.truncated_normal(k_down, (Expert, Mlp, Embed), -2, 2) * Mlp.size**-0.5,
    }


@model
def tied(key: Any) -> Any:
    table = hax.random.normal(key, (Vocab, Embed)) * 0.02
    return {"embed": table, "head": table, "twice": table * 2.0 + 1.0, "transposed": table.rearrange((Embed, Vocab))}


@model
def convolution(key: Any) -> Any:
    In, Out = Axis("embed", 16), Axis("mlp", 32)
    k1, k2 = jr.split(key)
    conv = hnn.Conv.init((Axis("h", 9), Axis("w", 9)), In, Out, kernel_size=3, key=k1)
    return conv, eqx.nn.Conv2d(3, 16, 3, key=k2)


@model
def lora(key: Any) -> Any:
    k_base, k_a = jr.split(key)
    base = hnn.Linear.init(Embed, Mlp, key=k_base)
    a = hax.random.normal(k_a, (Rank, Embed)) / Rank.size
    return {"base": base, "a": a, "b": hax.zeros((Mlp, Rank)), "alpha": 16, "dropout": None}


@model
def stacked(key: Any) -> Any:
    k_embed, k_layers = jr.split(key)
    layers = hnn.Stacked.init(Layers, Block, gradient_checkpointing=False)(key=jr.split(k_layers, Layers.size))
    return hnn.Embedding.init(Vocab, Embed, key=k_embed), layers


@model
def mixed_dtypes(key: Any) -> Any:
    keys = jr.split(key, 8)
    return {
        "bf16": hax.random.normal(keys[0], (Embed, Mlp), dtype=jnp.bfloat16) * jnp.bfloat16(0.3) + jnp.bfloat16(0.1),
        "f16": hax.random.uniform(keys[1], (Embed, Mlp), dtype=jnp.float16, minval=-0.3, maxval=0.7),
        "cast": (hax.random.normal(keys[2], (Embed, Mlp)) * 0.02).astype(jnp.bfloat16),
        "int8": hax.random.randint(keys[3], (Embed, Mlp), -100, 100).astype(jnp.int8),
        "bool": hax.random.bernoulli(keys[4], (Embed, Mlp), 0.3),
        "f8": hax.random.normal(keys[5], (Embed, Mlp)).astype(jnp.float8_e4m3fn),
        "complex": hax.named(jr.normal(keys[6], (64, 128), jnp.complex64) * 2.0, (Embed, Mlp)),
        "key": jr.split(keys[7], 3),
        "step": jnp.zeros((), jnp.int32),
        "weak": jnp.asarray(0.5) * 3,
    }


def _data_dependent(key: Any, data: hax.NamedArray) -> Any:
    weight = hax.random.normal(key, (Embed, Mlp))
    scale = data.array.std()
    return {
        "w": weight / scale,
        "gain": hax.sqrt(hax.sum(weight * weight, Embed)),
        "mean": data.array.mean(0),
        "first": data["batch", 0],
        "data": data,
    }


CATALOGUE["data_dependent"] = lambda: (
    _data_dependent,
    (jr.PRNGKey(3), hax.random.normal(jr.PRNGKey(4), (Axis("batch", 16), Embed))),
)


@model
def loops(key: Any) -> Any:
    def body(i: Any, carry: Any) -> Any:
        return carry * 0.5 + jr.normal(jr.fold_in(key, i), (64, 128))

    walk = jax.lax.fori_loop(0, 4, body, jnp.ones((64, 128)))
    chosen = jax.lax.cond(jr.bernoulli(key), lambda: jr.normal(key, (64, 128)), lambda: jnp.ones((64, 128)))
    _, rows = jax.lax.scan(lambda k, _: (jr.split(k)[0], jr.uniform(k, (128,))), key, length=64)
    chain = []
    for _ in range(3):
        key, sub = jr.split(key)
        chain.append(hax.random.normal(sub, (Embed, Mlp)))
    return [hax.named(x, (Embed, Mlp)) for x in (walk, chosen, rows)], chain


class Declared(eqx.Module):
    weight: jax.Array = eqx.field(metadata={"axis_names": ("embed", "mlp")})
    bias: jax.Array
    activation: Callable[..., Any]


@model
def plain_equinox(key: Any) -> Any:
    keys = jr.split(key, 4)
    return (
        eqx.nn.MLP(16, 8, 32, 3, key=keys[0]),
        eqx.nn.MultiheadAttention(4, 32, key=keys[1]),
        eqx.nn.LSTMCell(16, 32, key=keys[2]),
        Declared(jr.normal(keys[3], (64, 128)), jnp.zeros(128), jax.nn.gelu),
    )


def _params() -> Any:
    return jax.tree.map(lambda x: x, dense(jr.PRNGKey(1)))


CATALOGUE["optimizer_state"] = lambda: (
    optax.adamw(1e-3, mu_dtype=jnp.bfloat16).init,
    (eqx.filter(_params(), eqx.is_array),),
)


@model
def fused(key: Any) -> Any:
    qkv = jr.normal(key, (3, 64, 128)) * 0.1
    return [hax.named(part, (Embed, Mlp)) for part in qkv]


@model
def vmapped(key: Any) -> Any:
    return jax.vmap(lambda k: {"w": jr.normal(k, (64, 32)) * 0.3 + 0.1, "b": jr.uniform(k, (32,))})(jr.split(key, 3))


def _typed_keys(key: Any) -> Any:
    deep = [hax.random.normal(jr.fold_in(key, i), (Embed, Mlp)) * (2 * (i + 1)) ** -0.5 for i in range(3)]
    return deep, jr.clone(key), jr.key_data(key)


CATALOGUE["typed_keys"] = lambda: (_typed_keys, (jr.key(11),))
CATALOGUE["rbg_keys"] = lambda: (_typed_keys, (jr.key(11, impl="rbg"),))


@model
def distributions(key: Any) -> Any:
    uniform = functools.partial(jr.uniform, minval=-0.3, maxval=0.7)
    draws: list[Callable[..., Any]] = [jr.normal, jr.exponential, uniform]
    shapes = [("embed", "mlp"), ("odd", "mlp"), ("embed", "odd"), ("odd",)]
    sizes = {"embed": 64, "mlp": 128, "odd": 24}
    keys = iter(jr.split(key, 64))
    # Two shapes of each, so that all shapes occur.
    pairs = [(draw, shapes[(i + n) % 4]) for i, draw in enumerate(draws) for n in (0, 2)]
    named = [hax.named(draw(next(keys), shape=tuple(sizes[n] for n in s)), s) for draw, s in pairs]
    others = [jr.gumbel(next(keys), (64, 128)), jr.cauchy(next(keys), (24, 5)), jr.rademacher(next(keys), (7,))]
    return named, others, jr.gamma(next(keys), 2.0, (33,)), jr.permutation(next(keys), 100)


@model
def initialisers(key: Any) -> Any:
    keys = jr.split(key, 6)
    nn = jax.nn.initializers
    made = [
        nn.he_normal()(keys[0], (64, 128)),
        nn.glorot_uniform()(keys[1], (64, 128)),
        nn.orthogonal()(keys[2], (64, 128)),
        jax.jit(nn.lecun_normal(), static_argnums=1)(keys[3], (64, 128)),
        jax.nn.silu(jr.normal(keys[4], (64, 128))),
        jnp.linspace(0, 1, 64 * 128).reshape(64, 128) ** 0.5,
    ]
    return [hax.named(x, (Embed, Mlp)) for x in made], jnp.sin(jnp.arange(64) / 10000 ** (jnp.arange(64) / 64))


_TABLE = np.linspace(-1, 1, 64 * 128, dtype=np.float32).reshape(64, 128)
_SMALL = jnp.arange(5)


@model
def closures_and_statics(key: Any) -> Any:
    return {
        "shifted": hax.named(jr.normal(key, (64, 128)) + _TABLE, (Embed, Mlp)),
        "table": _TABLE,
        "small": _SMALL,
        "gathered": jr.normal(key, (8, 32))[_SMALL],
        "name": "a model",
        "nothing": None,
        "number": 3,
        "function": jax.nn.relu,
    }


@functools.partial(jax.jit, static_argnums=1)
def _whole(key: Any, depth: int) -> Any:
    return [Block.init(key=k).up for k in jr.split(key, depth)]


CATALOGUE["jitted_model"] = lambda: (lambda key: eqx.filter(_whole(key, 3), eqx.is_array), (jr.PRNGKey(5),))


@functools.cache
def jitted(name: str) -> Any:
    """The values of `jax.jit`; what isn't an array is as the function returns it."""
    fn, args = CATALOGUE[name]()
    found: list[Any] = []

    def flat(*args: Any) -> list[jax.Array]:
        found[:] = jax.tree.flatten(fn(*args))
        return [x for x in found[0] if isinstance(x, jax.Array)]

    arrays = iter(jax.jit(flat)(*args))
    return found[1].unflatten([next(arrays) if isinstance(x, jax.Array) else x for x in found[0]])
