"""The parts of `init` one by one: keys and small integers, and what makes two programs one."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from support import E42, M42, bits, nothing_compiled

import namedshard as ns
from namedshard._init.keys import KeySchedule, schedule
from namedshard._init.tails import Graph, flatten, split, tail_of

# --- keys and small integers ------------------------------------------------------------------------------------------


def _scheduled(fn: Any, *args: Any) -> tuple[KeySchedule, Graph, dict[int, Any]]:
    graph = flatten(jax.make_jaxpr(fn)(*args))
    return schedule(graph, graph.inputs), graph, dict(zip(graph.inputs, args, strict=True))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_are_those_of_eager_execution(impl: str) -> None:
    def fn(key: Any) -> Any:
        out: list[Any] = []
        for i in range(9):
            key, sub = jr.split(key)
            out.append(jr.key_data(jr.fold_in(sub, i)) if i % 2 else sub)
        folded = jax.vmap(jr.fold_in, (None, 0))(key, jnp.arange(5))
        return *out, *folded, jr.split(key, (2, 3))[1], jr.clone(key), jr.split(key, 4)[::-1], jr.key(3)

    key = jr.key(9, impl=impl)
    keys, graph, inputs = _scheduled(fn, key)
    made = keys.run(inputs)
    for ref, wanted in zip(graph.outputs, fn(key), strict=True):
        assert ref in keys.values
        assert bits(made[ref]) == bits(wanted)


def test_small_integers_are_those_of_eager_execution() -> None:
    def fn(n: Any, flags: Any, bytes_: Any) -> Any:
        return n * 3 - 1, (n // 2).astype(jnp.int8), flags & (n > 3), bytes_[::-1][1:], jnp.where(flags, n, -n)[None]

    args = jnp.int32(7), jnp.array([True, False]), np.array([1, 255, 7], np.uint8)
    keys, graph, inputs = _scheduled(fn, *args)
    made = keys.run(inputs)
    for ref, wanted in zip(graph.outputs, fn(*args), strict=True):
        assert ref in keys.values
        assert bits(made[ref]) == bits(wanted)


def test_what_is_left_to_the_leaves() -> None:
    """Floats, draws, what no argument leads to, and what is large."""

    def fn(key: Any, x: Any, large: Any) -> Any:
        return jr.uniform(key), jr.bits(key), x + 1, jnp.arange(4), large + 1, x.astype(jnp.int32)

    keys, graph, _ = _scheduled(fn, jr.key(0), jnp.float32(1), jnp.zeros(1 << 15, jnp.int32))
    assert not keys.values.intersection(ref for ref in graph.outputs if isinstance(ref, int))


def test_taking_keys_apart_compiles_nothing() -> None:
    keys, graph, inputs = _scheduled(
        lambda keys: [keys[i].reshape(2, 1)[:, 0] for i in (0, 3)], np.arange(10, dtype=np.uint32).reshape(5, 2)
    )
    with nothing_compiled():
        made = keys.run(inputs)
    assert [made[ref].tolist() for ref in graph.outputs if isinstance(ref, int)] == [[0, 1], [6, 7]]


def test_equal_operations_on_keys_are_one_program() -> None:
    def tree(key: Any, n: int) -> Any:
        return [jr.fold_in(k, 3) for k in jr.split(key, n)]

    def chain(key: Any, n: int) -> Any:
        for _ in range(n):
            key = jr.split(key)[0]
        return key

    def compiled(fn: Any, n: int) -> int:
        steps = _scheduled(functools.partial(fn, n=n), jr.key(0))[0].steps
        return len({id(run) for _, run in steps if hasattr(run, "lower")})

    assert [compiled(tree, n) for n in (3, 30)] == [2, 2]
    assert [compiled(chain, n) for n in (3, 30)] == [1, 1]


# --- what is one program ----------------------------------------------------------------------------------------------


def _programs(fn: Any, *args: Any) -> list[tuple[str, int]]:
    report = ns.init(fn, *args, report=True)[1]
    return sorted((p.name, p.calls) for p in report.programs)


def test_equal_initialisers_are_one_program_whatever_their_scales() -> None:
    def fn(key: Any) -> Any:
        return [jr.normal(k, (40, 40)) * (i + 1) ** -0.5 for i, k in enumerate(jr.split(key, 12))]

    assert _programs(fn, jr.PRNGKey(0)) == [("init_normal", 12)]


def test_other_shapes_dtypes_and_operations_are_others() -> None:
    def fn(key: Any) -> Any:
        twice = [
            lambda: jr.normal(key, (40, 40)),
            lambda: jr.normal(key, (40, 41)),
            lambda: jr.normal(key, (40, 40), jnp.bfloat16),
            lambda: jr.normal(key, (40, 40)) + 1,
            lambda: jr.normal(key, (40, 40)) - 1,
        ]
        return [make() for make in twice for _ in range(2)]

    assert _programs(fn, jr.PRNGKey(0)) == [("init_normal", 2)] * 5


def test_constants_of_one_shape_are_one_program() -> None:
    def fn() -> Any:
        return jnp.zeros(8), jnp.ones(8), jnp.zeros((4, 4)), jnp.full(3, 2, jnp.int32), jnp.arange(5)

    # Those of a shape and dtype share a program, whatever the number.
    assert _programs(fn) == [*(("init_broadcast_in_dim", n) for n in (1, 1, 2)), ("init_iota", 1)]


def test_what_several_need_is_computed_once() -> None:
    def fn(key: Any) -> Any:
        shared = jr.normal(key, (64, 64))
        return shared * 2, shared * 3, shared + 1

    assert _programs(fn, jr.PRNGKey(0)) == [("init_normal", 1)]


def test_a_small_result_that_several_need_is_computed_by_each() -> None:
    def fn(key: Any, data: Any) -> Any:
        scale = data.std()
        return [jr.normal(k, (40, 40)) * scale for k in jr.split(key, 3)]

    args = jr.PRNGKey(0), jr.normal(jr.PRNGKey(1), (256, 64))
    assert _programs(fn, *args) == [("init_std", 3)]
    for i, x in enumerate(ns.init(fn, *args)):
        assert bits(x) == bits(jax.jit(lambda *a, i=i: fn(*a)[i])(*args))


def test_cheap_results_that_several_need_are_computed_by_each() -> None:
    def fn(key: Any) -> Any:
        table = jnp.sin(jnp.arange(64 * 64).reshape(64, 64) / 10)
        return [jr.normal(k, (64, 64)) + table for k in jr.split(key, 4)], table

    assert _programs(fn, jr.PRNGKey(0)) == [("init_normal", 4), ("init_sin", 1)]


def test_what_is_not_returned_is_not_computed() -> None:
    def fn(key: Any) -> Any:
        unused = jr.orthogonal(key, 64)
        return jr.normal(key, (64, 64)), unused.shape

    assert _programs(fn, jr.PRNGKey(0)) == [("init_normal", 1)]


def test_parts_of_one_large_value_that_feed_each_other() -> None:
    def fn(key: Any) -> Any:
        large = jr.normal(key, (512, 512))
        first = large[:256] * 2
        second = first.sum(0) * large[0]
        return first, second, (large[256:] + second[None]) * 1.5, jr.normal(key, (4, 256)) + second[:256]

    key = jr.PRNGKey(0)
    made, report = ns.init(fn, key, mesh=M42, report=True)
    for a, b in zip(made, fn(key), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert report.calls <= 4


def test_small_results_that_need_each_other() -> None:
    def fn(x: Any, y: Any) -> Any:
        a = x.sum()
        b = (y * a).sum()
        c = (x * b).sum()
        return x * c, y * c, x * b, y * a

    x, y = jr.normal(jr.key(0), (2, 256, 64))
    made = ns.init(fn, x, y)
    for a, b in zip(made, jax.jit(fn)(x, y), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def _softened() -> Any:
    @jax.custom_vjp
    def soft(x: Any) -> Any:
        return jnp.tanh(x) * 0.3 + 0.1

    soft.defvjp(lambda x: (soft(x), x), lambda x, g: (g * x,))
    return soft


def _rotated() -> Any:
    @jax.custom_jvp
    def rotate(x: Any) -> Any:
        return x * 0.7 - jnp.roll(x, 1, 0) * 0.2

    rotate.defjvp(lambda x, t: (rotate(*x), rotate(*t)))
    return rotate


NESTED = {
    "custom_vjp": _softened(),
    "custom_jvp": _rotated(),
    "checkpoint": jax.checkpoint(lambda x: jnp.sin(x) * 0.3 + x),
    "jit in jit": jax.jit(lambda x: jax.jit(lambda y: y * 3 + 1)(x) * 0.7 + x),
    "gelu": lambda x: jax.nn.gelu(x) + x,
    "while": lambda x: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 0.5 + c[1]), (0, x))[1],
    "switch": lambda x: jax.lax.switch(1, [jnp.sin, jnp.cos, jnp.tan], x) * 0.3 + x,
    "vmap": jax.vmap(lambda row: row * 0.3 + row[::-1] * 0.7),
    "gradient": jax.grad(lambda x: (jnp.sin(x) * 0.5 * x).sum()),
    "donation": jax.jit(lambda x: x * 2 + 1, donate_argnums=0),
}


@pytest.mark.parametrize("name", NESTED)
def test_operations_that_hold_others(name: str) -> None:
    def fn(key: Any) -> Any:
        return [NESTED[name](jr.normal(k, (32, 64))) * 0.1 + 0.2 for k in jr.split(key, 2)]

    key = jr.PRNGKey(3)
    wanted = [bits(x) for x in jax.jit(fn)(key)]
    for _ in range(2):
        assert [bits(x) for x in ns.init(fn, key)] == wanted
    made, report = ns.init(fn, key, mesh=E42, report=True)
    assert [bits(x) for x in made] == wanted
    assert [p.calls for p in report.programs] == [2]


def test_literals_that_a_compiler_removes_are_no_inputs() -> None:
    """Whether ``x * 1 + y`` is a sum or a fused product and sum is decided as in `jax.jit`."""
    table = np.linspace(0, 1, 5000, dtype=np.float32)

    def fn(key: Any) -> Any:
        return [jr.normal(k, (5000,)) * s + o + table for k in jr.split(key, 2) for s in (1, -1, 0.3) for o in (0, 0.7)]

    made = ns.init(fn, jr.key(0))
    for i, x in enumerate(made):
        assert bits(x) == bits(jax.jit(lambda k, i=i: fn(k)[i])(jr.key(0))), i


def _tails(fn: Any, *args: Any) -> list[tuple[bool, bool]]:
    graph = flatten(jax.make_jaxpr(fn)(*args))
    parts = split(graph, frozenset(), [ref for ref in graph.outputs if isinstance(ref, int)])
    tails = [tail_of(graph, frozenset(), ops, results) for ops, results in parts]
    return [(tail.reduces, tail.approximates) for tail in tails]


def test_what_can_depend_on_the_mesh() -> None:
    x, n = jnp.ones((4, 4)), jnp.ones((4, 4), jnp.int32)
    assert _tails(lambda x: x * 2 + 1, x) == [(False, False)]
    assert _tails(jnp.sum, x) == [(True, False)]
    assert _tails(jnp.sum, n) == [(False, False)]
    assert _tails(jnp.max, x) == [(False, False)]
    assert _tails(lambda x: x @ x, x) == [(True, False)]
    assert _tails(jnp.exp, x) == [(False, True)]
    assert _tails(lambda k: jr.normal(k, (4,)), jr.key(0)) == [(False, True)]
    assert _tails(lambda k: jr.uniform(k, (4,)), jr.key(0)) == [(False, False)]
    assert _tails(lambda k: jr.orthogonal(k, 4), jr.key(0))[-1][0] is True
    assert _tails(lambda x: jax.lax.fori_loop(0, 2, lambda _, c: c @ c, x), x) == [(True, False)]
