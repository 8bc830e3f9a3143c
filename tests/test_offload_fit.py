"""How much of a state lives in host memory, and how much of it is on the device at a time."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from offloading import OPTIMIZERS, STATEFUL, assert_same, kinds, message_of, train
from support import E8, M8, na

import namedshard as ns
from namedshard._plan.leaves import named_leaves


@pytest.mark.parametrize("name", STATEFUL)
def test_a_budget_changes_no_value(name: str) -> None:
    plain = OPTIMIZERS[name]()
    params, state = train(ns.offload_optimizer(plain, budget=600), "auto", jax.jit, 20)
    expected, on_device = train(plain, "auto", jax.jit, 20)
    assert_same(params, expected)
    assert_same(state, on_device)
    assert set(kinds(state).values()) == {"device", "pinned_host"}


ODD_OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adagrad": lambda: optax.adagrad(1e-2),
    "rmsprop": lambda: optax.rmsprop(1e-2, momentum=0.9, centered=True),
    "moments of two dtypes": lambda: optax.adamw(1e-2, mu_dtype="bfloat16"),
    "two dtypes then clip": lambda: optax.chain(optax.adamw(1e-2, mu_dtype="bfloat16"), optax.clip_by_global_norm(0.1)),
    "lamb": lambda: optax.lamb(1e-2),
    "muon": lambda: optax.contrib.muon(1e-2),
    "nesterov": lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True),
}


def group_barriers(text: str) -> int:
    """The barriers between groups of states, which tie several arrays; the others are for one that comes in."""
    return len(re.findall(r"optimization_barrier %[^:]*,", text))


@pytest.mark.parametrize("budget", [1000, 60_000])
@pytest.mark.parametrize("name", ODD_OPTIMIZERS)
def test_a_budget_leaves_the_compilers_fusions_as_they_are(name: str, budget: int) -> None:
    # Odd sizes, whose last elements are not computed in vectors, tell fusions apart by their rounding.
    start = {"a": (33,), "b": (32, 48), "c": (130, 65)}
    start = {k: jax.random.normal(jax.random.key(n), shape) for n, (k, shape) in enumerate(start.items())}

    def run(tx: Any) -> tuple[Any, str]:
        params, state = start, tx.init(start)

        def step(params: Any, state: Any) -> Any:
            updates, state = tx.update(jax.tree.map(lambda p: jnp.sin(p * 3), params), state, params)
            return optax.apply_updates(params, updates), state

        compiled = jax.jit(step)
        text = compiled.lower(params, state).as_text()
        for _ in range(4):
            params, state = compiled(params, state)
        return (params, state), text

    (expected, none), (got, some) = (
        run(ODD_OPTIMIZERS[name]()),
        run(ns.offload_optimizer(ODD_OPTIMIZERS[name](), budget=budget)),
    )
    assert_same(got, expected)
    assert none.count("optimization_barrier") == 0
    # Muon's loop takes a state that all parameters share.
    assert group_barriers(some) == (2 if budget == 1000 and name != "muon" else 1)


def test_a_budget_runs_effects_once_and_in_their_order() -> None:
    seen: list[tuple[int, ...]] = []

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        new = jax.tree.map(lambda u, s: u + s, updates, state)
        jax.debug.callback(lambda x: seen.append(x.shape), updates["a"][:1])
        jax.debug.callback(lambda x: seen.append(x.shape), new["b"][:2])
        jax.debug.callback(lambda x: seen.append(x.shape), new["a"][:3])
        return new, new

    params = {"a": jnp.ones(8), "b": jnp.ones(8)}
    inner = optax.GradientTransformation(lambda p: jax.tree.map(jnp.zeros_like, p), update)
    optimizer = ns.offload_optimizer(inner, budget=64)
    state = optimizer.init(params)
    jaxpr = jax.jit(optimizer.update).trace(params, state).jaxpr.jaxpr
    assert [eqn.invars[0].aval.shape for eqn in jaxpr.eqns if eqn.effects] == [(1,), (2,), (3,)]
    assert [len(eqn.invars) for eqn in barriers(jaxpr)].count(2) == 1
    jax.block_until_ready(jax.jit(optimizer.update)(params, state))
    jax.effects_barrier()
    assert sorted(seen) == [(1,), (2,), (3,)]


def barriers(jaxpr: Any) -> list[Any]:
    return [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "optimization_barrier"]


def live_state_bytes(jaxpr: Any) -> int:
    """The most bytes moved in from host memory that are alive at once, by the order of the jaxpr's equations."""
    last_use: dict[Any, int] = {}
    for n, eqn in enumerate(jaxpr.eqns):
        last_use |= dict.fromkeys((v for v in eqn.invars if not hasattr(v, "val")), n)
    for eqn in barriers(jaxpr):
        if len(eqn.invars) == 1:
            last_use |= {v: last_use[out] for v, out in zip(eqn.invars, eqn.outvars, strict=True) if out in last_use}
    most = now = 0
    ends: dict[int, int] = {}
    for n, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive.name == "device_put" and jax.memory.Space.Device in eqn.params["devices"]:
            size = sum(v.aval.size * v.aval.dtype.itemsize for v in eqn.outvars if last_use.get(v, n) > n)
            now += size
            end = max((last_use[v] for v in eqn.outvars if v in last_use), default=n)
            ends[end] = ends.get(end, 0) + size
        most = max(most, now)
        now -= ends.pop(n, 0)
    return most


@pytest.mark.parametrize("budget", [None, 4096])
def test_a_budget_bounds_the_states_on_the_device(budget: int | None) -> None:
    params = {str(i): jnp.ones((8, 32)) for i in range(8)}
    optimizer = ns.offload_optimizer(optax.adam(1e-2), budget=budget)
    state = optimizer.init(params)
    with jax.set_mesh(M8):
        jaxpr = jax.jit(lambda g, s: optimizer.update(g, s)).trace(params, state).jaxpr.jaxpr
    moved = live_state_bytes(jaxpr)
    between_groups = sum(len(eqn.invars) > 1 for eqn in barriers(jaxpr))
    if budget is None:
        assert (moved, between_groups) == (16 * 1024, 0)
    else:
        # The two states of 1 KiB of one parameter at a time, each beside its successor, tied one group to the next.
        assert 2 * 1024 <= moved <= budget
        assert between_groups == 7


def test_fit_takes_the_largest_until_the_rest_fits() -> None:
    params = {"big": jnp.ones((64, 64)), "middle": jnp.ones((32, 32)), "small": jnp.ones((8, 8))}
    optimizer = ns.offload_optimizer(optax.adam(1e-3), fit=8 * 1024 + 516)
    state = optimizer.init(params)
    assert [p for p, kind in kinds(state).items() if kind == "pinned_host"] == ["[0].mu['big']", "[0].nu['big']"]
    staying = sum(x.value.nbytes for x in named_leaves(state) if x.value.sharding.memory_kind == "device")
    assert staying == 2 * (32 * 32 + 8 * 8) * 4 + 4
    _, after = jax.jit(optimizer.update)(params, state)
    assert kinds(after) == kinds(state)


def test_fit_counts_bytes_per_device() -> None:
    params = {"w": na(jnp.ones((8, 1024)), "embed mlp")}
    with jax.set_mesh(M8):
        sharded = ns.shard(params, {"embed": "data"})
        state = ns.offload_optimizer(optax.adam(1e-3), fit="4100B").init(sharded)
    # 4 KiB of each moment per device: one may stay, and the count.
    assert sorted(kinds(state).values()) == ["device", "device", "pinned_host"]


def test_a_budget_counts_the_bytes_of_a_device_where_types_tell_them() -> None:
    optimizer = ns.offload_optimizer(optax.adam(1e-2), budget=1024)

    def counted(mesh: Any) -> int:
        with jax.set_mesh(mesh):
            place = NamedSharding(mesh, PartitionSpec("data"))
            params = {name: jax.device_put(jnp.ones((8, 16)), place) for name in "ab"}
            state = optimizer.init(params)
            return group_barriers(jax.jit(optimizer.update).lower(params, state).as_text())

    assert (counted(E8), counted(M8)) == (0, 1)


@pytest.mark.parametrize("mesh", [M8, E8], ids=["auto", "explicit"])
@pytest.mark.parametrize(("fit", "on_host"), [("8KiB", 0), ("3KiB", 1), ("1KiB", 2)])
def test_what_init_chose_to_fit_stays_chosen_in_compiled_code(mesh: Any, fit: str, on_host: int) -> None:
    optimizer = ns.offload_optimizer(optax.adam(1e-3), fit=fit)
    params = {"w": jax.device_put(jnp.ones((64, 64)), NamedSharding(mesh, PartitionSpec("data")))}
    with jax.set_mesh(mesh):
        state = optimizer.init(params)
        chosen = kinds(state)
        assert list(chosen.values()).count("pinned_host") == on_host
        assert kinds(optimizer.update(params, state, params)[1]) == chosen
        assert kinds(jax.jit(optimizer.update)(params, state, params)[1]) == chosen

        def body(state: Any, _: Any) -> Any:
            return optimizer.update(params, state, params)[1], None

        last, _ = jax.jit(lambda s: jax.lax.scan(body, s, None, length=3))(state)
    assert kinds(last) == chosen
    assert int(last[0].count) == 3


def test_a_traced_init_counts_shards_where_types_tell_them() -> None:
    optimizer = ns.offload_optimizer(optax.adam(1e-3), fit="3KiB")
    for mesh in (E8, M8):
        params = {"w": jax.device_put(jnp.ones((64, 64)), NamedSharding(mesh, PartitionSpec("data")))}
        with jax.set_mesh(mesh):
            if mesh is E8:
                assert kinds(jax.jit(optimizer.init)(params)) == kinds(optimizer.init(params))
                continue
            assert message_of(lambda params=params: jax.jit(optimizer.init)(params), ns.OffloadError) == (
                "fit=3072 bytes per device cannot be counted while tracing: the shards of 2 of 3 leaves are not known\n"
                "  [0].mu['w']\n"
                "  [0].nu['w']\n"
                "  fix: create the state with ns.init(tx.init, params), which knows them"
            )
            assert kinds(ns.init(optimizer.init, params)) == kinds(optimizer.init(params))


def test_a_traced_init_of_what_fits_whole_needs_no_shards() -> None:
    params = {"w": jax.device_put(jnp.ones((64, 64)), NamedSharding(M8, PartitionSpec("data")))}
    state = jax.jit(ns.offload_optimizer(optax.adam(1e-3), fit="1MiB").init)(params)
    assert set(kinds(state).values()) == {"device"}
