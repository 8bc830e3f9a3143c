"""Haliax's helpers on the planner: the same answers where Haliax has one, and an error where it guesses."""

from typing import Any

import equinox as eqx
import haliax as hax
import haliax.partitioning
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

import namedshard as ns

P = PartitionSpec
MESH = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))
ABSTRACT = AbstractMesh((2, 4), ("data", "model"))
MAPPING = {"batch": "data", "mlp": "model", "both": ("data", "model"), "embed": None}
B, M, E = Axis("batch", 4), Axis("mlp", 8), Axis("embed", 3)


class Block(eqx.Module):
    """Every kind of field."""

    named: hax.NamedArray
    declared: jax.Array = eqx.field(metadata={"axis_names": ("mlp",)})
    plain: jax.Array
    missing: Any
    number: float
    static: int = eqx.field(static=True)


def block() -> Block:
    return Block(hax.zeros((B, M)), jnp.zeros(8), jnp.zeros((3, 2)), None, 1.5, 7)


AXES: list[tuple[Any, PartitionSpec]] = [
    (B, P("data")),
    ("batch", P("data")),
    ("unknown", P(None)),
    (E, P(None)),
    ((B, M), P("data", "model")),
    ([B, "mlp", E], P("data", "model", None)),
    (("both", "embed"), P(("data", "model"), None)),
    ((), P()),
]


@pytest.mark.parametrize(("axes", "spec"), AXES)
def test_axes(axes: Any, spec: PartitionSpec) -> None:
    assert ns.pspec_for(axes, MAPPING, MESH) == spec
    assert ns.pspec_for(axes, MAPPING, ABSTRACT) == spec
    # With plain rules the names alone decide, as in Haliax.
    assert ns.pspec_for(axes, MAPPING) == spec
    assert haliax.partitioning.pspec_for_axis(axes, MAPPING) == spec
    with ns.axis_mapping(MAPPING), jax.set_mesh(MESH):
        assert ns.pspec_for(axes) == spec
        assert ns.sharding_for(axes) == NamedSharding(MESH, spec)
    assert ns.sharding_for(axes, MAPPING, MESH) == NamedSharding(MESH, spec)


def test_axes_with_no_mapping_anywhere_are_unsharded() -> None:
    assert ns.pspec_for((B, M)) == P(None, None)
    assert ns.sharding_for(B, None, MESH) == NamedSharding(MESH, P(None))


def test_trees() -> None:
    tree = {"block": block(), "host": np.zeros(3, np.float32), "flag": True, "name": "x", "fn": jnp.tanh, "none": None}
    specs = ns.pspec_for(tree, MAPPING, MESH)
    b = specs["block"]
    assert (b.named, b.declared, b.plain) == (P("data", "model"), P("model"), P(None, None))
    assert (b.missing, b.number, b.static) == (None, P(), 7)
    assert (specs["host"], specs["flag"], specs["name"], specs["fn"], specs["none"]) == (P(None), P(), None, None, None)
    shardings = ns.sharding_for(tree, MAPPING, MESH)
    assert shardings["block"].named == NamedSharding(MESH, P("data", "model"))
    assert shardings["flag"] == NamedSharding(MESH, P())
    assert shardings["name"] is None


def test_the_specs_are_the_plan() -> None:
    with ns.axis_mapping(MAPPING), jax.set_mesh(MESH):
        placed = ns.shard(block())
        specs = ns.pspec_for(block())
    assert placed.named.array.sharding.spec == specs.named
    assert placed.declared.sharding.spec == specs.declared


def test_a_carried_mapping_and_filtered_and_misfitting_leaves() -> None:
    carried = ns.with_mapping(hax.zeros((B, M)), {"mlp": None})
    assert ns.pspec_for(carried, MAPPING, MESH) == P("data", None)
    assert ns.pspec_for(carried, None, MESH) == P(None, None)
    filtered = jax.tree_util.tree_map(lambda _: None, hax.zeros((B, M)))
    assert ns.pspec_for([filtered], MAPPING, MESH) == [None]
    short = jax.tree_util.tree_map(lambda x: x[0], hax.zeros((B, M)))
    assert ns.pspec_for([short], MAPPING, MESH) == [None]


def test_specs_serve_shard_map() -> None:
    x = hax.named(jnp.arange(32.0).reshape(4, 8), ("batch", "mlp"))
    seen: list[tuple[int, ...]] = []

    def local(a: jax.Array) -> jax.Array:
        seen.append(a.shape)
        return a * 2

    spec = ns.pspec_for(x, MAPPING, MESH)
    y = jax.shard_map(local, mesh=MESH, in_specs=spec, out_specs=spec)(x.array)
    assert seen[0] == (2, 2)
    np.testing.assert_array_equal(y, np.arange(32.0).reshape(4, 8) * 2)


def test_first_is_chosen_by_the_mesh_and_the_size() -> None:
    mapping = {"vocab": ns.first("model", "data", None)}
    assert ns.pspec_for(Axis("vocab", 8), mapping, MESH) == P("model")
    assert ns.pspec_for(Axis("vocab", 6), mapping, MESH) == P("data")
    assert ns.pspec_for(Axis("vocab", 7), mapping, MESH) == P(None)
    assert ns.pspec_for("vocab", mapping, MESH) == P("model")
    assert ns.pspec_for("vocab", mapping, AbstractMesh((2,), ("data",))) == P("data")
    for tree in ("vocab", [hax.zeros(Axis("vocab", 8))]):
        with pytest.raises(ns.NoMeshError) as error:
            ns.pspec_for(tree, mapping)
        assert str(error.value) == (
            "no mesh: the first(...) rules of vocab need one to choose by\n  fix: pass mesh=, or enter jax.set_mesh"
        )
    # A rule that is not asked does not need to choose.
    assert ns.pspec_for(("mlp",), {**mapping, "mlp": "model"}) == P("model")


ERRORS: list[tuple[Any, Any, type[ns.PlanError], str]] = [
    (
        (Axis("mlp", 7), B),
        {"mlp": "model"},
        ns.IndivisibleAxisError,
        "1 of 1 leaf cannot be sharded by this mapping\n"
        "  (mlp, batch): axis mlp=7 is not divisible by mesh axis 'model'=4 (7 = 4*1 + 3)\n"
        '  fix: pad the axis to 8, or pass indivisible="replicate"',
    ),
    (
        ("mlp", B),
        {"mlp": "modle"},
        ns.MeshAxisNotFoundError,
        "1 of 1 leaf cannot be sharded by this mapping\n"
        "  (mlp, batch): axis mlp is mapped to 'modle', but the mesh has 'data'=2, 'model'=4 (did you mean 'model'?)\n"
        "  fix: map the axis to a mesh axis that exists, or use first(..., None)",
    ),
    (
        ("mlp", "batch"),
        {"mlp": "model", "batch": "model"},
        ns.MeshAxisConflictError,
        "1 of 1 leaf cannot be sharded by this mapping\n"
        "  (mlp, batch): axes mlp and batch are both mapped to mesh axis 'model'\n"
        "  fix: map one of the two axes to None or to another mesh axis, or use first(...) to let it give way",
    ),
    (
        "mlp",
        {"mlp": ns.first("pod", "rack")},
        ns.NoCandidateError,
        "1 of 1 leaf cannot be sharded by this mapping\n"
        "  (mlp): no candidate of first('pod', 'rack') fits axis mlp: 'pod' is absent; 'rack' is absent\n"
        "  fix: end the candidates with None to leave the axis unsharded when nothing fits",
    ),
]


@pytest.mark.parametrize(("axes", "mapping", "kind", "said"), ERRORS)
def test_errors_of_axes(axes: Any, mapping: Any, kind: type[ns.PlanError], said: str) -> None:
    for call in (ns.pspec_for, ns.sharding_for):
        with pytest.raises(kind) as error:
            call(axes, mapping, MESH)
        assert str(error.value) == said


def test_errors_of_trees() -> None:
    with pytest.raises(ns.NoMappingError):
        ns.pspec_for([hax.zeros(B)])
    with pytest.raises(ns.NoMappingError):
        ns.sharding_for([hax.zeros(B)], None, MESH)
    with pytest.raises(ns.NoMeshError) as error:
        ns.sharding_for([hax.zeros(B)], MAPPING)
    assert str(error.value) == "no mesh: none was given and none is in force\n  fix: pass mesh=, or enter jax.set_mesh"
    with pytest.raises(ns.IndivisibleAxisError):
        ns.pspec_for([hax.zeros(Axis("mlp", 7))], MAPPING, MESH)
    # Nothing to divide by.
    assert ns.pspec_for([hax.zeros(Axis("mlp", 7))], MAPPING) == [P("model")]


SIZES: list[tuple[Any, Any, int | None]] = [
    ("mlp", MAPPING, 4),
    (Axis("mlp", 7), MAPPING, 4),
    ("both", MAPPING, 8),
    ("embed", MAPPING, None),
    ("unknown", MAPPING, None),
    ("mlp", None, None),
    ("vocab", {"vocab": ns.first("model", "data", None)}, 4),
    (Axis("vocab", 6), {"vocab": ns.first("model", "data", None)}, 2),
    (Axis("vocab", 7), {"vocab": ns.first("model", "data", None)}, None),
    (Axis("vocab", 7), {"vocab": ns.first("pod", "model", "data")}, 4),
]


@pytest.mark.parametrize(("axis", "mapping", "size"), SIZES)
def test_physical_axis_size(axis: Any, mapping: Any, size: int | None) -> None:
    assert ns.physical_axis_size(axis, mapping, MESH) == size
    assert ns.physical_axis_size(axis, mapping, ABSTRACT) == size
    with jax.set_mesh(MESH):
        assert ns.physical_axis_size(axis, mapping) == size
        if mapping is MAPPING:
            assert haliax.partitioning.physical_axis_size(axis, mapping) == size


@pytest.mark.parametrize("n", range(1, 18))
def test_round_axis_for_partitioning(n: int) -> None:
    axis = Axis("mlp", n)
    rounded = ns.round_axis_for_partitioning(axis, MAPPING, MESH)
    assert rounded == Axis("mlp", (n + 3) // 4 * 4)
    assert ns.pspec_for(rounded, MAPPING, MESH) == P("model")
    with jax.set_mesh(MESH):
        assert haliax.partitioning.round_axis_for_partitioning(axis, MAPPING) == rounded
    choosing = {"mlp": ns.first("model", "data")}
    chosen = ns.round_axis_for_partitioning(axis, choosing, MESH)
    assert chosen.size == (n if n % 2 == 0 else (n + 3) // 4 * 4)
    assert ns.pspec_for(chosen, choosing, MESH) in (P("model"), P("data"))


def test_rounding_without_a_mapping_or_a_rule_keeps_the_axis() -> None:
    axis = Axis("mlp", 7)
    assert ns.round_axis_for_partitioning(axis) is axis
    assert ns.round_axis_for_partitioning(axis, {"batch": "data"}) is axis
    assert ns.round_axis_for_partitioning(axis, {"mlp": None}, MESH) is axis
    assert ns.round_axis_for_partitioning(axis, {"mlp": ns.first("model", None)}, MESH) is axis


def test_errors_of_sizes() -> None:
    with pytest.raises(ns.NoMeshError) as no_mesh:
        ns.physical_axis_size("mlp", MAPPING)
    assert str(no_mesh.value) == (
        "no mesh: none was given and none is in force\n  fix: pass mesh=, or enter jax.set_mesh"
    )
    for rule in ("modle", ns.first("modle")):
        with pytest.raises(ns.MeshAxisNotFoundError) as absent:
            ns.round_axis_for_partitioning(Axis("mlp", 7), {"mlp": rule}, MESH)
        assert str(absent.value) == (
            "axis mlp is mapped to 'modle', but the mesh has 'data'=2, 'model'=4 (did you mean 'model'?)\n"
            "  fix: map the axis to a mesh axis that exists, or use first(..., None)"
        )


def test_a_rounded_axis_follows_the_mesh_of_each_call() -> None:
    sizes = [
        ns.round_axis_for_partitioning(Axis("vocab", 17), {"vocab": "data"}, AbstractMesh((n,), ("data",))).size
        for n in (8, 5, 2)
    ]
    assert sizes == [24, 20, 18]
