"""Whole trees through `shard`: nothing done twice, all or nothing, structs."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support import (
    DEVICES,
    E8,
    E42,
    M8,
    M8_REVERSED,
    M42,
    assert_exactly,
    bits,
    counting,
    mesh,
    na,
    nothing_compiled,
    nothing_moved,
)

import namedshard as ns

BASE = counting(8, 16)
MAPPING = {"a": "data", "b": "model"}
PERMUTED42 = mesh((4, 2), "data model", devices=DEVICES[[0, 4, 1, 5, 2, 6, 3, 7]])


def put(x: Any, where: Any, *spec: Any, kind: str = "device") -> jax.Array:
    return jax.device_put(x, NamedSharding(where, P(*spec), memory_kind=kind))


@pytest.fixture(params=["rebuilt from pieces", "as on accelerators"])
def either_way(request: pytest.FixtureRequest) -> Iterator[None]:
    """CPUs have a way of their own; the ones that other devices take must be right as well, and run here too."""
    as_accelerators = request.param == "as on accelerators"
    with ns.testing.accelerator_routes() if as_accelerators else contextlib.nullcontext():
        yield


# --- whole trees ------------------------------------------------------------------------------------------------------


def model() -> dict[str, Any]:
    return {
        "numpy": na(BASE, "a b"),
        "uncommitted": na(jnp.asarray(BASE), "a b"),
        "committed": na(jax.device_put(BASE, DEVICES[5]), "a b"),
        "pinned": na(put(BASE, M42, "model", kind="pinned_host"), "a b"),
        "key": na(jax.random.split(jax.random.key(0), 8), "a"),
        "plain": jnp.ones(3),
        "host": np.ones(3),
        "n": 3,
        "none": None,
        "text": "s",
    }


def test_what_is_in_place_comes_back_as_it_is_and_compiles_nothing() -> None:
    placed = ns.shard(model(), MAPPING, M42)
    with nothing_compiled():
        assert ns.shard(placed, MAPPING, M42) is placed
        copied = {**placed}
        again = ns.shard(copied, MAPPING, M42)
    assert jax.tree.leaves(again) == jax.tree.leaves(placed) or all(
        x is y for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(placed), strict=True)
    )
    # One new leaf in a tree moves alone.
    copied["numpy"] = na(BASE, "a b")
    mixed = ns.shard(copied, MAPPING, M42)
    assert mixed["uncommitted"].array is placed["uncommitted"].array
    assert_exactly(mixed["numpy"], M42, P("data", "model"))


@pytest.mark.usefixtures("either_way")
def test_the_same_moves_again_compile_nothing() -> None:
    def moves() -> None:
        placed = ns.shard(model(), MAPPING, M42)
        ns.shard(ns.shard(placed, {"a": "model"}, M42), MAPPING, PERMUTED42)
        ns.shard(placed, MAPPING, M42, memory_kind="pinned_host")

    moves()
    with nothing_compiled():
        moves()


def test_leaves_without_names_are_left_exactly_as_they_are() -> None:
    tree = {
        "step": 7,
        "lr": 1.5,
        "flag": True,
        "a": jnp.float32(2),
        "n": np.float32(4),
        "key": jax.random.key(0),
        "struct": jax.ShapeDtypeStruct((8,), jnp.float32),
        "f": model,
        "s": na(jnp.float32(3), ""),
    }
    placed = ns.shard(tree, {"a": "data"}, M8)
    assert all(placed[k] is tree[k] for k in tree if k != "s")
    assert_exactly(placed["s"], M8, P())
    assert not placed["a"].committed


def test_one_array_in_two_places_stays_one() -> None:
    for x in (counting(8), jnp.asarray(counting(8)), put(counting(8), M8), put(counting(8), M8_REVERSED)):
        tied = ns.shard({"emb": na(x, "a"), "head": na(x, "a"), "plain": x}, {"a": "data"}, M8)
        assert tied["emb"].array is tied["head"].array
        assert tied["plain"] is x
        other = ns.shard({"emb": na(x, "a"), "head": na(x, "z")}, {"a": "data"}, M8)
        assert_exactly(other["emb"], M8, P("data"))
        assert_exactly(other["head"], M8, P())


@pytest.mark.usefixtures("either_way")
def test_a_donated_array_that_is_also_kept_stays() -> None:
    x = put(counting(8, 8), M8, "data", None)
    y = ns.shard({"kept": na(x, "a b"), "moved": na(x, "b a")}, {"a": "data"}, M8, donate=True)
    assert y["kept"].array is x and not x.is_deleted()
    assert_exactly(y["moved"], M8, P(None, "data"))
    x = put(counting(8, 8), M8)
    y = ns.shard({"plain": x, "moved": na(x, "b a")}, {"a": "data"}, M8, donate=True)
    assert y["plain"] is x and not x.is_deleted()
    for x in (put(counting(8, 8), M8), put(counting(8, 8), M8_REVERSED), jnp.asarray(counting(8, 8))):
        y = ns.shard({"one": na(x, "a b"), "two": na(x, "b a"), "three": na(x, "a b")}, {"a": "data"}, M8, donate=True)
        assert x.is_deleted() and y["one"].array is y["three"].array
        assert_exactly(y["one"], M8, P("data"))
        assert_exactly(y["two"], M8, P(None, "data"))
        assert bits(y["one"].array) == bits(y["two"].array) == bits(counting(8, 8))


class Config:
    """A static field that can be neither hashed nor compared."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise ValueError


@jax.tree_util.register_pytree_node_class
class Holder:
    def __init__(self, x: Any, config: Any):
        self.x, self.config = x, config

    def tree_flatten(self) -> Any:
        return (self.x,), self.config

    @classmethod
    def tree_unflatten(cls, config: Any, children: Any) -> "Holder":
        return cls(*children, config)


def test_trees_with_any_static_parts() -> None:
    for config in (Config(), Config(), np.ones(3), np.ones(3), {"a": [1]}, {"a": [1]}, 1, 1.0, True):
        y = ns.shard(Holder(na(BASE, "a b"), config), MAPPING, M42)
        assert_exactly(y.x, M42, P("data", "model"))
        assert y.config is config
        assert ns.shard(y, MAPPING, M42) is y


def test_the_cache_of_plans_knows_all_that_a_plan_depends_on() -> None:
    x = na(BASE, "a b")
    own = ns.with_mapping(x, {"a": "model"})
    for _ in range(2):
        assert_exactly(ns.shard(x, {"a": "data"}, M42), M42, P("data"))
        assert_exactly(ns.shard(x, {"a": "model"}, M42), M42, P("model"))
        assert_exactly(ns.shard(x, {"a": ns.first("data", None), "b": ns.first("data", None)}, M42), M42, P("data"))
        assert_exactly(
            ns.shard(x, {"b": ns.first("data", None), "a": ns.first("data", None)}, M42), M42, P(None, "data")
        )
        assert_exactly(ns.shard(x, {"a": "data"}, E42), E42, P("data"))
        assert_exactly(ns.shard(x, {"a": "data"}, M8), M8, P("data"))
        assert_exactly(ns.shard(own, {"a": "data"}, M42), M42, P("model"))
        assert_exactly(ns.shard(x, {"a": "data"}, M42, memory_kind="pinned_host"), M42, P("data"), "pinned_host")
        assert_exactly(ns.shard(na(BASE[:4], "a b"), {"a": "data"}, M42), M42, P("data"))
        assert_exactly(ns.shard(na(BASE, "b a"), {"a": "data"}, M42), M42, P(None, "data"))
        with pytest.raises(ns.IndivisibleAxisError):
            ns.shard(na(BASE[:3], "a b"), {"a": "data"}, M42)


# --- all or nothing ---------------------------------------------------------------------------------------------------


def gone() -> jax.Array:
    x = jnp.asarray(counting(8))
    x.delete()
    return x


def fails(kind: type[Exception], text: str, tree: Any, where: Any = M8, **options: Any) -> None:
    """It fails so, with nothing put anywhere and no source given up."""
    sound = put(counting(8), M8_REVERSED, "data")
    with nothing_moved(), pytest.raises(kind) as caught:
        ns.shard({"fine": na(sound, "b"), **tree}, {"b": "data"}, where, donate=True, **options)
    assert str(caught.value) == text
    assert isinstance(caught.value, ns.NamedShardError)
    assert not sound.is_deleted()


def test_deleted_arrays() -> None:
    fails(
        ns.DeletedArrayError,
        "shard: 2 of 4 leaves donated or deleted\n"
        "  ['r']\n"
        "  ['s'][0]\n"
        "  fix: keep the result of the call that the array was donated to, and use that",
        {"r": na(gone(), "b"), "s": [na(gone(), "b")], "plain": gone()},
    )
    placed = ns.shard(na(counting(8), "b"), {"b": "data"}, M8)
    assert ns.shard(placed, {"b": "data"}, M8) is placed
    placed.array.delete()
    with pytest.raises(ns.DeletedArrayError) as caught:
        ns.shard(placed, {"b": "data"}, M8)
    assert str(caught.value).splitlines()[1] == "  (root)"


def test_integers_that_do_not_fit_without_64_bits() -> None:
    fails(
        ns.NarrowingError,
        "3 of 5 leaves would be narrowed to wrong values\n"
        "  ['high']: int64 values from 4294967301 to 4294967301 do not fit int32\n"
        "  ['low']: int64 values from -1099511627776 to 3 do not fit int32\n"
        "  ['unsigned']: uint64 values from 0 to 1099511627776 do not fit uint32\n"
        '  fix: enable 64-bit types (jax.config.update("jax_enable_x64", True)), or cast them first',
        {
            "high": na(np.array([2**32 + 5] * 8), "b"),
            "low": na(np.array([3, -(2**40)]), "x"),
            "unsigned": na(np.array([0, 2**40], np.uint64), "x"),
            "fits": na(np.array([2**31 - 1, -(2**31)] * 4, ">i8"), "b"),
        },
    )
    y = ns.shard(na(np.array([2**31 - 1, -(2**31)] * 4, ">i8"), "b"), {"b": "data"}, M8).array
    assert y.dtype == np.int32 and np.asarray(y)[:2].tolist() == [2**31 - 1, -(2**31)]
    with pytest.raises(ns.NarrowingError):
        jax.jit(lambda: ns.shard(na(np.array([2**40] * 8), "b"), {"b": "data"}, M8))()


def test_64_bit_floats_become_32_bit_ones_and_overflow_is_told() -> None:
    y = ns.shard(na(np.array([0.1, np.inf, np.nan]), "x"), {}, M8).array
    assert y.dtype == np.float32 and bits(y) == bits(np.array([0.1, np.inf, np.nan], np.float32))
    for huge in (np.array([1e300, 1]), np.array([1e300j, 1])):
        with pytest.warns(RuntimeWarning) as caught:
            y = ns.shard({"w": na(huge, "x")}, {}, M8)["w"].array
        assert [str(w.message) for w in caught] == [
            f"1 of 1 leaf overflow in 32 bits\n  ['w']: {huge.dtype} values up to 1e+300 are infinite in {y.dtype}"
        ]
        assert np.isinf(np.asarray(y)).tolist() == [True, False]


def test_with_64_bits_on_nothing_is_narrowed() -> None:
    with jax.enable_x64(True):
        y = ns.shard(na(np.array([2**40] * 8), "b"), {"b": "data"}, M8).array
        assert y.dtype == np.int64 and np.asarray(y).tolist() == [2**40] * 8


WIDE = [
    np.arange(8) + 2**40,
    np.arange(8, dtype=np.uint64) + 2**63,
    np.arange(8) * 1e300 + 0.1,
    np.arange(8) * 1e300j + 0.1,
]
STARTS = {
    "uncommitted": jnp.asarray,
    "one device": lambda x: jax.device_put(x, DEVICES[3]),
    "sharded": lambda x: put(x, M42, "data"),
    "explicit": lambda x: put(x, E42, "model"),
    "host": lambda x: put(x, M42, "data", kind="pinned_host"),
}


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("values", WIDE, ids=lambda x: str(x.dtype))
def test_64_bit_arrays_keep_their_bits_though_64_bits_are_off(tmp_path, either_way, values, start):
    with jax.enable_x64(True):
        x = na(STARTS[start](values), "b")

    def check(found: Any) -> None:
        found = getattr(found, "array", found)
        assert found.dtype == values.dtype and bits(found) == bits(values)

    for where, name, kind in [
        (M42, "model", None),
        (PERMUTED42, "data", "pinned_host"),
        (mesh((2, 2), "data model"), "data", None),
        (E42, "data", "device"),
    ]:
        check(ns.shard(x, {"b": name}, where, memory_kind=kind))
    check(ns.to_host(x))
    check(ns.offload(x))
    with jax.set_mesh(M42), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(ns.named_jit(lambda t: t, axis_resources={"b": "model"}, on_mismatch="reshard")(x))
    if values.dtype.kind != "c":
        ns.save_safetensors({"x": x}, tmp_path)
        info = ns.read_header(tmp_path)["x"]
        assert info.dtype == values.dtype
        assert (tmp_path / "model.safetensors").read_bytes()[info.start : info.stop] == bits(values)


def test_a_memory_kind_that_is_not_there() -> None:
    text = (
        "memory kind 'vmem' is not offered by cpu devices, which have 'device', 'pinned_host', 'unpinned_host'\n"
        "  fix: use one of 'device', 'pinned_host', 'unpinned_host'"
    )
    fails(ns.MemoryKindError, text, {}, memory_kind="vmem")
    struct = na(jax.ShapeDtypeStruct((8,), jnp.float32), "b")
    for run in (lambda x: ns.shard(x, {}, M8, memory_kind="vmem"), lambda x: ns.shard({}, {}, M8, memory_kind="vmem")):
        with pytest.raises(ns.MemoryKindError) as caught:
            jax.jit(lambda x, run=run: run(x))(na(counting(8), "b"))
        assert str(caught.value) == text
        with pytest.raises(ns.MemoryKindError):
            run(struct)


def test_an_abstract_mesh_takes_structs_and_no_arrays() -> None:
    abstract = AbstractMesh((8,), ("data",))
    fails(
        ns.NoMeshError,
        "3 of 5 leaves cannot be placed: the mesh ('data'=8) is abstract and has no devices\n"
        "  fix: pass a jax.sharding.Mesh",
        {
            "numpy": na(counting(8), "b"),
            "committed": na(jax.device_put(counting(8), DEVICES[2]), "b"),
            "struct": na(jax.ShapeDtypeStruct((8,), jnp.float32), "b"),
            "plain": np.ones(3),
        },
        abstract,
    )
    struct = ns.shard(na(jax.ShapeDtypeStruct((8,), jnp.float32), "b"), {"b": "data"}, abstract).array
    assert struct.sharding == NamedSharding(abstract, P("data"))
    with jax.sharding.use_abstract_mesh(abstract):
        assert ns.shard(na(struct, "b"), {"b": None}).array.sharding == NamedSharding(abstract, P(None))


def test_a_bad_leaf_anywhere_stops_everything() -> None:
    fails(
        ns.IndivisibleAxisError,
        "1 of 2 leaves cannot be sharded by this mapping\n"
        "  ['zz']: axis b=9 is not divisible by mesh axis 'data'=8 (9 = 8*1 + 1)\n"
        '  fix: pad the axis to 16, or pass indivisible="replicate"',
        {"zz": na(counting(9), "b")},
    )


# --- structs ----------------------------------------------------------------------------------------------------------


def test_structs_are_annotated_with_their_sharding() -> None:
    tree = jax.eval_shape(lambda: {"w": na(jnp.zeros((8, 16)), "a b"), "plain": jnp.zeros(3)})
    with nothing_moved():
        y = ns.shard(tree, MAPPING, M42)
    assert y["w"].array.sharding == NamedSharding(M42, P("data", "model")) and y["plain"] is tree["plain"]
    assert y["w"].array.shape == (8, 16) and y["w"].array.dtype == jnp.float32
    again = ns.shard(y, MAPPING, M42)
    assert again["w"].array is y["w"].array
    pinned = ns.shard(tree, MAPPING, M42, memory_kind="pinned_host")
    assert pinned["w"].array.sharding.memory_kind == "pinned_host"
    # As arrays do, structs keep the kind of memory that they have.
    assert ns.shard(pinned, {}, M8)["w"].array.sharding == NamedSharding(M8, P(None, None), memory_kind="pinned_host")
    keys = na(jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8)), "k")
    assert ns.shard(keys, {"k": "data"}, M8).array.sharding.spec == P("data")


def test_a_struct_makes_a_load_target() -> None:
    """The names alone say where an array goes: what eval_shape forgets, shard adds."""
    made = jax.eval_shape(lambda: ns.shard(na(jnp.zeros(8), "b"), {"b": "data"}, M8))
    target = ns.shard(made, {"b": "data"}, M8).array
    assert target.sharding == NamedSharding(M8, P("data"))
    loaded = jax.device_put(counting(8), target.sharding)
    assert ns.shard(na(loaded, "b"), {"b": "data"}, M8).array is loaded
    with jax.set_mesh(E8):
        explicit = jax.eval_shape(lambda: ns.shard(na(jnp.zeros(8), "b"), {"b": "data"}))
    assert explicit.array.sharding.spec == P("data")


def test_haliax_arrays_stay_haliax_arrays() -> None:
    y = ns.shard(na(BASE, "a b"), MAPPING, M42)
    assert type(y) is hax.NamedArray and [a.size for a in y.axes] == [8, 16]
    assert float(hax.sum(y).array) == BASE.sum()
