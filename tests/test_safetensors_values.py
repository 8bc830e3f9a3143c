"""Dtypes and names of loaded tensors: every bit kept or an error, every name found or listed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import EVERY_DTYPE, Recorder, encode, load_recorded, raw, struct, structs, write
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import (
    M42,
    bits,
    counting,
    mesh,
    na,
    nothing_moved,
)

import namedshard as ns

VALUE = counting(8, 16)


# --- dtypes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [P(), P("data"), P(None, "model")])
@pytest.mark.parametrize("name", sorted(EVERY_DTYPE))
def test_every_dtype_keeps_its_bits(tmp_path, name, spec):
    value = EVERY_DTYPE[name]
    path = write(tmp_path / "x.safetensors", {"x": value})
    where = mesh((8, 1), "data model") if spec == P("data") else mesh((1, 2), "data model")
    tree = ns.load_safetensors(path, {"x": struct(8, 2, dtype=value.dtype, sharding=NamedSharding(where, spec))})
    assert tree["x"].dtype == value.dtype
    assert bits(tree["x"]) == bits(value)


def test_bytes_that_are_no_bool_become_one(tmp_path):
    data = encode({"x": np.zeros(4, np.bool_)})
    (tmp_path / "x.safetensors").write_bytes(data[:-4] + bytes([0, 1, 2, 255]))
    tree = ns.load_safetensors(tmp_path / "x.safetensors", {"x": struct(4, dtype=np.bool_)})
    assert bits(tree["x"]) == bytes([0, 1, 1, 1])


@pytest.mark.parametrize(
    ("have", "want"),
    [
        ("float32", "bfloat16"),
        ("bfloat16", "float32"),
        ("float32", "float8_e4m3fn"),
        ("int8", "int32"),
        ("uint8", "int16"),
    ],
)
def test_slices_are_cast_to_the_dtype_of_like_or_the_one_asked_for(tmp_path, have, want):
    value = (counting(8, 16) - 3).astype(have)
    path = write(tmp_path / "x.safetensors", {"x": value, "y": value})
    like = {"x": na(struct(8, 16, dtype=want), "a b"), "y": na(struct(8, 16, dtype=have), "a b")}
    for mapping in ({"a": "data"}, {"b": "data"}, {"a": "model", "b": "data"}):
        tree = ns.load_safetensors(path, like, mapping=mapping, mesh=M42)
        assert (tree["x"].dtype, tree["y"].dtype) == (want, have)
        assert bits(tree["x"].array) == bits(value.astype(want))
        assert bits(tree["y"].array) == bits(value)
    for dtype in (want, {"['y']": want}, lambda path, have: want if path == "['y']" else None):
        tree = ns.load_safetensors(path, like, dtype=dtype)
        assert bits(tree["y"].array) == bits(value.astype(want))


def test_one_dtype_is_for_leaves_of_its_kind(tmp_path):
    path = write(tmp_path / "x.safetensors", {"f": counting(4), "i": np.arange(4, dtype=np.int16)})
    like = {"f": struct(4), "i": struct(4, dtype=np.int16)}
    tree = ns.load_safetensors(path, like, dtype=jnp.bfloat16)
    assert (tree["f"].dtype, tree["i"].dtype) == (jnp.bfloat16, np.int16)
    tree = ns.load_safetensors(path, like, dtype=np.int32)
    assert (tree["f"].dtype, tree["i"].dtype) == (np.float32, np.int32)
    tree = ns.load_safetensors(path, like, dtype={"['i']": np.float32})
    assert (tree["f"].dtype, tree["i"].dtype) == (np.float32, np.float32)
    assert bits(tree["i"]) == bits(np.arange(4, dtype=np.float32))


WIDE = {
    "u": np.array([1, 2**33], np.uint64),
    "i": np.array([-(2**31), 2**31 - 1], np.int64),
    "f": np.array([1.5, -2.25], np.float64),
    "big": np.array([1e300, 1.0], np.float64),
}


def test_narrowing_is_an_error_that_lists_all_tensors(tmp_path):
    path = write(tmp_path / "x.safetensors", {**WIDE, "ok": np.ones(2, np.float32), "kind": np.ones(2, np.int32)})
    like = {
        "u": struct(2, dtype=np.uint32),
        "i": struct(2, dtype=np.int32),
        "f": struct(2),
        "big": struct(2),
        "ok": struct(2, dtype=np.float16),
        "kind": struct(2),
    }
    with nothing_moved(), pytest.raises(ns.NarrowingError) as error:
        ns.load_safetensors(path, like)
    assert str(error.value) == (
        f"{path}: 5 of 6 leaves cannot take the checkpoint's dtypes\n"
        "  ['big']: tensor 'big': float64 would be rounded to float32\n"
        "  ['f']: tensor 'f': float64 would be rounded to float32\n"
        "  ['i']: tensor 'i': int64 values may not fit int32\n"
        "  ['kind']: tensor 'kind': int32 is not the kind of number that float32 is\n"
        "  ['u']: tensor 'u': uint64 values may not fit uint32\n"
        '  fix: say with dtype= what they shall be, pass narrow="fit" if the values fit, or enable 64-bit types'
    )


@pytest.mark.parametrize("spec", [P(), P("data")])
def test_values_that_fit_are_taken_where_the_caller_allows_it(tmp_path, spec):
    path = write(tmp_path / "x.safetensors", WIDE)
    place = NamedSharding(mesh((2,), "data"), spec)
    like = {n: struct(2, dtype=d, sharding=place) for n, d in {"i": np.int32, "f": np.float32}.items()}
    tree = ns.load_safetensors(path, like, narrow="fit", unexpected="ignore")
    assert bits(tree["i"]) == bits(WIDE["i"].astype(np.int32))
    assert bits(tree["f"]) == bits(WIDE["f"].astype(np.float32))
    both = {n: struct(2, dtype=d, sharding=place) for n, d in {"u": np.uint32, "big": np.float32}.items()}
    with nothing_moved(), pytest.raises(ns.NarrowingError) as error:
        ns.load_safetensors(path, both, narrow="fit", unexpected="ignore")
    assert str(error.value) == (
        f"{path}: 2 tensors hold values that do not fit\n"
        "  ['big']: tensor 'big': 1e+300 does not fit float32\n"
        "  ['u']: tensor 'u': 8589934592 does not fit uint32\n"
        "  fix: pass a wider dtype=, or enable 64-bit types"
    )
    # What dtype= asks for needs no leave: floats are rounded, integers still must fit.
    tree = ns.load_safetensors(path, {"big": both["big"]}, dtype=np.float32, unexpected="ignore")
    assert bits(tree["big"]) == bits(np.array([np.inf, 1], np.float32))
    with pytest.raises(ns.NarrowingError):
        ns.load_safetensors(path, {"u": both["u"]}, dtype=np.uint32, unexpected="ignore")
    with pytest.raises(ns.NarrowingError) as error:
        ns.load_safetensors(path, {"i": struct(2, dtype=np.int8)}, narrow="fit", unexpected="ignore")
    assert str(error.value) == (
        f"{path}: 1 tensor holds values that do not fit\n"
        "  ['i']: tensor 'i': -2147483648 and 2147483647 do not fit int8\n"
        "  fix: pass a wider dtype=, or enable 64-bit types"
    )


def test_values_are_checked_where_another_kind_or_a_narrow_integer_is_asked_for(tmp_path):
    tensors = {"f": np.array([-8, 7, 300], np.float32), "n": np.array([1, np.nan], np.float32), "i": np.arange(-8, 8)}
    path = write(tmp_path / "x.safetensors", tensors)
    tree = ns.load_safetensors(path, {"i": struct(16, dtype=jnp.int4)}, narrow="fit", unexpected="ignore")
    assert tree["i"].dtype == jnp.int4
    np.testing.assert_array_equal(np.asarray(tree["i"]).astype(np.int64), tensors["i"])
    like = {"f": struct(3), "n": struct(2)}
    with pytest.raises(ns.NarrowingError) as error:
        ns.load_safetensors(path, like, dtype={"['f']": np.int8, "['n']": np.int32}, unexpected="ignore")
    assert str(error.value) == (
        f"{path}: 2 tensors hold values that do not fit\n"
        "  ['f']: tensor 'f': 300.0 does not fit int8\n"
        "  ['n']: tensor 'n': nan does not fit int32\n"
        "  fix: pass a wider dtype=, or enable 64-bit types"
    )
    # The largest int32 is no float32: the next one up is, and does not fit.
    edge = write(tmp_path / "edge.safetensors", {"f": np.array([2.0**31], np.float32), "g": np.float32([-(2.0**31)])})
    with pytest.raises(ns.NarrowingError) as error:
        ns.load_safetensors(edge, {"f": struct(1), "g": struct(1)}, dtype={"['f']": np.int32, "['g']": np.int32})
    assert str(error.value).splitlines()[:2] == [
        f"{edge}: 1 tensor holds values that do not fit",
        "  ['f']: tensor 'f': 2.1474836e+09 does not fit int32",
    ]
    tree = ns.load_safetensors(path, like, dtype={"['f']": np.int16}, unexpected="ignore")
    assert bits(tree["f"]) == bits(np.array([-8, 7, 300], np.int16))


def test_64_bit_types_are_kept_where_they_are_enabled(tmp_path):
    path = write(tmp_path / "x.safetensors", WIDE)
    with jax.enable_x64(True):
        tree = ns.load_safetensors(path, structs(WIDE))
        assert {n: x.dtype for n, x in tree.items()} == {n: x.dtype for n, x in WIDE.items()}
        assert all(bits(tree[n]) == bits(WIDE[n]) for n in WIDE)


def test_packed_dtypes_and_keys_are_refused_by_name(tmp_path):
    header = {"x": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}
    (tmp_path / "x.safetensors").write_bytes(raw(header, b"\x11"))
    refusal = (
        "%s: 1 of 1 leaf cannot take the checkpoint's dtypes\n"
        "  ['x']: tensor 'x'%s: F4 is packed and cannot be loaded\n"
        '  fix: say with dtype= what they shall be, pass narrow="fit" if the values fit, or enable 64-bit types'
    )
    for path, of in [(tmp_path / "x.safetensors", ""), (tmp_path, " of x.safetensors")]:
        with pytest.raises(ns.NarrowingError) as error:
            ns.load_safetensors(path, {"x": struct(2)})
        assert str(error.value) == refusal % (path, of)
    write(tmp_path / "k.safetensors", {"k": np.zeros((), np.uint32)})
    with pytest.raises(
        ns.NarrowingError, match=r"a typed PRNG key has no dtype in a file; load its jax.random.key_data"
    ):
        ns.load_safetensors(tmp_path / "k.safetensors", {"k": jax.random.key(0)})


# --- names ------------------------------------------------------------------------------------------------------------


def test_missing_unexpected_and_misshapen_tensors_are_listed_at_once_before_any_read(tmp_path):
    path = write(tmp_path / "x.safetensors", {"encoder.w": VALUE, "bias": VALUE[0], "spare": VALUE})
    like = {"encoder": {"w": struct(16, 8)}, "bais": struct(16), "other": jnp.zeros(3)}
    recorder = Recorder()
    with nothing_moved(), pytest.raises(ns.MissingTensorError) as error:
        load_recorded(path, like, recorder, unexpected="error")
    assert str(error.value) == (
        f"{path} and the tree do not go together: 3 tensors, 3 leaves\n"
        "  ['bais']: no tensor 'bais' (did you mean 'bias'?)\n"
        "  ['encoder']['w']: tensor 'encoder.w' has shape (8, 16), but (16, 8) is needed\n"
        "  ['other']: no tensor 'other'\n"
        "  tensor 'bias' is for no leaf\n"
        "  tensor 'spare' is for no leaf\n"
        '  fix: correct names= (leaf path to tensor name), or the tree\'s shapes, or pass missing="keep" for leaves to'
        " be left as they are"
    )
    assert recorder.data() == []


def test_missing_leaves_are_kept_on_request_if_there_is_something_to_keep(tmp_path):
    path = write(tmp_path / "x.safetensors", {"w": VALUE})
    own = jnp.arange(3.0)
    tree = ns.load_safetensors(path, {"w": struct(8, 16), "own": own}, missing="keep")
    assert tree["own"] is own
    with pytest.raises(ns.MissingTensorError) as error:
        ns.load_safetensors(path, {"w": struct(8, 16), "own": struct(3)}, missing="keep")
    assert str(error.value) == (
        f"{path} and the tree do not go together: 1 tensors, 2 leaves\n"
        "  ['own']: no tensor 'own', and the leaf is abstract: there is nothing to keep\n"
        "  fix: correct names= (leaf path to tensor name), or the tree's shapes"
    )


def test_unexpected_tensors_are_warned_of_by_default(tmp_path):
    path = write(tmp_path / "x.safetensors", {"w": VALUE, "spare": VALUE})
    with pytest.warns(UserWarning) as caught:
        ns.load_safetensors(path, {"w": struct(8, 16)})
    assert str(caught[0].message) == (
        f'{path}: 1 of 2 tensors are for no leaf of the tree\n  spare\n  fix: pass unexpected="ignore" if that is meant'
    )
    ns.load_safetensors(path, {"w": struct(8, 16)}, unexpected="ignore")


def test_names_by_dict_and_by_function(tmp_path):
    path = write(tmp_path / "x.safetensors", {"first": VALUE, "b": VALUE + 1})
    like = {"a": struct(8, 16), "b": struct(8, 16)}
    for names in ({"['a']": "first"}, lambda path: {"['a']": "first"}.get(path), {"['a']": "first", "['b']": "b"}):
        tree = ns.load_safetensors(path, like, names=names)
        assert bits(tree["a"]) == bits(VALUE)
        assert bits(tree["b"]) == bits(VALUE + 1)
    same = ns.load_safetensors(path, like, names={"['b']": "first", "['a']": "first"}, unexpected="ignore")
    assert bits(same["a"]) == bits(same["b"]) == bits(VALUE)


def test_one_tensor_per_index_of_the_first_dimension(tmp_path):
    value = counting(3, 4, 6)
    path = write(tmp_path / "x.safetensors", {f"h.{i}.w": value[i] for i in range(3)})
    like = {"w": na(struct(3, 4, 6), "layer b a")}
    names = {"['w']": [f"h.{i}.w" for i in range(3)]}
    where = mesh((3, 2), "data model")
    for mapping in ({}, {"layer": "data"}, {"a": "data", "b": "model"}):
        tree, recorder = load_recorded(path, like, names=names, mapping=mapping, mesh=where)
        assert bits(tree["w"].array) == bits(value)
        assert recorder.data_bytes() == value.nbytes
    with pytest.raises(ns.CheckpointError) as error:
        ns.load_safetensors(path, like, names={"['w']": ["a", "b"], "['x']": "y"})
    assert str(error.value) == (
        "2 names do not fit the tree\n"
        "  ['x']: no such leaf (did you mean \"['w']\"?)\n"
        "  ['w']: 2 names for shape (3, 4, 6): give one, or one for each index of the first dimension\n"
        "  fix: correct names=, by leaf path as explain prints it"
    )


def test_a_tree_that_is_one_array_needs_a_name(tmp_path):
    path = write(tmp_path / "x.safetensors", {"w": VALUE})
    assert bits(ns.load_safetensors(path, struct(8, 16), names={"": "w"})) == bits(VALUE)
    with pytest.raises(ns.CheckpointError, match=r"\(root\): has no name"):
        ns.load_safetensors(path, struct(8, 16))
