"""Values of `init`: those of `jax.jit` on every mesh, but for sharded reductions; `exact=True` gives eager ones."""

import functools
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from support import M42, MIXED42, bits, mesh

import namedshard as ns

M24 = mesh((2, 4), "data model")


def _low_rank(key: Any) -> Any:
    a, b = jr.split(key)
    return jr.normal(a, (32, 4)) @ jr.normal(b, (4, 16))


def _needed_and_returned(key: Any) -> Any:
    a = jr.normal(key, (32, 4))
    return a, a * 2


def _bent(key: Any) -> Any:
    a = jnp.tanh(jr.uniform(key, (100,)))
    return a, a * 2, jnp.tanh(jr.uniform(key, (100,)))


def _centred(key: Any) -> Any:
    x = jr.normal(key, (64, 48))
    return x - x.mean(), x - x.mean(0), (x - x.mean()) / x.std(), x / 3.0, jnp.var(x, axis=1)


def _approximated(key: Any) -> Any:
    x = jr.normal(key, (64, 64))
    return [f(x) for f in (jax.scipy.special.erf, jax.nn.gelu, jnp.log2, jnp.sinc)], jnp.exp2(jnp.arange(40) / 40)


def _scaled_by_small_values(key: Any) -> Any:
    scale = jnp.exp(jr.normal(key, (48,)))
    return [jr.normal(k, (64, 48)) * scale / jnp.linalg.norm(scale) for k in jr.split(key, 3)], scale


def _with_derivatives_of_its_own(key: Any) -> Any:
    centred, scaled = jax.custom_jvp(lambda x: x - jnp.mean(x)), jax.custom_vjp(lambda x: x / jnp.std(x))
    centred.defjvp(lambda primals, tangents: (centred(*primals), tangents[0]))
    scaled.defvjp(lambda x: (scaled(x), None), lambda _, g: (g,))
    x = jr.normal(key, (100, 90))
    return centred(x), scaled(x), scaled(centred(x))


@jax.jit
def _a_whole_model(key: Any) -> Any:
    return [jr.normal(k, (16, 16)) * 1.3 + 0.1 for k in jr.split(key, 3)]


FUNCTIONS = [
    _low_rank,
    _needed_and_returned,
    _bent,
    _centred,
    _approximated,
    _scaled_by_small_values,
    _with_derivatives_of_its_own,
    _a_whole_model,
]


def _all_bits(tree: Any) -> list[bytes]:
    return [bits(x) for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("fn", FUNCTIONS)
def test_exact_values_are_eager_ones_and_the_others_those_of_jit(fn: Any) -> None:
    key = jr.key(1)
    made, report = ns.init(fn, key, mesh=MIXED42, exact=True, report=True)
    assert _all_bits(made) == _all_bits(fn(key))
    assert (report.local, report.programs) == (report.leaves, ())
    made, report = ns.init(fn, key, report=True)
    for i, x in enumerate(jax.tree.leaves(made)):
        assert bits(x) == bits(jax.jit(lambda k, i=i: jax.tree.leaves(fn(k))[i])(key))
    assert report.local == 0
    assert not any(program.inexact for program in report.programs)


# --- on every mesh ----------------------------------------------------------------------------------------------------


def _reductions(key: Any) -> Any:
    w = jr.normal(key, (2048, 128))
    return {
        "normed": hax.named(w / jnp.sqrt((w * w).sum(0)), ("embed", "mlp")),
        "product": hax.named(w @ w.T[:, :128], ("embed", "mlp")),
        "plain": hax.named(jr.uniform(key, (2048, 128)), ("embed", "mlp")),
        "scaled": hax.named(w * jnp.float32(0.5), ("embed", "mlp")),
    }


def test_the_report_says_which_programs_may_differ_in_the_last_bits() -> None:
    key = jr.PRNGKey(2)
    wanted = jax.jit(_reductions)(key)
    made, report = ns.init(_reductions, key, mapping={"embed": "data", "mlp": "model"}, mesh=M42, report=True)
    # What shares the draw with the reductions is computed with them.
    assert [(p.name, p.inexact) for p in report.programs] == [("init_normal", True), ("init_uniform", False)]
    for name in ("normed", "product"):
        np.testing.assert_allclose(made[name].array, wanted[name].array, rtol=2e-5, atol=2e-5)
    for name in ("plain", "scaled"):
        assert bits(made[name].array) == bits(wanted[name].array)
    # Nothing is sharded here, so nothing can differ.
    made, report = ns.init(_reductions, key, mapping={}, mesh=M42, report=True)
    assert not any(program.inexact for program in report.programs)
    assert _all_bits(made) == _all_bits(wanted)


DRAWS: dict[str, Any] = {
    "normal": jr.normal,
    "exponential": jr.exponential,
    "bf16": functools.partial(jr.normal, dtype=jnp.bfloat16),
    "tanh": lambda key, shape: jnp.tanh(jr.normal(key, shape)),
    "rsqrt": lambda key, shape: jax.lax.rsqrt(jr.uniform(key, shape) + 0.1) * 0.3,
    "transposed": lambda key, shape: jnp.tanh(jr.uniform(key, shape[::-1])).T,
}
"""Functions that compilers approximate, on CPUs by other instructions in short rows."""


SHAPES = [(24,), (64, 24), (16, 8), (3, 4, 5, 32)]
# Each function in two shapes, normal numbers in all.
PAIRS = [(draw, SHAPES[n]) for i, draw in enumerate(DRAWS) for n in range(4) if draw == "normal" or (n - i) % 2]


@pytest.mark.parametrize(("draw", "shape"), PAIRS)
def test_approximated_functions_are_the_same_on_every_mesh(draw: str, shape: Any) -> None:
    names = ("a", "b", "c", "d")[: len(shape)]

    def fn(key: Any) -> Any:
        return hax.named(DRAWS[draw](key, shape=shape), names)

    wanted = bits(jax.jit(fn)(jr.PRNGKey(5)).array)
    for name, size in zip(names, shape, strict=True):
        for axis in ("data", "model"):
            if size % M24.shape[axis] == 0:
                made, report = ns.init(fn, jr.PRNGKey(5), mapping={name: axis}, mesh=M24, report=True)
                assert not any(program.inexact for program in report.programs)
                assert made.array.sharding == ns.plan(made, {name: axis}, M24).shardings.array
                assert bits(made.array) == wanted, (name, axis)


def test_large_arrays_of_short_rows_are_computed_in_shards_and_reported() -> None:
    def fn(key: Any) -> Any:
        return hax.named(jr.normal(key, (1 << 16, 8)), ("embed", "mlp"))

    made, report = ns.init(fn, jr.key(0), mapping={"mlp": "data"}, mesh=M42, report=True)
    assert [program.inexact for program in report.programs] == [True]
    np.testing.assert_allclose(made.array, fn(jr.key(0)).array, rtol=1e-6, atol=1e-6)
