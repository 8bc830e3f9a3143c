"""What `init` costs: distinct programs whatever the depth, temporaries, a compilation cache on disk, what it shows."""

import functools
import gc
import io
import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import haliax as hax
import init_models
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
import rich.console
from haliax import Axis
from support import M8, M42, bits

import namedshard as ns
from namedshard._init import programs

MAPPING = {"embed": "data", "mlp": "model", "vocab": "model"}


def blocks(key: Any, n: int) -> Any:
    return [init_models.Block.init(key=k) for k in jr.split(key, n)]


def chained(key: Any, n: int) -> Any:
    made = []
    for _ in range(n):
        key, sub = jr.split(key)
        made.append(init_models.Block.init(key=sub))
    return made


@pytest.mark.parametrize("model", [blocks, chained])
def test_the_programs_are_those_of_one_block(model: Any) -> None:
    counts = []
    for n in (9, 18):
        report = ns.init(model, jr.PRNGKey(0), n, mapping=MAPPING, mesh=M42, report=True)[1]
        counts.append([(p.name, p.calls // n) for p in report.programs])
    assert counts[0] == counts[1]
    # Two biases and the two leaves of a norm, of which those with one shape share a program.
    assert sorted(counts[0]) == [
        ("init_broadcast_in_dim", 1),
        ("init_broadcast_in_dim", 3),
        ("init_truncated_normal", 1),
        ("init_truncated_normal", 1),
    ]


def test_a_deeper_model_compiles_no_initialiser_again() -> None:
    ns.init(blocks, jr.PRNGKey(0), 4, mapping=MAPPING, mesh=M42)
    report = ns.init(blocks, jr.PRNGKey(0), 8, mapping=MAPPING, mesh=M42, report=True)[1]
    assert not any(p.compile_seconds for p in report.programs)


def test_unrolled_truncated_normals_are_one_program() -> None:
    def fn(key: Any, n: int) -> Any:
        return [jr.truncated_normal(k, -2, 2, (64, 64)) for k in jr.split(key, n)]

    for n in (4, 16, 32):
        made, report = ns.init(fn, jr.PRNGKey(0), n, report=True)
        assert [(p.name, p.calls) for p in report.programs] == [("init_truncated_normal", n)]
        assert [bits(x) for x in made] == [bits(x) for x in fn(jr.PRNGKey(0), n)]


# --- memory -----------------------------------------------------------------------------------------------------------

Embed, Mlp = Axis("embed", 1024), Axis("mlp", 2048)
DRAWS = {
    "normal": lambda k: hax.random.normal(k, (Embed, Mlp)) * 0.02,
    "truncated normal": lambda k: hax.random.truncated_normal(k, (Embed, Mlp), -2, 2) * 0.02 + 0.01,
    "uniform": lambda k: hax.random.uniform(k, (Embed, Mlp), minval=-1, maxval=1),
    "bfloat16": lambda k: hax.random.normal(k, (Embed, Mlp), dtype=jnp.bfloat16) * jnp.bfloat16(0.02),
    "integers": lambda k: hax.named(jr.bits(k, (1024, 2048)), (Embed, Mlp)),
}


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("mapping", [{"embed": "data", "mlp": "model"}, {"embed": ("data", "model")}, {"mlp": "data"}])
def test_a_leaf_takes_what_jit_takes(draw: str, mapping: Any) -> None:
    """In temporaries, and in bytes accessed: nothing is kept apart or copied that `jax.jit` fuses."""
    made, report = ns.init(DRAWS[draw], jr.PRNGKey(0), mapping=mapping, mesh=M42, report=True)
    shard = made.array.addressable_shards[0].data.nbytes
    assert report.bytes_per_device == shard
    assert max(p.bytes_per_device for p in report.programs) == shard
    (ours,) = ns.lower_init(DRAWS[draw], jr.PRNGKey(0), mapping=mapping, mesh=M42).compile().programs
    jitted = jax.jit(lambda k: DRAWS[draw](k).array, out_shardings=made.array.sharding)
    plain = jitted.lower(jr.PRNGKey(0)).compile()
    accessed = [p.cost_analysis()["bytes accessed"] for p in (ours, plain)]
    temporaries = [p.memory_analysis().temp_size_in_bytes for p in (ours, plain)]
    assert accessed[0] <= 1.01 * accessed[1]
    assert temporaries[0] == report.peak_temporary_bytes
    # A few words more: the key comes as its data.
    assert temporaries[0] <= temporaries[1] + 256


def test_only_shards_are_ever_on_a_device() -> None:
    """The leaf is 8 times as large as what any device gets, and nothing else is left behind."""
    gc.collect()
    key = jr.PRNGKey(0)
    before = {id(x) for x in jax.live_arrays()}
    made, report = ns.init(DRAWS["normal"], key, mapping={"embed": "data"}, mesh=M8, report=True)
    after = [x for x in jax.live_arrays() if id(x) not in before]
    assert [x.shape for x in after] == [(1024, 2048)]
    assert report.local == 0
    assert {s.data.nbytes for s in made.array.addressable_shards} == {1024 * 2048 * 4 // 8}
    assert report.peak_temporary_bytes < 1024 * 2048 * 4 // 2


def test_the_report_adds_up() -> None:
    made, report = ns.init(blocks, jr.PRNGKey(4), 3, mapping=MAPPING, mesh=M42, report=True)
    arrays = [x for x in jax.tree.leaves(made) if isinstance(x, jax.Array)]
    assert report.leaves == len(arrays) == 18
    assert report.bytes == sum(x.nbytes for x in arrays)
    assert report.bytes_per_device == sum(x.addressable_shards[0].data.nbytes for x in arrays)
    assert sum(p.calls * p.bytes_per_device for p in report.programs) == report.bytes_per_device
    assert report.calls == sum(p.calls for p in report.programs)
    assert report.total_seconds >= report.trace_seconds + report.compile_seconds > 0


# --- compilations -----------------------------------------------------------------------------------------------------

CACHED = """
    import json, sys
    import jax
    jax.config.update("jax_compilation_cache_dir", sys.argv[1])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    seen = []
    jax.monitoring.register_event_listener(lambda event, **_: seen.append(event))
    import init_models
    import namedshard as ns
    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    key = jax.random.PRNGKey(0)
    jax.block_until_ready(key)
    seen.clear()
    ns.init(init_models.dense, key, mapping={"embed": "data"}, mesh=mesh)
    ns.init(init_models.dense, key, mapping={"embed": "data"}, mesh=mesh, exact=True)
    names = ("cache_hits", "cache_misses")
    print(json.dumps([sum(e.endswith("compilation_cache/" + name) for e in seen) for name in names]))
"""


def test_a_second_process_finds_every_program_on_disk(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    counts: list[list[int]] = []
    for _ in range(2):
        command = [sys.executable, "-c", textwrap.dedent(CACHED), str(tmp_path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        counts.append(json.loads(done.stdout))
    (_, missed), (hit, missed_again) = counts
    assert missed >= 4
    assert missed_again == 0
    assert hit >= missed


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class _Slow:
    """Stands for what is lowered, and is compiled when told."""

    def __init__(self, seconds: float):
        self.seconds = seconds

    def compile(self) -> str:
        time.sleep(self.seconds)
        return "compiled"


@pytest.mark.parametrize(("seconds", "terminal", "shown"), [(0.3, True, True), (0.0, True, False), (0.3, False, False)])
def test_progress_is_shown_on_terminals_when_it_takes_long(
    seconds: float, terminal: bool, shown: bool, monkeypatch: Any
) -> None:
    out = _Terminal()
    monkeypatch.setattr(programs, "_QUIET_SECONDS", 0.1)
    monkeypatch.setattr(
        programs, "Console", lambda **_: rich.console.Console(file=out, force_terminal=terminal, width=80)
    )
    assert programs.finish({"slow": programs.submit(_Slow(seconds))}) == {"slow": "compiled"}
    assert ("init: compiling" in out.getvalue()) is shown


def test_a_compilation_that_fails_fails_the_call_and_is_tried_again(monkeypatch: Any) -> None:
    key = jr.PRNGKey(0)
    compile_ = jax.stages.Lowered.compile

    def fail(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(jax.stages.Lowered, "compile", fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^planted$"):
            ns.init(DRAWS["uniform"], key, mapping={"embed": "model"}, mesh=M42)
    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_)
    made = ns.init(DRAWS["uniform"], key, mapping={"embed": "model"}, mesh=M42)
    assert bits(made.array) == bits(jax.jit(DRAWS["uniform"])(key).array)


# --- what stays in memory ---------------------------------------------------------------------------------------------


def _held() -> int:
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays())


@pytest.mark.parametrize("how", ["closure", "argument", "partial", "jit", "jit in jit", "scan"])
def test_what_a_function_closes_over_goes_with_it(how: str) -> None:
    def call() -> None:
        table = jnp.ones((256, 256))

        def added(x: Any) -> Any:
            return x + table[:8, :8]

        def fn(key: Any) -> Any:
            x = jr.normal(key, (8, 8))
            if how == "scan":
                x = jax.lax.scan(lambda c, _: (added(c), None), x, length=2)[0]
            elif "jit" in how:
                inner = jax.jit(added)
                x = (jax.jit(lambda y: inner(y) * 2) if how == "jit in jit" else inner)(x)
            return x, hax.named(table * 2.0, ("embed", "mlp"))

        def apply(key: Any, fn: Any) -> Any:
            return fn(key)

        key = jr.PRNGKey(0)
        if how not in ("argument", "partial"):
            ns.init(fn, key, mapping=MAPPING, mesh=M42)
        elif how == "argument":
            ns.init(apply, key, fn, mapping=MAPPING, mesh=M42)
        else:
            ns.init(functools.partial(apply, fn=fn), key, mapping=MAPPING, mesh=M42)

    call()
    before = _held()
    for _ in range(5):
        call()
    assert _held() - before < 256 * 256 * 4


def test_clear_caches_forgets_the_programs() -> None:
    fn = DRAWS["uniform"]
    for _ in range(2):
        ns.init(fn, jr.PRNGKey(0), mapping={"mlp": "model"}, mesh=M42)
    assert len(programs.compilations) > 0
    jax.clear_caches()
    assert len(programs.compilations) == 0
    report = ns.init(fn, jr.PRNGKey(0), mapping={"mlp": "model"}, mesh=M42, report=True)[1]
    assert report.trace_seconds > 0
    assert all(program.compile_seconds > 0 for program in report.programs)


def test_with_jit_disabled_the_function_is_called_and_its_result_sharded() -> None:
    with jax.disable_jit():
        made = ns.init(DRAWS["uniform"], jr.PRNGKey(0), mapping={"embed": "data"}, mesh=M42)
    assert made.array.sharding == ns.plan(made, {"embed": "data"}, M42).shardings.array
