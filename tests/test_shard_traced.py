"""Under jit, grad, vmap, scan, while, cond, checkpoint and shard_map, on Auto, Explicit and mixed meshes."""

import contextlib
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
from support import (
    AUTO,
    DEVICES,
    E8,
    E42,
    EXPLICIT,
    M8,
    M8_REVERSED,
    M42,
    MIXED42,
    ONE_OF_EACH,
    assert_exactly,
    bits,
    counting,
    mesh,
    na,
    unchecked,
)

import namedshard as ns

MAPPING = {"b": "data", "f": "model"}
BASE = counting(8, 4)

each_mesh = pytest.mark.parametrize("where", ONE_OF_EACH.values(), ids=ONE_OF_EACH)
own_context = pytest.mark.parametrize("context", [False, True], ids=["no context", "its own context"])


def entered(where: Mesh, wanted: bool) -> Any:
    return jax.set_mesh(where) if wanted else contextlib.nullcontext()


def to(where: Mesh) -> Callable[[Any], Any]:
    return lambda x: ns.shard(na(x, "b f"), MAPPING, where).array


def put(x: Any, where: Mesh, *spec: Any, kind: str = "device") -> jax.Array:
    return jax.device_put(x, NamedSharding(where, P(*spec), memory_kind=kind))


def assert_placed(x: jax.Array, where: Mesh, *spec: Any) -> None:
    assert isinstance(x.sharding, NamedSharding)
    assert x.sharding.mesh is where
    assert x.sharding.is_equivalent_to(NamedSharding(where, P(*spec)), x.ndim), x.sharding


# --- jit --------------------------------------------------------------------------------------------------------------


@each_mesh
@own_context
def test_jit_places_whatever_comes_in(where: Mesh, context: bool) -> None:
    f = jax.jit(to(where))
    with entered(where, context):
        for x in (BASE, jnp.asarray(BASE), put(BASE, where), put(BASE, where, "model", "data")):
            y = f(x)
            assert_exactly(y, where, P("data", "model"))
            assert bits(y) == bits(BASE)
        assert_exactly(jax.jit(lambda: to(where)(jnp.asarray(BASE)))(), where, P("data", "model"))
        assert_exactly(jax.jit(lambda: to(where)(BASE))(), where, P("data", "model"))
        assert_exactly(jax.jit(lambda: to(where)(jnp.zeros((8, 4)) + 1))(), where, P("data", "model"))


@each_mesh
@own_context
def test_jit_in_jit_and_an_array_that_jit_closes_over(where: Mesh, context: bool) -> None:
    closed = jax.device_put(BASE, DEVICES[0])
    inner = jax.jit(to(where))
    with entered(where, context):
        assert_placed(jax.jit(lambda x: inner(x + 1))(BASE), where, "data", "model")
        for over in (BASE, jnp.asarray(BASE), put(BASE, where, "model")):
            y = jax.jit(lambda over=over: to(where)(over) * 2)()
            assert_placed(y, where, "data", "model")
            assert bits(y) == bits(2 * BASE)
    assert bits(jax.jit(lambda x: to(M42)(closed) + x)(jnp.zeros(()))) == bits(BASE)


def test_an_explicit_mesh_given_inside_of_plain_jit_is_not_lost() -> None:
    for where in (M8, E8):
        shard = lambda x, where=where: ns.shard(na(x, "b"), {"b": "data"}, where).array  # noqa: E731
        for run, args in (
            (jax.jit(shard), (jnp.ones(8),)),
            (jax.jit(shard), (np.ones(8, np.float32),)),
            (jax.jit(lambda shard=shard: shard(jnp.ones(8))), ()),
        ):
            assert_exactly(run(*args), where, P("data"))


def test_haliax_and_equinox_transformations() -> None:
    tree = {"a": na(jnp.asarray(BASE), "b f"), "n": 3, "np": na(BASE, "b f"), "plain": jnp.ones(3), "s": "text"}
    y = eqx.filter_jit(lambda t: ns.shard(t, MAPPING, M42))(tree)
    assert_placed(y["a"].array, M42, "data", "model")
    assert_placed(y["np"].array, M42, "data", "model")
    assert y["n"] == 3 and y["s"] == "text"
    layers = unchecked(jnp.asarray(counting(3, 8, 4)), "b f", 8, 4)
    y = eqx.filter_jit(eqx.filter_vmap(lambda t: ns.shard(t, MAPPING, M42)))(layers)
    assert_placed(y.array, M42, None, "data", "model")
    loss = eqx.filter_value_and_grad(lambda t: (ns.shard(t, MAPPING, M42)["a"].array ** 2).sum())
    value, grads = eqx.filter_jit(loss)(tree)
    assert float(value) == (BASE**2).sum() and bits(grads["a"].array) == bits(2 * BASE)
    layer = hax.Axis("layer", 3)
    batched = na(jnp.asarray(counting(3, 8, 4)), "layer b f")
    with jax.set_mesh(M42), ns.axis_mapping(MAPPING):
        y = hax.vmap(ns.auto_sharded, layer)(put_named(batched, M42))
        assert_placed(y.array, M42, None, "data", "model")
        _, ys = hax.scan(lambda c, x: (c, ns.auto_sharded(x)), layer)(0, batched)
        assert_placed(ys.array, M42, None, "data", "model")


def put_named(x: hax.NamedArray, where: Mesh) -> hax.NamedArray:
    return hax.NamedArray(put(x.array, where), x.axes)


def test_eval_shape() -> None:
    out = jax.eval_shape(to(M42), BASE)
    assert out.shape == (8, 4) and out.dtype == jnp.float32
    assert_sharded_type(jax.eval_shape(to(E42), put(BASE, E42)))


def assert_sharded_type(x: Any) -> None:
    assert x.sharding.spec == P("data", "model")


# --- grad -------------------------------------------------------------------------------------------------------------


@each_mesh
@own_context
def test_grad_in_jit(where: Mesh, context: bool) -> None:
    f = jax.jit(jax.grad(lambda w: (to(where)(w) ** 2).sum()))
    with entered(where, context):
        for w in (BASE, jnp.asarray(BASE), put(BASE, where), put(BASE, where, "data", "model")):
            assert bits(f(w)) == bits(2 * BASE)
        assert_placed(f(put(BASE, where, "data", "model")), where, "data", "model")
        value, grads = jax.jit(jax.value_and_grad(lambda w: (to(where)(w) ** 2).sum()))(jnp.asarray(BASE))
        assert float(value) == (BASE**2).sum() and bits(grads) == bits(2 * BASE)


@each_mesh
def test_grad_outside_of_jit(where: Mesh) -> None:
    f = jax.grad(lambda w: (to(where)(w) ** 2).sum())
    with jax.set_mesh(where):
        for w in (jnp.asarray(BASE), put(BASE, where), put(BASE, where, "data", "model")):
            assert bits(f(w)) == bits(2 * BASE)
        if where is M42:
            assert_placed(f(put(BASE, where)), where, "data", "model")
    if where is M42:
        assert_placed(f(jnp.asarray(BASE)), where, "data", "model")


@each_mesh
def test_checkpoint(where: Mesh) -> None:
    loss = jax.checkpoint(lambda w: (to(where)(w) ** 2).sum())
    w = put(BASE, where, "data", "model")
    assert bits(jax.jit(jax.grad(loss))(w)) == bits(2 * BASE)


@each_mesh
def test_second_derivatives(where: Mesh) -> None:
    with jax.set_mesh(where):
        hessian = jax.jit(
            lambda w: jax.jvp(jax.grad(lambda w: (to(where)(w) ** 3).sum()), (w,), (jnp.ones_like(w),))[1]
        )
        assert bits(hessian(put(BASE, where, "data", "model"))) == bits(6 * BASE)


# --- vmap -------------------------------------------------------------------------------------------------------------


@each_mesh
@own_context
@pytest.mark.parametrize("transform", [jax.vmap, lambda f: jax.jit(jax.vmap(f))], ids=["eager", "jit"])
def test_vmap_never_shifts_the_spec(where: Mesh, context: bool, transform: Any) -> None:
    f = transform(lambda row: ns.shard(na(row, "f"), {"f": "model"}, where).array)
    with entered(where, context):
        for x in (
            BASE,
            jnp.asarray(BASE),
            put(BASE, where),
            put(BASE, where, "data", "model"),
            put(BASE, where, "data"),
        ):
            y = f(x)
            assert bits(y) == bits(BASE)
            assert y.sharding.mesh is where
            assert y.sharding.spec[1] == "model" and y.sharding.spec[0] in (None, "data")


@each_mesh
def test_vmap_over_any_dimension_and_twice(where: Mesh) -> None:
    shard = lambda row: ns.shard(na(row, "f"), {"f": "data"}, where).array  # noqa: E731
    x = put(counting(4, 8, 2), where)
    y = jax.jit(jax.vmap(jax.vmap(shard, in_axes=1, out_axes=1), in_axes=0))(x)
    assert_placed(y, where, None, "data", None)
    assert bits(y) == bits(x)


# --- loops and branches -----------------------------------------------------------------------------------------------


@each_mesh
@pytest.mark.parametrize("compiled", [True, False], ids=["jit", "eager"])
def test_scan_over_layers(where: Mesh, compiled: bool) -> None:
    def run(carry: Any, xs: Any) -> Any:
        def body(carry: Any, x: Any) -> Any:
            carry = to(where)(carry + x)
            return carry, carry

        return jax.lax.scan(body, carry, xs)

    xs = put(counting(3, 8, 4), where, None, "data", "model")
    carry, ys = (jax.jit(run) if compiled else run)(put(np.zeros((8, 4), np.float32), where, "data", "model"), xs)
    assert_placed(carry, where, "data", "model")
    assert_placed(ys, where, None, "data", "model")
    assert bits(ys) == bits(np.cumsum(counting(3, 8, 4), 0)) and bits(carry) == bits(counting(3, 8, 4).sum(0))


@each_mesh
def test_while_fori_and_cond(where: Mesh) -> None:
    shard = to(where)
    zeros = put(np.zeros((8, 4), np.float32), where, "data", "model")
    y = jax.jit(lambda c: jax.lax.while_loop(lambda c: c.sum() < 100, lambda c: shard(c + 1), c))(zeros)
    assert_placed(y, where, "data", "model")
    assert bits(y) == bits(np.full((8, 4), 4, np.float32))
    y = jax.jit(lambda c: jax.lax.fori_loop(0, 3, lambda _, c: shard(c + 1), c))(zeros)
    assert_placed(y, where, "data", "model")
    choose = jax.jit(lambda c, p: jax.lax.cond(p, lambda c: shard(c + 1), lambda c: shard(c - 1), c))
    for p, value in ((True, 1), (False, -1)):
        y = choose(zeros, p)
        assert_placed(y, where, "data", "model")
        assert bits(y) == bits(np.full((8, 4), value, np.float32))


# --- shard_map --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [M42, E42], ids=["auto", "explicit"])
@own_context
@pytest.mark.parametrize("manual", [{"data"}, {"model"}, {"data", "model"}], ids=["data", "model", "both"])
def test_shard_map_leaves_its_manual_axes_out(where: Mesh, context: bool, manual: set[str]) -> None:
    def body(x: Any) -> Any:
        return ns.shard(na(x, "b f"), MAPPING, where).array * 2

    spec = P(*(n if n in manual else None for n in ("data", "model")))
    mapped = jax.shard_map(body, mesh=where, in_specs=spec, out_specs=spec, axis_names=manual)
    with entered(where, context):
        for run in (jax.jit(mapped), mapped):
            y = run(put(BASE, where, *spec))
            assert_placed(y, where, "data", "model")
            assert bits(y) == bits(2 * BASE)


def test_shard_map_of_something_that_does_not_divide_globally() -> None:
    """In it the axis is local: 2 of 16 rows, over no mesh axis that is left."""
    seen: list[Any] = []

    def body(x: Any) -> Any:
        seen.append(x.shape)
        return ns.shard(na(x, "b"), {"b": "data"}, M8).array

    x = put(counting(16), M8, "data")
    y = jax.jit(jax.shard_map(body, mesh=M8, in_specs=P("data"), out_specs=P("data")))(x)
    assert seen == [(2,)] and bits(y) == bits(x)


# --- other meshes in force --------------------------------------------------------------------------------------------

FOREIGN = {
    "auto": mesh((4, 2), "p q"),
    "explicit": mesh((4, 2), "p q", EXPLICIT),
    "mixed": mesh((4, 2), "p q", (EXPLICIT, AUTO)),
    "one axis": mesh((8,), "data", EXPLICIT),
}
OTHER_SHAPE = {
    "auto, other shape": mesh((2, 4), "p q"),
    "explicit, other shape": mesh((2, 4), "p q", EXPLICIT),
    "same names, other sizes": mesh((2, 4), "data model", EXPLICIT),
}
# Before 0.12 JAX mixed up the axes of two meshes of different shapes in one program, and said so.
SHAPES_MAY_DIFFER = jax.__version_info__ >= (0, 12)


def compiled(where: Mesh, *xs: Any) -> None:
    for x in xs:
        y = jax.jit(to(where))(x)
        assert_exactly(y, where, P("data", "model"))
        assert bits(y) == bits(BASE)


def mapped(where: Mesh, *xs: Any) -> None:
    for x in xs:
        y = jax.vmap(lambda row: ns.shard(na(row, "f"), {"f": "model"}, where).array)(x)
        assert y.sharding.spec[1] == "model" and bits(y) == bits(BASE)


@each_mesh
@pytest.mark.parametrize("context", (FOREIGN | OTHER_SHAPE).values(), ids=FOREIGN | OTHER_SHAPE)
def test_another_mesh_in_force_over_the_same_devices(where: Mesh, context: Mesh) -> None:
    one, *_ = context.axis_names
    eager = [BASE, jnp.asarray(BASE), jax.device_put(BASE, DEVICES[2]), put(BASE, M8_REVERSED, "data")]
    with jax.set_mesh(context):
        for x in (*eager, jnp.asarray(BASE) + 0, put(BASE, context, one)):
            assert_exactly(ns.shard(na(x, "b f"), MAPPING, where), where, P("data", "model"))
        if context in FOREIGN.values() or SHAPES_MAY_DIFFER:
            compiled(where, BASE, jnp.asarray(BASE), put(BASE, context, one), put(BASE, context))
            mapped(where, BASE, jnp.asarray(BASE), put(BASE, context))


@each_mesh
@pytest.mark.parametrize("source", (FOREIGN | OTHER_SHAPE).values(), ids=FOREIGN | OTHER_SHAPE)
def test_arrays_of_another_mesh_without_any_in_force(where: Mesh, source: Mesh) -> None:
    one, *_ = source.axis_names
    if source in FOREIGN.values() or SHAPES_MAY_DIFFER:
        compiled(where, put(BASE, source, one), put(BASE, source))
        mapped(where, put(BASE, source), put(BASE, source, None, one) if source.shape[one] < 8 else BASE)
    else:
        with pytest.raises(ValueError, match="incompatible with mesh"):
            compiled(M42, put(BASE, OTHER_SHAPE["auto, other shape"], None, "p"))


def test_under_vmap_a_mapped_dimension_cannot_change_its_mesh() -> None:
    x = put(BASE, FOREIGN["explicit"], "p")
    with pytest.raises(ns.TracedMoveError, match="nor a mapped dimension its mesh"):
        mapped(M42, x)


def test_other_devices_in_force_do_not_matter_to_eager_calls() -> None:
    half = mesh((4,), "data")
    key = jax.random.split(jax.random.key(0), 8)
    for context in (half, mesh((4,), "data", EXPLICIT), M8_REVERSED, mesh((8,), "data", EXPLICIT, DEVICES[::-1])):
        with jax.set_mesh(context):
            made = jnp.asarray(counting(8))
            for where in (M8, E8, M8_REVERSED, half):
                for x in (counting(8), made, jax.device_put(counting(8), DEVICES[6]), key):
                    y = ns.shard(na(x, "b"), {"b": "data"}, where)
                    assert_exactly(y, where, P("data"))
                    assert bits(y.array) == bits(x)


def test_under_eager_vmap_and_grad_concrete_arrays_move_at_once() -> None:
    sources = {
        "numpy": counting(8),
        "uncommitted": jnp.asarray(counting(8)),
        "on one device": jax.device_put(counting(8), DEVICES[3]),
        "reversed": put(counting(8), M8_REVERSED, "data"),
        "pinned": put(counting(8), M8_REVERSED, "data", kind="pinned_host"),
        "key": jax.random.split(jax.random.key(0), 8),
    }
    for name, x in sources.items():
        kind = "pinned_host" if name == "pinned" else "device"
        got: list[Any] = []

        def f(y: Any, x: Any = x, got: list[Any] = got) -> Any:
            got.append(ns.shard(na(x, "b"), {"b": "data"}, M8))
            return y * 2.0

        jax.vmap(f)(jnp.ones(2))
        jax.grad(f)(1.0)
        with jax.set_mesh(M42):
            jax.vmap(f)(jnp.ones(2))
            jax.grad(f)(1.0)
        assert len(got) == 4
        for y in got:
            assert_exactly(y, M8, P("data"), kind)
            assert bits(y.array) == bits(x)


# --- moves that tracing cannot make -----------------------------------------------------------------------------------


def refused(kind: type[Exception], text: str, f: Callable[[], Any]) -> None:
    with pytest.raises(kind) as caught:
        f()
    assert str(caught.value) == text


def test_leaving_the_traced_devices_is_refused() -> None:
    text = (
        "2 of 3 leaves cannot leave the traced mesh from compiled code\n"
        "  ['a']: traced for devices [7, 6, 5, 4, 3, 2, 1, 0], wanted on [0, 1, 2, 3, 4, 5, 6, 7]\n"
        "  ['z'][0]: traced for devices [7, 6, 5, 4, 3, 2, 1, 0], wanted on [0, 1, 2, 3, 4, 5, 6, 7]\n"
        "  fix: move the arrays with shard before or after the compiled call, or trace under"
        " jax.set_mesh(the wanted mesh)"
    )
    x = {"a": na(BASE, "b f"), "p": jnp.ones(3), "z": [na(BASE, "b f")]}
    with jax.set_mesh(M8_REVERSED):
        refused(ns.TracedMoveError, text, lambda: jax.jit(lambda t: ns.shard(t, {"b": "data"}, M8))(x))
    with jax.set_mesh(mesh((4,), "data")):
        refused(
            ns.TracedMoveError,
            text.replace("[7, 6, 5, 4, 3, 2, 1, 0]", "[0, 1, 2, 3]"),
            lambda: jax.jit(lambda t: ns.shard(t, {"b": "data"}, M8))(x),
        )


def test_changing_devices_under_eager_vmap_is_refused() -> None:
    x = jax.device_put(BASE, DEVICES[3])
    for run in (
        lambda: jax.vmap(lambda row: ns.shard(na(row, "f"), {"f": "model"}, M42).array)(x),
        lambda: jax.grad(lambda w: to(M42)(w).sum())(x),
    ):
        with pytest.raises(ns.TracedMoveError) as caught:
            run()
        lines = str(caught.value).splitlines()
        assert lines[0] == (
            "(root): under eager vmap or grad an array cannot change its devices, nor a mapped dimension its mesh"
        )
        assert "[3]" in lines[1]  # JAX's own words, which name the devices
        assert lines[2] == "  fix: shard the arrays before the vmap or grad, or put it in jit"
        assert len(lines) == 3


def test_a_dimension_over_axes_of_both_types_is_refused_in_traced_code_only() -> None:
    x = {"w": na(BASE, "b f")}
    assert_exactly(ns.shard(x, {"b": ("data", "model")}, MIXED42)["w"], MIXED42, P(("data", "model")))
    refused(
        ns.MixedAxesError,
        "1 of 1 leaf cannot be sharded while tracing\n"
        "  ['w']: one dimension is mapped to ('data', 'model'): 'data' is Auto, 'model' is Explicit\n"
        "  fix: map each dimension to mesh axes of one type, or shard it outside of compiled code",
        lambda: jax.jit(lambda t: ns.shard(t, {"b": ("data", "model")}, MIXED42))(x),
    )


def test_unpinned_memory_is_refused_in_traced_code_only() -> None:
    refused(
        ns.MemoryKindError,
        "compiled code cannot place arrays in memory kind 'unpinned_host'\n"
        "  fix: use 'device' or 'pinned_host', or move the arrays with shard before or after the compiled call",
        lambda: jax.jit(lambda x: ns.shard(na(x, "b f"), MAPPING, M42, memory_kind="unpinned_host"))(BASE),
    )


# --- memory kinds -----------------------------------------------------------------------------------------------------


@each_mesh
def test_memory_kinds_in_jit(where: Mesh) -> None:
    for kind in ("device", "pinned_host"):
        for has in ("device", "pinned_host"):
            y = jax.jit(lambda x, kind=kind: ns.shard(na(x, "b f"), MAPPING, where, memory_kind=kind))(
                put(BASE, where, kind=has)
            )
            assert_exactly(y, where, P("data", "model"), kind)
            assert bits(y.array) == bits(BASE)
    for has in ("device", "pinned_host"):
        y = jax.jit(to(where))(put(BASE, where, "model", kind=has))
        assert_exactly(y, where, P("data", "model"), has)


# --- optimizer states -------------------------------------------------------------------------------------------------


def test_optimizer_states_are_placed_as_the_parameters() -> None:
    params = {"w": na(jnp.asarray(BASE), "b f")}
    placed = ns.shard(params, MAPPING, M42)
    init = optax.adam(1e-3).init
    for state in (
        init(placed),
        ns.shard(init(params), MAPPING, M42),
        eqx.filter_jit(lambda p: ns.shard(init(p), MAPPING, M42))(placed),
        eqx.filter_jit(lambda p: ns.shard(init(p), MAPPING, M42))(params),
        ns.shard(eqx.filter_jit(init)(placed), MAPPING, M42),
        ns.shard(jax.jit(init)(placed), MAPPING, M42),
    ):
        for moment in (state[0].mu, state[0].nu):
            assert_exactly(moment["w"], M42, P("data", "model"))
            assert not np.any(np.asarray(moment["w"].array))


def test_partitioned_operations_on_what_shard_places_equal_numpy() -> None:
    a, b = counting(4), counting(12) + 100
    for where in (M42, M8_REVERSED):
        x, y = (ns.shard(na(v, "n"), {"n": ns.first("data", None)}, where).array for v in (a, b))
        assert bits(jnp.concatenate([x, y])) == bits(np.concatenate([a, b]))
    for shape in ((8, 1), (1, 8), (2, 4)):
        grid = mesh(shape, "data model")
        x = ns.shard(na(counting(8, 8), "r c"), {"r": "data", "c": "model"}, grid).array
        shifted = jax.jit(lambda x: x.at[1:].set(x[:-1]))(x)
        assert bits(shifted) == bits(np.vstack([counting(8, 8)[:1], counting(8, 8)[:-1]]))
        assert bits(jax.jit(lambda x: jnp.cumsum(x, 0))(x)) == bits(np.cumsum(counting(8, 8), 0))
        rolled = jax.jit(jax.grad(lambda x: (jnp.roll(x, 3, 0) * counting(8, 8)).sum()))(x)
        assert bits(rolled) == bits(np.roll(counting(8, 8), -3, 0))
