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


def _small(leaves: int) -> dict[str, hax.NamedArray]:
    """Named arrays of 64 x 128 in a dict: the leaves that cost least to flatten and to move."""
    axes = hax.Axis("embed", 64), hax.Axis("mlp", 128)
    return ns.shard({f"w{i}": hax.full(axes, float(i)) for i in range(leaves)}, MAPPING, mesh())


def _nothing_to_do(rounds: int) -> dict[str, float]:
    tree, where = blocks(96), mesh()
    shardings = jax.tree.map(lambda x: x.sharding, tree)
    # A plain dict in Haliax's own context, which knows nothing of this library's mappings.
    with jax.set_mesh(where), hax.axis_mapping(dict(MAPPING)):
        candidates: dict[str, Thunk] = {
            "tree_flatten": lambda: jax.tree_util.tree_flatten(tree),
            "ns.shard": lambda: ns.shard(tree, MAPPING, where),
            "ns.shard, all from the context": lambda: ns.shard(tree),
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


def _one_way(tree: Any, rounds: int) -> dict[str, float]:
    """Each direction by itself, from arrays that stay where they are."""
    where = mesh()
    wide = ns.shard(tree, WIDE, where)
    given, wanted = (jax.tree.map(lambda x: x.sharding, t) for t in (tree, wide))
    with jax.set_mesh(where):
        return interleaved(
            {
                "ns.shard, there": lambda: _wait(ns.shard(tree, WIDE, where)),
                "one batched jax.device_put, there": lambda: _wait(jax.device_put(tree, wanted)),
                "ns.shard, back": lambda: _wait(ns.shard(wide, MAPPING, where)),
                "one batched jax.device_put, back": lambda: _wait(jax.device_put(wide, given)),
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
        "96 leaves of 64 x 128, one way": _one_way(_small(96), rounds),
        "96 leaves, 192 MiB, one way": _one_way(_large(96), 1 if quick else 7),
    }


def table(results: dict[str, Any]) -> str:
    """One table per case; a real move is compared with the better alternative."""
    parts: list[str] = []
    for name, times in results.items():
        if "tree_flatten" in times:
            aims = {"ns.shard": 1.5, "ns.shard, all from the context": 1.5}
            parts.append(versus(name, times, "tree_flatten", aims))
            continue
        if "ns.shard, there" in times:
            for way in ("there", "back"):
                each = {key: t for key, t in times.items() if key.endswith(way)}
                reference = f"one batched jax.device_put, {way}"
                parts.append(versus(f"{name}, {way}", each, reference, {f"ns.shard, {way}": 1.0}))
            continue
        best = min(("one jitted identity", "one batched jax.device_put"), key=times.__getitem__)
        parts.append(versus(name, times, best, {"ns.shard": 1.15}))
    return "\n\n".join(parts)
