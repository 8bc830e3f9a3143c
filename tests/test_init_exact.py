"""Where the last bit could depend on how arrays are split: what `init` makes whole, and what it says of the rest."""

import functools
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from support import MIXED42, bits

import namedshard as ns
from namedshard._init import split as splitting


def _large(key: Any) -> Any:
    """Leaves too large to be made whole: one has rows that are no multiple of 16, one is divided by sums."""
    w = jr.normal(key, (2048, 128))
    return {
        "ragged": hax.named(jr.normal(key, (2048, 130)), ("embed", "odd")),
        "normed": hax.named(w / jnp.sqrt((w * w).sum(0)), ("embed", "mlp")),
        "plain": hax.named(jr.uniform(key, (2048, 130)), ("embed", "odd")),
    }


LARGE = {"embed": "data", "mlp": "model", "odd": "model"}


def test_the_report_says_which_programs_may_differ_in_the_last_bit() -> None:
    key = jr.PRNGKey(2)
    made, report = ns.init(_large, key, mapping=LARGE, mesh=MIXED42, report=True)
    inexact = sorted(program.name for program in report.programs if program.inexact)
    assert inexact == ["init_normal", "init_normal"]
    assert report.local == 0
    wanted = _large(key)
    assert bits(made["plain"].array) == bits(wanted["plain"].array)
    for name in ("ragged", "normed"):
        np.testing.assert_allclose(made[name].array, wanted[name].array, rtol=3e-7, atol=3e-7)


def test_exact_makes_them_whole() -> None:
    key = jr.PRNGKey(2)
    made, report = ns.init(_large, key, mapping=LARGE, mesh=MIXED42, report=True, exact=True)
    assert report.local == 2
    assert not any(program.inexact for program in report.programs)
    for name, wanted in _large(key).items():
        assert bits(made[name].array) == bits(wanted.array)
        assert made[name].array.sharding == ns.plan(wanted, LARGE, MIXED42).shardings.array


# --- what compilers round otherwise beside other operations ----------------------------------------------------------


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


AS_EAGER = [
    _low_rank,
    _needed_and_returned,
    _bent,
    _centred,
    _approximated,
    _scaled_by_small_values,
    _with_derivatives_of_its_own,
]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("fn", AS_EAGER)
def test_small_leaves_are_those_of_eager_execution(fn: Any, exact: bool) -> None:
    for seed in range(4):
        key = jr.key(seed)
        wanted = fn(key)
        for on in (None, MIXED42):
            made, report = ns.init(fn, key, mesh=on, exact=exact, report=True)
            assert not any(program.inexact for program in report.programs)
            assert [bits(x) for x in jax.tree.leaves(made)] == [bits(x) for x in jax.tree.leaves(wanted)]


def _large_and_approximated(key: Any) -> Any:
    x = jr.normal(key, (512, 512))
    return jax.scipy.special.erf(x), x - x.mean(), jr.normal(key, (512, 512))


def test_large_leaves_are_marked_or_exact() -> None:
    wanted = _large_and_approximated(jr.key(0))
    for on in (None, MIXED42):
        made, report = ns.init(_large_and_approximated, jr.key(0), mesh=on, report=True)
        assert any(program.inexact for program in report.programs)
        for a, b in zip(made, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=3e-7, atol=3e-7)
        made, report = ns.init(_large_and_approximated, jr.key(0), mesh=on, report=True, exact=True)
        assert not any(program.inexact for program in report.programs)
        assert [bits(x) for x in made] == [bits(x) for x in wanted]


@jax.jit
def _a_whole_model(key: Any) -> Any:
    return [jr.normal(k, (16, 16)) * 1.3 + 0.1 for k in jr.split(key, 10)]


def test_a_jit_with_many_results_is_marked_or_kept_whole() -> None:
    wanted = _a_whole_model(jr.key(0))
    made, report = ns.init(_a_whole_model, jr.key(0), report=True)
    assert [(p.name, p.inexact) for p in report.programs if p.name != "init_keys"] == [("init_normal", True)]
    for a, b, k in zip(made, wanted, jr.split(jr.key(0), 10), strict=True):
        assert bits(a) == bits(jr.normal(k, (16, 16)) * 1.3 + 0.1)
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    made, report = ns.init(_a_whole_model, jr.key(0), report=True, exact=True)
    assert not any(program.inexact for program in report.programs)
    assert [bits(x) for x in made] == [bits(x) for x in wanted]


# --- rows -------------------------------------------------------------------------------------------------------------

DRAWS = {
    "normal": jr.normal,
    "exponential": jr.exponential,
    "bf16": functools.partial(jr.normal, dtype=jnp.bfloat16),
}


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("shape", [(64,), (24, 48), (3, 4, 5, 32)])
def test_rows_of_whole_vectors_are_exact_however_split(draw: str, shape: Any, monkeypatch: Any) -> None:
    """What `init` relies on where it splits approximated functions on CPUs."""
    monkeypatch.setattr(splitting, "_LEAST_LOCAL", 0)
    names = ("a", "b", "c", "d")[: len(shape)]

    def fn(key: Any) -> Any:
        return hax.named(DRAWS[draw](key, shape=shape), names)

    wanted = fn(jr.PRNGKey(5))
    tried = 0
    for name, size in zip(names, shape, strict=True):
        for axis in ("data", "model"):
            if size % MIXED42.shape[axis] == 0:
                made, report = ns.init(fn, jr.PRNGKey(5), mapping={name: axis}, mesh=MIXED42, report=True)
                assert report.local == 0
                if not any(program.inexact for program in report.programs):
                    tried += 1
                    assert bits(made.array) == bits(wanted.array)
    assert tried
