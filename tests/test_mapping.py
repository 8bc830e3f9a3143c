"""AxisMapping, first, carried mappings, and the context that Haliax shares."""

import copy
import dataclasses
import io
import pickle
import threading
import warnings
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from haliax.partitioning import current_thread_local_mapping
from jax.sharding import PartitionSpec as P
from support import M8, M42, bits, counting, na

import namedshard as ns
from namedshard import _errors
from namedshard._plan.mapping import current_mapping

# --- AxisMapping ------------------------------------------------------------------------------------------------------


def test_it_reads_as_a_mapping_of_first_candidates() -> None:
    m = ns.AxisMapping({"a": ns.first("x", None), "b": ("x", "y"), "c": None, "d": "y"})
    assert dict(m) == {"a": "x", "b": ("x", "y"), "c": None, "d": "y"}
    assert list(m) == ["a", "b", "c", "d"] and len(m) == 4 and "a" in m and "z" not in m
    assert m.get("z") is None
    with pytest.raises(KeyError):
        m["z"]
    assert m.rules["a"] == ns.first("x", None)


def test_values_are_normalized() -> None:
    m = ns.AxisMapping({"one": ("x",), "none": (), "list": ["x", "y"]})
    assert dict(m) == {"one": "x", "none": None, "list": ("x", "y")}
    assert ns.first(("x",), ()) == ns.first("x", None)


def test_equal_mappings_hash_alike_and_order_counts() -> None:
    a = ns.AxisMapping({"a": "x", "b": ns.first("y", None)})
    assert a == ns.AxisMapping({"a": "x", "b": ns.first("y", None)})
    assert hash(a) == hash(ns.AxisMapping(dict(a.rules)))
    # Where axes compete the order decides, so mappings of another order are others.
    assert a != ns.AxisMapping({"b": ns.first("y", None), "a": "x"})
    assert a != ns.AxisMapping(a, indivisible="replicate")
    assert ns.AxisMapping({"a": "x"}) == {"a": "x"} and ns.AxisMapping({"a": "x"}) != {"a": "y"}
    assert ns.AxisMapping({"a": "x"}) != 3


def test_it_is_frozen() -> None:
    m = ns.AxisMapping({"a": "x"})
    with pytest.raises(AttributeError, match=r"^AxisMapping is frozen; use `mapping \| \{\.\.\.\}` to make another$"):
        m.indivisible = "replicate"
    with pytest.raises(TypeError):
        m["a"] = "y"  # type: ignore[index]


def test_the_source_of_a_mapping_may_change_afterwards() -> None:
    rules = {"a": "x"}
    m = ns.AxisMapping(rules)
    rules["a"] = "y"
    assert m["a"] == "x"


def test_merging_lets_the_right_hand_side_win_and_keeps_the_order() -> None:
    left = ns.AxisMapping({"a": "x", "b": "y"}, indivisible="replicate")
    merged = left | {"b": None, "c": "z"}
    assert list(merged.items()) == [("a", "x"), ("b", None), ("c", "z")]
    assert merged.indivisible == "replicate"
    assert (left | ns.AxisMapping({"c": "z"})).indivisible == "error"
    reverse = {"b": None, "c": "z"} | left
    assert list(reverse.items()) == [("b", "y"), ("c", "z"), ("a", "x")] and reverse.indivisible == "replicate"


def test_copies_and_pickles_are_equal() -> None:
    m = ns.AxisMapping({"a": ns.first("x", ("x", "y"), None), "b": "y"}, indivisible="replicate")
    for other in (pickle.loads(pickle.dumps(m)), copy.copy(m), copy.deepcopy(m)):
        assert other == m and hash(other) == hash(m) and other.rules == m.rules


def test_its_repr_can_be_typed_in() -> None:
    m = ns.AxisMapping({"a": ns.first("x", ("x", "y"), None), "b": "y"}, indivisible="replicate")
    assert repr(m) == "AxisMapping({'a': first('x', ('x', 'y'), None), 'b': 'y'}, indivisible='replicate')"
    assert eval(repr(m), {"AxisMapping": ns.AxisMapping, "first": ns.first}) == m
    assert repr(ns.AxisMapping()) == "AxisMapping({})"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ns.first(), "first() needs at least one candidate"),
        (
            lambda: ns.AxisMapping({"a": 3}),
            "axis 'a': 3 is not a rule\n"
            "  fix: use a mesh axis name, a tuple of names (their product), first(...), or None",
        ),
        (
            lambda: ns.AxisMapping({"a": ("x", None)}),
            "axis 'a': ('x', None) is not a rule\n"
            "  fix: use a mesh axis name, a tuple of names (their product), first(...), or None",
        ),
        (lambda: ns.AxisMapping({"a": ("x", "x")}), "axis 'a': mesh axes ('x', 'x') repeat"),
        (lambda: ns.first(("x", "x")), "first(...): mesh axes ('x', 'x') repeat"),
    ],
)
def test_rules_that_are_none(make: Any, text: str) -> None:
    with pytest.raises(ns.MappingError) as caught:
        make()
    assert str(caught.value) == text


def test_wrong_types_are_refused() -> None:
    # The annotations say so to the type checker of these tests; outside of them the message is the library's own.
    plain = ns.AxisMapping.__init__.__wrapped__  # type: ignore[attr-defined]
    with pytest.raises(ns.MappingError) as caught:
        plain(object.__new__(ns.AxisMapping), {3: "x"})
    assert str(caught.value) == "mapping key 3 is not an axis name: use a string"
    with pytest.raises(ns.MappingError) as caught:
        plain(object.__new__(ns.AxisMapping), {"a": "x"}, indivisible="ignore")
    assert str(caught.value) == "indivisible='ignore': use 'error' or 'replicate'"


# --- the context ------------------------------------------------------------------------------------------------------


def test_haliax_and_namedshard_see_each_other() -> None:
    assert current_mapping() is None
    with hax.axis_mapping({"a": "data"}):
        assert current_mapping() == {"a": "data"}
        with ns.axis_mapping({"b": "model"}) as inner:
            assert inner == {"b": "model"}
            assert current_thread_local_mapping() == {"b": "model"}
            with hax.axis_mapping({"c": "data"}):
                assert current_mapping() == {"c": "data"}
            assert current_mapping() is inner
        assert current_mapping() == {"a": "data"}
    assert current_mapping() is None


def test_on_a_merge_the_inner_mapping_wins_and_in_haliax_it_loses() -> None:
    with hax.axis_mapping({"a": "data", "b": "model"}):
        with ns.axis_mapping({"b": None}, merge=True) as mine:
            assert list(mine.items()) == [("a", "data"), ("b", None)]
            assert hax.partitioning.pspec_for_axis(("a", "b")) == P("data", None)
        with hax.axis_mapping({"b": None}, merge=True):
            assert current_mapping() == {"a": "data", "b": "model"}
    with ns.axis_mapping({"b": "data"}, merge=True) as alone:
        assert alone == {"b": "data"}


def test_candidates_and_policy_outlive_haliax_context() -> None:
    outer = ns.AxisMapping({"a": ns.first("model", "data", None)}, indivisible="replicate")
    with ns.axis_mapping(outer):
        assert current_mapping() is outer
        assert current_thread_local_mapping() == {"a": "model"}
        with ns.axis_mapping({"b": "data"}, merge=True) as merged:
            assert merged.rules == {"a": ns.first("model", "data", None), "b": "data"}
            assert merged.indivisible == "replicate"
        with ns.axis_mapping(ns.AxisMapping({"b": "data"}), merge=True) as merged:
            assert merged.indivisible == "error"
    with hax.axis_mapping({"a": ns.first("x", "y")}):
        assert current_mapping() == ns.AxisMapping({"a": ns.first("x", "y")})


def test_a_context_ends_with_its_block_also_by_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), ns.axis_mapping({"a": "x"}):
        raise ZeroDivisionError
    assert current_mapping() is None


def test_a_haliax_mapping_that_changes_in_place_is_seen_changed() -> None:
    with hax.axis_mapping({"a": "data"}):
        raw = current_thread_local_mapping()
        assert raw is not None
        assert current_mapping() == {"a": "data"}
        raw["a"] = "model"
        assert current_mapping() == {"a": "model"}


def in_thread(f: Any) -> Any:
    """What f returns or raises in a thread of its own."""
    out: list[Any] = []

    def work() -> None:
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                out.append((f(), [str(w.message) for w in caught]))
        except Exception as error:
            out.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return out[0]


def test_a_thread_without_the_context_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_errors, "_warned", set())
    x = na(counting(8), "b")
    hint = "in this thread (another thread has one: contexts are thread-local, so pass mapping= and mesh= along)"
    with jax.set_mesh(M8), ns.axis_mapping({"b": "data"}):
        result, said = in_thread(lambda: ns.shard(x))
        assert result is x
        assert said == [f"shard: no axis mapping was given and none is in force; the tree is returned as it is {hint}"]
        error = in_thread(lambda: ns.shard(x, {"b": "data"}))
        assert isinstance(error, ns.NoMeshError)
        assert str(error) == (
            f"shard: there is an axis mapping, but no mesh was given and none is in force {hint}\n"
            "  fix: pass mesh=, or enter jax.set_mesh"
        )
        placed, said = in_thread(lambda: ns.shard(x, {"b": "data"}, M8))
        assert placed.array.sharding.spec == P("data") and said == []
        assert ns.shard(x).array.sharding.spec == P("data")


def test_without_any_mapping_shard_warns_once_and_auto_sharded_never(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_errors, "_warned", set())
    x = na(counting(8), "b")
    with pytest.warns(RuntimeWarning) as caught:
        assert ns.shard(x) is x
    assert [str(w.message) for w in caught] == [
        "shard: no axis mapping was given and none is in force; the tree is returned as it is"
    ]
    assert ns.shard(x) is x and ns.auto_sharded(x) is x and ns.auto_sharded(x, M8) is x


# --- arrays that carry a mapping --------------------------------------------------------------------------------------

OWN = ns.AxisMapping({"a": "data"})


def carrier() -> hax.NamedArray:
    return ns.with_mapping(na(jnp.asarray(counting(8, 4)), "a b"), {"a": "data"})


def round_trips(x: hax.NamedArray) -> dict[str, Any]:
    """The array, after each thing that keeps the metadata of a tree."""
    optimizer = optax.adam(1e-3)
    state = optimizer.init({"w": x})
    updates, state = optimizer.update({"w": x}, state, {"w": x})
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, x)
    file.seek(0)
    return {
        "tree.map": jax.tree.map(lambda v: v + 1, x),
        "jit": jax.jit(lambda v: v)(x),
        "filter_jit": eqx.filter_jit(lambda v: v)(x),
        "grad": jax.grad(lambda v: (v.array**2).sum())(x),
        "filter_grad": eqx.filter_grad(lambda v: (v.array**2).sum())(x),
        "vmap": jax.vmap(lambda v: v)(x),
        "scan": jax.lax.scan(lambda c, v: (c, v), 0, x)[1],
        "optimizer state": state[0].mu["w"],
        "updates": updates["w"],
        "optax.apply_updates": optax.apply_updates({"w": x}, updates)["w"],
        "eqx.apply_updates": eqx.apply_updates({"w": x}, updates)["w"],
        "serialised": eqx.tree_deserialise_leaves(file, x),
        "pickle": pickle.loads(pickle.dumps(x)),
        "copy": copy.copy(x),
        "deepcopy": copy.deepcopy(x),
        "partition": eqx.combine(*eqx.partition({"w": x}, eqx.is_array))["w"],
        "eval_shape": jax.eval_shape(lambda v: v, x),
        "shard": ns.shard(x, {"b": "model"}, M42),
    }


def test_a_carried_mapping_survives_whatever_keeps_a_tree() -> None:
    kept = round_trips(carrier())
    assert {name: ns.carried_mapping(x) for name, x in kept.items()} == dict.fromkeys(kept, OWN)
    assert bits(kept["serialised"].array) == bits(counting(8, 4)) == bits(kept["pickle"].array)
    assert [a.name for a in kept["scan"].axes] == ["a", "b"]


def test_arithmetic_gives_a_plain_array() -> None:
    x = carrier()
    for y in (x + 1, -x, hax.sum(x, "b"), x["a", 0], x.rename({"a": "c"}), x.astype(jnp.int32), hax.where(x > 1, x, x)):
        assert type(y) is hax.NamedArray
        assert ns.carried_mapping(y) is None


def test_a_carrier_is_a_named_array_of_the_same_array() -> None:
    plain = na(jnp.asarray(counting(8, 4)), "a b")
    x = ns.with_mapping(plain, {"a": "data"})
    assert x.array is plain.array and x.axes == plain.axes and isinstance(x, hax.NamedArray)
    assert ns.carried_mapping(plain) is None
    assert jax.tree.structure(x) == jax.tree.structure(carrier())
    assert jax.tree.structure(x) != jax.tree.structure(plain)
    assert jax.tree.structure(x) != jax.tree.structure(ns.with_mapping(plain, {"a": "model"}))


def test_a_second_mapping_is_merged_over_the_first() -> None:
    x = ns.with_mapping(carrier(), {"a": None, "b": "model"})
    assert ns.carried_mapping(x) == {"a": None, "b": "model"}
    keeper = ns.with_mapping(x, ns.AxisMapping({"c": "data"}, indivisible="replicate"))
    assert ns.carried_mapping(ns.with_mapping(keeper, {"b": "data"})) == ns.AxisMapping(
        {"a": None, "b": "data", "c": "data"}, indivisible="replicate"
    )


def test_its_rules_override_the_callers_for_the_axes_it_names() -> None:
    x = carrier()
    assert ns.plan(x, {"a": "model", "b": "model"}, M42).leaves[0].spec == P("data", "model")
    assert ns.shard(x, {"a": "model", "b": "model"}, M42).array.sharding.spec == P("data", "model")
    assert ns.shard(ns.with_mapping(x, {"a": None}), {"a": "model"}, M42).array.sharding.spec == P(None, None)
    # Where axes compete for a mesh axis, the array's own come first.
    mine = ns.with_mapping(na(counting(8, 4), "a b"), {"b": ns.first("data", None)})
    assert ns.plan(mine, {"a": ns.first("data", "model", None)}, M42).leaves[0].spec == P("model", "data")


def test_a_carried_mapping_is_enough() -> None:
    x = {"w": carrier(), "other": na(counting(8), "a")}
    placed = ns.shard(x, mesh=M42)
    assert placed["w"].array.sharding.spec == P("data", None)
    assert placed["other"].array.sharding.spec == P(None)
    assert ns.plan(x, mesh=M42)["['w']"].spec == P("data", None)


def test_an_array_may_ask_to_be_replicated_where_it_does_not_divide() -> None:
    mine = ns.with_mapping(na(counting(9), "odd"), ns.AxisMapping({"odd": "data"}, indivisible="replicate"))
    with pytest.warns(UserWarning, match="1 of 1 leaf replicated along an axis"):
        assert ns.plan(mine, {}, M42).leaves[0].spec == P(None)
    with pytest.raises(ns.IndivisibleAxisError):
        ns.plan(ns.with_mapping(na(counting(9), "odd"), {"odd": "data"}), {}, M42)


def test_dataclass_replace_gives_an_array_that_carries_nothing() -> None:
    y = dataclasses.replace(carrier(), array=jnp.zeros((8, 4)))
    assert ns.carried_mapping(y) == {}
    assert jax.tree.leaves(jax.tree.map(np.asarray, y))[0].sum() == 0


def test_only_named_arrays_carry_mappings() -> None:
    plain = ns.with_mapping.__wrapped__ if hasattr(ns.with_mapping, "__wrapped__") else ns.with_mapping
    with pytest.raises(TypeError) as caught:
        plain(np.zeros(3), {})  # type: ignore[arg-type]
    assert str(caught.value) == "with_mapping takes a haliax.NamedArray, not ndarray"
