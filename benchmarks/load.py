"""Loading a 1 GiB checkpoint onto a 2 x 4 mesh: against a raw read, and against what one writes by hand.

Memory and bytes read are the operating system's own counters, each in a fresh process; two processes share a mesh by
halves.
"""

import json
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import _checkpoint as checkpoint
from benchmarks import _harness as harness


def run(quick: bool = False) -> dict[str, Any]:
    """Time side by side; then count in fresh processes."""
    mebibytes = 64 if quick else 1024
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        total = checkpoint.write(folder, mebibytes)
        like = checkpoint.abstract(mebibytes)
        times = harness.interleaved(
            {
                "raw read": checkpoint.settled(lambda: checkpoint.raw_read(folder)),
                "load_safetensors": checkpoint.settled(lambda: checkpoint.load(folder, like)),
                "load_file + device_put": checkpoint.settled(lambda: checkpoint.load_file_and_put(folder, like)),
            },
            rounds=3 if quick else 7,
        )
        alone = _in_processes(folder, mebibytes, 1)
        two = _in_processes(folder, mebibytes, 2)
    return {"bytes": total, "times": times, "alone": alone, "two_processes": two}


def _in_processes(folder: Path, mebibytes: int, count: int) -> list[dict[str, int]]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.load", str(folder), str(mebibytes), str(count), str(port)]
    started = [
        subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for i in range(count)
    ]
    try:
        answers = [p.communicate(timeout=240) for p in started]
    finally:
        for p in started:
            p.kill()
    for p, (_, errors) in zip(started, answers, strict=True):
        if p.returncode:
            raise RuntimeError(errors)
    return [json.loads(out.splitlines()[-1]) for out, _ in answers]


def worker(folder: str, mebibytes: int, count: int, port: int, number: int) -> None:
    """Load once, and print what the operating system counted."""
    import os

    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={8 // count}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=count, process_id=number)
    jax.block_until_ready(jax.numpy.zeros(8) + 1)
    before = checkpoint.counters()
    loaded = checkpoint.load(Path(folder), checkpoint.abstract(mebibytes))
    after = checkpoint.counters()
    shards = sum(s.data.nbytes for x in jax.tree.leaves(loaded) for s in x.addressable_shards)
    print(
        json.dumps(
            {
                "read": after["read"] - before["read"],
                "shards": shards,
                "extra_memory": after["peak"] - before["now"] - shards,
            }
        ),
        flush=True,
    )


def table(results: dict[str, Any]) -> str:
    """Times, then bytes and memory."""
    times = results["times"]
    title = f"{results['bytes'] / 2**20:.0f} MiB of float32 in two files onto a 2 x 4 mesh"
    aims = {"load_safetensors": 1.5}
    text = harness.versus(title, times, "raw read", aims)
    faster = times["load_file + device_put"] / times["load_safetensors"]
    text += f"\nload_safetensors is {faster:.1f} times as fast as load_file + device_put (aim: 2.5)\n\n"
    mib = 2**20
    rows = [
        [
            name,
            f"{r['shards'] / mib:.0f} MiB",
            f"{r['read'] / mib:.1f} MiB",
            f"{r['read'] / r['shards']:.3f}",
            f"{r['extra_memory'] / mib:.0f} MiB",
        ]
        for name, r in [
            ("one process", results["alone"][0]),
            *((f"process {i} of 2", r) for i, r in enumerate(results["two_processes"])),
        ]
    ]
    columns = ("", "its shards", "bytes read", "read per byte needed", "memory beyond the shards")
    return text + harness.text_table("by the operating system's counters, in fresh processes", columns, rows)


if __name__ == "__main__":
    worker(sys.argv[1], *map(int, sys.argv[2:]))
