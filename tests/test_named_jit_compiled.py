"""How often a function is traced and compiled, and what its compiled program says."""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support import E42, M8, M8_REVERSED, M42, ONE_OF_EACH, assert_exactly, bits, counting, mesh, na

import namedshard as ns

MAPPING = {"batch": "data", "embed": "model"}


def same(a: Any, b: Any) -> bool:
    return bits(getattr(a, "array", a)) == bits(getattr(b, "array", b))


# --- how often it is traced -------------------------------------------------------------------------------------------


def test_the_body_runs_once_per_signature() -> None:
    fn = ns.named_jit(lambda x, y=None: x + 1, {"a": "data"})
    with jax.set_mesh(M8):
        for size in (8, 16, 8, 24, 16):
            out = fn(na(counting(size), "a"))
            assert_exactly(out, M8, P("data"))
            assert same(out, counting(size) + 1)
        assert fn.report() == ns.Report(calls=5, traces=3, compiles=3, reshards=0, bytes_moved=0)


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_results_fed_back_compile_nothing_again(kind: str) -> None:
    fn = ns.named_jit(lambda state: {k: v + 1 for k, v in state.items()}, MAPPING)
    with jax.set_mesh(ONE_OF_EACH[kind]):
        state: Any = {"x": na(counting(8, 4), "batch embed"), "step": np.int32(0)}
        for _ in range(4):
            state = fn(state)
        assert same(state["x"], counting(8, 4) + 4)
        assert int(state["step"]) == 4
        assert (fn.report().traces, fn.report().compiles) == (1, 1)


def test_uncommitted_scalars_and_keys_fed_back() -> None:
    step = ns.named_jit(lambda n, key: (n + 1, jax.random.fold_in(key, n)))
    n, key = jnp.int32(0), jax.random.key(0)
    with jax.set_mesh(M8):
        for _ in range(5):
            n, key = step(n, key)
    assert int(n) == 5
    assert (step.report().traces, step.report().compiles) == (1, 1)


def test_equal_shardings_never_miss() -> None:
    fn = ns.named_jit(lambda x: x + 1, {"batch": "data"})
    for _ in range(5):
        where = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
        with jax.set_mesh(where):
            fn(na(jax.device_put(counting(8, 4), NamedSharding(where, P("data", None))), "batch embed"))
    assert (fn.report().traces, fn.report().compiles) == (1, 1)


def test_nothing_stale_when_mesh_mapping_shape_or_precision_change() -> None:
    def step(x):
        return x * 2

    fn = ns.named_jit(step)
    for where, mapping, spec in (
        (M8, {"a": "data"}, P("data")),
        (M8, {"a": None}, P()),
        (M8_REVERSED, {"a": "data"}, P("data")),
        (M42, {"a": "model"}, P("model")),
        (M42, {"a": ("data", "model")}, P(("data", "model"))),
        (E42, {"a": "model"}, P("model")),
        (M8, {"a": "data"}, P("data")),
    ):
        with jax.set_mesh(where), ns.axis_mapping(mapping):
            assert_exactly(fn(na(counting(8), "a")), where, spec)
    assert fn.report().traces == 6
    wide = ns.named_jit(lambda x: x * 2)
    assert wide(np.arange(4)).dtype == np.int32
    with jax.enable_x64(True):
        assert wide(np.arange(4)).dtype == np.int64
    assert wide(np.arange(4)).dtype == np.int32
    # Structures of results that depend on rank.
    shapes = ns.named_jit(lambda x: {"a": x} if x.ndim == 1 else {"a": x, "b": x})
    assert [sorted(shapes(jnp.zeros((2,) * n))) for n in (1, 2, 1)] == [["a"], ["a", "b"], ["a"]]
    double = ns.named_jit(lambda x: x * 2, {"a": "data"})
    with jax.set_mesh(M8):
        assert double(counting(3)).shape == (3,)
        assert double(np.float32(2)).shape == ()


def test_options_of_jax_that_change_the_structure() -> None:
    fn = ns.named_jit(lambda x: {str(jax.config.jax_default_matmul_precision): x})
    with jax.default_matmul_precision("highest"):
        assert list(fn(jnp.ones(2))) == ["highest"]
    assert list(fn(jnp.ones(2))) == ["None"]
    with jax.default_matmul_precision("highest"):
        assert list(fn(jnp.ones(2))) == ["highest"]


def test_threads_share_programs_and_trace_once() -> None:
    fn = ns.named_jit(lambda x: x * 2, {"a": "data"})
    got: list[Any] = [None] * 8
    start = threading.Barrier(8)

    def work(n: int) -> None:
        start.wait()
        with jax.set_mesh(M8):
            for _ in range(5):
                got[n] = fn(na(counting(8) + n, "a"))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n in range(8):
        assert_exactly(got[n], M8, P("data"))
        assert same(got[n], (counting(8) + n) * 2)
    assert fn.report().traces == 1


def test_a_body_that_fails_is_traced_anew() -> None:
    fail = [True]

    @ns.named_jit
    def step(x):
        if fail[0]:
            raise ValueError("not yet")
        return x + 1

    with pytest.raises(ValueError) as caught:
        step(jnp.ones(3))
    assert str(caught.value) == "not yet"
    fail[0] = False
    assert same(step(jnp.ones(3)), np.full(3, 2, np.float32))
    with jax.disable_jit():
        assert same(step(jnp.ones(3)), np.full(3, 2, np.float32))


# --- what is compiled -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mapping", [None, {}, MAPPING])
@pytest.mark.parametrize("donate", [False, True])
def test_donation_and_options_cost_no_second_trace(mapping: Any, donate: bool) -> None:
    fn = ns.named_jit(
        lambda x: x + 1, mapping, donate_args=(donate,), compiler_options={"xla_embed_ir_in_executable": True}
    )
    with jax.set_mesh(M42):
        x = ns.shard(na(counting(8, 4), "batch embed"), MAPPING if mapping is None else mapping)
        assert same(fn(x), counting(8, 4) + 1)
        assert x.array.is_deleted() == donate
    assert (fn.report().traces, fn.report().compiles) == (1, 1)


def test_operations_keep_their_names_and_lines() -> None:
    def layer(x):
        with jax.named_scope("attention"):
            return na(jnp.sin(x.array) * 2, "batch embed")

    with jax.set_mesh(M42):
        x = ns.shard(na(counting(8, 4), "batch embed"), MAPPING)
        text = ns.named_jit(layer, MAPPING).lower(x).as_text(debug_info=True)
    assert "module @jit_layer" in text
    assert '"jit(layer)/attention/sin"' in text
    line = layer.__code__.co_firstlineno + 2
    assert f'test_named_jit_compiled.py":{line}:' in text


def test_outputs_have_the_very_spec_that_was_planned() -> None:
    with jax.set_mesh(M42):
        x = ns.shard(na(counting(8, 4), "batch embed"), {"batch": "data"})
        out = ns.named_jit(lambda x: x * 2, {"batch": "data"})(x)
        assert out.array.sharding == NamedSharding(M42, P("data", None)) == x.array.sharding


def test_effects_happen_in_order_and_once() -> None:
    seen: list[int] = []

    @ns.named_jit(axis_resources=MAPPING)
    def step(x):
        for n in range(3):
            jax.debug.callback(lambda n=n: seen.append(n), ordered=True)
        return x + 1

    one = mesh((1, 1), "data model")
    with jax.set_mesh(one):
        for _ in range(2):
            assert same(step(na(counting(8, 4), "batch embed")), counting(8, 4) + 1)
        jax.effects_barrier()
    assert seen == [0, 1, 2, 0, 1, 2]


def test_constant_outputs_keep_their_types() -> None:
    table = jnp.arange(4.0)

    @ns.named_jit(axis_resources=MAPPING)
    def step(x):
        return x, jnp.asarray(1.0), table, jnp.float32(2), np.int32(3), hax.ones(hax.Axis("batch", 8))

    with jax.set_mesh(M42):
        out = step(na(counting(8, 4), "batch embed"))
    assert [(x.dtype.name, x.weak_type) for x in jax.tree.leaves(out)] == [
        ("float32", False),
        ("float32", True),
        ("float32", False),
        ("float32", False),
        ("int32", False),
        ("float32", False),
    ]
    assert_exactly(out[5], M42, P("data"))
    assert same(out[2], np.arange(4, dtype=np.float32))


def test_the_body_runs_by_itself_where_compilation_is_off_or_a_nan_is_looked_for() -> None:
    seen: list[bool] = []

    def body(x):
        seen.append(isinstance(x.array, jax.core.Tracer))
        return na(jnp.log(x.array - 1) + jnp.zeros((8, 4)), "batch embed")

    with jax.set_mesh(M42):
        x = ns.shard(na(counting(8, 4), "batch embed"), {"batch": "data"})
        with jax.disable_jit():
            for _ in range(2):
                fn = ns.named_jit(body, {"batch": "data"})
                seen.clear()
                assert_exactly(fn(x), M42, P("data"))
                assert seen[-1] is False
        with (
            jax.debug_nans(True),
            pytest.raises(FloatingPointError, match=r"^invalid value \(nan\) encountered in log"),
        ):
            ns.named_jit(body, {"batch": "data"})(x)


def test_jax_names_the_users_function_and_arguments() -> None:
    def step(model, flag):
        return model["w"] if flag else model["w"] * 2

    line = f"step at {__file__}:{step.__code__.co_firstlineno}"
    with jax.set_mesh(M42):
        model = {"w": ns.shard(na(counting(8, 4), "batch embed"), MAPPING)}
        for fn in (ns.named_jit(step, MAPPING), ns.named_jit(functools.partial(step), MAPPING)):
            with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
                fn(model, jnp.float32(1))
            assert f"tracing the function {line} for jit" in str(caught.value)
            assert "depends on the value of the argument flag" in str(caught.value)
        text = ns.named_jit(lambda model: model["w"] * 2, MAPPING).lower(model).as_text(debug_info=True)
    assert "loc(\"model['w']\")" in text


def test_threads_that_trace_functions_which_call_each_other_do_not_wait_for_each_other() -> None:
    barrier = threading.Barrier(2, timeout=60)
    first = threading.local()

    def body(other: Callable[[], Any]) -> Callable[[Any], Any]:
        def run(x):
            if not getattr(first, "done", False):
                first.done = True
                barrier.wait()
                return other()(x) + 1
            return x + 1

        return run

    fns: dict[str, Any] = {}
    fns["f"] = ns.named_jit(body(lambda: fns["g"]))
    fns["g"] = ns.named_jit(body(lambda: fns["f"]))
    out: dict[str, Any] = {}

    def work(name: str) -> None:
        out[name] = fns[name](jnp.float32(1))

    threads = [threading.Thread(target=work, args=(name,), daemon=True) for name in fns]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {name: float(x) for name, x in out.items()} == {"f": 3.0, "g": 3.0}


def test_results_in_host_memory_on_mixed_meshes() -> None:
    where = mesh((4, 2), "data model", (AxisType.Explicit, AxisType.Auto))
    with jax.set_mesh(where):
        x = na(
            jax.device_put(counting(8, 4), NamedSharding(where, P("data"), memory_kind="pinned_host")), "batch embed"
        )
        for mapping in ({"batch": "data"}, {}, {"batch": "data", "embed": "model"}):
            out = ns.named_jit(lambda x: x, mapping)(x)
            spec = P(*(mapping.get(name) for name in ("batch", "embed")))
            assert out.array.sharding.is_equivalent_to(NamedSharding(where, spec, memory_kind="pinned_host"), 2)
            assert same(out, counting(8, 4))
        # JAX forgets the memory of results that no Auto axis splits.
        for fn in (ns.named_jit(lambda x: x), ns.named_jit(lambda x: ns.offload(x + 0)), ns.named_jit(ns.offload)):
            for out in (fn(x.array), fn(x.array), fn.lower(x.array).compile()(x.array)):
                assert out.sharding.is_equivalent_to(x.array.sharding, 2)
                assert same(out, counting(8, 4))


def test_references_and_arrays_without_bytes_pass_as_they_are() -> None:
    @ns.named_jit
    def step(total, tangent, x):
        total[...] = total[...] + x
        return x * 2

    tangent = np.zeros(8, jax.dtypes.float0)
    with jax.set_mesh(M8):
        total = jax.new_ref(jax.device_put(jnp.zeros(8), NamedSharding(M8, P("data"))))
        for _ in range(2):
            assert same(step(total, tangent, jnp.ones(8)), np.full(8, 2, np.float32))
        assert same(total[...], np.full(8, 2, np.float32))


# --- results on several meshes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [None, M42], ids=["no mesh", "mesh"])
@pytest.mark.parametrize("placed", [False, True])
def test_results_on_several_meshes_are_named(context: Any, placed: bool) -> None:
    four = mesh((4,), "z")

    def step(x):
        here = jax.lax.with_sharding_constraint(x * 2, NamedSharding(M42, P("data")))
        there = jax.jit(lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(four, P("z"))))(x)
        return {"a": here, "b": jax.lax.with_sharding_constraint(x, NamedSharding(four, P("z"))), "c": there + 1}

    x = jax.device_put(counting(8), NamedSharding(M42, P())) if placed else counting(8)
    fn = ns.named_jit(step)
    with jax.set_mesh(context) if context else contextlib.nullcontext():
        for call in (fn, fn.eval_shape, fn.lower):
            with pytest.raises(ns.TracedMoveError) as caught:
                call(x)
    line = inspect.getsourcelines(step)[1] + 2
    assert str(caught.value) == (
        "step: 2 arrays are constrained to other devices than the compiled function runs on, cpu devices"
        " [0, 1, 2, 3, 4, 5, 6, 7]\n"
        f"  {__file__}:{line}: to cpu devices [0, 1, 2, 3]\n"
        "  ['b']: to cpu devices [0, 1, 2, 3]\n"
        "  fix: place all results on one mesh, and move the others after the call with ns.shard"
    )
    # Meshes with the same devices in one order are fine.
    both = ns.named_jit(
        lambda x: [
            jax.lax.with_sharding_constraint(x, NamedSharding(m, P(m.axis_names[0]))) for m in (M42, mesh((8,), "z"))
        ]
    )
    assert all(same(y, counting(8)) for y in both(counting(8)))
