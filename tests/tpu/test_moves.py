"""What the TPU compiler makes of moves to other shards on the same devices, in any order."""

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
from namedshard._place.boxes import bounds_of, volume
from namedshard._place.compiled import lowered

SHAPE = (2048, 2048)
MOVES: dict[str, tuple[P, P, bool]] = {
    "another order": (P("x", "y"), P("x", "y"), True),
    "transposed": (P("x", "y"), P("y", "x"), False),
    "transposed, another order": (P("x", "y"), P("y", "x"), True),
    "partly replicated": (P("x"), P("x", "y"), True),
    "a tuple of axes": (P(("x", "y")), P(None, "y"), True),
    "rows to columns": (P(("x", "y")), P(None, ("x", "y")), True),
    "one axis to the other": (P("x"), P("y"), True),
    "replicated": (P("x", "y"), P(), True),
}
TOPOLOGIES: dict[str, tuple[str, dict[str, int], int]] = {
    "v5e": ("v5e:4x4", {"x": 4, "y": 4}, 1),
    "v5p": ("v5p:2x2x4", {"x": 4, "y": 4}, 1),
    "two slices": ("v5e:2x4", {"x": 4, "y": 4}, 2),
}


def change(topology: str, move: str) -> tuple[NamedSharding, NamedSharding]:
    name, axes, slices = TOPOLOGIES[topology]
    source, target, shuffled = MOVES[move]
    mesh = ns.topology_mesh(name, axes, num_slices=slices)
    devices = list(mesh.devices.flat)
    if shuffled:
        random.Random(0).shuffle(devices)
    other = Mesh([devices[i : i + axes["y"]] for i in range(0, len(devices), axes["y"])], mesh.axis_names)
    return NamedSharding(mesh, source), NamedSharding(other, target)


def planned(have: NamedSharding, want: NamedSharding) -> tuple[rounds.Round, ...]:
    boxes = [{d: bounds_of(index, SHAPE) for d, index in s.devices_indices_map(SHAPE).items()} for s in (have, want)]
    order = list(want.mesh.devices.flat)
    return rounds.plan(*([b[d] for d in order] for b in boxes), [d.process_index for d in order])


def must_cross(have: NamedSharding, want: NamedSharding) -> int:
    """Elements that devices are to have and don't have."""
    had, wanted = (s.devices_indices_map(SHAPE) for s in (have, want))
    missing = 0
    for device, index in wanted.items():
        inside = [
            max(0, min(a[1], b[1]) - max(a[0], b[0]))
            for a, b in zip(bounds_of(index, SHAPE), bounds_of(had[device], SHAPE), strict=True)
        ]
        missing += volume(bounds_of(index, SHAPE)) - inside[0] * inside[1]
    return missing


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_moves_are_permutations_between_the_devices(topology: str, move: str) -> None:
    have, want = change(topology, move)
    plan = planned(have, want)
    sent = sum(volume(tuple((0, n) for n in r.shape)) for r in plan for a, b in r.pairs if a != b)
    assert sent == must_cross(have, want) > 0
    compiled = lowered(SHAPE, jnp.float32, have, want).compile()
    text: Any = compiled.as_text()
    steps = len([r for r in plan if any(a != b for a, b in r.pairs)])
    # Between slices the compiler may make two of one.
    assert steps <= len(re.findall(r" collective-permute(?:-start)?\(", text)) <= 2 * steps
    assert not re.findall(r" (?:all-gather|all-to-all|all-reduce|reduce-scatter)(?:-start)?\(", text)
    assert HOST not in text and "HostExecute" not in text
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes <= 2 * (memory.argument_size_in_bytes + memory.output_size_in_bytes) + 2**20
    if move == "another order":
        assert steps == 1
