"""Saving a 1 GiB model from a 2 x 4 mesh: against a raw write and sync, and against gathering by hand."""

import os
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

import namedshard as ns
from benchmarks import _checkpoint as checkpoint
from benchmarks import _harness as harness


def run(quick: bool = False) -> dict[str, Any]:
    """Time side by side, every candidate synced to the disk."""
    mebibytes = 64 if quick else 1024
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        total = checkpoint.write(folder / "source", mebibytes)
        model = checkpoint.load(folder / "source", checkpoint.abstract(mebibytes))
        flat = {f"{k}.{part}": x for k, layer in model.items() for part, x in layer.items()}
        block = os.urandom(1 << 24)

        def raw_write() -> None:
            with open(folder / "raw", "wb", buffering=0) as f:
                for _ in range(total // len(block)):
                    f.write(block)
                os.fsync(f.fileno())

        def by_hand() -> None:
            from safetensors.numpy import save_file

            path = folder / "by_hand.safetensors"
            save_file({k: np.asarray(jax.device_get(x.array)) for k, x in flat.items()}, path)
            with open(path, "rb") as f:
                os.fsync(f.fileno())

        times = harness.interleaved(
            {
                "raw write": raw_write,
                "save_safetensors": lambda: ns.save_safetensors(model, folder / "ours.safetensors", progress=False),
                "device_get + save_file": checkpoint.settled(by_hand),
            },
            rounds=3 if quick else 5,
            warmup=1,
        )
    return {"bytes": total, "times": times}


def table(results: dict[str, Any]) -> str:
    """One row a candidate."""
    title = f"{results['bytes'] / 2**20:.0f} MiB of float32 from a 2 x 4 mesh into one file, synced"
    return harness.versus(title, results["times"], "raw write")
