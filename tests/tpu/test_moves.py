"""What the TPU compiler makes of moves between devices."""

import random
import re
from typing import Any

import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import HOST

import namedshard as ns
from namedshard._place import rounds
from namedshard._place.boxes import bounds_of, overlap, volume
from namedshard._place.compiled import lowered

MIB = 1 << 20
# Specs of source and target; the devices of each: all in order, all shuffled, or a range of all.
ALL, SHUFFLED = slice(None), None
MOVES: dict[str, tuple[P, P, slice, slice | None]] = {
    "another order": (P("x", "y"), P("x", "y"), ALL, SHUFFLED),
    "transposed": (P("x", "y"), P("y", "x"), ALL, ALL),
    "transposed, another order": (P("x", "y"), P("y", "x"), ALL, SHUFFLED),
    "partly replicated": (P("x"), P("x", "y"), ALL, SHUFFLED),
    "a tuple of axes": (P(("x", "y")), P(None, "y"), ALL, SHUFFLED),
    "rows to columns": (P(("x", "y")), P(None, ("x", "y")), ALL, SHUFFLED),
    "one axis to the other": (P("x"), P("y"), ALL, SHUFFLED),
    "replicated": (P("x", "y"), P(), ALL, SHUFFLED),
    "to half of the devices": (P("x", "y"), P("x", "y"), ALL, slice(8)),
    "from half of the devices": (P("x", "y"), P(None, "x"), slice(8), ALL),
    "to the other half": (P("x", "y"), P("y", "x"), slice(8), slice(8, None)),
}
TOPOLOGIES: dict[str, tuple[str, int]] = {"v5e": ("v5e:4x4", 1), "v5p": ("v5p:2x2x4", 1), "two slices": ("v5e:2x4", 2)}
# For devices of the second slice alone there is no compiler without them.
CASES = [(t, m) for t in TOPOLOGIES for m in MOVES if (t, m) != ("two slices", "to the other half")]
REORDERED = ("replicated", "partly replicated", "from half of the devices")
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float8_e5m2, jnp.int8, jnp.bool_]


def change(topology: str, move: str) -> tuple[NamedSharding, NamedSharding]:
    name, slices = TOPOLOGIES[topology]
    source, target, *which = MOVES[move]
    all_devices = list(ns.topology_mesh(name, {"x": 4, "y": 4}, num_slices=slices).devices.flat)

    def mesh(part: slice | None) -> Mesh:
        devices = random.Random(0).sample(all_devices, len(all_devices)) if part is None else all_devices[part]
        width = len(devices) // 4
        return Mesh([devices[i : i + width] for i in range(0, len(devices), width)], ("x", "y"))

    return NamedSharding(mesh(which[0]), source), NamedSharding(mesh(which[1]), target)


def must_cross(have: NamedSharding, want: NamedSharding, shape: tuple[int, ...]) -> int:
    """Elements that devices are to have and don't have."""
    had, wanted = (
        {d: bounds_of(index, shape) for d, index in s.devices_indices_map(shape).items()} for s in (have, want)
    )
    kept = [overlap(box, had[d]) if d in had else None for d, box in wanted.items()]
    return sum(map(volume, wanted.values())) - sum(volume(box) for box in kept if box is not None)


def sent(plan: rounds.Plan) -> int:
    """Elements that devices send."""
    groups = [group for step in plan.steps for group in step]
    return sum(
        volume(tuple((0, c * n) for c, n in zip(group.chunk, group.counts, strict=True)))
        for group in groups
        for r in group.rounds
        for a, b in r.pairs
        if a != b
    )


@pytest.mark.parametrize(("topology", "move"), CASES)
def test_moves_are_permutations_between_the_devices(topology: str, move: str) -> None:
    have, want = change(topology, move)
    shape = (2048, 2048)
    plan = rounds.plan_between(have, want, shape, 4)
    assert sent(plan) == must_cross(have, want, shape) > 0
    programs = [program.compile() for program in lowered(shape, jnp.float32, have, want)]
    assert len(programs) == (1 if have.device_set == want.device_set else 3)
    text = "\n".join(program.as_text() for program in programs)
    steps = [r for step in plan.steps for group in step for r in group.rounds if any(a != b for a, b in r.pairs)]
    # Between slices the compiler may make two of one.
    assert len(steps) <= len(re.findall(r" collective-permute(?:-start)?\(", text)) <= 2 * len(steps)
    assert not re.findall(r" (?:all-gather|all-to-all|all-reduce|reduce-scatter)(?:-start)?\(", text)
    assert HOST not in text and "HostExecute" not in text
    if move == "another order":
        assert len(steps) == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: jnp.dtype(d).name)
@pytest.mark.parametrize(("topology", "move"), CASES)
def test_what_a_large_move_takes_beyond_both_shards(topology: str, move: str, dtype: Any) -> None:
    have, want = change(topology, move)
    shape = (1 << 15, 1 << 15)
    itemsize = jnp.dtype(dtype).itemsize
    plan = rounds.plan_between(have, want, shape, itemsize)
    assert sent(plan) <= 1.1 * must_cross(have, want, shape)
    slots = plan.elements * itemsize
    assert 0 < slots <= rounds.CHUNK_BYTES // 5
    for program in (lowering.compile() for lowering in lowered(shape, dtype, have, want)):
        memory: Any = program.memory_analysis()
        beyond = memory.temp_size_in_bytes + (2 * slots if have.device_set != want.device_set else 0)
        if itemsize == 1 and move in REORDERED:
            # The compiler copies a shard to keep its bytes in another order.
            beyond -= max(memory.output_size_in_bytes, memory.argument_size_in_bytes)
        assert beyond <= rounds.CHUNK_BYTES
        # No number is converted on the way, which could change its bits.
        name = {"bfloat16": "bf16", "float8_e5m2": "f8e5m2", "float32": "f32"}.get(jnp.dtype(dtype).name, "pred")
        assert not re.search(rf"= {name}\[[\d,]+\]\S* convert\(|convert\({name}\[[\d,]+\]", program.as_text())
