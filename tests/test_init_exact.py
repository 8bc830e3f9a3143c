"""Where the last bit could depend on how arrays are split: what `init` makes whole, and what it says of the rest."""

import functools
from typing import Any

import haliax as hax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from support import MIXED42, bits

import namedshard as ns
from namedshard import _init_split as splitting


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
