"""What `shard` costs: where there is nothing to do, and where everything has to move."""

from typing import Any

import haliax as hax
import jax
from jax.sharding import PartitionSpec

import namedshard as ns
from benchmarks._harness import Thunk, interleaved, versus
from benchmarks.dispatch import MAPPING, Block, blocks, mesh

WIDE = {"embed": "model", "mlp": "data"}


def _of_size(leaves: int, embed: int, mlp: int) -> list[Block]:
    """The same structure with weights of another size."""
    axes = hax.Axis("embed", embed), hax.Axis("mlp", mlp)
    tree = [
        Block(hax.nn.Linear.init(*axes, key=up), hax.nn.Linear.init(*axes[::-1], key=down))
        for up, down in jax.random.split(jax.random.key(0), (leaves // 4, 2))
    ]
    return ns.shard(tree, MAPPING, mesh())


def _wait(tree: Any) -> None:
    jax.block_until_ready(jax.tree_util.tree_leaves(tree))


def _nothing_to_do(rounds: int) -> dict[str, float]:
    tree, where = blocks(96), mesh()
    shardings = jax.tree.map(lambda x: x.sharding, tree)
    with jax.set_mesh(where), hax.axis_mapping(MAPPING):
        candidates: dict[str, Thunk] = {
            "tree_flatten": lambda: jax.tree_util.tree_flatten(tree),
            "ns.shard": lambda: ns.shard(tree, MAPPING, where),
            "ns.shard, Haliax's context": lambda: ns.shard(tree),
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


def _one_way(tree: list[Block], back: bool, rounds: int) -> dict[str, float]:
    where = mesh()
    wide = ns.shard(tree, WIDE, where)
    source, target, mapping = (wide, tree, MAPPING) if back else (tree, wide, WIDE)
    shardings = jax.tree.map(lambda x: x.sharding, target)
    with jax.set_mesh(where):
        return interleaved(
            {
                "ns.shard": lambda: _wait(ns.shard(source, mapping, where)),
                "one batched jax.device_put": lambda: _wait(jax.device_put(source, shardings)),
            },
            rounds=rounds,
        )


def run(quick: bool = False) -> dict[str, Any]:
    """Median seconds per call, by case and candidate."""
    rounds = 3 if quick else 31
    small, large = _of_size(96, 64, 128), _of_size(96, 1024, 1024)
    return {
        "nothing to do, 96 leaves": _nothing_to_do(rounds),
        "96 small leaves move, there": _one_way(small, False, rounds),
        "96 small leaves move, back": _one_way(small, True, rounds),
        "96 leaves move, 192 MiB, there": _one_way(large, False, 1 if quick else 15),
        "96 leaves move, 192 MiB, back": _one_way(large, True, 1 if quick else 15),
        "all of 96 small leaves move, there and back": _everything_moves(blocks(96), rounds),
        "all of 96 leaves move, 192 MiB, there and back": _everything_moves(large, 1 if quick else 7),
    }


def table(results: dict[str, Any]) -> str:
    """One table per case; a real move is compared with the better alternative."""
    parts: list[str] = []
    for name, times in results.items():
        if "tree_flatten" in times:
            parts.append(versus(name, times, "tree_flatten", {"ns.shard": 1.5, "ns.shard, Haliax's context": 1.5}))
            continue
        rivals = [rival for rival in ("one jitted identity", "one batched jax.device_put") if rival in times]
        aim = 1.15 if len(rivals) > 1 else 1.0
        parts.append(versus(name, times, min(rivals, key=times.__getitem__), {"ns.shard": aim}))
    return "\n\n".join(parts)
