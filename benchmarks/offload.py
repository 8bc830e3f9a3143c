"""Adamw with and without its states in host memory: placement and values. Times on a CPU mean nothing here."""

from typing import Any

import jax

from benchmarks import _harness as harness
from benchmarks.offload_gpu import VARIANTS, measure


def run(quick: bool = False) -> dict[str, Any]:
    """Train the same small model each way."""
    results = [measure(v, 1_000_000 if quick else 16_000_000, 2 if quick else 5, 512, 64) for v in VARIANTS]
    expected = results[0]["parameters_sha256"]
    for r in results:
        r["equal"] = r.pop("parameters_sha256") == expected
    return {"platform": jax.devices()[0].platform, "variants": results}


def table(results: dict[str, Any]) -> str:
    """One row a variant."""
    rows = [
        [
            r["variant"],
            ", ".join(r["moments_in"]),
            f"{r['state_bytes'] / 2**20:.0f} MiB",
            harness.duration(r["step_seconds"]),
            "equal" if r["equal"] else "DIFFERENT",
        ]
        for r in results["variants"]
    ]
    text = harness.text_table(
        "adamw, states on the device and in host memory", ("states", "moments in", "size", "step", "parameters"), rows
    )
    if results["platform"] == "cpu":
        text += (
            "\nOn a CPU host memory is device memory: these times mean nothing; run benchmarks/offload_gpu.py on a GPU."
        )
    return text
