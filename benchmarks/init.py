"""Initialising a model of unstacked blocks: first call and later calls, over the number of blocks.

First calls compile, and JAX remembers what it compiled, so each is made in a process of its own.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import numpy as np
from jax.sharding import Mesh

import namedshard as ns
from benchmarks._harness import duration, text_table

MAPPING = {"embed": "data", "mlp": "model"}
Embed, Mlp, Layers = hax.Axis("embed", 256), hax.Axis("mlp", 512), "layers"
METHODS = ("ns.init", "eager + ns.shard", "jax.jit", "hax.named_jit", "eqx.filter_jit")


class Block(eqx.Module):
    """Two linear layers: four leaves."""

    up: hnn.Linear
    down: hnn.Linear

    @staticmethod
    def init(*, key: Any) -> "Block":
        """A block with fresh weights."""
        k1, k2 = jax.random.split(key)
        return Block(hnn.Linear.init(Embed, Mlp, key=k1), hnn.Linear.init(Mlp, Embed, key=k2))


def unstacked(key: Any, blocks: int) -> list[Block]:
    """Blocks in a list, each initialised by itself."""
    return [Block.init(key=k) for k in jax.random.split(key, blocks)]


def stacked(key: Any, blocks: int) -> Any:
    """Blocks stacked along an axis: no two leaves have the same initialiser."""
    layers = hax.Axis(Layers, blocks)
    return hnn.Stacked.init(layers, Block, gradient_checkpointing=False)(key=jax.random.split(key, blocks))


MODELS: dict[str, Callable[[Any, int], Any]] = {"unstacked": unstacked, "stacked": stacked}


def _mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


def _methods(fn: Callable[[Any, int], Any], blocks: int, mesh: Mesh) -> dict[str, Callable[[Any], Any]]:
    def wanted() -> Any:
        described = eqx.filter_eval_shape(fn, jax.random.PRNGKey(0), blocks)
        return jax.tree.map(lambda s: s, ns.plan(eqx.filter(described, eqx.is_array_like), MAPPING, mesh).shardings)

    def arrays(key: Any) -> Any:
        return eqx.filter(fn(key, blocks), eqx.is_array)

    def constrained(key: Any) -> Any:
        return ns.shard(fn(key, blocks), MAPPING, mesh)

    named = hax.named_jit(lambda key: fn(key, blocks), axis_resources=MAPPING)
    return {
        "ns.init": lambda key: ns.init(fn, key, blocks, mapping=MAPPING, mesh=mesh),
        "eager + ns.shard": lambda key: ns.shard(fn(key, blocks), MAPPING, mesh),
        "jax.jit": _once(lambda: jax.jit(arrays, out_shardings=wanted())),
        "hax.named_jit": named,
        "eqx.filter_jit": eqx.filter_jit(constrained),
    }


def _once(make: Callable[[], Callable[[Any], Any]]) -> Callable[[Any], Any]:
    """Made at the first call, so that what it takes is on that call's clock."""
    made: list[Callable[[Any], Any]] = []

    def call(key: Any) -> Any:
        if not made:
            made.append(make())
        return made[0](key)

    return call


def measure(model: str, method: str, blocks: int, rounds: int) -> dict[str, float]:
    """Seconds of the first call, processor seconds of it, and the best of later calls with other keys."""
    mesh = _mesh()
    keys = [jax.random.PRNGKey(i) for i in range(rounds + 1)]
    call = _methods(MODELS[model], blocks, mesh)[method]
    with jax.set_mesh(mesh) if method == "hax.named_jit" else jax.default_device(None):
        spent, start = time.process_time(), time.perf_counter()
        jax.block_until_ready(jax.tree.leaves(call(keys[0])))
        first, spent = time.perf_counter() - start, time.process_time() - spent
        later: list[float] = []
        for key in keys[1:]:
            start = time.perf_counter()
            jax.block_until_ready(jax.tree.leaves(call(key)))
            later.append(time.perf_counter() - start)
    return {"first": first, "processor": spent, "later": min(later)}


def _in_a_process(*args: Any) -> dict[str, float]:
    environment = dict(os.environ)
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [sys.executable, "-m", "benchmarks.init", *map(str, args)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def run(quick: bool = False) -> dict[str, Any]:
    """By model, method and number of blocks: seconds of the first call, its processor seconds, and later calls."""
    blocks = (2, 4) if quick else (12, 24, 48, 96)
    rounds = 1 if quick else 7
    results: dict[str, Any] = {
        "unstacked": {m: {str(n): _in_a_process("unstacked", m, n, rounds) for n in blocks} for m in METHODS}
    }
    few = METHODS[:1] + METHODS[2:3]
    results["stacked"] = {m: {str(blocks[0]): _in_a_process("stacked", m, blocks[0], rounds)} for m in few}
    return results


def _grid(title: str, results: dict[str, Any], field: str) -> str:
    blocks = list(next(iter(results.values())))
    rows = [[m, *(duration(by[n][field]) for n in blocks)] for m, by in results.items()]
    return text_table(title, ["", *(f"{n} blocks" for n in blocks)], rows)


def _ratio(a: float, b: float) -> str:
    return f"{a / b:.2f}"


def table(results: dict[str, Any]) -> str:
    """Times over blocks, and the ratios that matter."""
    unstacked = results["unstacked"]
    least, most = next(iter(unstacked["ns.init"])), list(unstacked["ns.init"])[-1]
    ours, jit, others = unstacked["ns.init"], unstacked["jax.jit"], results["stacked"]
    aims = [
        [f"jax.jit to ns.init, first call, {most} blocks", _ratio(jit[most]["first"], ours[most]["first"]), "> 12"],
        ["the same in processor time", _ratio(jit[most]["processor"], ours[most]["processor"]), ""],
        [f"ns.init, {most} to {least} blocks, first call", _ratio(ours[most]["first"], ours[least]["first"]), "< 2"],
        [f"ns.init to jax.jit, later calls, {most} blocks", _ratio(ours[most]["later"], jit[most]["later"]), "< 1.3"],
        [
            "ns.init to jax.jit, first call, stacked",
            _ratio(*(next(iter(others[m].values()))["first"] for m in ("ns.init", "jax.jit"))),
            "< 1.1",
        ],
    ]
    return "\n\n".join(
        [
            _grid("unstacked blocks, first call (trace, compile, run)", unstacked, "first"),
            _grid("unstacked blocks, first call, processor time", unstacked, "processor"),
            _grid("unstacked blocks, later calls with other keys", unstacked, "later"),
            _grid("stacked blocks, first call", others, "first"),
            text_table("ratios", ["", "ratio", "aim"], aims),
        ]
    )


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
