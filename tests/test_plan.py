"""The planner: which candidate wins, paths, bytes, module fields, names that do not fit, policies."""

import itertools
import math
import warnings
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import haliax as hax
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support import M42, counting, na, unchecked

import namedshard as ns
from namedshard import _errors

ABSTRACT = AbstractMesh((4, 2), ("data", "model"))


def struct(names: str, *shape: int, dtype: Any = jnp.float32) -> hax.NamedArray:
    return na(jax.ShapeDtypeStruct(shape, dtype), names)


def spec_of(x: Any, mapping: Any, mesh: Any = ABSTRACT, **policy: Any) -> P:
    (leaf,) = ns.plan(x, mapping, mesh, **policy).leaves
    return leaf.spec


# --- rules ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mapping", "spec"),
    [
        ({}, P(None, None)),
        ({"a": "data"}, P("data", None)),
        ({"b": "model", "a": "data"}, P("data", "model")),
        ({"a": ("data", "model")}, P(("data", "model"), None)),
        ({"a": ("model", "data")}, P(("model", "data"), None)),
        ({"a": None, "b": ["data"], "elsewhere": "absent"}, P(None, "data")),
    ],
)
def test_plain_rules(mapping: Any, spec: P) -> None:
    assert spec_of(struct("a b", 8, 8), mapping) == spec


f = ns.first


@pytest.mark.parametrize(
    ("mapping", "spec", "lost"),
    [
        # The order of the mapping decides between competing axes, not the order of the array's.
        ({"a": f("data", None), "b": f("data", "model")}, P("data", "model"), {"b": (("data", "busy"),)}),
        ({"b": f("data", None), "a": f("data", "model")}, P("model", "data"), {"a": (("data", "busy"),)}),
        ({"a": "data", "b": f("data", None)}, P("data", None), {"b": (("data", "busy"),)}),
        ({"b": f("data", "model"), "a": "model"}, P("model", "data"), {}),
        # One mesh axis of a product being taken is enough to lose.
        ({"a": "model", "b": f(("data", "model"), "data")}, P("model", "data"), {"b": ((("data", "model"), "busy"),)}),
        ({"a": f(("data", "model"), None), "b": f("model", "data", None)}, P(("data", "model"), None), None),
        # Absent, also as a part of a product.
        ({"a": f("nope", "model")}, P("model", None), {"a": (("nope", "absent"),)}),
        ({"a": f(("data", "nope"), "data")}, P("data", None), {"a": ((("data", "nope"), "absent"),)}),
        # Nothing after None is tried.
        ({"a": f(None, "data")}, P(None, None), {}),
        ({"a": f("nope", None, "data")}, P(None, None), {"a": (("nope", "absent"),)}),
    ],
)
def test_candidates_in_order(mapping: Any, spec: P, lost: Any) -> None:
    (leaf,) = ns.plan(struct("a b", 8, 8), mapping, ABSTRACT).leaves
    assert leaf.spec == spec
    if lost is not None:
        assert {c.axis: c.lost for c in leaf.why if c.lost} == lost
    assert [(c.axis, c.size, c.won) for c in leaf.why] == [("a", 8, spec[0]), ("b", 8, spec[1])]
    assert [c.rule for c in leaf.why] == [ns.AxisMapping(mapping).rules.get(c.axis) for c in leaf.why]


def test_a_candidate_that_does_not_divide_gives_way() -> None:
    (leaf,) = ns.plan(struct("a", 6), {"a": f(("data", "model"), "data", "model", None)}, ABSTRACT).leaves
    assert leaf.spec == P("model")
    assert leaf.why[0].lost == ((("data", "model"), "indivisible"), ("data", "indivisible"))


def test_a_mesh_axis_that_lost_is_free_for_others() -> None:
    mapping = {"a": f("data", "model"), "b": f("data", "model")}
    assert spec_of(struct("a b", 6, 8), mapping) == P("model", "data")


def test_mesh_axes_of_size_one_always_divide() -> None:
    assert spec_of(struct("a", 7), {"a": "x"}, AbstractMesh((1, 8), ("x", "y"))) == P("x")


@st.composite
def problems(draw: Any) -> tuple[dict[str, int], dict[str, int], dict[str, tuple[Any, ...]]]:
    mesh_axes = {name: draw(st.sampled_from([1, 2, 3, 4])) for name in ("x", "y", "z")}
    axes = {name: draw(st.sampled_from([1, 2, 4, 6, 12, 5])) for name in draw(st.permutations("abc"))}
    products = st.lists(st.sampled_from("xyzw"), min_size=1, max_size=2, unique=True)
    candidates = st.one_of(st.none(), products.map(lambda p: tuple(p) if len(p) > 1 else p[0]))
    rules = {a: tuple(draw(st.lists(candidates, min_size=1, max_size=3))) for a in draw(st.permutations("abc"))}
    return mesh_axes, axes, rules


@given(problems())
def test_the_first_candidate_wins_that_exists_is_free_and_divides(problem: Any) -> None:
    """Against the definition, written down again in the plainest way."""
    mesh_axes, axes, rules = problem
    taken: set[str] = set()
    want: dict[str, Any] = {}
    for axis, candidates in rules.items():
        for c in candidates:
            names = () if c is None else (c,) if isinstance(c, str) else c
            exists = all(n in mesh_axes for n in names)
            if exists and not taken & set(names) and axes[axis] % math.prod(mesh_axes[n] for n in names) == 0:
                want[axis] = c
                taken |= set(names)
                break
    mesh = AbstractMesh(tuple(mesh_axes.values()), tuple(mesh_axes))
    x = struct(" ".join(axes), *axes.values())
    mapping = {a: ns.first(*c) for a, c in rules.items()}
    if len(want) < len(rules):
        with pytest.raises(ns.NoCandidateError):
            ns.plan(x, mapping, mesh)
        return
    (leaf,) = ns.plan(x, mapping, mesh).leaves
    assert leaf.spec == P(*(want[a] for a in axes))
    shard_shape = NamedSharding(mesh, leaf.spec).shard_shape(tuple(axes.values()))
    assert leaf.bytes_per_device == 4 * math.prod(shard_shape)
    assert leaf.bytes == 4 * math.prod(axes.values())


# --- what a plan says -------------------------------------------------------------------------------------------------


def test_a_plan_tells_of_every_leaf() -> None:
    tree = {
        "w": struct("a b", 8, 6, dtype=jnp.bfloat16),
        "plain": jax.ShapeDtypeStruct((3,), jnp.int32),
        "scalar": struct(""),
        "n": 3,
        "none": None,
        "text": "s",
    }
    p = ns.plan(tree, {"a": "data", "b": "model"}, ABSTRACT, memory_kind="pinned_host")
    assert [leaf.path for leaf in p.leaves] == ["['n']", "['plain']", "['scalar']", "['text']", "['w']"]
    w = p["['w']"]
    assert (w.axes, w.shape, w.dtype) == ((("a", 8), ("b", 6)), (8, 6), jnp.bfloat16)
    assert (w.spec, w.memory_kind, w.bytes, w.bytes_per_device) == (P("data", "model"), "pinned_host", 96, 12)
    assert p["['scalar']"].spec == P() and p["['scalar']"].bytes_per_device == 4
    plain = p["['plain']"]
    assert (plain.axes, plain.spec, plain.shape, plain.bytes, plain.bytes_per_device) == (None, None, (3,), 12, 12)
    assert p["['n']"].shape is None and p["['n']"].spec is None and p["['n']"].bytes == 0
    assert p.bytes_per_device == 16
    assert p.mapping == {"a": "data", "b": "model"} and p.mesh is ABSTRACT
    assert p.specs["w"].array == P("data", "model") and p.specs["plain"] is None
    assert p.shardings["w"].array == NamedSharding(ABSTRACT, P("data", "model"), memory_kind="pinned_host")
    with pytest.raises(KeyError) as caught:
        p["['v']"]
    assert caught.value.args == ("no leaf \"['v']\" (did you mean \"['w']\"?)",)


def test_shardings_can_be_given_to_jax() -> None:
    tree = {"w": na(counting(8, 6), "a b"), "b": na(counting(8), "a")}
    p = ns.plan(tree, {"a": "data", "b": "model"}, M42)
    placed = jax.jit(lambda t: t, out_shardings=p.shardings)(tree)
    assert placed["w"].array.sharding.spec == P("data", "model")


class Linear(eqx.Module):
    weight: Any = eqx.field(metadata={"axis_names": ("out", "in")})
    bias: Any = eqx.field(metadata={"axis_names": "out"})
    scale: Any
    names: tuple[str, ...] = eqx.field(static=True, default=())


class Model(eqx.Module):
    layers: list[Any]
    head: Linear
    embed: hax.NamedArray
    tied: Any = None


def linear(*out_in: int, **changes: Any) -> Linear:
    out, inn = out_in
    return Linear(**{"weight": counting(out, inn), "bias": counting(out), "scale": np.float32(2), **changes})


def test_module_fields_declared_with_names_are_planned_like_named_arrays() -> None:
    model = Model(
        [linear(8, 4), {"deep": linear(4, 8)}, None],
        linear(8, 8, weight=na(counting(8, 8), "in out"), bias=None),
        na(counting(4, 8), "vocab in"),
    )
    p = ns.plan(model, {"out": "data", "in": "model"}, ABSTRACT)
    assert {leaf.path: leaf.spec for leaf in p.leaves} == {
        "layers[0].weight": P("data", "model"),
        "layers[0].bias": P("data"),
        "layers[0].scale": None,
        "layers[1]['deep'].weight": P("data", "model"),
        "layers[1]['deep'].bias": P("data"),
        "layers[1]['deep'].scale": None,
        "head.weight": P("model", "data"),
        "head.scale": None,
        "embed": P(None, "model"),
    }
    assert len(p.leaves) == len(jax.tree.leaves(model))


def test_a_field_may_hold_a_module_or_no_array() -> None:
    odd = Linear(weight=linear(8, 4), bias=3, scale=None)
    p = ns.plan(odd, {"out": "data", "in": "model"}, ABSTRACT)
    assert [(leaf.path, leaf.spec) for leaf in p.leaves] == [
        ("weight.weight", P("data", "model")),
        ("weight.bias", P("data")),
        ("weight.scale", None),
        ("bias", None),
    ]


def test_stacked_modules_are_planned_outside_of_the_loop_and_in_it() -> None:
    stacked = jax.tree.map(lambda *xs: np.stack(xs), *(linear(8, 4) for _ in range(3)))
    mapping = {"out": "data", "in": "model"}
    p = ns.plan(stacked, mapping, ABSTRACT)
    assert [(leaf.spec, leaf.axes) for leaf in p.leaves] == [
        (P(None, "data", "model"), (("_", 3), ("out", 8), ("in", 4))),
        (P(None, "data"), (("_", 3), ("out", 8))),
        (None, None),
    ]
    seen: list[Any] = []
    jax.eval_shape(jax.vmap(lambda m: seen.append(ns.plan(m, mapping, ABSTRACT))), stacked)
    assert seen[0]["weight"].spec == P("data", "model")


def test_paths_are_those_of_jax_without_what_is_inside_of_a_named_array() -> None:
    tree = ({"x": [struct("a", 8)]}, linear(8, 4), [3])
    keystrs = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    planned = [leaf.path for leaf in ns.plan(tree, {}, ABSTRACT).leaves]
    assert len(keystrs) == len(planned)
    assert all(k.removeprefix(".").startswith(path) for k, path in zip(keystrs, planned, strict=True))
    assert planned == ["[0]['x'][0]", "[1].weight", "[1].bias", "[1].scale", "[2][0]"]


# --- leaves that are left ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [None, True, 3, 2.5, "text", object()])
def test_a_named_array_may_hold_anything(inside: Any) -> None:
    odd = unchecked(inside, "a", 8)
    p = ns.plan(odd, {"a": "data"}, ABSTRACT)
    assert [leaf.spec for leaf in p.leaves] == ([] if inside is None else [None])
    assert len(p.leaves) == len(jax.tree.leaves(odd))


def test_a_named_array_may_hold_a_tree() -> None:
    odd = unchecked({"one": counting(8), "two": na(counting(8), "a")}, "a", 8)
    p = ns.plan(odd, {"a": "data"}, ABSTRACT)
    assert len(p.leaves) == 2 and all(leaf.spec is None for leaf in p.leaves)


def test_names_that_do_not_fit() -> None:
    p = ns.plan(unchecked(counting(2, 8), "a", 8), {"a": "data"}, ABSTRACT)
    assert [(leaf.spec, leaf.axes, leaf.note) for leaf in p.leaves] == [
        (None, None, "names (a) do not fit rank 2; left as it is")
    ]


def test_dtypes_that_jax_has_not() -> None:
    odd = {
        "text": unchecked(np.array(["a", "b"]), "a", 2),
        "object": unchecked(np.array([None, 1]), "a", 2),
        "time": unchecked(np.zeros(2, "M8[s]"), "a", 2),
        "duration": unchecked(np.zeros(2, "m8[s]"), "a", 2),
        "long": unchecked(np.zeros(2, np.longdouble), "a", 2),
        "void": unchecked(np.zeros(2, [("x", "f4")]), "a", 2),
        "no gradient": unchecked(np.zeros(2, jax.dtypes.float0), "a", 2),
        "text of any length": unchecked(np.array(["a", "b"], np.dtypes.StringDType()), "a", 2),
        "masked objects": unchecked(np.ma.masked_array(np.array([None, 1]), mask=[True, False]), "a", 2),
        "ref": unchecked(jax.new_ref(jnp.zeros(2)), "a", 2),
    }
    p = ns.plan(odd, {"a": "data"}, ABSTRACT)
    assert all(leaf.spec is None for leaf in p.leaves)
    assert p["['text']"].note == "JAX has no dtype <U1; left as it is"
    assert p["['ref']"].note == "a jax.Ref is changed in place; left as it is"
    assert ns.shard(odd, {"a": "data"}, M42) is odd


DTYPES = [
    "bool",
    "int2",
    "int4",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint2",
    "uint4",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float4_e2m1fn",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e8m0fnu",
    "float8_e4m3b11fnuz",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]


def test_every_dtype_that_jax_has() -> None:
    tree = {d: na(np.zeros(8, jnp.dtype(d)), "a") for d in DTYPES}
    tree["swapped"] = na(np.zeros(8, ">f4"), "a")
    tree["key"] = na(jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8)), "a")
    assert {leaf.spec for leaf in ns.plan(tree, {"a": "data"}, ABSTRACT).leaves} == {P("data")}


def factored() -> Any:
    params = {
        "w": struct("a b", 256, 128),
        "scale": struct("b", 128),
        "stack": struct("l a b", 2, 128, 128),
        "one": struct("single", 1),
    }
    return jax.eval_shape(optax.adafactor(1e-3).init, params)


def test_factored_optimizer_states() -> None:
    mapping = {"a": ns.first("data", None), "b": ns.first("data", None), "l": "model", "single": None}
    p = ns.plan(factored(), mapping, ABSTRACT)
    by_path = {leaf.path.removeprefix("[0]."): (leaf.shape, leaf.spec) for leaf in p.leaves}
    assert by_path["v['scale']"] == ((128,), P("data"))
    # Placeholders of one element, and factors of another rank, stay where they are.
    assert by_path["v_row['scale']"] == ((1,), None)
    assert by_path["v['w']"] == ((1,), None)
    assert by_path["v_row['w']"][1] is None and by_path["v_col['w']"][1] is None
    assert by_path["v_row['stack']"][1] is None
    assert by_path["v['one']"] == ((1,), P(None))
    assert p["[0].v_row['scale']"].note == "axis b has another size in the other leaves; left as it is"


def test_an_axis_that_is_of_size_one_everywhere_must_divide() -> None:
    with pytest.raises(ns.IndivisibleAxisError):
        ns.plan({"x": struct("batch", 1), "y": struct("batch c", 1, 8)}, {"batch": "data"}, ABSTRACT)


# --- one policy for axes that do not divide ---------------------------------------------------------------------------


@pytest.fixture
def no_warnings_yet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_errors, "_warned", set())
    yield


@pytest.mark.usefixtures("no_warnings_yet")
def test_replicate_leaves_that_axis_and_warns_once_with_the_leaves() -> None:
    tree = {"a": struct("v e", 17, 4), "b": struct("v", 17), "c": struct("e", 4)}
    mapping = {"v": "data", "e": "model"}
    with pytest.warns(UserWarning) as caught:
        p = ns.plan(tree, mapping, ABSTRACT, indivisible="replicate")
    assert [str(w.message) for w in caught] == [
        '2 of 3 leaves replicated along an axis (indivisible="replicate")\n'
        "  ['a']: axis v=17 is not divisible by mesh axis 'data'=4 (17 = 4*4 + 1)\n"
        "  ['b']: axis v=17 is not divisible by mesh axis 'data'=4 (17 = 4*4 + 1)"
    ]
    assert [leaf.spec for leaf in p.leaves] == [P(None, "model"), P(None), P("model")]
    assert p["['a']"].why[0].lost == (("data", "indivisible"),)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ns.plan(tree, mapping, ABSTRACT, indivisible="replicate")


@pytest.mark.usefixtures("no_warnings_yet")
def test_the_call_overrides_the_mapping() -> None:
    x = struct("v", 17)
    lenient = ns.AxisMapping({"v": "data"}, indivisible="replicate")
    with pytest.warns(UserWarning, match="replicated"):
        assert spec_of(x, lenient) == P(None)
    with pytest.raises(ns.IndivisibleAxisError):
        ns.plan(x, lenient, ABSTRACT, indivisible="error")
    with pytest.raises(ns.IndivisibleAxisError):
        ns.plan(x, {"v": "data"}, ABSTRACT)


@pytest.mark.usefixtures("no_warnings_yet")
def test_replicate_stands_for_a_last_candidate() -> None:
    with pytest.warns(UserWarning, match="axis v=17 is not divisible by mesh axis 'data'=4"):
        assert spec_of(struct("v", 17), {"v": f("nope", "data", "model")}, indivisible="replicate") == P(None)
    # Absent and busy axes are no matter of division.
    for mapping in ({"v": "nope"}, {"w": "data", "v": "data"}, {"v": f("nope")}):
        with pytest.raises(ns.PlanError):
            ns.plan(struct("w v", 8, 8), mapping, ABSTRACT, indivisible="replicate")


# --- the mesh ---------------------------------------------------------------------------------------------------------


def test_the_mesh_and_mapping_of_the_context() -> None:
    x = struct("a", 8)
    with jax.sharding.use_abstract_mesh(ABSTRACT), ns.axis_mapping({"a": "data"}):
        p = ns.plan(x)
    assert p.leaves[0].spec == P("data") and p.mesh == ABSTRACT
    with jax.set_mesh(M42):
        assert ns.plan(x, {"a": "model"}).mesh is M42


def test_axes_that_shard_map_holds_are_left_out() -> None:
    seen: list[Any] = []

    def body(x: Any) -> Any:
        seen.append(ns.plan(na(x, "a b"), {"a": ("data", "model"), "b": "data"}, M42).leaves[0])
        return x

    jax.eval_shape(
        jax.shard_map(body, mesh=M42, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}),
        jax.ShapeDtypeStruct((8, 8), jnp.float32),
    )
    assert seen[0].spec == P("model", None) and seen[0].shape == (2, 8)
    assert seen[0].bytes_per_device == 32


def test_planning_a_long_tree_twice_gives_equal_leaves() -> None:
    tree = [struct("a b", 8 * (1 + i), 8) for i in range(20)]
    one, two = (ns.plan(tree, {"a": "data", "b": "model"}, ABSTRACT) for _ in range(2))
    assert one.leaves == two.leaves
    assert len({leaf.path for leaf in one.leaves}) == 20


def test_mesh_axes_in_any_order_give_the_same_shards() -> None:
    for names in itertools.permutations(("x", "y", "z")):
        sizes = {"x": 2, "y": 2, "z": 3}
        mesh = AbstractMesh(tuple(sizes[n] for n in names), names)
        leaf = ns.plan(struct("a b", 12, 8), {"a": ("x", "z"), "b": "y"}, mesh).leaves[0]
        assert leaf.spec == P(("x", "z"), "y") and leaf.bytes_per_device == 2 * 4 * 4
