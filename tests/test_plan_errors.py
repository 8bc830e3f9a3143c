"""Every error of the planner, word for word: all offending leaves at once, arithmetic, and the fix."""

from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from support import M8, M8_REVERSED, M42, counting, na

import namedshard as ns
from namedshard import _errors
from namedshard._plan.mesh import resolve_mesh

ABSTRACT = AbstractMesh((4, 2), ("data", "model"))


def struct(names: str, *shape: int) -> hax.NamedArray:
    return na(jax.ShapeDtypeStruct(shape, jnp.float32), names)


def fails(kind: type[Exception], text: str, tree: Any, mapping: Any, mesh: Any = ABSTRACT) -> None:
    """plan fails so, and shard does (eagerly and traced) with the very same words."""
    with pytest.raises(ns.PlanError) as caught:
        ns.plan(tree, mapping, mesh)
    assert type(caught.value) is kind and str(caught.value) == text
    assert isinstance(caught.value, ns.NamedShardError) and isinstance(caught.value, ValueError)
    concrete = M42 if mesh is ABSTRACT else mesh
    arrays = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), tree)
    for run in (lambda t: ns.shard(t, mapping, concrete), jax.jit(lambda t: ns.shard(t, mapping, concrete))):
        with pytest.raises(kind) as caught:
            run(arrays)
        assert str(caught.value) == text


def test_one_axis_that_does_not_divide() -> None:
    fails(
        ns.IndivisibleAxisError,
        "1 of 3 leaves cannot be sharded by this mapping\n"
        "  ['embed']: axis vocab=30522 is not divisible by mesh axis 'data'=4 (30522 = 4*7630 + 2)\n"
        "  fix: pad the axis to 30524, map vocab to 'model'=2, or pass indivisible=\"replicate\"",
        {"embed": struct("vocab e", 30522, 8), "ok": struct("e", 8), "plain": jax.ShapeDtypeStruct((3,), jnp.int32)},
        {"vocab": "data", "e": "model"},
    )


def test_no_other_mesh_axis_is_advised_where_none_fits() -> None:
    fails(
        ns.IndivisibleAxisError,
        "1 of 1 leaf cannot be sharded by this mapping\n"
        "  (root): axis vocab=17 is not divisible by mesh axis 'data'=8 (17 = 8*2 + 1)\n"
        '  fix: pad the axis to 24, or pass indivisible="replicate"',
        struct("vocab e", 17, 4),
        {"vocab": "data"},
        M8,
    )


def test_a_product_of_mesh_axes() -> None:
    fails(
        ns.IndivisibleAxisError,
        "1 of 1 leaf cannot be sharded by this mapping\n"
        "  (root): axis a=12 is not divisible by mesh axes ('data', 'model')=8 (12 = 8*1 + 4)\n"
        '  fix: pad the axis to 16, or pass indivisible="replicate"',
        struct("a", 12),
        {"a": ("data", "model")},
    )


def test_the_same_axis_in_many_leaves_gets_one_fix() -> None:
    fails(
        ns.IndivisibleAxisError,
        "2 of 2 leaves cannot be sharded by this mapping\n"
        "  [0]: axis v=6 is not divisible by mesh axis 'data'=4 (6 = 4*1 + 2)\n"
        "  [1]: axis v=6 is not divisible by mesh axis 'data'=4 (6 = 4*1 + 2)\n"
        "  fix: pad the axis to 8, map v to 'model'=2, or pass indivisible=\"replicate\"",
        [struct("v", 6), struct("v e", 6, 2)],
        {"v": "data"},
    )


def test_several_axes_are_all_listed() -> None:
    fails(
        ns.IndivisibleAxisError,
        "2 of 2 leaves cannot be sharded by this mapping\n"
        "  ['x']: axis a=6 is not divisible by mesh axis 'data'=4 (6 = 4*1 + 2)\n"
        "  ['x']: axis b=3 is not divisible by mesh axis 'model'=2 (3 = 2*1 + 1)\n"
        "  ['y']: axis a=7 is not divisible by mesh axis 'data'=4 (7 = 4*1 + 3)\n"
        "  fix: pad the axes (a=6 to 8, b=3 to 4, a=7 to 8), map them to mesh axes that divide them,"
        ' or pass indivisible="replicate"',
        {"x": struct("b a", 3, 6), "y": struct("a", 7)},
        {"a": "data", "b": "model"},
    )


def test_a_mesh_axis_that_is_not_there() -> None:
    fails(
        ns.MeshAxisNotFoundError,
        "1 of 1 leaf cannot be sharded by this mapping\n"
        "  (root): axis heads=8 is mapped to 'tensor', but the mesh has 'data'=8\n"
        "  fix: map the axis to a mesh axis that exists, or use first(..., None)",
        struct("heads", 8),
        {"heads": "tensor"},
        M8,
    )


def test_a_misspelled_mesh_axis_is_guessed() -> None:
    fails(
        ns.MeshAxisNotFoundError,
        "1 of 1 leaf cannot be sharded by this mapping\n"
        "  (root): axis heads=8 is mapped to 'modle', but the mesh has 'data'=4, 'model'=2 (did you mean 'model'?)\n"
        "  fix: map the axis to a mesh axis that exists, or use first(..., None)",
        struct("heads", 8),
        {"heads": ("data", "modle")},
    )


def test_two_axes_on_one_mesh_axis() -> None:
    fails(
        ns.MeshAxisConflictError,
        "1 of 1 leaf cannot be sharded by this mapping\n"
        "  (root): axes heads and kv are both mapped to mesh axis 'data'\n"
        "  fix: map one of the two axes to None or to another mesh axis, or use first(...) to let it give way",
        struct("kv heads", 8, 8),
        {"heads": "data", "kv": "data"},
        M8,
    )


def test_no_candidate_that_fits() -> None:
    fails(
        ns.NoCandidateError,
        "1 of 1 leaf cannot be sharded by this mapping\n"
        "  (root): no candidate of first('expert', 'data', ('data', 'model'), 'model') fits axis b=7:"
        " 'expert' is absent; 'data' is busy (axis a has it); ('data', 'model') is busy (axis a has it);"
        " 'model' is indivisible (7 = 2*3 + 1)\n"
        "  fix: end the candidates with None to leave the axis unsharded when nothing fits",
        struct("a b", 8, 7),
        {"a": "data", "b": ns.first("expert", "data", ("data", "model"), "model")},
    )


def test_problems_of_every_kind_come_together_with_every_fix() -> None:
    fails(
        ns.MeshAxisNotFoundError,
        "4 of 5 leaves cannot be sharded by this mapping\n"
        "  ['a']: axis p=8 is mapped to 'dat', but the mesh has 'data'=4, 'model'=2 (did you mean 'data'?)\n"
        "  ['b']: axes q and r are both mapped to mesh axis 'data'\n"
        "  ['c']: no candidate of first('none') fits axis s=8: 'none' is absent\n"
        "  ['d']: axis q=9 is not divisible by mesh axis 'data'=4 (9 = 4*2 + 1)\n"
        "  fix: map the axis to a mesh axis that exists, or use first(..., None)\n"
        "  fix: map one of the two axes to None or to another mesh axis, or use first(...) to let it give way\n"
        "  fix: end the candidates with None to leave the axis unsharded when nothing fits\n"
        '  fix: pad the axis to 12, or pass indivisible="replicate"',
        {
            "a": struct("p", 8),
            "b": struct("r q", 8, 8),
            "c": struct("s", 8),
            "d": struct("q", 9),
            "e": struct("q", 8),
        },
        {"p": "dat", "q": "data", "r": "data", "s": ns.first("none")},
    )


def test_a_very_long_list_is_cut_and_says_so() -> None:
    tree = [struct("v", 17) for _ in range(_errors.MAX_LISTED + 3)]
    with pytest.raises(ns.IndivisibleAxisError) as caught:
        ns.plan(tree, {"v": "data"}, ABSTRACT)
    lines = str(caught.value).splitlines()
    assert lines[0] == "53 of 53 leaves cannot be sharded by this mapping"
    assert len(lines) == 1 + _errors.MAX_LISTED + 1 + 1
    assert lines[-3] == "  [49]: axis v=17 is not divisible by mesh axis 'data'=4 (17 = 4*4 + 1)"
    assert lines[-2] == "  ... and 3 more"


def test_no_mapping_and_no_mesh() -> None:
    with pytest.raises(ns.NoMappingError) as caught:
        ns.plan(struct("a", 8), mesh=M8)
    assert str(caught.value) == (
        "no axis mapping: none was given and none is in force\n  fix: pass mapping=, or enter axis_mapping"
    )
    with pytest.raises(ns.NoMeshError) as caught:
        ns.plan(struct("a", 8), {"a": "data"})
    assert str(caught.value) == (
        "no mesh: none was given and none is in force\n  fix: pass mesh=, or enter jax.set_mesh"
    )
    x = na(counting(8), "a")
    for run in (lambda x: ns.shard(x, {"a": "data"}), jax.jit(lambda x: ns.shard(x, {"a": "data"}))):
        with pytest.raises(ns.NoMeshError) as caught:
            run(x)
        assert str(caught.value) == (
            "shard: there is an axis mapping, but no mesh was given and none is in force\n"
            "  fix: pass mesh=, or enter jax.set_mesh"
        )
    with ns.axis_mapping({"a": "data"}), pytest.raises(ns.NoMeshError):
        ns.auto_sharded(x)


@pytest.mark.filterwarnings("ignore:.*context manager has been deprecated:DeprecationWarning")
def test_two_meshes_in_force() -> None:
    x = na(counting(8), "a")
    with M8, jax.set_mesh(M8_REVERSED):
        with pytest.raises(ns.AmbiguousMeshError) as caught:
            ns.shard(x, {"a": "data"})
        assert str(caught.value) == (
            "two meshes are in force: jax.set_mesh gives ('data'=8) on devices [7, 6, 5, 4, 3, 2, 1, 0],"
            " `with mesh:` gives ('data'=8) on devices [0, 1, 2, 3, 4, 5, 6, 7]\n"
            "  fix: leave one of the two contexts, or pass mesh="
        )
        assert ns.shard(x, {"a": "data"}, M42).array.sharding.mesh is M42
    with M8, jax.set_mesh(M8):
        assert ns.shard(x, {"a": "data"}).array.sharding.mesh is M8


def test_what_is_no_mesh() -> None:
    plain = resolve_mesh.__wrapped__  # type: ignore[attr-defined]
    with pytest.raises(TypeError) as caught:
        plain("mesh")
    assert str(caught.value) == "mesh must be a jax.sharding.Mesh or AbstractMesh, not str"
