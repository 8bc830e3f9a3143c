"""Laws over random arrays, mappings, meshes and sources: as planned, eager as in jit, bit for bit, once is enough."""

import contextlib
import dataclasses
import math
import warnings
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from jax.sharding import AxisType, Mesh, NamedSharding
from support import AUTO, DEVICES, EXPLICIT, bits, na, nothing_compiled, order

import namedshard as ns

NAMES = ("x", "y", "z")
SHAPES = [(8,), (4, 2), (2, 4), (2, 2, 2), (1, 8), (2, 2), (3,), (3, 2), (1,), (1, 1, 5)]


@st.composite
def meshes(draw: Any) -> Mesh:
    """Any part of the devices, in any order, in any shape, with axes of any type."""
    shape = draw(st.sampled_from(SHAPES))
    some = draw(st.permutations(range(8)))[: math.prod(shape)]
    types = tuple(draw(st.sampled_from([AUTO, EXPLICIT])) for _ in shape)
    names = tuple(draw(st.permutations(NAMES)))[: len(shape)]
    return Mesh(DEVICES[list(some)].reshape(shape), names, axis_types=types)


@st.composite
def specs(draw: Any, shape: tuple[int, ...], mesh: Mesh) -> jax.sharding.PartitionSpec:
    """A spec that divides."""
    free = list(draw(st.permutations(mesh.axis_names)))
    entries: list[Any] = []
    for size in shape:
        take = tuple(free[: draw(st.integers(0, 2))])
        if take and size % math.prod(mesh.shape[n] for n in take) == 0:
            del free[: len(take)]
            entries.append(take)
        else:
            entries.append(None)
    return jax.sharding.PartitionSpec(*entries)


@dataclasses.dataclass
class Case:
    base: np.ndarray
    names: str
    # Candidates of each axis: the mapping is made in the tests, since the type checker draws random numbers.
    rules: dict[str, list[Any]]
    mesh: Mesh
    memory_kind: str | None

    @property
    def mapping(self) -> ns.AxisMapping:
        rules = {axis: ns.first(*candidates) for axis, candidates in self.rules.items()}
        return ns.AxisMapping(rules, indivisible="replicate")

    def shard(self, x: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*replicated along an axis")
            return ns.shard(na(x, self.names), self.mapping, self.mesh, memory_kind=self.memory_kind).array

    def planned(self) -> ns.LeafPlan:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*replicated along an axis")
            (leaf,) = ns.plan(na(self.base, self.names), self.mapping, self.mesh, memory_kind=self.memory_kind).leaves
        return leaf

    def mixes_types(self) -> bool:
        types = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
        entries = [e for e in self.planned().spec if isinstance(e, tuple)]
        return any(len({types[n] for n in e}) > 1 for e in entries)


@st.composite
def cases(draw: Any) -> Case:
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 6, 8, 12]), max_size=3)))
    dtype = draw(st.sampled_from(["float32", "int8", "bfloat16", "bool", "complex64", "int4"]))
    base = (np.arange(math.prod(shape)) % 7).astype(jnp.dtype(dtype)).reshape(shape)
    names = "abc"[: len(shape)]
    mesh = draw(meshes())
    products = st.lists(st.sampled_from(mesh.axis_names), min_size=1, max_size=2, unique=True).map(tuple)
    candidates = st.lists(st.one_of(products, st.just(("elsewhere",))), min_size=1, max_size=2)
    rules = {a: [*draw(candidates), None] for a in draw(st.permutations(names)) if draw(st.booleans())}
    kind = draw(st.sampled_from([None, None, "device", "pinned_host"]))
    return Case(base, " ".join(names), rules, mesh, kind)


@st.composite
def placed(draw: Any, base: np.ndarray) -> Any:
    """The array somewhere: on the host, on one device, or on some mesh, in some memory."""
    where = draw(st.sampled_from(["numpy", "uncommitted", "one device", "mesh", "mesh", "mesh"]))
    if where == "numpy":
        return base.copy()
    if where == "uncommitted":
        return jnp.asarray(base)
    if where == "one device":
        return jax.device_put(base, DEVICES[draw(st.integers(0, 7))])
    mesh = draw(meshes())
    kind = draw(st.sampled_from(["device", "device", "pinned_host", "unpinned_host"]))
    return jax.device_put(base, NamedSharding(mesh, draw(specs(base.shape, mesh)), memory_kind=kind))


@given(st.data())
@settings(max_examples=150)
def test_an_array_ends_where_it_was_planned_with_its_values(data: Any) -> None:
    case = data.draw(cases())
    x = data.draw(placed(case.base))
    y = case.shard(x)
    leaf = case.planned()
    own_kind = x.sharding.memory_kind if isinstance(x, jax.Array) and x.committed else "device"
    want = NamedSharding(case.mesh, leaf.spec, memory_kind=case.memory_kind or own_kind)
    assert isinstance(y.sharding, NamedSharding) and y.sharding.mesh is case.mesh
    assert y.sharding.is_equivalent_to(want, y.ndim)
    assert y.sharding.memory_kind == want.memory_kind
    assert order(y) == order(case.mesh) and y.committed
    assert y.addressable_shards[0].data.nbytes <= max(leaf.bytes_per_device, 1)
    assert y.dtype == case.base.dtype and y.shape == case.base.shape
    assert bits(y) == bits(case.base) == bits(x)
    # Where it is already, it stays; and that costs nothing.
    with nothing_compiled():
        assert case.shard(y) is y


@given(st.data())
def test_eager_and_compiled_calls_agree(data: Any) -> None:
    case = data.draw(cases())
    if case.mixes_types() or 0 in case.base.shape:
        # No constraint can say the one, and compiled code reports no sharding for arrays without elements.
        case = dataclasses.replace(case, base=np.ones((2, 2), np.float32), names="a b", rules={})
    if len(set(case.mesh.axis_types)) > 1:
        # JAX forgets the memory of a compiled function's result that is sharded over no Auto axis of a mixed mesh.
        case = dataclasses.replace(case, memory_kind="device")
    eager = case.shard(case.base)
    in_context = data.draw(st.booleans())
    with jax.set_mesh(case.mesh) if in_context else contextlib.nullcontext():
        compiled = jax.jit(case.shard)(case.base)
    assert compiled.sharding.is_equivalent_to(eager.sharding, eager.ndim), (compiled.sharding, eager.sharding)
    assert compiled.sharding.memory_kind == eager.sharding.memory_kind
    assert order(compiled) == order(eager) and compiled.committed
    if case.mesh.size > 1 and len(set(case.mesh.axis_types)) == 1:
        assert compiled.sharding.mesh is eager.sharding.mesh
    assert compiled.dtype == eager.dtype and bits(compiled) == bits(eager)


@given(st.data())
def test_a_tree_is_as_its_leaves_one_by_one(data: Any) -> None:
    case = data.draw(cases())
    xs = [data.draw(placed(case.base)) for _ in range(3)]
    tree = {"a": [na(x, case.names) for x in xs], "plain": xs[0], "tied": na(xs[0], case.names), "n": 1}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*replicated along an axis")
        ys = ns.shard(tree, case.mapping, case.mesh, memory_kind=case.memory_kind)
    for x, y in zip(xs, ys["a"], strict=True):
        alone = case.shard(x)
        assert y.array.sharding == alone.sharding and bits(y.array) == bits(alone)
    assert ys["plain"] is xs[0] and ys["tied"].array is ys["a"][0].array


def test_the_random_meshes_are_of_every_kind() -> None:
    """The laws would say little if the generator never made the awkward ones."""
    seen: set[str] = set()

    @given(meshes())
    @settings(max_examples=100)
    def look(mesh: Mesh) -> None:
        kinds = set(mesh.axis_types)
        seen.add("mixed" if len(kinds) > 1 else "explicit" if AxisType.Explicit in kinds else "auto")
        seen.add("part" if mesh.size < 8 else "whole")
        seen.add("in order" if order(mesh) == sorted(order(mesh)) else "permuted")

    look()
    assert seen == {"mixed", "explicit", "auto", "part", "whole", "in order", "permuted"}
