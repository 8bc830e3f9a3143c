"""Compiled functions, plans and explanations in other processes: pickle, cloudpickle and deepcopy."""

import copy
import functools
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from support import M42, bits, counting, na

import namedshard as ns

MAPPING = {"batch": "data", "embed": ns.first("model", None)}
COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "cloudpickle": lambda x: pickle.loads(cloudpickle.dumps(x)),
    "deepcopy": copy.deepcopy,
}


def plain(x):
    return x * 2


@ns.named_jit(axis_resources=MAPPING, donate_args=[False], on_mismatch="reshard")
def decorated(x):
    return x * 2


@ns.fsdp(MAPPING, {"batch": "data"})
def sharded(x):
    return x * 2


class Model(eqx.Module):
    weight: hax.NamedArray

    def __call__(self, x):
        return x * self.weight

    @ns.named_jit
    def compiled(self, x):
        return x * self.weight


class Trainer:
    factor = 2

    def __init__(self) -> None:
        self.mine = ns.named_jit(self.plain)

    def plain(self, x):
        return x * self.factor

    @ns.named_jit
    def step(self, x):
        return x * self.factor

    @staticmethod
    @ns.named_jit
    def static(x):
        return x * 2


def model() -> Model:
    return Model(na(np.full((8, 4), 2, np.float32), "batch embed"))


def held(x, *, model):
    return model(x)


# Each doubles its argument.
FUNCTIONS: dict[str, Callable[[], Any]] = {
    "plain": lambda: ns.named_jit(plain, MAPPING),
    "decorated": lambda: decorated,
    "fsdp": lambda: ns.fsdp(plain, MAPPING, {"batch": "data"}),
    "decorated by fsdp": lambda: sharded,
    "method of a module": lambda: model().compiled,
    "method in its class": lambda: functools.partial(Model.compiled, model()),
    "module": lambda: ns.named_jit(model(), MAPPING),
    "module's method": lambda: ns.named_jit(model().__call__),
    "partial": lambda: ns.named_jit(functools.partial(held, model=model())),
    "method of an object": lambda: Trainer().step,
    "an object's compiled method": lambda: Trainer().mine,
    "static method": lambda: Trainer.static,
    "twice": lambda: ns.named_jit(ns.named_jit(plain)),
}


def check_doubles(fn: Any) -> None:
    with jax.set_mesh(M42):
        assert bits(fn(na(counting(8, 4), "batch embed")).array) == bits(counting(8, 4) * 2)


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_copies_of_compiled_functions(kind: str, way: str) -> None:
    fn = FUNCTIONS[kind]()
    for _ in range(2):
        again = COPIES[way](fn)
        check_doubles(again)
        check_doubles(fn)
    if isinstance(fn, ns.NamedJit):
        assert repr(again) == repr(fn) and again._options == fn._options


@pytest.mark.parametrize("way", COPIES)
def test_copies_of_objects_that_hold_compiled_functions(way: str) -> None:
    trainer = Trainer()
    trainer.factor = 3
    again = COPIES[way](trainer)
    again.factor = 2
    assert again.mine._fn.__self__ is again
    check_doubles(again.mine)
    x = jnp.ones(3)
    assert trainer.mine(x).tolist() == [3, 3, 3] and again.step(x).tolist() == [2, 2, 2]


@pytest.mark.parametrize("way", ["cloudpickle", "deepcopy"])
def test_copies_of_closures(way: str) -> None:
    factor = 2
    fn = ns.named_jit(lambda x: x * factor, MAPPING, donate_args=(lambda leaf: False,))
    check_doubles(COPIES[way](fn))
    check_doubles(COPIES[way](lambda x: fn(x)))


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("mesh", [M42, M42.abstract_mesh], ids=["mesh", "abstract"])
def test_copies_of_plans_and_explanations(way: str, mesh: Any) -> None:
    tree = {"model": Model(na(counting(8, 4), "batch embed")), "key": jax.random.key(0), "text": "a", "none": None}
    plan, explained = ns.plan(tree, MAPPING, mesh), ns.explain(tree, MAPPING, mesh)
    again = COPIES[way](plan)
    assert (again.leaves, again.mapping, again.mesh, again.treedef) == (
        plan.leaves,
        plan.mapping,
        plan.mesh,
        plan.treedef,
    )
    assert jax.tree.leaves(again.shardings) == jax.tree.leaves(plan.shardings)
    told = COPIES[way](explained)
    assert (str(told), repr(told), told.to_json(), told.ok) == (
        str(explained),
        repr(explained),
        explained.to_json(),
        True,
    )
    assert told.plan.mesh == mesh


CHILD = """
import pickle, sys
with open(sys.argv[1], "rb") as file:
    functions, plan = pickle.load(file)
import test_pickling
for fn in functions:
    test_pickling.check_doubles(fn)
print(type(plan.mesh).__name__, tuple(plan["['w']"].spec), len(functions))
"""


def run(*arguments: str, devices: int = 8) -> str:
    """What a new process prints."""
    flag = f"--xla_force_host_platform_device_count={devices}"
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    env = os.environ | {"XLA_FLAGS": flag, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_compiled_functions_in_a_new_process(tmp_path: Path) -> None:
    file = tmp_path / "functions"
    functions = [make() for make in FUNCTIONS.values()]
    for fn in functions:
        check_doubles(fn)
    file.write_bytes(pickle.dumps((functions, ns.plan({"w": model().weight}, MAPPING, M42))))
    assert run("-c", CHILD, str(file)) == f"Mesh ('data', 'model') {len(functions)}\n"


def test_a_plan_in_a_process_without_its_devices(tmp_path: Path) -> None:
    file = tmp_path / "plan"
    file.write_bytes(pickle.dumps(((), ns.plan({"w": model().weight}, MAPPING, M42))))
    child = CHILD.replace("import test_pickling\n", "")
    assert run("-c", child, str(file), devices=2) == "AbstractMesh ('data', 'model') 0\n"
    assert isinstance(M42.abstract_mesh, AbstractMesh)


SCRIPT = """
import multiprocessing, pickle, subprocess, sys
import jax.numpy as jnp, namedshard as ns

@ns.named_jit
def step(x):
    return x * 2

@ns.fsdp({"a": None}, {"a": None})
def sharded(x):
    return x * 2

class Trainer:
    factor = 2
    @ns.named_jit
    def step(self, x):
        return x * self.factor

if __name__ == "__main__":
    import cloudpickle
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print([float(pool.apply(step, (3.0,))), float(pool.apply(Trainer().step, (3.0,)))])
    # The process of a worker, which never saw this script.
    sent = cloudpickle.dumps([step, Trainer().step, ns.named_jit(lambda x: x * 2)])
    load = "import pickle, sys; print([float(f(3.0)) for f in pickle.load(sys.stdin.buffer)])"
    print(subprocess.run([sys.executable, "-c", load], input=sent, stdout=-1, check=True).stdout.decode().strip())
    print(step, float(step(3.0)))
"""


def test_compiled_functions_of_a_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert run(str(script)) == "[6.0, 6.0]\n[6.0, 6.0, 6.0]\nnamed_jit(step) 6.0\n"
