"""What `explain` says: the whole table, why candidates lost, where things are, routes, lints, JSON, HTML, colour."""

import re
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from support import E42, unchecked, unreduced

import namedshard as ns

P = PartitionSpec
DEVICES = np.array(jax.devices()[:8])
MESH = Mesh(DEVICES.reshape(2, 4), ("data", "model"))
ABSTRACT = AbstractMesh((2, 4), ("data", "model"))
VOCAB = {"vocab": ns.first("model", "data", None), "inner": "model", "mlp": "model"}


def named(dtype: str = "float32", **axes: int) -> hax.NamedArray:
    """An abstract array with these axes."""
    struct = jax.ShapeDtypeStruct(tuple(axes.values()), dtype)
    return hax.NamedArray(struct, tuple(hax.Axis(name, size) for name, size in axes.items()))


def full(**axes: int) -> hax.NamedArray:
    """A concrete array with these axes."""
    return hax.named(jnp.arange(float(np.prod([*axes.values()]))).reshape(tuple(axes.values())), tuple(axes))


def transformer(layers: int = 6) -> dict[str, Any]:
    """A small model with repeated layers."""
    return {
        "words": named(vocab=30522, embed=384),
        "layers": [
            {
                "query": {"weight": named(inner=384, embed=384), "bias": named(inner=384)},
                "mlp": {"weight": named("bfloat16", mlp=1536, embed=384)},
            }
            for _ in range(layers)
        ],
        "norm": named(embed=384),
    }


# --- the whole table --------------------------------------------------------------------------------------------------

AT_120 = """\
leaf                                    axes                    spec              dtype     per device  route
────────────────────────────────────────────────────────────────────────────────────────────────────────────────
['layers'][0..5]['mlp']['weight'] ×6    mlp=1536, embed=384     P('model', None)  bfloat16     288 KiB  annotate
['layers'][0..5]['query']['bias'] ×6    inner=384               P('model')        float32        384 B  annotate
['layers'][0..5]['query']['weight'] ×6  inner=384, embed=384    P('model', None)  float32      144 KiB  annotate
['norm']                                embed=384               P(None)           float32      1.5 KiB  annotate
['words']                               vocab=30522, embed=384  P('data', None)   float32     22.4 MiB  annotate
  vocab → 'data' by first('model', 'data', None): 'model' is indivisible (30522 = 4*7630 + 2)

all leaves: now abstract
20 leaves, 54.8 MiB; on each of 8 devices 24.9 MiB, of which 1.5 KiB replicated
mesh 'data'=2, 'model'=4; no rule for embed"""

AT_100 = """\
leaf                                    axes                           dtype     per device
───────────────────────────────────────────────────────────────────────────────────────────
['layers'][0..5]['mlp']['weight'] ×6    mlp=1536 → model, embed=384    bfloat16     288 KiB
['layers'][0..5]['query']['bias'] ×6    inner=384 → model              float32        384 B
['layers'][0..5]['query']['weight'] ×6  inner=384 → model, embed=384   float32      144 KiB
['norm']                                embed=384                      float32      1.5 KiB
['words']                               vocab=30522 → data, embed=384  float32     22.4 MiB
  vocab → 'data' by first('model', 'data', None): 'model' is indivisible (30522 = 4*7630 + 2)

all leaves: now abstract, route annotate
20 leaves, 54.8 MiB; on each of 8 devices 24.9 MiB, of which 1.5 KiB replicated
mesh 'data'=2, 'model'=4; no rule for embed"""

AT_80 = """\
leaf                                   axes                           per device
────────────────────────────────────────────────────────────────────────────────
['layers'][0..5]['mlp']['weight'] ×6   mlp=1536 → model, embed=384       288 KiB
['layers'][0..5]['query']['bias'] ×6   inner=384 → model                   384 B
['layers'][0..5]['query']              inner=384 → model, embed=384      144 KiB
  ['weight'] ×6
['norm']                               embed=384                         1.5 KiB
['words']                              vocab=30522 → data, embed=384    22.4 MiB
  vocab → 'data' by first('model', 'data', None): 'model' is indivisible
    (30522 = 4*7630 + 2)

all leaves: now abstract, route annotate
20 leaves, 54.8 MiB; on each of 8 devices 24.9 MiB, of which 1.5 KiB replicated
mesh 'data'=2, 'model'=4; no rule for embed"""


@pytest.mark.parametrize(("width", "table"), [(120, AT_120), (100, AT_100), (80, AT_80)])
def test_the_whole_table(width: int, table: str) -> None:
    explanation = ns.explain(transformer(), VOCAB, ABSTRACT)
    assert explanation.table(width) == table


def test_str_is_as_wide_as_the_terminal_and_120_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    explanation = ns.explain(transformer(), VOCAB, ABSTRACT)
    monkeypatch.setenv("COLUMNS", "80")
    assert str(explanation) == AT_80
    monkeypatch.setenv("COLUMNS", "0")
    monkeypatch.setattr("os.get_terminal_size", lambda _: (_ for _ in ()).throw(OSError))
    assert str(explanation) == AT_120
    assert repr(explanation) == "<Explanation of 20 leaves on mesh 'data'=2, 'model'=4: 0 problems>"


PROBLEMS = """\
leaf           axes               spec  dtype    per device  now                 route
──────────────────────────────────────────────────────────────────────────────────────────
['busy']       heads=8, kv=8      -     float32           -  cpu:0, uncommitted  error
  axes heads and kv are both mapped to mesh axis 'model'
['candidate']  batch=3            -     float32           -  cpu:0, uncommitted  error
  no candidate of first('data', 'model') fits axis batch=3: 'data' is indivisible (3 = 2*1 + 1); 'model' is indivisible
    (3 = 4*0 + 3)
['lost']       mlp=8, embed=4     -     float32           -  cpu:0, uncommitted  error
  axis mlp=8 is mapped to 'modle', but the mesh has 'data'=2, 'model'=4 (did you mean 'model'?)
['odd']        vocab=17, embed=4  -     float32           -  cpu:0, uncommitted  error
  axis vocab=17 is not divisible by mesh axis 'model'=4 (17 = 4*4 + 1)
['plain']      (5,)               -     int64          40 B  host                left
['scalar']     scalar             P()   float32         4 B  cpu:0, uncommitted  from host

6 leaves, 712 B; on each of 8 devices 4 B, of which 4 B replicated
1 leaf is left as it is (40 B)
2 leaves are no array
mesh 'data'=2, 'model'=4; no rule for embed
4 of 6 leaves cannot be placed
fix: map the axis to a mesh axis that exists, or use first(..., None)
fix: map one of the two axes to None or to another mesh axis, or use first(...) to let it give way
fix: end the candidates with None to leave the axis unsharded when nothing fits
fix: pad the axis to 20, or pass indivisible="replicate"
! mapping key 'hads' matches no axis (did you mean 'heads'?)
! mapping key 'seq' matches no axis (the axes are heads, kv, batch, mlp, embed, vocab)
! the rule for mlp ('modle') names mesh axis 'modle', but the mesh has 'data'=2, 'model'=4 (did you mean 'model'?)
! mesh axis 'data'=2 splits no leaf"""


def test_problems_are_shown_not_raised() -> None:
    tree = {
        "odd": full(vocab=17, embed=4),
        "lost": full(mlp=8, embed=4),
        "busy": full(heads=8, kv=8),
        "candidate": full(batch=3),
        "scalar": full(),
        "plain": np.zeros(5, np.int64),
        "number": 3.0,
        "name": "x",
    }
    mapping = {
        "hads": None,
        "seq": "data",
        "vocab": "model",
        "mlp": "modle",
        "heads": "model",
        "kv": "model",
        "batch": ns.first("data", "model"),
    }
    explanation = ns.explain(tree, mapping, MESH)
    assert explanation.table(120) == PROBLEMS
    assert not explanation.ok
    with pytest.raises(ns.PlanError):
        ns.plan(tree, mapping, MESH)


def test_a_tree_that_is_one_array_and_one_that_is_empty() -> None:
    assert ns.explain(named(mlp=8), {"mlp": "model"}, ABSTRACT).table(80).splitlines()[2].startswith("(root)  mlp=8 ")
    assert ns.explain({}, {"mlp": "model"}, ABSTRACT).table(80) == (
        "0 leaves, 0 B; on each of 8 devices 0 B, of which 0 B replicated\n"
        "mesh 'data'=2, 'model'=4\n"
        "! mapping key 'mlp' matches no axis: no leaf has axis names"
    )


def test_context_errors_are_raised() -> None:
    with pytest.raises(ns.NoMappingError):
        ns.explain(transformer(), None, ABSTRACT)
    with pytest.raises(ns.NoMeshError):
        ns.explain(transformer(), VOCAB)
    with pytest.raises(ns.MemoryKindError):
        ns.explain(transformer(), VOCAB, MESH, memory_kind="vmem")
    with jax.set_mesh(MESH), ns.axis_mapping(VOCAB):
        assert ns.explain(transformer()).table(80) == AT_80


@settings(max_examples=60, deadline=None, derandomize=True)
@given(width=st.integers(10, 200), all=st.booleans(), problems=st.booleans())
def test_no_width_breaks_a_word(width: int, all: bool, problems: bool) -> None:
    mapping = {**VOCAB, "vocab": "model"} if problems else VOCAB
    explanation = ns.explain(transformer(3), mapping, ABSTRACT)
    table = explanation.table(width, all=all)
    words = set(table.split())
    for word in ("['words']", "['query']", "vocab=30522", "abstract", "annotate", "indivisible", "(30522", "22.4"):
        if word in explanation.table(1000, all=all):
            assert any(w.strip(",;").endswith(word) or word in w for w in words), (word, table)
    too_long = [line for line in table.splitlines() if len(line) > width]
    assert width < 60 or not too_long, table


# --- rows alike -------------------------------------------------------------------------------------------------------


def paths(tree: Any, mapping: Any = VOCAB, mesh: Any = ABSTRACT, all: bool = False) -> list[str]:
    """The first column of the table."""
    lines = ns.explain(tree, mapping, mesh).table(300, all=all).splitlines()[2:]
    return [re.split(r"  +", line)[0] for line in lines[: lines.index("")] if not line.startswith(" ")]


def test_rows_alike_become_one() -> None:
    layers = [{"w": named(mlp=8)} for _ in range(6)]
    assert paths({"layers": layers}) == ["['layers'][0..5]['w'] ×6"]
    assert paths({"layers": layers}, all=True) == [f"['layers'][{i}]['w']" for i in range(6)]
    assert paths({"layers": layers[:1]}) == ["['layers'][0]['w']"]


@pytest.mark.parametrize(
    "other",
    [
        named(mlp=16),
        named("bfloat16", mlp=8),
        named(up=8),
        full(mlp=8),
        ns.with_mapping(named(mlp=8), {"mlp": None}),
        jax.ShapeDtypeStruct((8,), "float32"),
        named(mlp=7),
    ],
    ids=["size", "dtype", "axis", "placement", "mapping", "plain", "problem"],
)
def test_a_row_that_differs_in_anything_stands_alone(other: Any) -> None:
    tree = [named(mlp=8), named(mlp=8), other, named(mlp=8), named(mlp=8), named(mlp=8)]
    assert paths(tree) == ["[0..1,3..5] ×5", "[2]"]


def test_two_indices_collapse_together() -> None:
    blocks = [{"layers": [named(mlp=8) for _ in range(3)]} for _ in range(4)]
    assert paths(blocks) == ["[0..3]['layers'][0..2] ×12"]
    blocks[1]["layers"][1] = named(mlp=16)
    assert paths(blocks) == ["[0,2..3]['layers'][0..2] ×9", "[1]['layers'][0,2] ×2", "[1]['layers'][1]"]


def test_several_mesh_axes_and_memory_kind_are_shown() -> None:
    line = ns.explain([named(mlp=8)], {"mlp": ("data", "model")}, ABSTRACT, memory_kind="pinned_host").table(200)
    assert "P(('data', 'model')) pinned_host" in line
    narrow = ns.explain([named(mlp=8, embed=4)], {"mlp": ("data", "model")}, ABSTRACT).table(60)
    assert "mlp=8 → data × model" in narrow.replace("\n", "")


# --- why --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mapping", "said"),
    [
        ({"mlp": "model"}, ()),
        ({"mlp": ns.first("model", None)}, ()),
        ({"mlp": ns.first("pod", "model")}, ("mlp → 'model' by first('pod', 'model'): 'pod' is absent",)),
        (
            {"embed": "model", "mlp": ns.first("model", ("data", "model"), None)},
            (
                "mlp is left whole by first('model', ('data', 'model'), None): 'model' is busy (axis embed has it);"
                " ('data', 'model') is busy (axis embed has it)",
            ),
        ),
        (
            {"odd": ns.first(("data", "model"), "data", None)},
            (
                "odd is left whole by first(('data', 'model'), 'data', None): ('data', 'model') is indivisible"
                " (7 = 8*0 + 7); 'data' is indivisible (7 = 2*3 + 1)",
            ),
        ),
        (
            ns.AxisMapping({"odd": "model"}, indivisible="replicate"),
            ("odd is left whole: 'model' is indivisible (7 = 4*1 + 3)",),
        ),
    ],
)
def test_why(mapping: Any, said: tuple[str, ...]) -> None:
    row = ns.explain(named(mlp=8, embed=8, odd=7), mapping, ABSTRACT).rows[0]
    assert (row.why, row.problems) == (said, ())


def test_an_array_with_its_own_mapping_says_so() -> None:
    row = ns.explain(ns.with_mapping(named(mlp=8), {"mlp": "data"}), {"mlp": "model"}, ABSTRACT).rows[0]
    assert row.plan.spec == P("data")
    assert row.why == ("carries its own mapping {'mlp': 'data'}",)


def test_inside_shard_map_the_manual_axes_are_left_out() -> None:
    seen: list[ns.Explanation] = []

    def local(x: jax.Array) -> jax.Array:
        mapping = ns.AxisMapping({"b": ns.first(("data", "model"), "data"), "f": "model"}, indivisible="replicate")
        seen.append(ns.explain(hax.named(x, ("b", "f")), mapping))
        return x

    with jax.set_mesh(MESH):
        jax.jit(jax.shard_map(local, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}))(jnp.zeros((6, 3)))
    (row,) = seen[0].rows
    assert (row.now, row.route, row.plan.spec) == ("traced", "traced", P(None, None))
    assert row.why == (
        "b is left whole by first(('data', 'model'), 'data'): ('data', 'model') is indivisible (3 = 4*0 + 3)",
        "f is left whole: 'model' is indivisible (3 = 4*0 + 3)",
    )
    assert [lint.text for lint in seen[0].lints] == ["mesh axis 'model'=4 splits no leaf"]


# --- now and route ----------------------------------------------------------------------------------------------------

REVERSED = Mesh(DEVICES[::-1].reshape(2, 4), ("data", "model"))
OTHER = Mesh(DEVICES[:4], ("x",))
EXPLICIT = Mesh(DEVICES.reshape(2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)


def put(sharding: Any) -> hax.NamedArray:
    return hax.NamedArray(jax.device_put(np.arange(8.0, dtype=np.float32), sharding), (hax.Axis("mlp", 8),))


def placements() -> dict[str, tuple[hax.NamedArray, str, str]]:
    """(array, now, route) for a mapping of mlp to 'model' on MESH."""
    mlp = (hax.Axis("mlp", 8),)
    return {
        "host": (hax.NamedArray(np.zeros(8, np.float32), mlp), "host", "from host"),
        "uncommitted": (hax.NamedArray(jnp.zeros(8), mlp), "cpu:0, uncommitted", "from host"),
        "one device": (put(DEVICES[3]), "cpu:3", "device_put"),
        "single device": (put(SingleDeviceSharding(DEVICES[2])), "cpu:2", "device_put"),
        "in place": (put(NamedSharding(MESH, P("model"))), "P('model')", "keep"),
        "elsewhere": (put(NamedSharding(MESH, P("data"))), "P('data')", "constrain"),
        "other order": (
            put(NamedSharding(REVERSED, P("model"))),
            "P('model') in another device order",
            "permute",
        ),
        "other mesh": (put(NamedSharding(OTHER, P("x"))), "P('x') on mesh 'x'=4", "device_put"),
        "other types": (put(NamedSharding(EXPLICIT, P("model"))), "P('model') on other axis types", "constrain"),
        "pinned": (
            put(NamedSharding(MESH, P("data"), memory_kind="pinned_host")),
            "P('data'), pinned_host",
            "constrain",
        ),
        "abstract": (named(mlp=8), "abstract", "annotate"),
        "annotated": (
            hax.NamedArray(jax.ShapeDtypeStruct((8,), "float32", sharding=NamedSharding(MESH, P("data"))), mlp),
            "P('data')",
            "annotate",
        ),
    }


@pytest.mark.parametrize("name", placements())
def test_now_and_route(name: str) -> None:
    array, now, route = placements()[name]
    row = ns.explain(array, {"mlp": "model"}, MESH).rows[0]
    assert (row.now, row.route) == (now, route)


def test_other_devices_of_the_same_mesh_shape() -> None:
    here, there = (Mesh(DEVICES[i : i + 4], ("model",)) for i in (0, 4))
    row = ns.explain(put(NamedSharding(there, P("model"))), {"mlp": "model"}, here).rows[0]
    assert (row.now, row.route) == ("P('model') on other devices", "device_put")


def test_a_move_to_another_memory_kind() -> None:
    in_place = put(NamedSharding(MESH, P("model")))
    row = ns.explain(in_place, {"mlp": "model"}, MESH, memory_kind="pinned_host").rows[0]
    assert (row.now, row.route, row.plan.memory_kind) == ("P('model')", "device_put", "pinned_host")


def test_what_is_explained_is_what_is_done() -> None:
    tree = {name: array for name, (array, _, _) in placements().items()}
    before = ns.explain(tree, {"mlp": "model"}, MESH)
    placed = ns.shard(tree, {"mlp": "model"}, MESH)
    leaves = jax.tree_util.tree_leaves(placed)
    assert [row.plan.spec for row in before.rows] == [leaf.sharding.spec for leaf in leaves]
    assert [row.plan.bytes_per_device for row in before.rows] == [8] * len(leaves)
    assert all(leaf.addressable_shards[0].data.nbytes == 8 for leaf in leaves if isinstance(leaf, jax.Array))
    assert {row.route for row in ns.explain(placed, {"mlp": "model"}, MESH).rows} <= {"keep", "annotate"}


def test_traced_arrays() -> None:
    seen: list[ns.Explanation] = []

    @jax.jit
    def f(x: jax.Array) -> jax.Array:
        seen.append(ns.explain(hax.named(x, "mlp"), {"mlp": "model"}, MESH))
        return x

    f(jnp.zeros(8))
    assert (seen[0].rows[0].now, seen[0].rows[0].route) == ("traced", "traced")


def test_arrays_of_every_kind() -> None:
    parts = unreduced(np.eye(4, dtype=np.float32))
    struct = jax.ShapeDtypeStruct((4, 4), "float32", sharding=parts.sharding)
    reduced = jax.ShapeDtypeStruct((4, 4), "float32", sharding=NamedSharding(E42, P("data", reduced={"model"})))
    masked = np.ma.masked_array(np.eye(4), mask=np.eye(4))
    record = np.zeros((4, 4), [("x", "f4")])
    values = {"masked": masked, "parts": parts, "record": record, "ref": jax.new_ref(jnp.ones((4, 4)))}
    values |= {"reduced": reduced, "struct": struct}
    named = {name: unchecked(x, "mlp k", 4, 4) for name, x in values.items()}
    explanation = ns.explain((named, values), {"mlp": "data"}, E42)
    held, typed = "P(None, None, unreduced={'model'})", "P('data', reduced={'model'})"
    assert [(row.now, row.route) for row in explanation.rows] == [
        ("host", "error"),
        (held, "constrain"),
        ("host", "left"),
        (typed, "annotate"),
        ("host", "left"),
        (held, "annotate"),
        *[(now, "left") for now in ("host", held, "host", typed, "host", held)],
    ]
    assert explanation.rows[0].problems == ("a masked array, whose mask would be lost",)
    assert "a jax.Ref is changed in place" in str(explanation)


def test_a_deleted_array_is_a_problem() -> None:
    array = put(NamedSharding(MESH, P("data")))
    array.array.delete()
    explanation = ns.explain([array, jnp.zeros(3)], {"mlp": "model"}, MESH)
    assert (explanation.rows[0].now, explanation.rows[0].route) == ("deleted", "error")
    assert explanation.rows[0].problems == ("the array was donated or deleted",)
    assert explanation.rows[1].route == "left"


def test_an_abstract_mesh_cannot_say_how_an_array_would_move() -> None:
    row = ns.explain(put(DEVICES[1]), {"mlp": "model"}, ABSTRACT).rows[0]
    assert (row.now, row.route) == ("cpu:1", "needs devices")
