"""Trees as tools make them: each leaf has a path of its own, and is saved and loaded bit by bit or refused by name."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from checkpoints import LAYERS, Block, write
from support import M42, bits, counting, na, unchecked

import namedshard as ns


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Quantized:
    """A node that looks like an array."""

    values: Any
    scale: Any
    shape = property(lambda self: self.values.shape)
    ndim = property(lambda self: self.values.ndim)
    dtype = property(lambda self: self.scale.dtype)


@jax.tree_util.register_pytree_with_keys_class
class Variable:
    """As in ``nnx.State``."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.value, name)

    def tree_flatten_with_keys(self) -> Any:
        return ((jax.tree_util.GetAttrKey("value"), self.value),), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> "Variable":
        return cls(*children)


@jax.tree_util.register_pytree_with_keys_class
class Twins:
    """Gives all of its children one key."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def tree_flatten_with_keys(self) -> Any:
        return [(jax.tree_util.GetAttrKey("x"), value) for value in self.values], None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> "Twins":
        return cls(*children)


@jax.tree_util.register_pytree_node_class
class WithoutKeys(Twins):
    def tree_flatten(self) -> Any:
        return self.values, None


class Foreign:
    """No array of JAX or numpy, though it has a shape and a dtype."""

    shape, dtype = (2,), "torch.float32"


X, Y = na(counting(8, 4), "b f"), na(counting(4) + 100, "f")
PARTS = Quantized(counting(8, 4, dtype=np.int8), counting(8, 1) + 0.5)
ALIKE = Quantized(counting(8, 4), counting(8, 4) + 50)


def in_names(inner: Any) -> hax.NamedArray:
    return unchecked(inner, "b f", 8, 4)


def stacked() -> Any:
    def values(x: Any) -> Any:
        return jnp.asarray(counting(*x.shape)) if isinstance(x, jax.ShapeDtypeStruct) else x

    keys = jax.random.split(jax.random.key(0), LAYERS.size)
    return jax.tree.map(values, eqx.filter_eval_shape(lambda: hnn.Stacked.init(LAYERS, Block)(key=keys)))


def inner_product(p: Any) -> Any:
    return jnp.sum((p["a"].array * p["b"].array) ** 2)


KEPT: dict[str, Callable[[], Any]] = {
    "quantized": lambda: {"w": PARTS},
    "quantized in names": lambda: {"w": in_names(PARTS)},
    "quantized, parts alike": lambda: {"w": in_names(ALIKE), "v": Quantized(X, X)},
    "quantized in a layer": lambda: [dataclasses.replace(ALIKE), {"w": Quantized(in_names(ALIKE), None)}],
    "nnx.State": lambda: {"kernel": Variable(counting(8, 4)), "bias": {"b": Variable(Y)}},
    "optax.sm3": lambda: optax.sm3(1e-2).init({"w": X, "b": Y}),
    "optax.adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2).init({"w": X, "b": Y}),
    "Hessian": lambda: jax.hessian(inner_product)({"a": Y, "b": Y}),
    "Jacobian": lambda: {"j": jax.jacrev(lambda x: {"y": x * 2.0, "z": x.sum()})(Y)},
    "names in names": lambda: {"w": in_names(Y)},
    "nodes without keys": lambda: WithoutKeys(X, {"a": Y}),
    "one of twins": lambda: Twins(X, None),
    "nothing in places": lambda: {
        "a": None,
        "b": [],
        "c": {},
        "d": [(), X],
        "e": in_names(None),
        "f": in_names("text"),
    },
    "zero sizes": lambda: {"a": jnp.zeros((0, 3)), "b": na(np.zeros((2, 0), np.int8), "x y"), "c": jnp.float32(2.5)},
    "numpy's own": lambda: {"a": np.int16(3), "b": np.float32(2), "c": np.bool_(True)},
    "other byte order": lambda: {"a": np.arange(5).astype(">i4"), "b": np.arange(5).astype(">f4")},
    "raw keys": lambda: {"k": jax.random.PRNGKey(3)},
    "modules with numbers": lambda: stacked(),
}


@pytest.mark.parametrize("name", KEPT)
def test_unusual_trees_come_back_bit_by_bit(tmp_path, name):
    tree = KEPT[name]()
    leaves, treedef = jax.tree.flatten(tree)
    paths = [leaf.path for leaf in ns.plan(tree, {"f": "model"}, M42).leaves]
    assert len(set(paths)) == len(paths) == len(leaves)
    ns.save_safetensors(tree, tmp_path)
    for options in ({}, {"mesh": M42}, {"mesh": M42, "mapping": {"f": "model"}}):
        found = ns.load_safetensors(tmp_path, tree, **options)
        assert jax.tree.structure(found) == treedef
        for x, y in zip(leaves, jax.tree.leaves(found), strict=True):
            if hasattr(x, "dtype"):
                assert y.dtype == x.dtype.newbyteorder("=") and y.shape == x.shape
                assert bits(y) == bits(np.asarray(x).astype(y.dtype))
            else:
                assert y is x or y == x


def deleted() -> jax.Array:
    x = jnp.ones(3)
    x.delete()
    return x


NO_DTYPE = "safetensors has no dtype {}; save it as another, with dtype= or after a cast"
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "twins": (lambda: {"p": Twins(Twins(X, X), Y)}, "['p'].x.x[0], ['p'].x.x[1]: 2 tensors would be called 'p.x.x'"),
    "names that meet": (lambda: {"a.b": X, "a": {"b": X}}, "['a']['b'], ['a.b']: 2 tensors would be called 'a.b'"),
    "keys": (lambda: {"k": jax.random.key(0)}, "['k']: is an array of typed keys; save its jax.random.key_data"),
    "shapes": (lambda: {"k": jax.ShapeDtypeStruct((2,), "int8")}, "['k']: is abstract: it has no values"),
    "deleted": (lambda: {"k": deleted()}, "['k']: was donated or deleted"),
    "numbers": (lambda: {"w": X, "n": (1, 2.5)}, "['n'][0]: the Python number 1 is no array"),
    "numbers in twins": (lambda: Twins(Twins(1, X), 2), "x.x[0]: the Python number 1 is no array"),
    "numbers in names": (lambda: {"w": X, "n": in_names(2.5)}, "['n']: the Python number 2.5 is no array"),
    "int4": (lambda: {"a": jnp.ones(3, jnp.int4)}, "['a']: " + NO_DTYPE.format("int4")),
    "uint2": (lambda: {"a": np.ones(3, ml_dtypes.uint2)}, "['a']: " + NO_DTYPE.format("uint2")),
    "objects": (lambda: {"a": np.array([1, "x"], object)}, "['a']: " + NO_DTYPE.format("object")),
    "text": (lambda: {"a": np.array(["x"])}, "['a']: " + NO_DTYPE.format("<U1")),
    "dates": (lambda: {"a": np.zeros(2, "M8[s]")}, "['a']: " + NO_DTYPE.format("datetime64[s]")),
    "complex128": (lambda: {"a": np.ones(2, np.complex128)}, "['a']: " + NO_DTYPE.format("complex128")),
    "masked": (
        lambda: {"a": np.ma.masked_array([1.0, 2.0], [True, False])},
        "['a']: is masked, and a file has no masks; fill it, or save data and mask",
    ),
    "jax.Ref": (lambda: {"a": jax.new_ref(jnp.ones(3))}, "['a']: is a jax.Ref; save its value, ref[...]"),
    "foreign": (lambda: {"a": Foreign()}, "['a']: is a Foreign, which is no array of JAX or numpy"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_file_cannot_hold_is_refused_by_name(tmp_path, name):
    make, line = REFUSED[name]
    with pytest.raises(ns.CheckpointError) as error:
        ns.save_safetensors(make(), tmp_path / "x")
    headline, first, *_, fix = str(error.value).splitlines()
    assert headline.startswith("the tree cannot be saved: ")
    assert first == f"  {line}"
    assert fix.startswith("  fix: make arrays of numbers")
    assert not (tmp_path / "x").exists()


def test_a_leaf_at_the_root_needs_a_name(tmp_path):
    tree = jax.jacrev(lambda x: x * 2.0)(Y)
    with pytest.raises(ns.CheckpointError) as error:
        ns.save_safetensors(tree, tmp_path)
    assert str(error.value) == (
        "1 names do not fit the tree\n  (root): has no name\n  fix: correct names=, by leaf path as explain prints it"
    )
    ns.save_safetensors(tree, tmp_path, names={"": "jacobian"})
    found = ns.load_safetensors(tmp_path, tree, names={"": "jacobian"})
    assert bits(jax.tree.leaves(found)[0]) == bits(jax.tree.leaves(tree)[0])


def test_leaves_that_a_modules_own_code_cannot_take_are_named(tmp_path):
    tree = optax.sm3(1e-2).init(eqx.filter(stacked(), eqx.is_array))
    with pytest.raises(ns.CheckpointError) as error:
        ns.save_safetensors(tree, tmp_path)
    assert str(error.value).splitlines()[1] == (
        "  [0].mu.stacked.attend.weight[0]: Linear.to_state_dict raises AttributeError: 'list' object has no attribute"
        " 'array'"
    )


@pytest.mark.parametrize("dtype", [np.longdouble, object, "M8[s]", "torch.float32"])
@pytest.mark.parametrize("size", [0, 2])
def test_leaves_of_dtypes_that_jax_has_not_are_refused_by_name(tmp_path, dtype, size):
    write(tmp_path / "x.safetensors", {"a": np.ones(size, np.float32)})

    class Like:
        shape = (size,)

    like: Any = Like()
    like.dtype = dtype if dtype == "torch.float32" else np.dtype(dtype)
    with pytest.raises(ns.NarrowingError) as error:
        ns.load_safetensors(tmp_path / "x.safetensors", {"a": like})
    assert str(error.value).splitlines()[1].endswith(f": JAX has no dtype {like.dtype}")
    assert str(error.value).splitlines()[1].startswith("  ['a']: ")
