"""What a compiled function means: arguments, statics, results, transformations and methods."""

import collections
import contextlib
import dataclasses
import functools
import gc
import math
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support import M8, M42, ONE_OF_EACH, assert_exactly, bits, counting, mesh, na, unchecked

import namedshard as ns
from namedshard._jit import store as _calls
from namedshard._plan.leaves import named_leaves

MAPPING = {"batch": "data", "embed": "model"}


def named(where: Mesh, *spec: Any) -> hax.NamedArray:
    return na(jax.device_put(counting(8, 4), NamedSharding(where, P(*spec))), "batch embed")


def same(a: Any, b: Any) -> bool:
    return bits(getattr(a, "array", a)) == bits(getattr(b, "array", b))


# --- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_results_come_out_as_planned_on_every_kind_of_mesh(kind: str) -> None:
    where = ONE_OF_EACH[kind]

    def step(x, plain):
        return {"x": x * 2, "column": x["embed", 1], "scalar": hax.named(jnp.float32(3), ()), "plain": plain + 1}

    # Indexing on Explicit axes is for newer Haliax only.
    fn = (lambda x, plain: {"x": x * 2, "plain": plain + 1}) if kind != "auto" else step
    with jax.set_mesh(where):
        x = ns.shard(na(counting(8, 4), "batch embed"), MAPPING)
        out = ns.named_jit(fn, MAPPING)(x, jax.device_put(counting(8), NamedSharding(where, P())))
        planned = ns.plan(out, MAPPING, where)
        for path, leaf in jax.tree_util.tree_leaves_with_path(out):
            plan = planned[jax.tree_util.keystr(path).removesuffix("[<flat index 0>]").removesuffix(".array")]
            if plan.spec is not None:
                assert_exactly(leaf, where, plan.spec)
        assert same(out["x"], counting(8, 4) * 2)
        assert same(out["plain"], counting(8) + 1)


def test_results_that_are_no_jax_arrays() -> None:
    class Tag:
        pass

    tag = Tag()

    def step(x):
        return {
            "x": x,
            "none": None,
            "int": 3,
            "float": 2.5,
            "str": "text",
            "tag": tag,
            "numpy": np.arange(3, dtype=np.int32),
            "numpy scalar": np.float32(7),
            "named numpy": na(counting(8), "batch"),
            "empty": [],
            "shape": x.shape,
        }

    fn = ns.named_jit(step, {"batch": "data"})
    with jax.set_mesh(M8):
        for _ in range(2):
            out = fn(counting(8))
            assert type(out["int"]) is int and out["int"] == 3
            assert type(out["float"]) is float and out["float"] == 2.5
            assert (out["none"], out["str"], out["shape"]) == (None, "text", (8,))
            assert out["tag"] is tag
            assert isinstance(out["numpy"], jax.Array) and same(out["numpy"], np.arange(3, dtype=np.int32))
            assert isinstance(out["numpy scalar"], jax.Array) and out["numpy scalar"].dtype == np.float32
            assert_exactly(out["named numpy"], M8, P("data"))
            # Containers are the caller's own: nothing done to them is seen by the next call.
            assert out["empty"] == []
            out["empty"].append(1)
            out["new"] = 1
    assert fn.report().traces == 1
    assert ns.named_jit(lambda: None)() is None
    assert ns.named_jit(lambda n: n + 1)(4) == 5


def test_a_result_carries_its_own_mapping() -> None:
    def step(x):
        return ns.with_mapping(x, {"batch": None}), ns.with_mapping(x, {"embed": "data", "batch": None}), x

    with jax.set_mesh(M42):
        out = ns.named_jit(step, MAPPING)(named(M42))
        assert_exactly(out[0], M42, P(None, "model"))
        assert_exactly(out[1], M42, P(None, "data"))
        assert_exactly(out[2], M42, P("data", "model"))
        # Without any other mapping, too.
        assert_exactly(ns.named_jit(step)(named(M42))[1], M42, P(None, "data"))


def test_in_and_out_mappings_and_the_one_in_force() -> None:
    seen = []

    def step(x):
        seen.append(ns.axis_mapping)
        seen[-1] = hax.partitioning.current_thread_local_mapping()
        return x

    step_in_out = ns.named_jit(
        step, {"batch": "model"}, in_axis_resources={"batch": "data"}, out_axis_resources={"embed": "data"}
    )
    with jax.set_mesh(M42):
        assert_exactly(step_in_out(na(counting(8, 4), "batch embed")), M42, P(None, "data"))
        assert dict(seen[-1]) == {"batch": "model"}
        by_context = ns.named_jit(step)
        with hax.axis_mapping({"batch": "data"}):
            assert_exactly(by_context(named(M42)), M42, P("data", None))
        with ns.axis_mapping({"batch": ns.first("model", "data")}):
            assert_exactly(by_context(named(M42)), M42, P("model", None))
        assert same(by_context(named(M42)), counting(8, 4))
        assert by_context.report().traces == 3


def test_an_axis_that_does_not_divide_fails_before_anything_runs() -> None:
    with jax.set_mesh(M8), pytest.raises(ns.IndivisibleAxisError) as caught:
        ns.named_jit(lambda: {"w": hax.zeros(hax.Axis("vocab", 17))}, {"vocab": "data"})()
    assert str(caught.value) == (
        "1 of 1 leaf cannot be sharded by this mapping\n"
        "  ['w']: axis vocab=17 is not divisible by mesh axis 'data'=8 (17 = 8*2 + 1)\n"
        '  fix: pad the axis to 24, or pass indivisible="replicate"'
    )


def test_shapes_that_depend_on_the_mesh_are_not_remembered() -> None:
    @ns.named_jit(axis_resources={"vocab": "data"})
    def zeros():
        return hax.zeros(ns.round_axis_for_partitioning(hax.Axis("vocab", 17), {"vocab": "data"}))

    for count, size in ((8, 24), (5, 20), (2, 18), (8, 24)):
        with jax.set_mesh(mesh((count,), "data")):
            assert zeros().array.shape == (size,)


# --- statics ----------------------------------------------------------------------------------------------------------


def test_statics_are_keyed_with_their_type() -> None:
    fn = ns.named_jit(lambda a, s: a * s)
    x = jnp.arange(8, dtype=jnp.int32)
    for value in (1, 1.0, True, 2, 2.0, np.int8(2), 1, 1.0):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = fn(x, value)
        assert got.dtype == (x * value).dtype, repr(value)
        assert same(got, x * value)
    # Equal values of other types inside a static argument are told apart just so.
    inside = ns.named_jit(lambda a, s: a * first_in(s))
    kinds: tuple[Callable[[Any], Any], ...] = (
        Config,
        lambda v: frozenset([v]),
        lambda v: slice(v),
        lambda v: Config((v,)),
        lambda v: Config(frozenset([v])),
        lambda v: Config(np.float32(v) if isinstance(v, float) else np.int8(v)),
    )
    for make in kinds:
        for value in (1, 1.0, 1):
            assert inside(x, make(value)).dtype == (x * first_in(make(value))).dtype, make(value)
        signs = [math.copysign(1, float(inside(jnp.float32(1), make(s)))) for s in (0.0, -0.0)]
        assert signs == [1, -1], make(1)
    assert inside.report().traces == 4 * len(kinds)
    zero = ns.named_jit(lambda x, s: x * s)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        signs = [math.copysign(1, float(zero(jnp.float32(1), s))) for s in (0.0, -0.0, 0.0)]
        assert signs == [1, -1, 1]
        zero(jnp.float32(1), math.nan), zero(jnp.float32(1), float("nan"))
    assert zero.report().traces == 3


@dataclasses.dataclass(frozen=True)
class Config:
    scale: Any
    more: tuple[Any, ...] = ()


def first_in(value: Any) -> Any:
    while not isinstance(value, int | float | np.generic):
        if isinstance(value, Config):
            value = value.scale
        else:
            value = value.stop if isinstance(value, slice) else next(iter(value))
    return value


class Scaled(eqx.Module):
    weight: jax.Array
    scale: Any = eqx.field(static=True)

    def __call__(self, x):
        return x * self.weight * (self.scale.scale if isinstance(self.scale, Config) else self.scale)

    def nested(self, x):
        value = self.scale
        while not isinstance(value, int | float | complex | np.generic):
            value = value[next(iter(value))] if isinstance(value, dict) else value[0]
        return x * value


def test_static_fields_are_told_apart_by_type_too() -> None:
    fn = ns.named_jit(lambda m, x: m(x))
    x, w = jnp.arange(8, dtype=jnp.int32), jnp.ones((), jnp.int32)
    for value in (1, 1.0, True, 1, 1.0, Config(1), Config(1.0), Config(1)):
        m = Scaled(w, value)
        assert fn(m, x).dtype == m(x).dtype, value
    assert fn.report().traces == 5
    # Equal objects that are not the same one need no new trace.
    fn(Scaled(w, Config(1)), x)
    assert fn.report().traces == 5

    deep = ns.named_jit(lambda m, x: m.nested(x))
    for value in ((1, 2), (1.0, 2), ((1,),), ((1.0,),), (True, 2), (1, 2)):
        assert deep(Scaled(w, value), x).dtype == Scaled(w, value).nested(x).dtype, value
    signs = [math.copysign(1, float(deep(Scaled(w, (s,)), jnp.float32(1)))) for s in (0.0, -0.0)]
    assert signs == [1, -1]

    # A function that holds arrays, its store shared by structure.
    for value in (1, 1.0, True):
        assert ns.named_jit(Scaled(w, value))(x).dtype == Scaled(w, value)(x).dtype


class Box:
    """A value that Python compares by its contents, and so doesn't hash."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Box) and self.n == other.n


@dataclasses.dataclass
class Fields:
    n: int


@dataclasses.dataclass(eq=False)
class ById:
    inner: Any


class Nested(eqx.Module):
    inner: Any = eqx.field(static=True)


def change(container: Any, key: Any, n: int) -> None:
    container[key] = n


def refill(container: Any, n: int) -> None:
    container.clear()
    container.update([n]) if isinstance(container, set) else container.append(n)


# How to make one that holds a number, read the number, and change it in place.
MUTABLE: dict[str, tuple[Callable[[int], Any], Callable[[Any], int], Callable[[Any, int], None]]] = {
    "dict": (lambda n: {"n": n}, lambda d: d["n"], lambda d, n: change(d, "n", n)),
    "dict of strings": (lambda n: {"n": str(n)}, lambda d: int(d["n"]), lambda d, n: change(d, "n", str(n))),
    "dict of lists": (lambda n: {"n": [n]}, lambda d: d["n"][0], lambda d, n: change(d["n"], 0, n)),
    "defaultdict": (
        lambda n: collections.defaultdict(int, n=n),
        lambda d: d["n"],
        lambda d, n: change(d, "n", n),
    ),
    "list": (lambda n: [n], lambda x: x[0], lambda x, n: change(x, 0, n)),
    "list of names": (lambda n: ["a"] * n, len, lambda x, n: change(x, slice(None), ["a"] * n)),
    "set": (lambda n: {n}, lambda x: next(iter(x)), refill),
    "deque": (lambda n: collections.deque([n]), lambda x: x[0], refill),
    "bytearray": (lambda n: bytearray([n]), lambda x: x[0], lambda x, n: change(x, 0, n)),
    "numpy": (lambda n: np.array([n, 0]), lambda x: int(x[0]), lambda x, n: change(x, 0, n)),
    "numpy scalar": (lambda n: np.array(n), lambda x: int(x[()]), lambda x, n: change(x, (), n)),
    "numpy objects": (lambda n: np.array([n, "a"], object), lambda x: x[0], lambda x, n: change(x, 0, n)),
    "namespace": (lambda n: types.SimpleNamespace(n=n), lambda x: x.n, lambda x, n: setattr(x, "n", n)),
    "object with __eq__": (Box, lambda x: x.n, lambda x, n: setattr(x, "n", n)),
    "view": (
        lambda n: types.MappingProxyType({"n": [n]}),
        lambda d: d["n"][0],
        lambda d, n: change(d["n"], 0, n),
    ),
    "dataclass": (Fields, lambda x: x.n, lambda x, n: setattr(x, "n", n)),
}
# Where it is held: how to put it there, and how to get it back.
HOLDERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "itself": (lambda x: x, lambda x: x),
    "tuple": (lambda x: ("a", (x,)), lambda x: x[1][0]),
    "frozen dataclass": (Config, lambda x: x.scale),
    "dataclass compared by identity": (ById, lambda x: x.inner),
    "partial": (lambda x: functools.partial(print, key=x), lambda x: x.keywords["key"]),
    "dict": (lambda x: {"a": x}, lambda x: x["a"]),
    "module": (Nested, lambda x: x.inner),
}


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
@pytest.mark.parametrize(
    ("kind", "holder"), [*((kind, "itself") for kind in MUTABLE), *(("dict", h) for h in HOLDERS if h != "itself")]
)
def test_static_values_may_change_in_place(kind: str, holder: str) -> None:
    make, read, write = MUTABLE[kind]
    hold, held = HOLDERS[holder]
    fn = ns.named_jit(lambda m, x: (m, x * read(held(m.scale))))
    w, x = jnp.ones(2), jnp.arange(3)

    def check(model: Scaled, n: int) -> None:
        out, y = fn(model, x)
        assert same(y, counting(3, dtype=np.int32) * n)
        # The static fields of a result, too.
        assert read(held(out.scale)) == n

    value, other = make(3), make(3)
    model, second = Scaled(w, hold(value)), Scaled(w, hold(other))
    check(model, 3)
    check(second, 3)
    for n in (7, 3, 5):
        write(value, n)
        check(second, 3)
        check(model, n)
        check(Scaled(w, hold(make(n))), n)
        check(Scaled(w, hold(make(9))), 9)
    write(other, 5)
    check(second, 5)
    traces = fn.report().traces
    for _ in range(3):
        check(model, 5)
        check(second, 5)
    assert fn.report().traces == traces
    # JAX traces again from what the program keeps.
    jax.clear_caches()
    write(other, 3)
    check(model, 5)
    check(second, 3)
    # A function that holds arrays, and a program lowered before.
    whole = ns.named_jit(Reading(w, hold(value), lambda s: read(held(s))))
    compiled = whole.lower(x).compile()
    assert same(whole(x), counting(3) * 5) and same(compiled(x), counting(3) * 5)
    write(value, 4)
    assert same(whole(x), counting(3) * 4)
    with pytest.raises(TypeError, match="have another structure"):
        compiled(x)


class Reading(Scaled):
    read: Callable[[Any], int] = eqx.field(static=True)

    def __call__(self, x):
        return x * self.weight[0] * self.read(self.scale)


@pytest.mark.parametrize("kind", MUTABLE)
def test_static_arguments_may_change_in_place(kind: str) -> None:
    make, read, write = MUTABLE[kind]
    for hold, held in (HOLDERS["dataclass compared by identity"], HOLDERS["partial"]):
        fn = ns.named_jit(lambda s, x, held=held: x * read(held(s)))
        value = make(3)
        static = hold(value)
        for n in (3, 7, 3):
            write(value, n)
            for _ in range(2):
                assert same(fn(static, jnp.arange(3)), counting(3, dtype=np.int32) * n)
        assert fn.report().traces == 2


def test_static_values_that_python_can_not_take_apart_are_refused() -> None:
    with pytest.raises(ns.StaticArgumentError) as caught:
        ns.named_jit(lambda m, x: x)(Scaled(jnp.ones(2), memoryview(bytearray(b"a"))), jnp.ones(3))
    assert str(caught.value) == (
        "a static field holds a value of type memoryview, which can be changed in place and can't be compared by its"
        " contents\n"
        "  fix: use a hashable value (a tuple, a frozen dataclass), or an array that isn't static"
    )


def test_keys_of_dicts_are_told_apart_by_type() -> None:
    fn = ns.named_jit(lambda d: [type(k).__name__ for k in d])
    assert [fn({k: jnp.ones(2)}) for k in (1, 1.0, True, 1)] == [["int"], ["float"], ["bool"], ["int"]]


def test_numpy_scalars_are_arrays_and_python_numbers_get_a_hint() -> None:
    def step(model, step):
        return model * step

    model = jnp.arange(8.0)
    fn = ns.named_jit(step)
    for n in range(4):
        assert same(fn(model, jnp.int32(n)), counting(8) * n)
    assert fn.report().traces == 1
    for n in range(4):
        assert same(fn(model, np.int32(n)), counting(8) * n)
    assert fn.report().traces == 1
    said: list[str] = []
    for n in range(5):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            assert same(fn(model, n), counting(8) * n)
        said.append("\n---\n".join(str(w.message) for w in found))
    assert said == [
        "",
        "",
        "step: argument step is a Python int and has had 3 distinct values; each of them compiles the function again\n"
        "  fix: pass an array, e.g. jnp.asarray(step)",
        "",
        "",
    ]
    assert fn.report().traces == 6


def test_leaves_of_all_kinds_are_static() -> None:
    def act(x):
        return x + 1

    fn = ns.named_jit(lambda x, *rest, **named: (x, *rest, named))
    rest = ("text", None, act, jax.nn.relu, np.float32, jnp.bfloat16, np.dtype("int8"), b"b", 1 + 2j, frozenset([1]))
    for _ in range(2):
        out = fn(counting(3), *rest, dtype=np.int32)
        assert same(out[0], counting(3))
        assert out[1:-1] == rest
        assert out[-1] == {"dtype": np.int32}
    assert fn.report().traces == 1
    mlp = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
    x = jnp.ones(2)
    assert same(ns.named_jit(mlp)(x), jax.jit(lambda x: mlp(x))(x))


def test_unhashable_statics_are_named_all_at_once() -> None:
    class Bag:
        __hash__ = None

    @ns.named_jit
    def step(model, other, x):
        return x

    with pytest.raises(ns.StaticArgumentError) as caught:
        step({"a": Bag(), "fine": 3}, bytearray(b"x"), jnp.ones(3))
    assert str(caught.value) == (
        "step: 2 arguments cannot be used as static ones\n"
        "  argument model['a'] is neither an array nor hashable: Bag\n"
        "  argument other is neither an array nor hashable: bytearray\n"
        "  fix: pass an array, or make it hashable (a tuple, a frozen dataclass)"
    )


# --- unusual trees ----------------------------------------------------------------------------------------------------


class SameKeys:
    """A node whose children all have one key."""

    def __init__(self, *children: Any, key: Any = None) -> None:
        self.children, self.key = children, key or jax.tree_util.GetAttrKey("x")


jax.tree_util.register_pytree_with_keys(
    SameKeys,
    lambda node: ([(node.key, child) for child in node.children], node.key),
    lambda key, children: SameKeys(*children, key=key),
)


class ReprLess:
    """Keys of a dict that print alike."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __lt__(self, other: "ReprLess") -> bool:
        return self.n < other.n

    def __repr__(self) -> str:
        return "key"


KEYS = ReprLess(0), ReprLess(1)
X, Y = na(counting(8, 4), "batch embed"), na(counting(4, 8) + 1, "embed batch")
UNUSUAL: dict[str, Callable[[], Any]] = {
    "equal keys": lambda: SameKeys(X, Y, jnp.ones(3)),
    "equal keys within each other": lambda: SameKeys(SameKeys(X, Y), SameKeys(X, Y)),
    "equal keys beside an index": lambda: SameKeys(X, Y, [X, Y]),
    "equal empty keys": lambda: SameKeys(X, Y, key=jax.tree_util.GetAttrKey("")),
    "keys that print alike": lambda: {KEYS[0]: X, KEYS[1]: Y},
    "a key that prints as a path": lambda: {"a": [X], "a'][0]['b": Y},
    "odd keys": lambda: {"": X, "a.b": Y, "fn": jnp.ones(2), "é\n": jnp.ones(2)},
    "optax.sm3": lambda: optax.sm3(1e-2).init({"w": X, "b": Y}),
    "optax.adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2).init({"w": X, "b": jnp.ones(3)}),
    "hessian": lambda: jax.hessian(lambda p: ((p["a"].array * p["b"].array.T) ** 2).sum())({"a": X, "b": Y}),
    "jacobian": lambda: jax.jacrev(lambda x: x * 2.0)(X),
    "quantized": lambda: unchecked({"values": jnp.ones((8, 4), jnp.int8), "scale": jnp.ones(8)}, "batch embed", 8, 4),
    "pair under one name": lambda: unchecked((jnp.ones((8, 4), jnp.int8), jnp.ones((8, 4))), "batch embed", 8, 4),
    "named arrays within": lambda: unchecked([X, Y], "batch embed", 8, 4),
    "nothing": lambda: (None, [], {}, unchecked(None, "batch", 8)),
    "tied": lambda: [X, X, X.array],
    "keys and empties": lambda: [jax.random.key(0), jnp.zeros((0, 3)), jnp.float32(1), np.bool_(True)],
}


def with_array(tree: Any) -> Any:
    return jax.tree_util.tree_map(lambda x: x if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x * 2, tree)


@pytest.mark.parametrize("where", [None, M42], ids=["no mesh", "mesh"])
@pytest.mark.parametrize("kind", UNUSUAL)
def test_unusual_trees_run_as_under_jax_jit(kind: str, where: Mesh | None) -> None:
    with jax.set_mesh(where) if where else contextlib.nullcontext():
        tree = UNUSUAL[kind]()
        paths = [leaf.path for leaf in named_leaves(tree)]
        assert len(set(paths)) == len(paths) == len(jax.tree_util.tree_leaves(tree))
        want = jax.jit(with_array)(tree)
        for call in (
            lambda fn: fn(tree),
            lambda fn: fn(tree=tree),
            lambda fn: fn.lower(tree).compile()(tree),
            lambda fn: ns.named_jit(functools.partial(lambda held: fn(held), tree))(),
        ):
            out = call(ns.named_jit(with_array, MAPPING if where else None))
            assert jax.tree_util.tree_structure(out) == jax.tree_util.tree_structure(want)
            pairs = zip(jax.tree_util.tree_leaves(out), jax.tree_util.tree_leaves(want), strict=True)
            assert all(bits(a) == bits(b) and a.dtype == b.dtype for a, b in pairs)
        if where:
            # An argument is named in messages by a path that no other has.
            planned = ns.plan(tree, MAPPING, where)
            assert all(planned[path].path == path for path in paths)


def test_arguments_of_one_name() -> None:
    def step(x, /, *rest, **named):
        return x, rest, named

    x = jnp.ones(2)
    for kwargs in ({"x": x * 3}, {"x[0]": x}, {"rest[0]": x, "": x * 5}, {".0": x, "x": x}):
        out = ns.named_jit(step)(x, x * 2, **kwargs)
        want = step(x, x * 2, **kwargs)
        assert jax.tree_util.tree_all(jax.tree_util.tree_map(same, out, want))

    class Holder(eqx.Module):
        weight: jax.Array

        def __call__(self, fn):
            return self.weight * fn["weight"]

    assert same(ns.named_jit(Holder(x * 2))({"weight": x * 3}), np.full(2, 6, np.float32))
    with jax.set_mesh(M8), pytest.raises(ns.MismatchError) as caught:
        ns.named_jit(lambda pair: pair)(SameKeys(*(jax.device_put(x, jax.devices()[n]) for n in range(2))))
    assert [line.split(":")[0] for line in str(caught.value).splitlines()[1:3]] == ["  pair.x[0]", "  pair.x[1]"]


# --- functions --------------------------------------------------------------------------------------------------------


class Model(eqx.Module):
    weight: hax.NamedArray

    def __call__(self, x, *, shift=0):
        return x * self.weight + shift

    def method(self, x):
        return x + self.weight

    @ns.named_jit
    def compiled(self, x, shift):
        return x * self.weight + shift

    @ns.named_jit(donate_args=(False, True))
    def donating(self, x):
        return x + self.weight


class Trainer:
    def __init__(self) -> None:
        self.factor = 3

    @ns.named_jit
    def step(self, x):
        return x * self.factor

    def plain(self, x):
        return x * self.factor


def test_functions_that_hold_arrays_are_arguments_not_constants() -> None:
    with jax.set_mesh(M42):
        w, x = named(M42, "data", "model"), named(M42, "data")
        first, second = Model(w), Model(w * 2)
        for make in (
            lambda m: ns.named_jit(m, MAPPING),
            lambda m: ns.named_jit(m.__call__, MAPPING),
            lambda m: ns.named_jit(jax.tree_util.Partial(lambda m, x: m(x), m), MAPPING),
            lambda m: ns.named_jit(functools.partial(lambda m, x: m(x), m), MAPPING),
        ):
            one, two = make(first), make(second)
            assert same(one(x), counting(8, 4) ** 2)
            assert same(two(x), counting(8, 4) ** 2 * 2)
            assert_exactly(two(x), M42, P("data", "model"))
            # One structure, one program; the arrays are no part of it.
            hlo = two.lower(x).as_text()
            assert hlo.count("dense<") <= 1
        assert same(ns.named_jit(first.method)(x), counting(8, 4) * 2)
        assert same(ns.named_jit(first, MAPPING)(x, shift=1), counting(8, 4) ** 2 + 1)
        assert same(ns.named_jit(functools.partial(lambda n, x: x * n, 3))(x), counting(8, 4) * 3)


def test_methods() -> None:
    x = jnp.arange(8.0)
    model = Model(na(x, "batch"))
    named_x = na(x, "batch")
    assert same(model.compiled(named_x, 1), counting(8) ** 2 + 1)
    assert same(model.compiled(named_x, shift=1), counting(8) ** 2 + 1)
    assert same(Model.compiled(model, named_x, 1), counting(8) ** 2 + 1)
    assert same(ns.named_jit(model.compiled)(named_x, 1), counting(8) ** 2 + 1)
    assert isinstance(model.compiled.report(), ns.Report)
    assert model.compiled.eval_shape(named_x, 1).array.shape == (8,)
    assert same(model.compiled.lower(named_x, jnp.float32(1)).compile()(named_x, jnp.float32(1)), counting(8) ** 2 + 1)
    fed = na(jnp.arange(8.0), "batch")
    assert same(model.donating(fed), counting(8) * 2)
    assert fed.array.is_deleted()
    assert not model.weight.array.is_deleted()
    trainer = Trainer()
    assert same(trainer.step(x), counting(8) * 3)
    assert same(ns.named_jit(trainer.plain)(x), counting(8) * 3)
    assert Model.compiled.__name__ == "compiled"
    assert repr(Model.compiled) == "named_jit(Model.compiled)"


def test_wrapping_again_compiles_nothing_again() -> None:
    traces = []

    def step(x):
        traces.append(1)
        return x + 1

    for _ in range(20):
        ns.named_jit(step, donate_args=[False])(jnp.ones(3))
    assert len(traces) == 1
    ns.named_jit(step)(jnp.ones(3))
    assert len(traces) == 2
    trainer = Trainer()
    for _ in range(3):
        again = ns.named_jit(trainer.plain)
        again(jnp.ones(3))
    assert again.report().traces == 1


def test_wrappers_of_one_function_have_reports_of_their_own() -> None:
    def step(x, n=1):
        return x + n

    first, second = ns.named_jit(step), ns.named_jit(step)
    for _ in range(3):
        first(jnp.ones(3))
    assert first.report() == ns.Report(3, 1, 1, 0, 0)
    assert second.report() == ns.Report(0, 0, 0, 0, 0)
    # It uses the other's program.
    for _ in range(2):
        second(jnp.ones(3))
    assert second.report() == ns.Report(2, 1, 1, 0, 0)
    second(jnp.ones(4))
    assert (first.report(), second.report()) == (ns.Report(3, 1, 1, 0, 0), ns.Report(3, 2, 2, 0, 0))
    moving = [ns.named_jit(step, on_mismatch="reshard", in_axis_resources={"a": "data"}) for _ in range(2)]
    with jax.set_mesh(M8):
        x = ns.shard(na(counting(8), "a"), {"a": None})
        moving[0](x)
    assert [fn.report().reshards for fn in moving] == [1, 0]
    assert [fn.report().bytes_moved for fn in moving] == [32, 0]


@pytest.mark.parametrize("make", [lambda t: lambda x: x * t.factor, lambda t: t.plain], ids=["closure", "method"])
def test_a_function_is_not_kept_alive(make: Callable[[Trainer], Any]) -> None:
    trainer = Trainer()
    gone = weakref.ref(trainer)
    fn = ns.named_jit(make(trainer))
    assert same(fn(jnp.ones(3)), np.full(3, 3, np.float32))
    del fn, trainer
    gc.collect()
    assert gone() is None


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_calls, "MAX_CALLS", 4)
    traced: list[int] = []
    fn = ns.named_jit(lambda x: traced.append(x.size) or x + 1)
    for n in range(20):
        fn(jnp.ones(n % 10 + 1))
        fn(jnp.ones(64))
    gc.collect()
    assert len(fn._store.calls) <= 4 and len(fn._store.programs) <= 4
    # The one in use throughout was never forgotten.
    assert traced.count(64) == 1
    assert 11 <= len(traced) == fn.report().traces


# --- around and inside ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_transformations_around_and_inside(kind: str) -> None:
    where = ONE_OF_EACH[kind]
    square = ns.named_jit(lambda x: x * x, MAPPING)

    def total(x):
        return (square(x) * 1.0).array.sum()

    with jax.set_mesh(where):
        x = ns.shard(na(counting(8, 4), "batch embed"), MAPPING)
        double = counting(8, 4) * 2
        assert_exactly(square(x), where, P("data", "model"))
        for grad in (
            eqx.filter_grad(total),
            ns.named_jit(eqx.filter_grad(total), MAPPING),
            eqx.filter_grad(ns.named_jit(total)),
            ns.named_jit(eqx.filter_grad(jax.checkpoint(total)), MAPPING),
            eqx.filter_grad(jax.checkpoint(ns.named_jit(total, MAPPING))),
            jax.jit(lambda x: eqx.filter_grad(total)(x)),
        ):
            assert same(grad(x), double)
        assert_exactly(ns.named_jit(eqx.filter_grad(total), MAPPING)(x), where, P("data", "model"))
        # Inside of jit, and of itself.
        assert same(jax.jit(lambda x: square(square(x)))(x), counting(8, 4) ** 4)
        assert same(ns.named_jit(lambda x: square(x))(x), counting(8, 4) ** 2)

        def layer(carry, w):
            carry = square(carry)
            return carry, carry

        carry, ys = jax.lax.scan(
            layer, ns.shard(na(np.ones((8, 4), np.float32), "batch embed"), MAPPING), jnp.arange(3)
        )
        assert same(carry, np.ones((8, 4), np.float32))
        assert ys.array.shape == (3, 8, 4)
        scanned = ns.named_jit(lambda x: jax.lax.scan(layer, x, jnp.arange(3))[0], MAPPING)
        assert_exactly(scanned(x), where, P("data", "model"))


def test_vmap_keeps_the_spec_on_its_axis() -> None:
    row = ns.named_jit(lambda x: x * 2, {"embed": "model"})

    def one(x):
        return row(na(x, "embed")).array

    with jax.set_mesh(M42):
        x = jax.device_put(counting(8, 4), NamedSharding(M42, P("data", "model")))
        for mapped in (jax.vmap(one), jax.jit(jax.vmap(one)), ns.named_jit(jax.vmap(one))):
            out = mapped(x)
            assert same(out, counting(8, 4) * 2)
            assert "model" not in (out.sharding.spec[:1] or (None,))
            assert out.sharding.spec[1] == "model"


def test_eager_transformations_trace_once_too() -> None:
    fn = ns.named_jit(lambda x: x * x)
    for _ in range(3):
        assert float(jax.grad(lambda x: fn(x))(jnp.float32(3))) == 6.0
    assert fn.report().traces == 1
    summed = ns.named_jit(lambda x: jax.lax.psum(x, "rows"))
    for _ in range(3):
        assert same(jax.vmap(summed, axis_name="rows")(jnp.arange(8.0)), np.full(8, 28, np.float32))
    assert summed.report().traces == 1


def test_a_module_keeps_its_fields_to_itself() -> None:
    class Odd(eqx.Module):
        report: Any
        lower: Any
        _store: Any

        def __call__(self, x):
            return x * self._store + self.lower

    odd = ns.named_jit(Odd(1, jnp.float32(2), jnp.float32(3)))
    assert float(odd(jnp.float32(4))) == 14.0
    assert odd.report().traces == 1


def test_a_closure_over_traced_values() -> None:
    def outer(w):
        inner = ns.named_jit(lambda x: x * w)
        return inner(jnp.float32(2)) + inner(jnp.float32(3)) + inner(jnp.float32(2))

    assert float(jax.grad(outer)(jnp.float32(1))) == 7.0
    assert float(jax.jit(outer)(jnp.float32(2))) == 14.0
    assert float(ns.named_jit(outer)(jnp.float32(2))) == 14.0


def test_nested_calls_take_numpy_and_static_arguments() -> None:
    inner = ns.named_jit(lambda x, table, n: x * table * n, {"a": "data"})
    outer = ns.named_jit(lambda x: inner(x, na(counting(8), "a"), 2), {"a": "data"})
    with jax.set_mesh(M8):
        out = outer(na(counting(8), "a"))
        assert_exactly(out, M8, P("data"))
        assert same(out, counting(8) ** 2 * 2)


def test_adapters_merge_as_partitions() -> None:
    o, b, r = hax.Axis("o", 8), hax.Axis("b", 8), hax.Axis("r", 2)
    mapping = {"b": "data", "o": "model"}
    w, a, up = na(counting(8, 8), "o b"), na(counting(2, 8), "r b"), na(counting(8, 2), "o r")

    class Adapted(eqx.Module):
        w: hax.NamedArray
        a: hax.NamedArray
        up: hax.NamedArray

    where = mesh((4, 2), "data model")
    with jax.set_mesh(where):
        model = ns.shard(Adapted(w, a, up), mapping)
        adapters, base = eqx.partition(model, Adapted(w=False, a=True, up=True))

        @ns.named_jit(axis_resources=mapping)
        def merge(adapters, base, nothing):
            m = eqx.combine(adapters, base)
            product = m.up.array @ m.a.array
            return hax.NamedArray(m.w.array + product, (o, b)), nothing

        merged, nothing = merge(adapters, base, None)
        assert nothing is None
        assert_exactly(merged, where, P("model", "data"))
        assert same(merged, counting(8, 8) + counting(8, 2) @ counting(2, 8))
        assert r.size == 2
