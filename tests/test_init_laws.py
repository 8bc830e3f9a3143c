"""Properties of `init` over a catalogue of models: values are those of `jax.jit`, and each leaf is where planned."""

import functools
import warnings
from typing import Any

import equinox as eqx
import haliax as hax
import init_models
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.sharding import Mesh
from support import AUTO, DEVICES, EXPLICIT, bits, mesh

import namedshard as ns

MESHES = {
    "8x1": mesh((8, 1), "data model"),
    "4x2 mixed": mesh((4, 2), "data model", (AUTO, EXPLICIT)),
    "2x4 explicit, reversed": mesh((2, 4), "data model", EXPLICIT, DEVICES[::-1]),
}
NAMES = {"embed": "data", "odd": "data", "mlp": "model", "vocab": "model", "heads": "model", "expert": "model"}
RULES = {name: ns.first(axis, None) for name, axis in NAMES.items()}
MAPPING = ns.AxisMapping(RULES, unmatched="ignore")


@functools.cache
def eager(name: str) -> Any:
    fn, args = init_models.CATALOGUE[name]()
    return fn(*args)


def assert_same(made: Any, wanted: Any) -> None:
    """Equal structures, statics, dtypes, weak types and bits."""
    left, right = jax.tree_util.tree_flatten_with_path(made), jax.tree_util.tree_flatten_with_path(wanted)
    assert left[1] == right[1]
    for (path, a), (_, b) in zip(left[0], right[0], strict=True):
        if isinstance(b, jax.Array | np.ndarray):
            kinds = [(type(x), x.shape, x.dtype, getattr(x, "weak_type", False)) for x in (a, b)]
            assert kinds[0] == kinds[1], path
            assert bits(a) == bits(b), path
        else:
            assert a is b or a == b, path


def assert_planned(made: Any, on: Mesh) -> None:
    """Every named leaf is exactly where the planner says, and everything made here is on the mesh."""
    plan = ns.plan(made, MAPPING, on)
    for planned, x in zip(plan.leaves, jax.tree.leaves(made), strict=True):
        wanted = plan.sharding_of(planned)
        if wanted is not None:
            assert x.sharding == wanted, planned.path
            assert x.committed, planned.path


def assert_close(made: Any, wanted: Any) -> None:
    """Equal but for the last bits."""
    for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


EVERYWHERE = {"tied", "data_dependent", "lora", "loops", "closures_and_statics"}
"""Models that are created on every mesh; the others, which compile for seconds, on one each."""

WHERE = [
    (name, where)
    for i, name in enumerate(init_models.CATALOGUE)
    for where in (MESHES if name in EVERYWHERE else [list(MESHES)[i % len(MESHES)]])
]


@pytest.mark.parametrize(("name", "where"), WHERE)
def test_values_are_those_of_jit_and_places_are_planned(name: str, where: str) -> None:
    fn, args = init_models.CATALOGUE[name]()
    made, report = ns.init(fn, *args, mapping=MAPPING, mesh=MESHES[where], report=True)
    assert_planned(made, MESHES[where])
    # Sums and matrix products are reported, since their last bits may depend on the mesh.
    inexact = any(program.inexact for program in report.programs)
    assert name in {"data_dependent", "initialisers"} or not inexact
    (assert_close if inexact else assert_same)(made, init_models.jitted(name))


@pytest.mark.parametrize("name", ["tied", "fused", "vmapped", "lora"])
def test_each_leaf_is_that_of_a_jit_of_its_own(name: str) -> None:
    """Also where `init` computes leaves together: shared draws, and parts of one draw."""
    fn, args = init_models.CATALOGUE[name]()
    made = jax.tree.leaves(ns.init(fn, *args, mapping=MAPPING, mesh=MESHES["4x2 mixed"]))
    for i, x in enumerate(jax.tree.leaves(eager(name))):
        if isinstance(x, jax.Array):
            assert bits(made[i]) == bits(jax.jit(lambda *a, i=i: jax.tree.leaves(fn(*a))[i])(*args)), i


@pytest.mark.parametrize("name", ["typed_keys", "closures_and_statics", "data_dependent", "optimizer_state", "tied"])
def test_without_a_mesh(name: str) -> None:
    fn, args = init_models.CATALOGUE[name]()
    made, report = ns.init(fn, *args, report=True)
    assert not any(program.inexact for program in report.programs)
    assert_same(made, init_models.jitted(name))
    for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(eager(name)), strict=True):
        if isinstance(b, jax.Array):
            assert (a.sharding, a.committed) == (b.sharding, b.committed)


@pytest.mark.parametrize("name", ["tied", "data_dependent", "jitted_model", "loops", "closures_and_statics"])
def test_exact(name: str) -> None:
    fn, args = init_models.CATALOGUE[name]()
    made, report = ns.init(fn, *args, mapping=MAPPING, mesh=MESHES["4x2 mixed"], report=True, exact=True)
    assert report.local == report.leaves
    assert report.programs == ()
    assert_same(made, eager(name))
    assert_planned(made, MESHES["4x2 mixed"])


def test_tied_leaves_stay_one_array() -> None:
    fn, args = init_models.CATALOGUE["tied"]()
    on = {"mapping": MAPPING, "mesh": MESHES["8x1"]}
    for made in (ns.init(fn, *args), ns.init(fn, *args, **on), ns.init(fn, *args, **on, exact=True)):
        assert made["embed"].array is made["head"].array
        assert made["twice"].array is not made["head"].array


def test_other_keys_give_other_values_without_compiling() -> None:
    traces = 0

    def fn(key: Any) -> Any:
        nonlocal traces
        traces += 1
        return init_models.dense(key)

    first = ns.init(fn, jr.PRNGKey(0), mapping=MAPPING, mesh=MESHES["8x1"])
    second, report = ns.init(fn, jr.PRNGKey(1), mapping=MAPPING, mesh=MESHES["8x1"], report=True)
    assert traces == 1
    assert report.trace_seconds == 0
    assert [program.compile_seconds for program in report.programs] == [0] * len(report.programs)
    for made, seed in ((first, 0), (second, 1)):
        wanted = jax.jit(lambda key: eqx.filter(init_models.dense(key), eqx.is_array))(jr.PRNGKey(seed))
        assert_same(eqx.filter(made, eqx.is_array), wanted)


def test_a_model_whose_axes_round_up_to_the_mesh_is_traced_anew_for_each() -> None:
    def fn() -> Any:
        return hax.zeros(ns.round_axis_for_partitioning(hax.Axis("vocab", 17), {"vocab": "data"}))

    sizes = []
    for n in (8, 5, 2):
        with jax.set_mesh(mesh((n,), "data")), ns.axis_mapping({"vocab": "data"}):
            sizes.append(ns.init(fn).array.shape[0])
    assert sizes == [24, 20, 18]


def test_an_equinox_module_as_the_function() -> None:
    class Scaled(eqx.Module):
        scale: jax.Array
        power: int

        def make(self, key: Any) -> Any:
            return jr.normal(key, (16, 16)) * self.scale**self.power

    module = Scaled(jnp.float32(3.0), 2)
    assert_same(ns.init(module.make, jr.PRNGKey(1)), jax.jit(lambda key: module.make(key))(jr.PRNGKey(1)))


def test_arguments_that_no_cache_can_hold() -> None:
    table = np.linspace(0, 1, 5000, dtype=np.float32)

    def fn(key: Any, table: np.ndarray, options: list[Any]) -> Any:
        return jr.normal(key, (5000,)) * table.max() + table, options

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = ns.init(fn, jr.PRNGKey(1), table, [{1, 2}])
    assert bits(made[0]) == bits(jax.jit(lambda k: fn(k, table, [])[0])(jr.PRNGKey(1)))
    assert made[1] == [{1, 2}]
    table[:] = 7.0
    wanted = jax.jit(lambda k: fn(k, table, [])[0])(jr.PRNGKey(1))
    assert bits(ns.init(fn, jr.PRNGKey(1), table, [])[0]) == bits(wanted)
