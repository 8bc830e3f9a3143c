"""The fast rebuilding of trees is equal to JAX's own, for every kind of node."""

import collections
import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import counting, na, unchecked

import namedshard as ns
from namedshard._jit.unflatten import unflattener


class Pair(NamedTuple):
    a: Any
    b: Any


class Node(eqx.Module):
    weight: Any
    inner: Any = None
    name: str = eqx.field(static=True, default="node")


class Sub(Node):
    extra: Any = 0


class Slotted(eqx.Module):
    __slots__ = ()
    weight: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    x: Any
    tag: str = dataclasses.field(metadata={"static": True}, default="t")


@jax.tree_util.register_pytree_node_class
class Picky:
    """Its constructor looks at its leaf."""

    def __init__(self, x: Any):
        self.x = x + 0

    def tree_flatten(self) -> Any:
        return (self.x,), None

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> "Picky":
        return cls(*children)


@jax.tree_util.register_pytree_node_class
class Bag:
    """A mutable container without leaves of its own."""

    def __init__(self, note: str):
        self.note = note
        self.seen: list[Any] = []

    def tree_flatten(self) -> Any:
        return (), self.note

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> "Bag":
        return cls(aux)


def x(n: int = 3) -> np.ndarray:
    return counting(n)


TREES: dict[str, Any] = {
    "leaf": x(),
    "none": None,
    "empty": [],
    "nothing": {"a": None, "b": [], "c": {}, "d": ()},
    "runs": ([x(), x()], (x(), x()), {"b": x(), "a": x()}, [x()], x()),
    "builtin": {"a": [x(), (x(), {"b": x()})], "c": (None, x())},
    "other containers": [collections.OrderedDict(b=x(), a=x()), collections.deque([x()]), Pair(x(), None)],
    "default dict": collections.defaultdict(list, a=x()),
    "module": Node(x(), Node(x(), [Node(x())], name="inner")),
    "subclass": Sub(x(), None, extra={"a": x(), "b": []}),
    "slots": Slotted(x()),
    "module of modules only": Node(None, Node(None, Node(x()))),
    "module without leaves": [Node(None), Node(None, {"a": []}), Node((), [None])],
    "named": na(counting(2, 3), "a b"),
    "named in module": Node(na(counting(2, 3), "a b"), [na(counting(2), "a")]),
    "mapped": ns.with_mapping(na(counting(2, 3), "a b"), {"a": "data"}),
    "names that do not fit": unchecked(counting(4), "a b", 2, 3),
    "struct leaves": Node(jax.ShapeDtypeStruct((2,), np.float32)),
    "registered": Registered([x(), x()]),
    "partial": jax.tree_util.Partial(max, x(), key=x()),
    "picky": [Picky(x()), x()],
    "bag": [Bag("b"), x()],
    "linear": hax.nn.Linear.init(hax.Axis("i", 2), hax.Axis("o", 3), key=jax.random.key(0)),
    "equinox": eqx.nn.MLP(2, 2, 4, 2, key=jax.random.key(0)),
    "wrapped": eqx.filter_jit(lambda v: v),
    "method": Node(x()).__init__,
    "optimizer-like": (Pair({"w": x()}, [x()]), {"count": jnp.int32(3)}),
}


def described(node: Any) -> Any:
    """A node's own attributes, which the tree's structure does not tell all of."""
    return type(node), sorted(getattr(node, "__dict__", {}))


@pytest.mark.parametrize("name", TREES)
def test_equal_to_jaxs_own(name: str) -> None:
    leaves, treedef = jax.tree_util.tree_flatten(TREES[name])
    build = unflattener(treedef, leaves, range(len(leaves)))
    for new in (leaves, [jnp.asarray(x(n + 1)) for n in range(len(leaves))]):
        mine, jaxs = build(new), treedef.unflatten(new)
        mine_leaves, mine_def = jax.tree_util.tree_flatten(mine)
        assert mine_def == treedef == jax.tree_util.tree_structure(jaxs)
        if "picky" not in name:
            assert all(a is b for a, b in zip(mine_leaves, new, strict=True))
        mine_nodes, jax_nodes = ([described(n) for n in nodes(tree)] for tree in (mine, jaxs))
        assert mine_nodes == jax_nodes


def nodes(tree: Any) -> list[Any]:
    """All nodes, outermost first."""
    children = jax.tree_util.tree_leaves(tree, is_leaf=lambda n: n is not tree)
    if len(children) == 1 and children[0] is tree:
        return [tree]
    return [tree, *(n for child in children for n in nodes(child))]


def test_containers_are_new_each_time() -> None:
    tree = {"a": [], "b": Node(x(), {"c": []}), "d": {}, "e": Bag("e"), "f": ([],)}
    leaves, treedef = jax.tree_util.tree_flatten(tree)
    build = unflattener(treedef, leaves, range(len(leaves)))
    first = build(leaves)
    first["a"].append(1)
    first["b"].inner["c"].append(1)
    first["d"]["k"] = 1
    first["e"].seen.append(1)
    first["f"][0].append(1)
    again = build(leaves)
    assert (again["a"], again["b"].inner, again["d"], again["e"].seen, again["f"]) == ([], {"c": []}, {}, [], ([],))


def test_static_fields_are_the_same_objects() -> None:
    leaves, treedef = jax.tree_util.tree_flatten(Node(x(), name="n" * 40))
    build = unflattener(treedef, leaves, range(len(leaves)))
    assert build(leaves).name is build(leaves).name


def test_static_leaves_are_kept_beside_the_arrays() -> None:
    tree = (Node([1, x(), "a"], {"n": 2.5, "x": x()}), [None, (3, "b")], Pair(x(), 4))
    leaves, treedef = jax.tree_util.tree_flatten(tree)
    indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, np.ndarray)]
    statics = [None if i in indices else leaf for i, leaf in enumerate(leaves)]
    built = unflattener(treedef, statics, indices)([leaves[i] for i in indices])
    assert jax.tree_util.tree_structure(built) == treedef
    assert all(a is b for a, b in zip(jax.tree_util.tree_leaves(built), leaves, strict=True))
