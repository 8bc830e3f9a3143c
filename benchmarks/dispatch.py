"""What one call of a compiled function costs, beyond the computation: ``named_jit`` beside what it stands in for."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import namedshard as ns
from benchmarks._harness import Thunk, duration, interleaved, text_table, versus

EMBED, MLP = hax.Axis("embed", 16), hax.Axis("mlp", 16)
MAPPING = {"embed": "data", "mlp": "model"}


class Block(eqx.Module):
    """Four leaves in two Haliax modules."""

    up: hax.nn.Linear
    down: hax.nn.Linear


class Mixed(eqx.Module):
    """Four arrays beside leaves that are none: activation functions and floats, as Equinox's own models have them."""

    first: eqx.nn.MLP
    dropout: eqx.nn.Dropout


def mesh() -> Mesh:
    """Eight devices, 2 x 4."""
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))


def blocks(leaves: int) -> list[Block]:
    """A tree of Haliax modules with this many arrays, sharded."""
    keys = jax.random.split(jax.random.key(0), leaves // 2)
    tree = [
        Block(hax.nn.Linear.init(EMBED, MLP, key=up), hax.nn.Linear.init(MLP, EMBED, key=down))
        for up, down in zip(keys[::2], keys[1::2], strict=True)
    ]
    return ns.shard(tree, MAPPING, mesh())


def arrays(count: int) -> list[jax.Array]:
    """Plain arrays, sharded."""
    sharding = NamedSharding(mesh(), PartitionSpec("data", "model"))
    return [jax.device_put(jnp.full((16, 16), float(i)), sharding) for i in range(count)]


def mixed(modules: int) -> list[Mixed]:
    """A tree of Equinox modules with eight leaves each, two or more of them no arrays, replicated."""
    replicated = NamedSharding(mesh(), PartitionSpec())
    made = [
        Mixed(eqx.nn.MLP(8, 8, 8, 1, key=key), eqx.nn.Dropout(0.5))
        for key in jax.random.split(jax.random.key(0), modules)
    ]
    return jax.tree.map(lambda x: jax.device_put(x, replicated) if eqx.is_array(x) else x, made)


def _thunk(call: Callable[..., Any], args: tuple[Any, ...], last: Callable[[Any], jax.Array]) -> Thunk:
    return lambda: last(call(*args)).block_until_ready()


def _scale(tree: Any) -> Any:
    return jax.tree.map(lambda x: x * 2, tree)


def _scale_mixed(tree: Any) -> Any:
    return jax.tree.map(lambda x: x * 2 if eqx.is_array(x) else x, tree)


def _add(x: jax.Array, y: jax.Array) -> jax.Array:
    return x + y


def _candidates(fn: Callable[..., Any], args: tuple[Any, ...], last: Callable[[Any], jax.Array]) -> dict[str, Thunk]:
    calls = {
        "jax.jit": jax.jit(fn),
        "eqx.filter_jit": eqx.filter_jit(fn),
        "haliax.named_jit": hax.named_jit(fn, MAPPING),
        "ns.named_jit": ns.named_jit(fn, MAPPING),
        "ns.named_jit (context)": ns.named_jit(fn),
    }
    if fn is _scale_mixed:
        # It takes arrays only.
        del calls["jax.jit"]
    return {name: _thunk(call, args, last) for name, call in calls.items()}


def _last_bias(tree: list[Block]) -> jax.Array:
    return tree[-1].down.bias.array


def _train(tree: list[Block]) -> list[Block]:
    """A step of gradient descent through all blocks."""

    def loss(tree: list[Block]) -> jax.Array:
        x = hax.ones((hax.Axis("batch", 8), EMBED))
        for block in tree:
            x = x + block.down(hax.nn.gelu(block.up(x)))
        return (x * x).array.mean()

    return jax.tree.map(lambda w, g: w - 0.01 * g, tree, eqx.filter_grad(loss)(tree))


def _first_call(fn: Callable[[list[Block]], list[Block]], tree: list[Block], rounds: int) -> dict[str, float]:
    """Trace, compile and run, each time of a new function."""
    shardings = jax.tree.map(lambda x: x.sharding, tree)

    def by_jit() -> None:
        _last_bias(jax.jit(lambda tree: fn(tree), out_shardings=shardings)(tree)).block_until_ready()

    def by_named_jit() -> None:
        _last_bias(ns.named_jit(lambda tree: fn(tree), MAPPING)(tree)).block_until_ready()

    return interleaved({"jax.jit": by_jit, "ns.named_jit": by_named_jit}, rounds=rounds, turn=0, warmup=1)


def run(quick: bool = False) -> dict[str, Any]:
    """Median seconds per call, by case and candidate."""
    rounds = 3 if quick else 41
    cases: dict[str, tuple[Callable[..., Any], tuple[Any, ...], Callable[[Any], jax.Array]]] = {
        "96 leaves in Haliax modules": (_scale, (blocks(96),), _last_bias),
        "384 leaves in Haliax modules": (_scale, (blocks(384),), _last_bias),
        "a flat list of 96 arrays": (_scale, (arrays(96),), lambda out: out[-1]),
        "two arrays": (_add, tuple(arrays(2)), lambda out: out),
        "96 leaves in Equinox modules, half of them no arrays": (
            _scale_mixed,
            (mixed(12),),
            lambda out: out[-1].first.layers[-1].bias,
        ),
    }
    results: dict[str, Any] = {}
    with jax.set_mesh(mesh()), ns.axis_mapping(MAPPING):
        for name, (fn, args, last) in cases.items():
            results[name] = interleaved(_candidates(fn, args, last), rounds=rounds)
        for name, fn in (("training step", _train), ("scaling", _scale)):
            results[f"first call, 96 leaves, {name}"] = _first_call(fn, blocks(96), 2 if quick else 7)
    return results


AIMS: dict[str, dict[str, float]] = {
    "96 leaves in Haliax modules": {"ns.named_jit": 0.9, "ns.named_jit (context)": 1.1},
    "a flat list of 96 arrays": {"ns.named_jit": 1.05, "ns.named_jit (context)": 1.1},
    "two arrays": {"ns.named_jit": 1.1, "ns.named_jit (context)": 1.1},
    "first call, 96 leaves, training step": {"ns.named_jit": 1.1},
    "first call, 96 leaves, scaling": {"ns.named_jit": 1.1},
}


def table(results: dict[str, Any]) -> str:
    """One table per case, and how the cost grows with the tree."""
    parts = [versus(name, times, next(iter(times)), AIMS.get(name)) for name, times in results.items()]
    small, large = (results[f"{n} leaves in Haliax modules"]["ns.named_jit"] for n in (96, 384))
    growth = [["ns.named_jit", duration(small), duration(large), f"{large / small:.2f}", "4.40"]]
    parts.append(text_table("four times the leaves", ["", "96", "384", "ratio", "aim"], growth))
    return "\n\n".join(parts)
