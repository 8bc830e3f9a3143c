"""Shardings for arrays without names: all that divides, never the replicas, on the caller's own mesh."""

import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import DEVICES, E8, EXPLICIT, M8, M42, MIXED42, counting, mesh, nothing_moved

import namedshard as ns

R = AbstractMesh((2, 2, 4), ("replica", "data", "model"))


@pytest.mark.parametrize(
    ("shape", "where", "spec"),
    [
        ((), M42, P()),
        ((8, 16), M42, P("model", "data")),
        ((16, 8), M42, P("data", "model")),
        ((8,), M42, P(("data", "model"))),
        ((4, 3), M42, P("data", None)),
        ((2, 3), M42, P("model", None)),
        ((7, 9), M42, P(None, None)),
        ((0, 8), M8, P(None, "data")),
        ((8, 8), M8, P("data", None)),
        ((30522, 384), R, P("data", "model")),
        ((16, 16), AbstractMesh((4, 2), ("replica_dcn", "data")), P("data", None)),
        ((16, 16), AbstractMesh((4,), ("replica",)), P(None, None)),
        ((16, 16), AbstractMesh((1, 4), ("data", "model")), P("model", None)),
    ],
)
def test_large_dimensions_first_and_replicas_never(shape, where, spec):
    with nothing_moved():
        found = ns.best_effort_sharding(shape, mesh=where)
    assert found is not None
    assert found.mesh is where
    assert found.spec == spec
    assert ns.best_effort_sharding(jax.ShapeDtypeStruct(shape, np.float32), mesh=where) == found
    assert ns.best_effort_sharding(np.zeros((3, 0)), mesh=M8).spec == P(None, None)


def test_the_mesh_is_the_one_given_else_the_one_in_force_else_none():
    assert ns.best_effort_sharding((8,)) is None
    with jax.set_mesh(E8):
        assert ns.best_effort_sharding((8,)) == NamedSharding(E8, P("data"))
        assert ns.best_effort_sharding((8,), mesh=M42).mesh is M42
        private = ns.best_effort_sharding((8,), devices=DEVICES[:2])
        assert private.mesh.axis_names == ("devices",)
        assert list(private.mesh.devices) == list(DEVICES[:2])
        assert private.spec == P("devices")
    with pytest.raises(TypeError, match="best_effort_sharding takes a mesh or devices, not both"):
        ns.best_effort_sharding((8,), mesh=M8, devices=DEVICES)


def test_mesh_axes_that_a_shard_map_holds_are_left_alone():
    manual = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Manual, AxisType.Auto))
    assert ns.best_effort_sharding((8, 8), mesh=manual).spec == P("model", None)


def test_no_dimension_is_split_over_axes_of_two_types():
    assert ns.best_effort_sharding((8,), mesh=MIXED42).spec == P("data")
    assert ns.best_effort_sharding((8, 8), mesh=MIXED42).spec == P("data", "model")


@given(
    st.lists(st.integers(0, 60), max_size=4),
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    st.integers(0, 3),
)
def test_whatever_divides_is_used(shape, sizes, replica):
    names = ["replica" if i == replica else f"m{i}" for i in range(len(sizes))]
    where = AbstractMesh(tuple(sizes), tuple(names))
    spec = ns.best_effort_sharding(tuple(shape), mesh=where).spec
    used = [(n, d) for d, e in enumerate(spec) for n in ((e,) if isinstance(e, str) else e or ())]
    assert len({n for n, _ in used}) == len(used)
    assert "replica" not in {n for n, _ in used}
    left = list(shape)
    for name, dim in used:
        assert left[dim] % where.shape[name] == 0
        left[dim] //= where.shape[name]
    for name, size in where.shape.items():
        if size > 1 and name != "replica" and name not in {n for n, _ in used}:
            assert not any(n and n % size == 0 for n in left)
    assert (
        math.prod(n for n in shape) == 0
        or used
        or all(n % s for n in shape for name, s in where.shape.items() if s > 1 and name != "replica")
    )


def test_the_sharding_can_be_used_on_devices():
    for where in (M42, MIXED42, mesh((2, 4), "data model", EXPLICIT), M8):
        x = jax.device_put(counting(8, 16), ns.best_effort_sharding((8, 16), mesh=where))
        assert len({str(s.index) for s in x.addressable_shards}) == 8
