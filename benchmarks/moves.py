"""Moves between two processes: time and bytes by route, what agreeing on a call costs, and the memory of `to_host`.

The processes are real ones on this machine, with four virtual devices each, joined by gloo collectives over loopback.
Where ``libtpu`` is installed, moves are also compiled for TPUs, which needs none.
"""

import ctypes
import gc
import importlib.util
import json
import math
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import haliax as hax
import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import namedshard as ns
from benchmarks._harness import duration, text_table
from namedshard._place import boxes, compiled, exchange, rounds
from namedshard._place import transfer as collective
from namedshard._processes import agreement

PROCESSES, DEVICES = 2, 4
MIB = 1 << 20
LIMIT = 900
MAPPING = {"a": "x", "b": "y"}

# Specs of source and target, and the devices of each: all in order, some of them, or (None) all shuffled.
P, ALL = PartitionSpec, slice(None)
CATALOGUE: dict[str, tuple[PartitionSpec, PartitionSpec, slice, slice | None]] = {
    "another order": (P("x", "y"), P("x", "y"), ALL, None),
    "(x, y) to (y, x)": (P("x", "y"), P("y", "x"), ALL, ALL),
    "x to (x, y)": (P("x"), P("x", "y"), ALL, ALL),
    "rows to columns": (P(("x", "y")), P(None, ("x", "y")), ALL, ALL),
    "rows to columns, another order": (P(("x", "y")), P(None, ("x", "y")), ALL, None),
    "to replicated": (P("x", "y"), P(), ALL, ALL),
    "to half of the devices": (P("x", "y"), P("x", "y"), ALL, slice(8)),
    "from half of the devices": (P("x", "y"), P(None, "x"), slice(8), ALL),
    "to the other half": (P("x", "y"), P("y", "x"), slice(8), slice(8, None)),
}
TOPOLOGIES = {"v5e:4x4": ("v5e:4x4", 1), "v5p:2x2x4": ("v5p:2x2x4", 1), "2 of v5e:2x4": ("v5e:2x4", 2)}
# For devices of the second slice alone there is no compiler without them.
NOT_COMPILED = ("2 of v5e:2x4", "to the other half")


def run(quick: bool) -> dict[str, Any]:
    """Start the two processes and return what the first of them measured, with the peak memory of both."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as held:
        # Bound, not listening: no other program is given the port, and JAX's service shares it.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
        }
        arguments = [sys.executable, "-m", "benchmarks.moves", folder, str(port), json.dumps(quick)]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for i in range(PROCESSES):
                with open(f"{folder}/{i}.log", "wb") as log:
                    processes.append(subprocess.Popen([*arguments, str(i)], env=environment, stdout=log, stderr=log))
            for p in processes:
                p.wait(LIMIT)
        finally:
            for p in processes:
                p.kill()
                p.wait()
        for i, p in enumerate(processes):
            if p.returncode:
                raise RuntimeError(f"process {i} ended with {p.returncode}:\n{Path(f'{folder}/{i}.log').read_text()}")
        first, *others = (json.loads(Path(f"{folder}/{i}.json").read_text()) for i in range(PROCESSES))
        for entry, *theirs in zip(first["to_host"], *(o["to_host"] for o in others), strict=True):
            entry["peak"] = [entry["peak"], *(t["peak"] for t in theirs)]
        for name, entry in first["moves"].items():
            for way in ("seconds", "on_devices", "device_put"):
                # A process that only sends is done before it has arrived.
                entry[way] = max((r["moves"][name][way] for r in (first, *others)), key=lambda found: found or 0.0)
        return first | {"on_tpus": _on_tpus(quick)}


def table(results: dict[str, Any]) -> str:
    """Three tables: moves, agreement, memory."""
    moved = [
        [
            name,
            duration(r["seconds"]),
            f"{r['must_cross'] / MIB:.1f} MiB",
            f"{r['sent'] / MIB:.1f} MiB",
            f"{r['sent'] / r['must_cross']:.2f}" if r["must_cross"] else "",
            duration(r["on_devices"]) if r["on_devices"] is not None else "-",
            duration(r["device_put"]) if r["device_put"] is not None else "-",
        ]
        for name, r in results["moves"].items()
    ]
    size = f"{results['array'] / MIB:.0f} MiB"
    title = f"One array of {size} between {PROCESSES} processes of {DEVICES} devices"
    agreed = [[name, duration(seconds)] for name, seconds in results["agree"].items()]
    memory = [
        [
            f"to_host(process={r['process']})",
            f"{r['tree'] / MIB:.0f} MiB",
            f"{r['budget'] / MIB:.0f} MiB",
            *(f"{(peak - kept) / MIB:.0f} MiB" for peak, kept in zip(r["peak"], r["kept"], strict=True)),
            duration(r["seconds"]),
        ]
        for r in results["to_host"]
    ]
    return "\n\n".join(
        [
            text_table(
                title, ["", "time", "must cross", "sent", "ratio", "as on accelerators", "jax.device_put"], moved
            ),
            on_tpus(results),
            text_table("Agreeing on a call", ["", "time"], agreed),
            text_table(
                "Peak memory beyond the result, by process",
                ["", "tree", "budget", *(f"process {i}" for i in range(PROCESSES)), "time"],
                memory,
            ),
        ]
    )


def on_tpus(results: dict[str, Any]) -> str:
    """The table of moves that were compiled for TPUs."""
    if not results["on_tpus"]:
        return "Not compiled for TPUs: libtpu is not installed."

    def needs(found: dict[str, int] | None) -> list[str]:
        return ["-", "-"] if found is None else [str(found["collectives"]), f"{found['beyond'] / MIB:.0f} MiB"]

    rows = [
        [
            f"{topology}: {move}",
            f"{r['shards'] / MIB:.0f} MiB",
            f"{r['must_cross'] / MIB:.0f} MiB",
            f"{r['sent'] / MIB:.0f} MiB",
            *needs(r["ours"]),
            *needs(r["jit"]),
        ]
        for topology, moves in results["on_tpus"].items()
        for move, r in moves.items()
    ]
    columns = ["", "both shards", "must cross", "sent", "permutes", "beyond", "jit: collectives", "beyond"]
    return text_table("A float32 array of 1 GiB on 16 TPU devices, as compiled", columns, rows)


def _on_tpus(quick: bool) -> dict[str, dict[str, Any]]:
    if importlib.util.find_spec("libtpu") is None:
        return {}
    found: dict[str, dict[str, Any]] = {}
    for name, (topology, slices) in TOPOLOGIES.items():
        devices = list(ns.topology_mesh(topology, {"x": 4, "y": 4}, num_slices=slices).devices.flat)
        found[name] = {
            move: _compiled(devices, *how) for move, how in CATALOGUE.items() if (name, move) != NOT_COMPILED
        }
        if quick:
            break
    return found


def _compiled(
    devices: list[Any], source: PartitionSpec, target: PartitionSpec, had: Any, wanted: Any
) -> dict[str, Any]:
    """What a move takes on one device, and what all send, next to what the compiler makes of it by itself."""

    def sharding(spec: PartitionSpec, which: Any) -> NamedSharding:
        some = random.Random(0).sample(devices, len(devices)) if which is None else devices[which]
        return NamedSharding(_mesh(some, 4, len(some) // 4), spec)

    have, want = sharding(source, had), sharding(target, wanted)
    shape = (1 << 14, 1 << 14)
    layouts = [boxes.layout_of(s, shape) for s in (have, want)]
    kept = [
        boxes.volume(shared)
        for box, holders in layouts[1].holders.items()
        for held, shared in boxes.shards_in(layouts[0], box)
        for device in holders
        if device in layouts[0].holders[held]
    ]
    plan = rounds.plan_between(have, want, shape, 4)
    slots = 0 if have.device_set == want.device_set else 2 * plan.elements * 4
    programs = [x.compile() for x in compiled.lowered(shape, np.float32, have, want)]
    steps = [(group, r) for step in plan.steps for group in step for r in group.rounds]
    sent = sum(math.prod(g.chunk) * math.prod(g.counts) * sum(a != b for a, b in r.pairs) for g, r in steps)
    return {
        "shards": 4 * sum(math.prod(s.shard_shape(shape)) for s in (have, want)),
        "must_cross": 4 * (sum(boxes.volume(b) * len(h) for b, h in layouts[1].holders.items()) - sum(kept)),
        "sent": 4 * sent,
        "ours": {
            "collectives": sum(map(_collectives, programs)),
            "beyond": max(p.memory_analysis().temp_size_in_bytes for p in programs) + slots,
        },
        "jit": _by_the_compiler(shape, have, want),
    }


def _collectives(program: Any) -> int:
    kinds = "collective-permute|all-gather|all-to-all|all-reduce|reduce-scatter"
    return len(re.findall(rf" (?:{kinds})(?:-start)?\(", program.as_text()))


def _by_the_compiler(shape: tuple[int, ...], have: NamedSharding, want: NamedSharding) -> dict[str, int] | None:
    """The same for a jitted identity, where JAX compiles that: it wants one order of devices."""
    if list(have.mesh.devices.flat) != list(want.mesh.devices.flat):
        return None
    struct = jax.ShapeDtypeStruct(shape, np.float32, sharding=have)
    program: Any = jax.jit(lambda x: x, out_shardings=want).lower(struct).compile()
    return {"collectives": _collectives(program), "beyond": program.memory_analysis().temp_size_in_bytes}


# --- in the processes -------------------------------------------------------------------------------------------------


def _named(x: Any) -> hax.NamedArray:
    return hax.NamedArray(x, (hax.Axis("a", x.shape[0]), hax.Axis("b", x.shape[1])))


def _mesh(devices: list[jax.Device], *shape: int) -> Mesh:
    return Mesh(np.array(devices).reshape(shape), ("x", "y"))


def _made(size: int, mesh: Mesh, spec: PartitionSpec, seed: int = 0) -> jax.Array:
    """A float32 array of about ``size`` bytes, each shard drawn where it will be."""
    rows = max(8, size // 4 // 1024 // 8 * 8)
    draw = np.random.default_rng(seed)

    def shard(index: tuple[slice, ...]) -> np.ndarray:
        a, b = (s.indices(n) for s, n in zip(index, (rows, 1024), strict=True))
        return draw.random((a[1] - a[0], b[1] - b[0]), np.float32)

    return jax.make_array_from_callback((rows, 1024), NamedSharding(mesh, spec), shard, dtype=np.float32)


def _median(call: Callable[[], Any], rounds: int) -> float:
    times: list[float] = []
    for _ in range(rounds + 1):
        multihost_utils.sync_global_devices("start")
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _bytes(call: Callable[[], Any]) -> tuple[int, int]:
    """Bytes that must go to another process in a call, and that do."""
    plans: list[exchange.Schedule] = []
    real = exchange.schedule

    def noted(*args: Any) -> exchange.Schedule:
        plans.append(real(*args))
        return plans[-1]

    exchange.schedule = noted
    try:
        call()
    finally:
        exchange.schedule = real
    sent = sum(phase.steps * phase.slot_bytes * sum(map(len, phase.rounds)) for p in plans for phase in p.phases)
    return sum(p.crossing_bytes for p in plans), sent


def _moves(size: int, rounds: int) -> dict[str, Any]:
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    first, second = devices[:DEVICES], devices[DEVICES:]
    turned = [d for pair in zip(first, second, strict=True) for d in pair]
    full, shuffled = _mesh(devices, 2, 4), _mesh(turned, 2, 4)
    p = PartitionSpec
    x = _made(size, full, p("x", "y"))
    whole = np.ones(x.shape, np.float32)
    pinned = jax.device_put(x, x.sharding.with_memory_kind("pinned_host"))
    one, other = _made(size, _mesh(first, 2, 2), p("x", "y")), _mesh(second, 2, 2)
    turns: dict[str, tuple[Any, dict[str, str], Mesh]] = {
        "from host: the same numpy array on both": (whole, MAPPING, full),
        "constrain in jit: (x, y) to (y, x)": (x, {"a": "y", "b": "x"}, full),
        "constrain in jit: to replicated": (x, {}, full),
        "device_put: devices in another order": (x, MAPPING, shuffled),
        "device_put: out of pinned_host": (pinned, MAPPING, full),
        "collective: to one process": (x, MAPPING, other),
        "collective: from one process to both": (one, MAPPING, full),
        "collective: from one process to the other": (one, MAPPING, other),
        "collective: to a sub-mesh over both": (x, MAPPING, _mesh(devices[2:6], 2, 2)),
    }
    out: dict[str, Any] = {}
    for name, (source, mapping, mesh) in turns.items():
        spec = p(*(mapping.get(axis) for axis in ("a", "b")))
        target = NamedSharding(mesh, spec, memory_kind="device")

        def ours(source: Any = source, mapping: Any = mapping, mesh: Mesh = mesh) -> Any:
            return ns.shard(_named(source), mapping, mesh, memory_kind="device").array

        must_cross, sent = _bytes(ours)
        seconds = _median(ours, rounds)
        theirs = None
        # JAX itself refuses other devices, or on one process only, so that the processes get out of step.
        if isinstance(source, np.ndarray) or source.sharding.device_set == target.device_set:
            theirs = _median(lambda source=source, target=target: jax.device_put(source, target), rounds)
        on_devices = None
        if not isinstance(source, np.ndarray):
            with ns.testing.accelerator_routes():
                on_devices = _median(ours, rounds)
        out[name] = {
            "seconds": seconds,
            "on_devices": on_devices,
            "device_put": theirs,
            "must_cross": must_cross,
            "sent": sent,
        }
    for keeper in (0, None):

        def gathered(keeper: int | None = keeper) -> Any:
            return ns.to_host(x, process=keeper)

        must_cross, sent = _bytes(gathered)
        name = "to_host: to one process" if keeper == 0 else "to_host: to both"
        seconds = _median(gathered, rounds)
        found = {"seconds": seconds, "on_devices": None, "device_put": None}
        out[name] = found | {"must_cross": must_cross, "sent": sent}
    return out


def _agreement(rounds: int) -> dict[str, float]:
    def described(count: int) -> list[agreement.LeafDescription]:
        return [
            agreement.LeafDescription(f"layers[{i}].weight", "float32[4096,4096]", "P('x', 'y')", "P('y')")
            for i in range(count)
        ]

    few, many = described(1), described(1000)
    return {
        "1 leaf": _median(lambda: agreement.agree("shard", few), rounds),
        "1000 leaves": _median(lambda: agreement.agree("shard", many), rounds),
    }


def _peak(call: Callable[[], Any]) -> tuple[Any, int, float]:
    """What a call returns, and by how much the memory of this process grew meanwhile at the most."""

    def memory(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

    # What was freed before goes back to the system, and the peak is forgotten.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    start = time.perf_counter()
    result = call()
    return result, memory("VmHWM") - before, time.perf_counter() - start


def _memory(size: int, budget: int) -> list[dict[str, Any]]:
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    mesh = _mesh(devices, 2, 4)
    part = size // 8
    tree = {str(i): _named(_made(part, mesh, PartitionSpec("x", "y"), i)) for i in range(8)}
    out: list[dict[str, Any]] = []
    for keeper in (0, 1, None):
        # Compilers and allocators take their own share once.
        ns.to_host(_made(budget, mesh, PartitionSpec("x", "y")), process=keeper, budget=budget)
        multihost_utils.sync_global_devices("start")
        result, peak, seconds = _peak(lambda keeper=keeper: ns.to_host(tree, process=keeper, budget=budget))
        whole = sum(x.array.nbytes for x in tree.values())
        kept = [whole if keeper in (None, i) else 0 for i in range(PROCESSES)]
        out.append({"process": keeper, "tree": whole, "budget": budget, "kept": kept, "peak": peak, "seconds": seconds})
        del result
    return out


def main() -> None:
    """One of the two processes."""
    folder, port, quick, process = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=PROCESSES, process_id=process)
    size = 4 * MIB if quick else 256 * MIB
    rounds = 1 if quick else 5
    results = {
        "array": size,
        "chunk": collective.CHUNK_BYTES,
        "moves": _moves(size, rounds),
        "agree": _agreement(3 if quick else 30),
        "to_host": _memory(16 * MIB if quick else 1024 * MIB, 8 * MIB if quick else 128 * MIB),
    }
    Path(f"{folder}/{process}.json").write_text(json.dumps(results))
    multihost_utils.sync_global_devices("end")
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
