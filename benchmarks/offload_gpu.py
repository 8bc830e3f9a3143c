"""Adamw on a model of 1 billion parameters on one accelerator, with and without its states in host memory.

    python benchmarks/offload_gpu.py [--parameters 1e9] [--steps 10]

Self-contained, under five minutes. Each variant runs in a process of its own, so that peak memory is its own. Prints
device bytes in use, peak bytes, step times, how much of the transfers hides behind compute, and whether the parameters
after the last step are bitwise those of the run without offload.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

VARIANTS = ("on the device", "in host memory", "in host memory, 2GiB at a time")


def optimizer_for(variant: str) -> Any:
    """Adamw, wrapped as the variant says."""
    import optax

    import namedshard as ns

    plain = optax.adamw(1e-3)
    if variant == VARIANTS[0]:
        return plain
    budget = "2GiB" if variant == VARIANTS[2] else None
    return ns.offload_optimizer(plain, where=r"\.(mu|nu)\b", budget=budget)


def build(variant: str, parameters: int, width: int, batch: int) -> tuple[Callable[..., Any], Any, Any, Any]:
    """(jitted step, parameters, state, batch) of a deep chain of square layers."""
    import jax
    import jax.numpy as jnp
    import optax

    count = max(1, round(parameters / width**2))
    keys = jax.random.split(jax.random.key(0), count)
    make = jax.jit(lambda key: jax.random.normal(key, (width, width), jnp.float32) * width**-0.5)
    params = [make(key) for key in keys]
    inputs = jax.random.normal(jax.random.key(1), (batch, width), jnp.float32)
    optimizer = optimizer_for(variant)
    state = optimizer.init(params)

    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = jax.checkpoint(lambda x, w: x + jnp.tanh(x @ w))(x, w)
        return jnp.mean(x**2)

    def step(params: Any, state: Any, x: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(jax.grad(loss)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step, donate_argnums=(0, 1)), params, state, inputs


def measure(variant: str, parameters: int, steps: int, width: int, batch: int) -> dict[str, Any]:
    """Train a few steps in this process."""
    import jax
    import numpy as np

    step, params, state, inputs = build(variant, parameters, width, batch)
    device = jax.devices()[0]
    times: list[float] = []
    for number in range(steps + 2):
        start = time.perf_counter()
        params, state = step(params, state, inputs)
        jax.block_until_ready((params, state))
        if number >= 2:
            times.append(time.perf_counter() - start)
    moments = [*state[0].mu, *state[0].nu]
    kinds = sorted({x.sharding.memory_kind for x in moments})
    digest = hashlib.sha256()
    for x in params:
        digest.update(np.asarray(x).tobytes())
    stats = device.memory_stats() or {}
    return {
        "variant": variant,
        "device": device.device_kind,
        "parameters": sum(x.size for x in params),
        "state_bytes": sum(x.nbytes for x in moments),
        "moments_in": kinds,
        "bytes_in_use": stats.get("bytes_in_use"),
        "peak_bytes": stats.get("peak_bytes_in_use"),
        "step_seconds": statistics.median(times),
        "parameters_sha256": digest.hexdigest(),
    }


def bandwidth(size: int = 1 << 30) -> dict[str, float]:
    """Bytes per second from host memory to the device and back."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    device = jax.devices()[0]
    places = [SingleDeviceSharding(device, memory_kind=k) for k in ("device", "pinned_host")]
    x = jax.block_until_ready(jax.device_put(jnp.ones(size // 4, jnp.float32), places[1]))
    out: dict[str, float] = {}
    for name, place in (("in", places[0]), ("out", places[1])):
        jax.block_until_ready(jax.device_put(x, place))
        start = time.perf_counter()
        moved = jax.block_until_ready(jax.device_put(x, place))
        out[name] = size / (time.perf_counter() - start)
        x = moved
    return out


def compare(results: list[dict[str, Any]], rates: dict[str, float]) -> list[str]:
    """The lines to print."""
    plain = results[0]
    lines = [f"{plain['device']}, adamw, {plain['parameters'] / 1e9:.3g} billion parameters"]
    lines.append(f"{'states':32}{'in use':>12}{'peak':>12}{'step':>12}{'hidden':>9}  parameters")
    for r in results:
        transfer = r["state_bytes"] / rates["in"] + r["state_bytes"] / rates["out"]
        hidden = 1 - (r["step_seconds"] - plain["step_seconds"]) / transfer
        same = "equal" if r["parameters_sha256"] == plain["parameters_sha256"] else "DIFFERENT"

        def gib(n: int | None) -> str:
            return "unknown" if n is None else f"{n / 2**30:.2f} GiB"

        lines.append(
            f"{r['variant']:32}{gib(r['bytes_in_use']):>12}{gib(r['peak_bytes']):>12}{r['step_seconds'] * 1e3:>9.1f} ms"
            f"{'' if r is plain else f'{hidden:.0%}':>9}  {same}; moments in {', '.join(r['moments_in'])}"
        )
    lines.append(
        f"transfers alone: {rates['in'] / 1e9:.1f} GB/s in, {rates['out'] / 1e9:.1f} GB/s out; 'hidden' is the part of"
        " their time that a step does not get longer by"
    )
    return lines


def main() -> int:
    """Run each variant in a process of its own, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=1e9)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--variant", choices=[*VARIANTS, "bandwidth"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.variant == "bandwidth":
        print(json.dumps(bandwidth()))
        return 0
    if given.variant:
        print(json.dumps(measure(given.variant, int(given.parameters), given.steps, given.width, given.batch)))
        return 0
    # Otherwise JAX takes most of the device's memory at once, and bytes in use say nothing.
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    answers: list[Any] = []
    for variant in (*VARIANTS, "bandwidth"):
        done = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--variant", variant],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            timeout=280,
            check=True,
        )
        answers.append(json.loads(done.stdout.splitlines()[-1]))
    lines = compare(answers[:-1], answers[-1])
    print("\n".join(lines))
    return 0 if all(a["parameters_sha256"] == answers[0]["parameters_sha256"] for a in answers[:-1]) else 1


if __name__ == "__main__":
    sys.exit(main())
