"""`lower`, `compile`, `eval_shape` and `explain` of compiled functions, and JAX's persistent compilation cache."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support import E42, M8, M8_REVERSED, M42, ONE_OF_EACH, assert_exactly, bits, counting, mesh, na

import namedshard as ns

MAPPING = {"batch": "data", "embed": "model"}


def struct(shape: tuple[int, ...], names: str, dtype: Any = np.float32, **kwargs: Any) -> hax.NamedArray:
    return na(jax.ShapeDtypeStruct(shape, dtype, **kwargs), names)


def put(x: Any, where: Mesh, *spec: Any, kind: str | None = None) -> jax.Array:
    return jax.device_put(x, NamedSharding(where, P(*spec), memory_kind=kind))


def told(kind: type[Exception], call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(kind) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def text(headline: str, *lines: str) -> str:
    return "\n".join([headline, *(f"  {line}" for line in lines)])


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_lowered_for_structs_and_called_with_arrays(kind: str) -> None:
    where = ONE_OF_EACH[kind]
    step = ns.named_jit(lambda x, y, n=1: {"out": x * n + 1, "plain": y}, MAPPING, in_axis_resources=MAPPING)
    with jax.set_mesh(where):
        lowered = step.lower(struct((8, 4), "batch embed"), jax.ShapeDtypeStruct((3,), np.int32), n=2)
        compiled = lowered.compile()
        assert "stablehlo" in lowered.as_text() or "module" in lowered.as_text()
        for x in (na(counting(8, 4), "batch embed"), ns.shard(na(counting(8, 4), "batch embed"), MAPPING)):
            out = compiled(x, np.arange(3, dtype=np.int32), n=2)
            assert_exactly(out["out"], where, P("data", "model"))
            assert bits(out["out"].array) == bits(counting(8, 4) * 2 + 1)
            assert bits(out["plain"]) == bits(np.arange(3, dtype=np.int32))
            # One trace serves the call itself, too.
            assert bits(step(x, np.arange(3, dtype=np.int32), n=2)["out"].array) == bits(counting(8, 4) * 2 + 1)
        assert step.report().traces == 1
        assert compiled.cost_analysis() is not None


def test_without_a_mesh() -> None:
    step = ns.named_jit(lambda x: x + 1)
    compiled = step.lower(jax.ShapeDtypeStruct((3,), np.float32)).compile()
    assert bits(compiled(counting(3))) == bits(counting(3) + 1)
    assert bits(compiled(jnp.arange(3.0))) == bits(counting(3) + 1)
    assert step.report() == ns.Report(calls=0, traces=1, compiles=1, reshards=0, bytes_moved=0)


def test_structs_with_a_sharding_are_checked_like_arrays() -> None:
    step = ns.named_jit(lambda x: x)
    with jax.set_mesh(M8):
        wrong = struct((8, 4), "batch embed", sharding=NamedSharding(M8_REVERSED, P("data")))
        said = told(ns.MismatchError, step.lower, wrong)
        assert said.splitlines()[1] == (
            "  x: [device order] device order [7, 6, 5, 4, 3, 2, 1, 0], but expected [0, 1, 2, 3, 4, 5, 6, 7]; a move"
            " costs 128 B"
        )
        right = struct((8, 4), "batch embed", sharding=NamedSharding(M8, P(None, None)))
        assert step.lower(right).compile()(na(put(counting(8, 4), M8), "batch embed")).array.shape == (8, 4)


def test_eval_shape_gives_shapes_types_and_planned_shardings() -> None:
    def step(x, n):
        return {"x": x * n, "sum": x.sum(), "n": n, "none": None, "weak": jnp.asarray(2) * x.array.size}

    fn = ns.named_jit(step, MAPPING)
    with jax.set_mesh(M42):
        shapes = fn.eval_shape(struct((8, 4), "batch embed", np.int16), 3)
        out = fn(na(counting(8, 4, dtype=np.int16), "batch embed"), 3)
        assert fn.report().traces == 1
        assert (shapes["n"], shapes["none"]) == (3, None)
        assert jax.tree_util.tree_structure(shapes) == jax.tree_util.tree_structure(out)
        for got, real in zip(jax.tree.leaves(shapes), jax.tree.leaves(out), strict=True):
            if isinstance(real, jax.Array):
                assert isinstance(got, jax.ShapeDtypeStruct)
                assert (got.shape, got.dtype, got.weak_type) == (real.shape, real.dtype, real.weak_type)
                if got.sharding is not None:
                    assert got.sharding.is_equivalent_to(real.sharding, real.ndim)
        assert shapes["x"].array.sharding == NamedSharding(M42, P("data", "model"))
        # JAX's own works, too, and sees no shardings on Auto axes.
        assert jax.eval_shape(lambda x: fn(x, 3), struct((8, 4), "batch embed", np.int16))["x"].array.shape == (8, 4)


@pytest.mark.parametrize("types", [("Auto", "Auto"), ("Explicit", "Explicit"), ("Explicit", "Auto")], ids=str)
@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("offload", [True, False])
def test_a_step_compiles_once_and_takes_its_own_results(offload: bool, donate: bool, types: tuple[str, str]) -> None:
    where = mesh((4, 2), "data model", tuple(jax.sharding.AxisType[t] for t in types))
    # Its factored states have no names, and the compiler would shard them.
    tx = optax.adafactor(1e-3, min_dim_size_to_factor=4)
    tx = ns.offload_optimizer(tx) if offload else tx
    params = ns.shard({"w": na(counting(8, 8), "embed mlp"), "v": na(counting(8), "mlp")}, {"mlp": "model"}, where)
    start = ns.init(tx.init, params, mapping={"mlp": "model"}, mesh=where)

    def step(params, state):
        updates, state = tx.update(params, state, params)
        return optax.apply_updates(params, updates), state

    fn = ns.named_jit(step, {"mlp": "model"}, donate_args=(False, donate))
    with jax.set_mesh(where):
        compiled = fn.lower(params, start).compile()
        shapes = fn.eval_shape(params, start)[1]
        state = fn(params, start)[1]
        once = fn.report().traces, fn.report().compiles
        for _ in range(2):
            places = [x.sharding for x in jax.tree.leaves(state)]
            state = fn(params, state)[1]
        assert (fn.report().traces, fn.report().compiles) == once
        state = compiled(params, state)[1]
    assert [x.sharding for x in jax.tree.leaves(state)] == places
    for x, s in zip(jax.tree.leaves(state), jax.tree.leaves(shapes), strict=True):
        assert s.sharding is None or s.sharding.is_equivalent_to(x.sharding, x.ndim)
        assert s.sharding is not None or x.sharding.memory_kind == "device"


def test_a_result_goes_with_the_one_argument_that_it_can_replace() -> None:
    def step(x, y, z):
        constrained = jax.lax.with_sharding_constraint(z * 2, NamedSharding(M42, P(None, "model")))
        return x * 2, x + y, constrained, z.T, x

    fn = ns.named_jit(step)
    with jax.set_mesh(M42):
        x, y, z = put(counting(8, 4), M42, "data"), put(counting(8, 4), M42), put(counting(8, 4), M42, "data")
        out = fn(x, y, z)
        assert out[0].sharding.is_equivalent_to(x.sharding, 2)
        assert out[2].sharding.spec == P(None, "model")
        assert out[4].sharding.is_equivalent_to(x.sharding, 2)
        said = [(o.path, o.by) for o in fn.lower(x, y, z).compile().outputs()]
        chosen, like = "chosen by the compiler", "as the argument that it replaces"
        assert said == [("[0]", like), ("[1]", chosen), ("[2]", chosen), ("[3]", chosen), ("[4]", like)]
        # For other arguments, the same trace has other results.
        other = fn(y, y, z)
        assert other[0].sharding.is_equivalent_to(y.sharding, 2)
        assert other[1].sharding.is_equivalent_to(y.sharding, 2)
        assert fn.report().traces == 1


def test_eval_shape_of_results_in_host_memory() -> None:
    def step(x):
        return ns.offload(x * 2), ns.offload(x @ jnp.ones((4, 8))), x.sum()

    for where in (M42, mesh((4, 2), "data model", (jax.sharding.AxisType.Explicit,) * 2)):
        with jax.set_mesh(where):
            x = put(counting(8, 4), where, "data")
            for got, real in zip(ns.named_jit(step).eval_shape(x), ns.named_jit(step)(x), strict=True):
                kind = real.sharding.memory_kind
                assert kind == "device" or (kind == "pinned_host" == got.sharding.memory_kind)
                assert got.sharding is None or got.sharding.is_equivalent_to(real.sharding, real.ndim)
    # An abstract mesh has nothing to compile for.
    with jax.sharding.use_abstract_mesh(M42.abstract_mesh):
        struct = jax.ShapeDtypeStruct((8, 4), np.float32)
        assert ns.named_jit(step).eval_shape(struct)[1].shape == (8, 8)


def test_explain_says_who_placed_each_output() -> None:
    def step(x, plain):
        return x, {"a": plain * 2, "b": na(jnp.zeros((0, 4)), "batch embed"), "c": plain.sum()}

    fn = ns.named_jit(step, MAPPING)
    with jax.set_mesh(M42):
        args = na(counting(8, 4), "batch embed"), put(counting(8), M42, "data")
        compiled = fn.lower(*args).compile()
        assert compiled.explain() == text(
            "step: 1 of 4 outputs is placed by the compiler",
            "argument x: P('data', 'model') in 'device'",
            "argument plain: P('data',) in 'device'",
            "output [0]: P('data', 'model') in 'device', as mapped",
            "output [1]['a']: P('data',) in 'device', as the argument that it replaces",
            "output [1]['b']: P('data', 'model') in 'device', as mapped",
            "output [1]['c']: P() in 'device', chosen by the compiler",
        )
        assert [(o.path, o.asked is None) for o in compiled.outputs()] == [
            ("[0]", False),
            ("[1]['a']", True),
            ("[1]['b']", False),
            ("[1]['c']", True),
        ]
        for output, got in zip(compiled.outputs(), jax.tree.leaves(compiled(*args)), strict=True):
            assert output.got.is_equivalent_to(got.sharding, got.ndim)
        named = ns.named_jit(lambda x: x, MAPPING).lower(args[0]).compile()
        assert named.explain() == text(
            "<lambda>: 0 of 1 output are placed by the compiler",
            "argument x: P('data', 'model') in 'device'",
            "output the result: P('data', 'model') in 'device', as mapped",
        )


def test_a_compiled_function_refuses_other_arguments() -> None:
    @ns.named_jit(axis_resources=MAPPING)
    def step(x, more, n):
        return x * 1 + (more["w"] + more["u"]).sum() * 0, more["v"]

    with jax.set_mesh(M42):
        x = ns.shard(na(counting(8, 4), "batch embed"), MAPPING)
        more = {
            "w": put(counting(8), M42, "data"),
            "v": put(counting(8), M42, kind="pinned_host"),
            "u": put(counting(8), M42),
        }
        compiled = step.lower(x, more, 1).compile()
        assert bits(compiled(x, more, 1)[0].array) == bits(counting(8, 4))

        assert told(TypeError, compiled, x, more, 2) == text(
            "step: static arguments have other values than those it was lowered for",
            "n: lowered for 1, called with 2",
            "fix: lower it again for these arguments",
        )
        for other in (1.0, True):
            assert f"n: lowered for 1, called with {other}" in told(TypeError, compiled, x, more, other)
        assert "n: lowered for 1, called with array([0., 1." in told(TypeError, compiled, x, more, counting(8))
        structure = told(TypeError, compiled, x, {"w": more["w"]}, 1).splitlines()
        assert structure[0] == "step: the arguments have another structure than those it was lowered for"
        assert structure[-1] == "  fix: lower it again for these arguments"
        with pytest.raises(TypeError) as caught:
            compiled(x, {**more, "w": put(counting(16), M42), "u": put(counting(8, dtype=np.int32), M42)}, 1)
        assert str(caught.value) == text(
            "step: 2 of 4 arguments have other types than those it was lowered for",
            "more['u']: lowered for float32[8], called with int32[8]",
            "more['w']: lowered for float32[8], called with float32[16]",
            "fix: lower it again for these arguments",
        )
        assert told(
            ns.MismatchError,
            compiled,
            na(put(counting(8, 4), mesh((2, 4), "data model"), "data"), "batch embed"),
            {
                "w": put(counting(8), M42),
                "v": put(counting(8), M42),
                "u": jax.device_put(counting(8), jax.devices()[1]),
            },
            1,
        ) == text(
            "step: 4 of 4 argument leaves are not placed as the call needs",
            "x: [axis sizes] mesh axes ('data'=2, 'model'=4), but expected ('data'=4, 'model'=2); a move costs 128 B",
            "more['u']: [committed to one device] committed to one device, 1, but expected on [0, 1, 2, 3, 4, 5, 6, 7];"
            " a move costs 32 B",
            "more['v']: [memory kind] memory kind 'device', but expected 'pinned_host'; a move costs 32 B",
            "more['w']: [spec] spec P(), but expected P('data',); a move costs 32 B",
            "fix: place them as they were when it was lowered, or lower it again for these arguments",
        )
        more["w"].delete()
        assert told(ns.DonationError, compiled, x, more, 1) == text(
            "step: 1 argument leaf was donated or deleted before this call",
            "more['w']",
            "fix: use the result of the call that they were donated to",
        )
        giving = ns.named_jit(lambda x, y: (x + 1, y), MAPPING, donate_args=(True,)).lower(x, x).compile()
        assert told(ns.DonationError, giving, x, x).splitlines()[1] == "  x and y are one array"


@pytest.mark.parametrize("lowered_for", ["struct", "uncommitted"])
def test_what_was_lowered_without_a_place_moves_no_committed_array(lowered_for: str) -> None:
    struct = na(jax.ShapeDtypeStruct((8, 4), np.float32), "batch embed")
    uncommitted = jnp.asarray(counting(8, 4))
    step = ns.named_jit(lambda w: w * 2, {"batch": "data"})
    with jax.set_mesh(M42):
        compiled = step.lower(struct if lowered_for == "struct" else na(uncommitted, "batch embed")).compile()
        for fine in (counting(8, 4), uncommitted, put(counting(8, 4), M42, "data")):
            assert bits(compiled(na(fine, "batch embed")).array) == bits(counting(8, 4) * 2)
        for where, spec, said in (
            (M42, (), "[spec] spec P(), but expected P('data', None)"),
            (mesh((2, 4), "data model"), ("data",), "[axis sizes] mesh axes ('data'=2, 'model'=4)"),
        ):
            elsewhere = na(put(counting(8, 4), where, *spec), "batch embed")
            lines = told(ns.MismatchError, compiled, elsewhere).splitlines()
            assert lines[0] == "<lambda>: 1 of 1 argument leaf is not placed as the call needs"
            assert lines[1].startswith(f"  w: {said}")
            assert lines[2].startswith("  fix: place them as they were when it was lowered")
    assert step.report().bytes_moved == 0


def test_explicit_meshes_by_structs() -> None:
    step = ns.named_jit(lambda x: x * 2, MAPPING)
    with jax.set_mesh(E42):
        given = struct((8, 4), "batch embed", sharding=NamedSharding(E42, P("data", "model")))
        compiled = step.lower(given).compile()
        x = ns.shard(na(counting(8, 4), "batch embed"), MAPPING)
        assert_exactly(compiled(x), E42, P("data", "model"))
        assert_exactly(step(x), E42, P("data", "model"))
        assert step.report().traces == 1


PROGRAM = """
import sys
import haliax as hax, jax, numpy as np
import namedshard as ns

jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
step = ns.named_jit(lambda x: hax.sum(x * 2, "batch") + 1, {"batch": "data", "embed": "model"})
with jax.set_mesh(jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))):
    out = step(hax.named(np.arange(32, dtype=np.float32).reshape(8, 4), ("batch", "embed")))
    print(np.asarray(out.array).tolist(), out.array.sharding.spec, sep="|")
hits, misses = (sum(e == f"/jax/compilation_cache/cache_{kind}" for e in events) for kind in ("hits", "misses"))
print(hits, misses)
"""


def test_the_persistent_cache_serves_another_process(tmp_path: Path) -> None:
    results: list[list[str]] = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path / "cache")],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONHASHSEED": str(len(results))},
            check=False,
        )
        assert done.returncode == 0, done.stderr
        results.append(done.stdout.split("\n"))
    values = (counting(8, 4) * 2).sum(0) + 1
    assert results[0][0] == results[1][0] == f"{values.tolist()}|P('model',)"
    first_hits, first_misses = map(int, results[0][1].split())
    hits, misses = map(int, results[1][1].split())
    assert first_hits == 0 and first_misses >= 1
    assert (hits, misses) == (first_misses, 0)
