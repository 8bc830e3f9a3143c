"""Planning a large model for a large machine, on any machine: no device is touched."""

import time
from typing import Any

import haliax as hax
import jax
import numpy as np
from haliax import NamedArray
from jax.sharding import AbstractMesh

import namedshard as ns
from benchmarks._harness import duration, interleaved, text_table

LAYERS = 100
MESH = AbstractMesh((32, 64, 8), ("replica", "data", "model"))
MAPPING = {"embed": "data", "mlp": "model", "heads": ns.first("model", None), "vocab": ("data", "model")}


def _struct(*axes: hax.Axis) -> NamedArray:
    return NamedArray(jax.ShapeDtypeStruct(tuple(a.size for a in axes), np.dtype("bfloat16")), axes)


def model(layers: int = LAYERS) -> dict[str, Any]:
    """Structs of a transformer with 12 named arrays per layer."""
    embed, mlp = hax.Axis("embed", 16384), hax.Axis("mlp", 65536)
    heads, size = hax.Axis("heads", 128), hax.Axis("head_size", 128)
    layer = {
        "norms": [_struct(embed), _struct(embed), _struct(embed), _struct(embed)],
        "attention": {k: _struct(embed, heads, size) for k in ("q", "k", "v", "o")},
        "mlp": {
            "up": _struct(embed, mlp),
            "gate": _struct(embed, mlp),
            "down": _struct(mlp, embed),
            "bias": _struct(mlp),
        },
    }
    return {"layers": [jax.tree.map(lambda x: x, layer) for _ in range(layers)]}


def run(quick: bool = False) -> dict[str, Any]:
    """Seconds for a plan of 1,200 leaves on 16,384 devices, and for all its shardings."""
    tree = model()
    start = time.perf_counter()
    plan = ns.plan(tree, MAPPING, MESH)
    first = time.perf_counter() - start
    times = interleaved(
        {
            "ns.plan": lambda: ns.plan(tree, MAPPING, MESH),
            "ns.plan(...).shardings": lambda: ns.plan(tree, MAPPING, MESH).shardings,
            "ns.explain": lambda: ns.explain(tree, MAPPING, MESH),
            "tree_flatten": lambda: jax.tree_util.tree_flatten(tree),
        },
        rounds=3 if quick else 15,
    )
    return {
        "leaves": len(plan.leaves),
        "devices": MESH.size,
        "bytes_per_device": plan.bytes_per_device,
        "first": first,
        **times,
    }


def table(results: dict[str, Any]) -> str:
    """One row per step."""
    aims = {"first": "300 ms", "ns.plan": "300 ms"}
    names = ("first", "ns.plan", "ns.plan(...).shardings", "ns.explain", "tree_flatten")
    rows = [["ns.plan, first call" if n == "first" else n, duration(results[n]), aims.get(n, "")] for n in names]
    title = f"{results['leaves']:,} leaves on {results['devices']:,} devices"
    return text_table(title, ["", "time", "aim"], rows)
