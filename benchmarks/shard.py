"""What `shard` costs: where there is nothing to do, and where everything has to move."""

from typing import Any

import haliax as hax
import jax
from jax.sharding import PartitionSpec

import namedshard as ns
from benchmarks._harness import Thunk, interleaved, versus
from benchmarks.dispatch import MAPPING, Block, blocks, mesh

WIDE = {"embed": "model", "mlp": "data"}
LARGE = hax.Axis("embed", 1024), hax.Axis("mlp", 1024)


def _large(leaves: int) -> list[Block]:
    """The same structure with 4 MiB weights."""
    tree = [
        Block(hax.nn.Linear.init(*LARGE, key=up), hax.nn.Linear.init(*LARGE[::-1], key=down))
        for up, down in jax.random.split(jax.random.key(0), (leaves // 4, 2))
    ]
    return ns.shard(tree, MAPPING, mesh())


def _wait(tree: Any) -> None:
    jax.block_until_ready(jax.tree_util.tree_leaves(tree))


def _nothing_to_do(rounds: int) -> dict[str, float]:
    tree, where = blocks(96), mesh()
    shardings = jax.tree.map(lambda x: x.sharding, tree)
    with jax.set_mesh(where):
        candidates: dict[str, Thunk] = {
            "tree_flatten": lambda: jax.tree_util.tree_flatten(tree),
            "ns.shard": lambda: ns.shard(tree, MAPPING, where),
            "jax.device_put, shardings given": lambda: jax.device_put(tree, shardings),
            "haliax.shard": lambda: hax.shard(tree, MAPPING, where),
        }
        return interleaved(candidates, rounds=rounds)


def _everything_moves(tree: list[Block], rounds: int) -> dict[str, float]:
    """There and back, so that each call moves every leaf. Half of the time is each direction."""
    where = mesh()
    there = [leaf.spec or PartitionSpec() for leaf in ns.plan(tree, WIDE, where).leaves]
    moved = jax.tree_util.tree_unflatten(
        jax.tree_util.tree_structure(tree), [jax.NamedSharding(where, spec) for spec in there]
    )
    back = jax.tree.map(lambda x: x.sharding, tree)
    to, fro = (jax.jit(lambda t: t, out_shardings=s) for s in (moved, back))

    def by_shard() -> None:
        _wait(ns.shard(ns.shard(tree, WIDE, where), MAPPING, where))

    def by_haliax() -> None:
        _wait(hax.shard(hax.shard(tree, WIDE, where), MAPPING, where))

    with jax.set_mesh(where):
        return interleaved(
            {
                "ns.shard": by_shard,
                "one jitted identity": lambda: _wait(fro(to(tree))),
                "one batched jax.device_put": lambda: _wait(jax.device_put(jax.device_put(tree, moved), back)),
                "haliax.shard": by_haliax,
            },
            rounds=rounds,
        )


def run(quick: bool = False) -> dict[str, Any]:
    """Median seconds per call, by case and candidate."""
    rounds = 3 if quick else 31
    return {
        "nothing to do, 96 leaves": _nothing_to_do(rounds),
        "all of 96 small leaves move, there and back": _everything_moves(blocks(96), rounds),
        "all of 96 leaves move, 192 MiB, there and back": _everything_moves(_large(96), 1 if quick else 7),
    }


def table(results: dict[str, Any]) -> str:
    """One table per case; a real move is compared with the better alternative."""
    parts: list[str] = []
    for name, times in results.items():
        if "tree_flatten" in times:
            parts.append(versus(name, times, "tree_flatten", {"ns.shard": 2.0}))
            continue
        best = min(("one jitted identity", "one batched jax.device_put"), key=times.__getitem__)
        parts.append(versus(name, times, best, {"ns.shard": 1.15}))
    return "\n\n".join(parts)
