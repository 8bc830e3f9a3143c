"""Planning needs no device: it works where JAX cannot start any backend at all."""

import os
import subprocess
import sys
import textwrap

import pytest

PLANNING = """
import haliax as hax
import jax
import numpy as np
import namedshard as ns

mesh = jax.sharding.AbstractMesh((64, 16, 16), ("replica", "data", "model"))
assert mesh.size == 16_384
mapping = ns.AxisMapping({
    "vocab": ns.first("model", "data", None),
    "mlp": "model",
    "heads": ("data", "model"),
    "embed": ns.first("data", None),
    "odd": "model",
}, indivisible="replicate")


def leaf(dtype, **axes):
    named = tuple(hax.Axis(name, size) for name, size in axes.items())
    return hax.NamedArray(jax.ShapeDtypeStruct(tuple(axes.values()), dtype), named)


layers = [
    {
        "up": leaf("bfloat16", mlp=4096, embed=1024),
        "down": leaf("bfloat16", embed=1024, mlp=4096),
        "attention": leaf("float32", heads=256, embed=1024),
        "bias": leaf("float32", odd=7),
        "scale": np.ones(8, np.float32),
        "step": 3,
    }
    for _ in range(200)
]
"""

PURE = {
    "plan": """
import warnings
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    plan = ns.plan(layers, mapping, mesh)
assert len(plan.leaves) == 1_200
assert plan["[199]['up']"].spec == jax.sharding.PartitionSpec("model", "data")
assert plan["[199]['attention']"].spec == jax.sharding.PartitionSpec(("data", "model"), None)
assert plan["[199]['bias']"].spec == jax.sharding.PartitionSpec(None)
assert plan.bytes_per_device == 200 * (2 * 2 * 4096 * 1024 // 256 + 4 * 1024 + 4 * 7)
plan.specs, plan.shardings
""",
    "explain": """
explanation = ns.explain(layers, mapping, mesh)
assert explanation.totals.leaves == 1_000 and explanation.ok
str(explanation), explanation.to_json(), explanation._repr_html_()
""",
    "annotate": """
placed = ns.shard([layer["up"] for layer in layers], mapping, mesh)
assert placed[7].array.sharding.spec == jax.sharding.PartitionSpec("model", "data")
""",
    "specs": """
assert ns.pspec_for(hax.Axis("mlp", 32), mapping, mesh) == jax.sharding.PartitionSpec("model")
assert ns.sharding_for(layers[0]["up"], mapping, mesh).spec == jax.sharding.PartitionSpec("model", "data")
assert ns.round_axis_for_partitioning(hax.Axis("odd", 7), mapping, mesh).size == 16
""",
    "errors": """
try:
    ns.plan(layers, ns.AxisMapping(mapping, indivisible="error"), mesh)
except ns.IndivisibleAxisError as error:
    assert "axis odd=7 is not divisible by mesh axis 'model'=16" in str(error)
else:
    raise AssertionError("planned")
""",
}

IMPURE = {
    "devices": "jax.devices()",
    "array": "jax.numpy.zeros(3)",
    "put": "jax.device_put(np.zeros(3))",
    "mesh": "jax.make_mesh((1,), ('data',))",
}


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Runs code where no backend can be had: asking JAX for this platform raises."""
    environment = os.environ | {"JAX_PLATFORMS": "no_such_platform"}
    whole = textwrap.dedent(PLANNING) + textwrap.dedent(code) + "\nprint('done')\n"
    return subprocess.run([sys.executable, "-c", whole], env=environment, capture_output=True, text=True)


def test_planning_needs_no_backend() -> None:
    done = run("".join(PURE.values()))
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


@pytest.mark.parametrize("code", IMPURE.values(), ids=IMPURE.keys())
def test_the_proof_can_fail(code: str) -> None:
    done = run(code)
    assert done.returncode == 1 and "no_such_platform" in done.stderr, done.stdout + done.stderr
    assert "done" not in done.stdout
