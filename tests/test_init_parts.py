"""The parts of `init` one by one: fences, random bits of a shard, the tape, and what makes two programs one."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.random import threefry2x32_p
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import E42, M42, bits

import namedshard as ns
from namedshard._init.bits import bits_maker, local_bits
from namedshard._init.jaxpr import fence, flatten
from namedshard._init.tape import Tape, decode, encode, host_value, host_words
from namedshard._init.traits import traits

# --- fences -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.complex64, jnp.float8_e5m2, jnp.int32])
def test_a_fence_changes_nothing(dtype: Any) -> None:
    x = jr.normal(jr.PRNGKey(0), (33,)).astype(dtype)
    assert bits(jax.jit(fence)(x, np.uint32(0))) == bits(x)


def test_a_fence_keeps_the_compiler_from_contracting() -> None:
    x, y = jr.normal(jr.PRNGKey(0), (2, 4096))

    def fenced(x: Any, y: Any, zero: Any) -> Any:
        return fence(x * y, zero) + x

    apart = x * y + x
    assert bits(jax.jit(lambda x, y: x * y + x)(x, y)) != bits(apart), "nothing to keep apart: the test shows nothing"
    assert bits(jax.jit(fenced)(x, y, np.uint32(0))) == bits(apart)


def test_a_fence_stands_on_both_sides_of_a_choice() -> None:
    """Fences around it must not cancel out: the sum would be taken into the choice, and there be contracted."""
    x = jr.normal(jr.PRNGKey(0), (64, 64))

    def fn(x: Any) -> Any:
        return jnp.where(x > 0, x * 0.7, x / 5) + x * x

    for on in (None, M42):
        assert bits(ns.init(fn, x, mesh=on)) == bits(fn(x))


def test_the_bits_of_special_values_pass_a_fence() -> None:
    x = np.array([0, 1 << 31, 0x7FC00001, 0x7F800000, 0xFF800000, 1, 0x80000001], np.uint32).view(np.float32)
    assert bits(jax.jit(fence)(x, np.uint32(0))) == bits(x)


# --- random bits ------------------------------------------------------------------------------------------------------

SPECS: list[Any] = [
    P(),
    P("data"),
    P(None, "model"),
    P("data", "model"),
    P(("data", "model")),
    P("model", None, "data"),
]


def _fits(spec: Any, shape: tuple[int, ...]) -> bool:
    sizes = [math.prod(M42.shape[n] for n in ((e,) if isinstance(e, str) else e or ())) for e in spec]
    return len(spec) <= len(shape) and all(n % k == 0 for n, k in zip(shape, sizes, strict=False))


@pytest.mark.parametrize("shape", [(8,), (16, 24), (8, 6, 8), (4096, 32), (8, 65536), (2, 2, 100003)])
@pytest.mark.parametrize("width", [8, 16, 32])
def test_the_bits_of_a_shard_are_those_of_the_whole(shape: tuple[int, ...], width: int) -> None:
    key, dtype = jr.key(3), jnp.dtype(f"uint{width}")
    wanted = bits(jr.bits(key, shape, dtype))
    for on in (M42, E42):
        for spec in (s for s in SPECS if _fits(s, shape)):
            sharding = NamedSharding(on, spec)
            drawn = jax.jit(lambda k, s=sharding: bits_maker([(shape, s)])(k, width, shape), out_shardings=sharding)(
                key
            )
            assert bits(drawn) == wanted
            if on is E42 or width != 32:
                break
    alone = jax.jit(lambda k: bits_maker([(shape, None)])(k, width, shape))(key)
    assert bits(alone) == wanted


@settings(max_examples=8)
@given(st.data())
def test_batches_of_keys(data: Any) -> None:
    batch = data.draw(st.sampled_from([(4,), (2, 4), (8, 2)]))
    shape = data.draw(st.sampled_from([(), (8,), (6, 8), (64, 64)]))
    whole = (*batch, *shape)
    spec = data.draw(st.sampled_from([s for s in SPECS if _fits(s, whole)]))
    keys = jr.split(jr.key(1), batch)
    wanted = functools.reduce(lambda f, _: jax.vmap(f), batch, lambda k: jr.bits(k, shape))(keys)
    sharding = NamedSharding(M42, spec)
    drawn = jax.jit(lambda k: bits_maker([(whole, sharding)])(k, 32, shape), out_shardings=sharding)(keys)
    assert bits(drawn) == bits(wanted)


@pytest.mark.parametrize("whole", [(8, 1 << 20, 1 << 13), (3, 1 << 31, 5), (1 << 20, 98765)])
def test_positions_beyond_32_bits(whole: tuple[int, ...]) -> None:
    """Parts of arrays far too large to be made: their bits are those of JAX's generator at the positions they have."""
    local = tuple(min(n, k) for n, k in zip(whole, (2, 24, 2048), strict=False))
    starts = tuple(n - k for n, k in zip(whole, local, strict=True))
    index = [np.arange(a, a + n, dtype=np.uint64) for a, n in zip(starts, local, strict=True)]
    strides = [np.uint64(math.prod(whole[i + 1 :])) for i in range(len(whole))]
    flat = functools.reduce(np.add.outer, [i * s for i, s in zip(index, strides, strict=True)])
    assert flat.max() == math.prod(whole) - 1 > 2**32
    key = jr.key(5)
    k1, k2 = jr.key_data(key)
    halves = (flat >> np.uint64(32)).astype(np.uint32), flat.astype(np.uint32)
    one, other = threefry2x32_p.bind(k1, k2, *map(jnp.asarray, halves))
    drawn = jax.jit(lambda k: local_bits(k, local, whole, 0, starts, jnp.dtype(jnp.uint32)))(jr.key_data(key))
    assert bits(drawn) == bits(one ^ other)


def test_what_is_left_to_jax() -> None:
    asked = bits_maker([((8,), None)])
    assert asked(jr.key(0), 32, (9,)) is None
    assert asked(jr.key(0), 64, (8,)) is None
    assert asked(jr.key(0, impl="rbg"), 32, (8,)) is None
    with jax.threefry_partitionable(False):
        assert asked(jr.key(0), 32, (8,)) is None


# --- small values -----------------------------------------------------------------------------------------------------

SMALL: list[Any] = [
    np.array([1.5, -0.0, np.inf], np.float32),
    np.array([[1, -2], [3, 4]], np.int32),
    np.array([1, 255], np.uint8),
    np.array([-1, 127], np.int8),
    np.array([1.5, -2], ml_dtypes.bfloat16),
    np.array([0.5, 2], ml_dtypes.float8_e4m3fn),
    np.array([True, False]),
    np.array(7, np.uint16),
]


@pytest.mark.parametrize("value", SMALL, ids=lambda v: v.dtype.name)
def test_words_hold_every_dtype(value: np.ndarray) -> None:
    aval = jax.ShapeDtypeStruct(value.shape, value.dtype)
    words = host_words(value, aval)
    assert words.dtype == np.uint32
    assert bits(host_value(words, aval)) == bits(value)
    assert bits(jax.jit(lambda w: decode(w, aval))(words)) == bits(value)
    assert bits(jax.jit(lambda x: encode(x, aval))(value)) == bits(words)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_words_hold_keys(impl: str) -> None:
    keys = jr.split(jr.key(5, impl=impl), 3)
    aval = jax.ShapeDtypeStruct(keys.shape, keys.dtype)
    words = host_words(keys, aval)
    assert bits(jax.jit(lambda w: jr.key_data(decode(w, aval)))(words)) == bits(jr.key_data(keys))


def _tape_of(fn: Any, *args: Any) -> tuple[Tape, Any]:
    graph = flatten(jax.make_jaxpr(fn)(*args), keep_jits=False)
    tape = Tape(graph)
    for value in graph.inputs:
        tape.add_input(value)
    for op in graph.ops:
        tape.add_op(op)
    return tape, graph


def test_a_tape_gives_what_eager_execution_gives() -> None:
    def fn(key: Any, scale: Any) -> Any:
        out: list[Any] = []
        for i in range(40):
            key, sub = jr.split(key)
            out.append(jr.key_data(jr.fold_in(sub, i)) if i % 2 else sub)
        bounds = scale * jnp.array([0.5, 3.0]) + 0.1
        return *out, bounds, bounds.astype(jnp.bfloat16), jr.uniform(key, (3,)) < 0.5, jr.split(key, (2, 3))[1]

    args = jr.PRNGKey(9), jnp.float32(0.3)
    graph = flatten(jax.make_jaxpr(fn)(*args), keep_jits=False)
    tape = Tape(graph)
    for value in graph.inputs:
        tape.add_input(value)
    for value, content in graph.consts.items():
        tape.add_constant(value, content)
    for op in graph.ops:
        tape.add_op(op)
    recording = tape.finish()
    given = dict(zip(graph.inputs, args, strict=True))
    words = np.asarray(jax.jit(recording.loop())(recording.load(given), recording.kinds, recording.places))
    for ref, wanted in zip(graph.outputs, fn(*args), strict=True):
        aval = graph.avals[ref]
        at = tape.places[ref]
        value = host_value(words[at : at + math.prod(aval.shape)], aval)
        assert bits(value) == bits(wanted)


def test_taking_keys_apart_is_no_step() -> None:
    tape, graph = _tape_of(lambda keys: [keys[i].reshape(2, 1)[:, 0] for i in (0, 3)], np.zeros((5, 2), np.uint32))
    recording = tape.finish()
    assert recording.length == 0
    start = tape.places[graph.inputs[0]]
    assert [tape.places[ref] - start for ref in graph.outputs] == [0, 6]


def test_steps_of_a_kind_share_a_branch() -> None:
    def chain(key: Any, n: int) -> Any:
        for _ in range(n):
            key = jr.fold_in(jr.split(key)[0], 3)
        return key

    short, long = (_tape_of(functools.partial(chain, n=n), jr.key(0))[0].finish() for n in (24, 30))
    assert (short.length, long.length) == (48, 60)
    assert len(long.branches) == 2
    assert short.key == long.key


# --- what is one program ----------------------------------------------------------------------------------------------


def _programs(fn: Any, *args: Any) -> list[tuple[str, int]]:
    report = ns.init(fn, *args, report=True)[1]
    return sorted((p.name, p.calls) for p in report.programs if p.name != "init_keys")


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


def test_constants_are_one_program_together() -> None:
    def fn() -> Any:
        return [jnp.zeros(8), jnp.ones((4, 4)), jnp.full(3, 2, jnp.int32), jnp.arange(5)] * 3

    assert _programs(fn) == [("init_constants", 1)]


def test_what_several_need_is_computed_once() -> None:
    def fn(key: Any) -> Any:
        shared = jr.normal(key, (64, 64))
        return shared * 2, shared * 3, shared + 1

    report = ns.init(fn, jr.PRNGKey(0), report=True)[1]
    assert sorted((p.name, p.calls) for p in report.programs) == [("init_add", 1), ("init_mul", 2), ("init_normal", 1)]


def test_what_is_not_returned_is_not_computed() -> None:
    def fn(key: Any) -> Any:
        unused = jr.orthogonal(key, 64)
        return jr.normal(key, (64, 64)), unused.shape

    assert _programs(fn, jr.PRNGKey(0)) == [("init_normal", 1)]


def test_programs_that_need_each_other_become_one() -> None:
    """Parts of one large value that feed each other: no order of separate programs could make them."""

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
    wanted = [bits(x) for x in fn(key)]
    for _ in range(2):
        assert [bits(x) for x in ns.init(fn, key)] == wanted
    assert [bits(x) for x in ns.init(fn, key, mesh=E42)] == wanted
    # What approximates a value made before it is run as eager execution runs it, not as a program.
    assert max((calls for _, calls in _programs(fn, key)), default=2) == 2


def _traits(fn: Any, *args: Any) -> list[tuple[bool, bool]]:
    graph = flatten(jax.make_jaxpr(fn)(*args), keep_jits=True)
    found = []
    for op in graph.ops:
        avals = [graph.avals[v] for v in (*op.outputs, *(r for r in op.inputs if isinstance(r, int)))]
        out = traits(op.primitive, op.params, avals)
        found.append((out.rounds, out.transcendental))
    return found


def test_what_may_depend_on_a_split() -> None:
    x, n = jnp.ones((4, 4)), jnp.ones((4, 4), jnp.int32)
    assert _traits(lambda x: x * 2 + 1, x) == [(False, False)] * 2
    assert _traits(jnp.sum, x) == [(True, False)]
    assert _traits(jnp.sum, n) == [(False, False)]
    assert _traits(jnp.max, x) == [(False, False)]
    assert _traits(lambda x: x @ x, x) == [(True, False)]
    assert _traits(jnp.exp, x) == [(False, True)]
    assert _traits(lambda k: jr.normal(k, (4,)), jr.key(0)) == [(False, True)]
    assert _traits(lambda k: jr.uniform(k, (4,)), jr.key(0)) == [(False, False)]
    assert _traits(lambda k: jr.orthogonal(k, 4), jr.key(0))[-1][0] is True
    assert _traits(lambda x: jax.lax.fori_loop(0, 2, lambda _, c: c @ c, x), x) == [(True, False)]


def test_what_a_compiler_may_contract_in_two_ways() -> None:
    def contracts(fn: Any) -> list[bool]:
        graph = flatten(jax.make_jaxpr(fn)(jnp.ones(4)), keep_jits=True)
        return [traits(op.primitive, op.params, [graph.avals[v] for v in op.outputs]).contracts for op in graph.ops]

    assert contracts(jax.jit(lambda x: x * 2 + x.reshape(2, 2).reshape(4) * x)) == [True]
    assert contracts(jax.jit(lambda x: (x * 2)[::-1] - x * x)) == [True]
    assert contracts(jax.jit(lambda x: x * 2 + x)) == [False]
    assert contracts(lambda x: x * 2 + x * x) == [False, False, False]
    assert contracts(lambda x: jr.normal(jr.key(0), (4,)))[-1:] == [False]
    wanted = [bits(jnp.linspace(0.1, 3, n)) for n in (64, 64, 7)]
    made, report = ns.init(lambda: [jnp.linspace(0.1, 3, n) for n in (64, 64, 7)], report=True)
    assert [bits(x) for x in made] == wanted
    assert report.local == 3
