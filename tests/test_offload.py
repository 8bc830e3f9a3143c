"""Optimizer states in host memory: where they are said to be, and worth exactly what they would be on the device."""

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from offloading import (
    MAPPING,
    MESHES,
    OPTIMIZERS,
    STATEFUL,
    assert_same,
    gradients,
    kinds,
    message_of,
    parameters,
    train,
)
from support import M42, counting, na

import namedshard as ns
from namedshard import _jaxcompat
from namedshard._offload import offload as _offload
from namedshard._plan.leaves import named_leaves


def as_struct(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding, weak_type=x.weak_type)


def donating(step: Any) -> Any:
    return jax.jit(step, donate_argnums=(0, 1))


COMPILERS = {"eager": lambda step: step, "jit": jax.jit, "named_jit": ns.named_jit, "donated": donating}


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("where", MESHES)
def test_twenty_steps_are_bitwise_those_without_offload(name: str, where: str) -> None:
    plain = OPTIMIZERS[name]()
    params, state = train(ns.offload_optimizer(plain), where, jax.jit, 20)
    expected, on_device = train(plain, where, jax.jit, 20)
    assert_same(params, expected)
    assert_same(state, on_device)
    found = kinds(state)
    scalars = {x.path for x in named_leaves(state) if not x.value.ndim}
    assert {path for path, kind in found.items() if kind == "pinned_host"} == found.keys() - scalars
    assert scalars and {found[path] for path in scalars} == {"device"}
    assert set(kinds(on_device).values()) == {"device"}


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("where", MESHES)
def test_every_way_to_run_a_step(compiler: str, where: str) -> None:
    plain = optax.adamw(1e-2)
    steps = 3 if compiler == "eager" else 20
    params, state = train(ns.offload_optimizer(plain, r"\.(mu|nu)\b"), where, COMPILERS[compiler], steps)
    expected, on_device = train(plain, where, COMPILERS[compiler], steps)
    assert_same(params, expected)
    mesh, mapping = MESHES[where]
    for moment, twin in ((state[0].mu, on_device[0].mu), (state[0].nu, on_device[0].nu)):
        assert moment["w"].array.sharding.memory_kind == "pinned_host"
        specs = PartitionSpec("data", mapping.get("mlp"))
        assert moment["w"].array.sharding.is_equivalent_to(NamedSharding(mesh, specs, memory_kind="pinned_host"), 2)
        on_host = twin["w"].array.sharding.with_memory_kind("pinned_host")
        assert moment["w"].array.sharding.is_equivalent_to(on_host, 2)
    assert state[0].count.sharding.memory_kind == "device"
    assert int(state[0].count) == steps


def test_states_live_in_host_memory_from_the_start_and_are_remeshed_there() -> None:
    with jax.set_mesh(M42), ns.axis_mapping(MAPPING):
        state = ns.offload_optimizer(optax.adam(1e-2)).init(ns.shard(parameters()))
        moved = ns.shard(state, {"embed": "model", "mlp": "data"})
    assert moved[0].mu["w"].array.sharding.memory_kind == "pinned_host"
    assert moved[0].mu["w"].array.sharding.spec == PartitionSpec("model", "data")
    assert_same(moved, state)


COPYING: dict[str, Callable[[], Any]] = {
    "adam": lambda: optax.adam(1e-2),
    "prodigy": lambda: optax.contrib.prodigy(),
    "dog": lambda: optax.contrib.dog(1e-2),
    "dowg": lambda: optax.contrib.dowg(1e-2),
    "cocob": lambda: optax.contrib.cocob(),
    "madgrad": lambda: optax.contrib.madgrad(1e-2),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("by", ["set_mesh", "with mesh", "later"])
@pytest.mark.parametrize("name", COPYING)
def test_states_that_copy_parameters_which_nobody_placed(name: str, by: str) -> None:
    params = {"w": na(counting(8, 4) / 32, "b f"), "scale": jnp.ones((4,)), "host": np.ones(3, np.float32)}
    mapping = {"b": "data", "f": "model"}
    if name in ("dog", "dowg"):
        # Their init takes the parameters' norms, of JAX arrays alone.
        del params["host"]

    def run(make: Callable[[Any], Any]) -> Any:
        context = {"set_mesh": lambda: jax.set_mesh(M42), "with mesh": lambda: M42, "later": contextlib.nullcontext}
        optimizer = make(COPYING[name]())
        with context[by]():
            placed = ns.shard(params, mapping, M42)
            state = optimizer.init(placed)

        @ns.named_jit(axis_resources=mapping)
        def step(gradients: Any, state: Any, params: Any) -> Any:
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        with jax.set_mesh(M42):
            for _ in range(2):
                placed, state = step(jax.tree.map(lambda x: x * 0.1, placed), state, placed)
        return placed, state

    plain = run(lambda optimizer: optimizer)
    params_after, state = run(ns.offload_optimizer)
    assert_same((params_after, state), plain)
    assert "pinned_host" in kinds(state).values()


def test_init_in_jit() -> None:
    optimizer = ns.offload_optimizer(optax.adam(1e-2), r"\.mu\b")
    with jax.set_mesh(M42), ns.axis_mapping(MAPPING):
        params = ns.shard(parameters())
        state = jax.jit(optimizer.init)(params)
    assert state[0].mu["w"].array.sharding.memory_kind == "pinned_host"
    assert state[0].nu["w"].array.sharding.memory_kind == "device"


def test_in_scan_the_carry_stays_on_the_host() -> None:
    optimizer, plain = ns.offload_optimizer(optax.adam(1e-2)), optax.adam(1e-2)

    def run(tx: Any) -> tuple[Any, Any]:
        with jax.set_mesh(M42), ns.axis_mapping(MAPPING):
            params = ns.shard(parameters())

            def body(carry: Any, number: Any) -> Any:
                params, state = carry
                updates, state = tx.update(gradients(params, number), state, params)
                return (optax.apply_updates(params, updates), state), None

            start = (params, tx.init(params))
            return jax.jit(lambda carry: jax.lax.scan(body, carry, jnp.arange(5.0))[0])(start)

    (params, state), (expected, _) = run(optimizer), run(plain)
    assert_same(params, expected)
    assert state[0].mu["w"].array.sharding.memory_kind == "pinned_host"


def test_gradient_accumulation_in_a_loop() -> None:
    optimizer, plain = ns.offload_optimizer(optax.adam(1e-2)), optax.adam(1e-2)

    def run(tx: Any) -> Any:
        params = parameters()

        @jax.jit
        def step(params: Any, state: Any) -> Any:
            zeros = jax.tree.map(jnp.zeros_like, params)
            total = jax.lax.fori_loop(
                0, 3, lambda i, g: jax.tree.map(jnp.add, g, gradients(params, i.astype(jnp.float32))), zeros
            )
            updates, state = tx.update(total, state, params)
            return optax.apply_updates(params, updates), state

        state = tx.init(params)
        for _ in range(4):
            params, state = step(params, state)
        return params

    assert_same(run(optimizer), run(plain))


def test_extra_arguments_reach_the_optimizer() -> None:
    seen: list[float] = []

    def update(updates: Any, state: Any, params: Any = None, *, loss: float, **_: Any) -> Any:
        seen.append(loss)
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda p: {"moment": jax.tree.map(jnp.zeros_like, p)}, update)
    optimizer = ns.offload_optimizer(inner)
    params = {"w": jnp.ones((4, 4))}
    state = optimizer.init(params)
    optimizer.update(params, state, params, loss=0.5)
    assert seen == [0.5]


def test_only_what_is_selected_and_large_enough_moves() -> None:
    params = {"w": jnp.ones((64, 64)), "b": jnp.ones(4)}
    state = ns.offload_optimizer(optax.adam(1e-3), r"\.(mu|nu)\b", min_size=1024).init(params)
    assert kinds(state) == {
        "[0].count": "device",
        "[0].mu['b']": "device",
        "[0].mu['w']": "pinned_host",
        "[0].nu['b']": "device",
        "[0].nu['w']": "pinned_host",
    }
    by_predicate = ns.offload_optimizer(optax.adam(1e-3), lambda path, leaf: ".nu" in path and leaf.ndim == 2)
    assert [p for p, kind in kinds(by_predicate.init(params)).items() if kind == "pinned_host"] == ["[0].nu['w']"]


def test_a_pattern_may_name_the_dot_of_a_field_at_the_root() -> None:
    state = ns.offload_optimizer(optax.scale_by_adam(), r"\.mu\b").init({"w": jnp.ones((4, 4))})
    assert kinds(state) == {"count": "device", "mu['w']": "pinned_host", "nu['w']": "device"}


def test_messages() -> None:
    params = {"w": jnp.ones((4, 4))}
    assert message_of(lambda: ns.offload_optimizer(optax.adam(1e-3), "mmu").init(params), ns.OffloadError) == (
        "where='mmu' selects no leaf for host memory: nothing matches; the arrays are\n"
        "  [0].count (4 bytes)\n"
        "  [0].mu['w'] (64 bytes)\n"
        "  [0].nu['w'] (64 bytes)"
    )
    assert message_of(lambda: ns.offload_optimizer(optax.adam(1e-3), "count").init(params), ns.OffloadError) == (
        "where='count' selects no leaf for host memory: the only matches are scalars; the arrays are\n"
        "  [0].count (4 bytes)\n"
        "  [0].mu['w'] (64 bytes)\n"
        "  [0].nu['w'] (64 bytes)"
    )
    assert message_of(
        lambda: ns.offload_optimizer(optax.adam(1e-3), "mu", min_size=100).init(params), ns.OffloadError
    ) == (
        "where='mu' selects no leaf for host memory: the only matches are scalars, or smaller than min_size=100 bytes;"
        " the arrays are\n"
        "  [0].count (4 bytes)\n"
        "  [0].mu['w'] (64 bytes)\n"
        "  [0].nu['w'] (64 bytes)"
    )
    assert message_of(lambda: ns.offload(params, "("), ns.OffloadError) == (
        "where='(' is not a regular expression: missing ), unterminated subpattern at position 0"
    )
    assert message_of(lambda: ns.offload(params, memory_kind="vmem"), ns.MemoryKindError) == (
        "memory kind 'vmem' is not offered by cpu devices, which have 'device', 'pinned_host', 'unpinned_host'\n"
        "  fix: use one of 'device', 'pinned_host', 'unpinned_host'"
    )
    assert message_of(lambda: ns.offload_optimizer(optax.adam(1e-3), fit=3).init(params), ns.OffloadError) == (
        "fit=3 bytes per device cannot be reached: 4 bytes stay with every selected leaf in host memory\n"
        "  fix: select more leaves with where, shard the states over more devices, or allow more bytes"
    )
    assert message_of(lambda: ns.offload_optimizer(optax.adam(1e-3), fit="lots"), ValueError) == (
        '\'lots\' is not a size: use a number of bytes, or text like "1GiB" or "500MB"'
    )


@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_breaking_the_move_back_is_found(monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    optimizer = ns.offload_optimizer(optax.adam(1e-3))
    params = {"w": jnp.ones((4, 4))}
    state = optimizer.init(params)
    # That look at the compiler comes first, once per process.
    _offload._check_compiler(jax.devices()[0], "pinned_host")
    real = _offload.change_memory
    monkeypatch.setattr(_offload, "change_memory", lambda xs, *_: real(xs, "device"))
    assert message_of(lambda: run(optimizer.update)(params, state), ns.OffloadError) == (
        "2 of 2 leaves selected for host memory are in device memory after the update\n"
        "  [0].mu['w']\n"
        "  [0].nu['w']\n"
        "  fix: keep the optimizer's own update between the transfers: wrap the outermost transformation"
    )


def test_breaking_the_move_in_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = ns.offload_optimizer(optax.adam(1e-3))
    params = {"w": jnp.ones((4, 4))}
    state = optimizer.init(params)
    # That look at the compiler comes first, once per process.
    _offload._check_compiler(jax.devices()[0], "pinned_host")
    monkeypatch.setattr(_offload, "change_memory", lambda xs, *_: list(xs))
    assert message_of(lambda: jax.jit(optimizer.update)(params, state), ns.OffloadError) == (
        "2 of 2 leaves selected for host memory are in host memory at the update\n"
        "  [0].mu['w']\n"
        "  [0].nu['w']\n"
        "  fix: keep the optimizer's own update between the transfers: wrap the outermost transformation"
    )


def test_a_compiler_that_ignores_the_transfers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_offload, "change_memory", lambda xs, *_: list(xs))
    _offload._check_compiler.cache_clear()
    device = jax.devices()[0]
    text = message_of(lambda: _offload._check_compiler(device, "unpinned_host"), ns.OffloadError)
    assert text == (
        "the compiler for cpu devices leaves a result meant for 'unpinned_host' in 'device'\n"
        "  fix: use a newer jaxlib, or do not offload on this backend"
    )
    _offload._check_compiler.cache_clear()


def test_named_jit_looks_at_its_compiled_step_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = ns.offload_optimizer(optax.adam(1e-3))
    params = {"w": jnp.ones((4, 4))}
    state = optimizer.init(params)

    def update(params: Any, state: Any) -> Any:
        return optimizer.update(params, state)

    step = ns.named_jit(update, donate_args=(False, True))
    jax.jit(update)(params, state)  # so that the first look at the compiler itself is over
    monkeypatch.setattr(_jaxcompat, "output_memory_kinds", lambda compiled: ["device"] * 4)
    assert message_of(lambda: step(params, state), ns.OffloadError) == (
        "update: 2 of 4 leaves traced into host memory would come out of the compiled program elsewhere\n"
        "  [1][0].mu['w']: in 'device', wanted in 'pinned_host'\n"
        "  [1][0].nu['w']: in 'device', wanted in 'pinned_host'\n"
        "  fix: use a newer jaxlib, or do not offload on this backend"
    )
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))
    monkeypatch.undo()
    _, after = step(params, state)
    assert kinds(after) == {"[0].count": "device", "[0].mu['w']": "pinned_host", "[0].nu['w']": "pinned_host"}
    assert step.report().compiles == 1


@pytest.mark.parametrize("way", ["call", "compiled", "compiled for structs", "one-device mesh"])
def test_states_donated_on_one_device_are_given_up_after_the_step(way: str) -> None:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    optimizer = ns.offload_optimizer(optax.adam(1e-3))
    with jax.set_mesh(mesh) if way == "one-device mesh" else contextlib.nullcontext():
        params = ns.shard({"w": jnp.ones((4, 4))}, {}) if way == "one-device mesh" else {"w": jnp.ones((4, 4))}
        state = optimizer.init(params)
        want, _ = optimizer.update(params, state)

        @ns.named_jit(donate_args=(False, True))
        def step(params: Any, state: Any) -> Any:
            return optimizer.update(params, state)

        run: Any = step
        if way == "compiled":
            run = step.lower(params, state).compile()
        elif way == "compiled for structs":
            run = step.lower(params, jax.tree.map(as_struct, state)).compile()
        updates, after = run(params, state)
        assert [x.is_deleted() for x in jax.tree.leaves(state)] == [True] * 3
        assert not any(x.is_deleted() for x in jax.tree.leaves((params, updates, after)))
        assert_same(updates, want)
        assert kinds(after) == {"[0].count": "device", "[0].mu['w']": "pinned_host", "[0].nu['w']": "pinned_host"}
        assert message_of(lambda: run(params, state), ns.DonationError).startswith("step: ")


def test_states_closed_over_by_an_outer_jit_are_not_given_up() -> None:
    optimizer = ns.offload_optimizer(optax.adam(1e-3))
    params = {"w": jnp.ones((4, 4))}
    state = optimizer.init(params)

    @ns.named_jit(donate_args=(False, True))
    def step(params: Any, state: Any) -> Any:
        return optimizer.update(params, state)

    want, _ = optimizer.update(params, state)
    got = jax.jit(lambda p: step(p, state)[0])(params)
    assert_same(got, want)
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


def test_states_are_saved_and_loaded_in_host_memory(tmp_path: Path) -> None:
    with jax.set_mesh(M42), ns.axis_mapping(MAPPING):
        state = ns.offload_optimizer(optax.adam(1e-2)).init(ns.shard(parameters()))
        ns.save_safetensors(state[0].mu, tmp_path, progress=False)
        loaded = ns.load_safetensors(tmp_path, state[0].mu, memory_kind="pinned_host", progress=False)
    assert set(kinds(loaded).values()) == {"pinned_host"}
    assert loaded["w"].array.sharding == state[0].mu["w"].array.sharding
    assert_same(loaded, state[0].mu)


def test_explain_tells_host_memory_apart() -> None:
    with jax.set_mesh(M42), ns.axis_mapping(MAPPING):
        params = ns.shard({"w": na(jnp.ones((64, 64)), "embed mlp")})
        told = ns.explain(ns.offload_optimizer(optax.adam(1e-2), r"\.mu\b").init(params))
    assert {row.path: row.memory_kind for row in told.rows} == {
        "[0].count": "device",
        "[0].mu['w']": "pinned_host",
        "[0].nu['w']": "device",
    }
    said = " ".join(str(told).split())
    assert "on each of 8 devices 4 KiB, of which 0 B replicated and 2 KiB in host memory" in said


def test_the_transfers_are_in_the_compiled_step() -> None:
    optimizer = ns.offload_optimizer(optax.adam(1e-3))
    params = {"w": jnp.ones((4, 4))}
    state = optimizer.init(params)
    compiled = jax.jit(optimizer.update).lower(params, state).compile()
    layout = re.search(r"entry_computation_layout=\{(.*)\}", compiled.as_text())
    assert layout is not None
    arguments, results = layout[1].split("->")
    assert (arguments.count("S(5)"), results.count("S(5)")) == (2, 2)
