"""What a type checker says of calls: right ones pass, and wrong ones are errors."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

CALLS = """
import dataclasses
from typing import assert_type

import haliax as hax
import jax
import namedshard as ns


@dataclasses.dataclass
class Model:
    w: jax.Array


def made(size: int) -> Model:
    return Model(jax.numpy.zeros(size))


@ns.named_jit(axis_resources={"mlp": "model"})
def scaled(x: hax.NamedArray, n: int) -> hax.NamedArray:
    return x * n


@ns.fsdp({"embed": "data"}, {"batch": "data"})
def step(model: Model, *, rate: float) -> Model:
    return model


doubled = ns.named_jit(lambda x: x, {"mlp": "model"})
plain = ns.fsdp(made, {"embed": "data"}, {"batch": "data"}, axes={"w": "embed"})
x = hax.ones(hax.Axis("mlp", 8))
model = Model(jax.numpy.ones(8))

assert_type(scaled(x, 3), hax.NamedArray)
assert_type(step(model, rate=0.1), Model)
assert_type(plain(8), Model)
assert_type(ns.shard(model, {"mlp": "model"}, axes={"w": "mlp"}), Model)
assert_type(ns.auto_sharded(model), Model)
assert_type(ns.offload(model), Model)
assert_type(ns.to_host(model), Model)
assert_type(ns.load_safetensors("x", model, {"mlp": "model"}), Model)
assert_type(ns.init(made, 8), Model)
assert_type(ns.init(made, 8, report=True), tuple[Model, ns.InitReport])
scaled.lower(x, 3).compile()

scaled(x, "three")  # wrong
scaled(x)  # wrong
scaled(x, 3, 4)  # wrong
scaled.lower(x)  # wrong
step(model)  # wrong
step(model, rate="fast")  # wrong
plain("8")  # wrong
ns.shard(model, {"mlp": "model"}, unmatched="never")  # wrong
ns.shard(model, {"mlp": "model"}, axes=3)  # wrong
ns.plan(model, mesh=(2, 4))  # wrong
ns.init(3)  # wrong
"""


def test_right_and_wrong_calls(tmp_path: Path) -> None:
    (tmp_path / "calls.py").write_text(CALLS)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT / "src")]}))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", "-p", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    found = json.loads(done.stdout)["generalDiagnostics"]
    errors = {d["range"]["start"]["line"]: d["message"] for d in found if d["severity"] == "error"}
    lines = CALLS.splitlines()
    wrong = {n for n, line in enumerate(lines) if line.endswith("# wrong")}
    assert len(wrong) == 11
    assert {n: lines[n] for n in errors} == {n: lines[n] for n in wrong}, errors
