"""A checkpoint to load and save: 1 GiB of float32 in two files, as a stack of named layers."""

import gc
import json
import os
from pathlib import Path
from typing import Any

import haliax as hax
import jax
import numpy as np

import namedshard as ns

MAPPING = {"embed": "data", "mlp": "model"}


def mesh() -> jax.sharding.Mesh:
    """2 x 4 over eight devices."""
    return jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))


def abstract(mebibytes: int) -> dict[str, Any]:
    """Two matrices of 16 MiB a layer, without values."""
    embed, mlp = hax.Axis("embed", 1024), hax.Axis("mlp", 4096)
    up = hax.NamedArray(jax.ShapeDtypeStruct((1024, 4096), np.float32), (embed, mlp))
    down = hax.NamedArray(jax.ShapeDtypeStruct((4096, 1024), np.float32), (mlp, embed))
    return {f"layer{i:03}": {"up": up, "down": down} for i in range(max(1, mebibytes // 32))}


def write(folder: Path, mebibytes: int) -> int:
    """Write the checkpoint in two files and an index; returns its tensors' bytes."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    layers = sorted(abstract(mebibytes))
    random = np.random.default_rng(0)
    where: dict[str, str] = {}
    total = 0
    halves = layers[: len(layers) // 2], layers[len(layers) // 2 :]
    for number, half in enumerate(halves, 1):
        name = f"model-0000{number}-of-00002.safetensors"
        tensors = {f"{k}.up": random.random((1024, 4096), np.float32) for k in half}
        tensors |= {f"{k}.down": random.random((4096, 1024), np.float32) for k in half}
        save_file(tensors, folder / name)
        where |= dict.fromkeys(tensors, name)
        total += sum(x.nbytes for x in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def files(folder: Path) -> list[Path]:
    """The checkpoint's two files."""
    return sorted(folder.glob("*.safetensors"))


def load(folder: Path, like: Any) -> Any:
    """Straight into shards."""
    return jax.block_until_ready(ns.load_safetensors(folder, like, mapping=MAPPING, mesh=mesh(), progress=False))


def raw_read(folder: Path) -> list[bytes]:
    """Every byte of the files, into fresh memory: a loader's memory is fresh, too."""
    return [file.read_bytes() for file in files(folder)]


def load_file_and_put(folder: Path, like: Any) -> Any:
    """What one writes by hand: whole tensors into memory, then one batched ``device_put``."""
    from safetensors.numpy import load_file

    plan = ns.plan(like, MAPPING, mesh())
    tensors: dict[str, Any] = {}
    for file in files(folder):
        tensors |= load_file(file)
    names = [f"{layer}.{part}" for layer in sorted(like) for part in sorted(like[layer])]
    places = [plan.sharding_of(leaf) for leaf in plan.leaves]
    return jax.block_until_ready(jax.device_put([tensors[n] for n in names], places))


def settled(call: Any) -> Any:
    """The call, without what an earlier one left to be freed."""

    def run() -> None:
        result = call()
        del result
        gc.collect()

    return run


def counters() -> dict[str, int]:
    """Bytes this process has read, and the most memory it has had, by the operating system's own counters."""
    io = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) * 1024
    now = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) * 1024
    return {"read": int(io["rchar"]), "peak": peak, "now": now, "pid": os.getpid()}
