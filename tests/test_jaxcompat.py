"""Tells when something private in JAX has moved: each use, against what JAX's public functions show."""

import inspect
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from support import AUTO, DEVICES, E8, E42, EXPLICIT, M8, M8_REVERSED, M42, MIXED42, bits, counting, mesh

from namedshard import _jaxcompat as compat

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def test_every_use_has_a_test() -> None:
    text = Path(__file__).read_text()
    own = [n for n, v in vars(compat).items() if inspect.isfunction(v) and v.__module__ == compat.__name__]
    assert len(own) >= 15
    assert [n for n in own if not n.startswith("_") and f"compat.{n}(" not in text] == []


def traced(look: Callable[[], Any]) -> dict[str, Any]:
    """What a function sees under each transformation."""
    out: dict[str, Any] = {"nothing": look()}

    def seen(name: str) -> Callable[[Any], Any]:
        def f(x: Any) -> Any:
            out[name] = look()
            return x * 1.0

        return f

    jax.jit(seen("jit"))(1.0)
    jax.vmap(seen("vmap"))(jnp.ones(2))
    jax.grad(seen("grad"))(1.0)
    jax.jit(jax.vmap(seen("vmap in jit")))(jnp.ones(2))
    jax.lax.scan(lambda c, x: (seen("scan")(c), x), 1.0, jnp.ones(2))
    jax.eval_shape(seen("eval_shape"), 1.0)
    return out


def test_transfers_count_as_explicit_and_no_longer_after() -> None:
    with jax.transfer_guard("disallow"):
        with compat.explicit_transfers():
            jnp.asarray(np.ones(3))
        with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device transfer"):
            jnp.asarray(np.ones(5))


# --- the meshes in force ----------------------------------------------------------------------------------------------


def test_the_mesh_of_set_mesh_also_while_tracing() -> None:
    assert set(traced(compat.context_meshes).values()) == {(None, None)}
    with jax.set_mesh(M8_REVERSED):
        assert set(traced(compat.context_meshes).values()) == {(M8_REVERSED, None)}
        assert jax.sharding.get_mesh() is compat.context_meshes()[0]
    assert compat.context_meshes() == (None, None)


@pytest.mark.filterwarnings("ignore:.*context manager has been deprecated:DeprecationWarning")
def test_the_mesh_of_with() -> None:
    with M42:
        assert set(traced(compat.context_meshes).values()) == {(None, M42)}
        with jax.set_mesh(M8):
            assert compat.context_meshes() == (M8, M42)
    assert compat.context_meshes() == (None, None)


def test_the_abstract_mesh() -> None:
    assert set(traced(compat.abstract_context_mesh).values()) == {None}
    with jax.set_mesh(E42):
        assert set(traced(compat.abstract_context_mesh).values()) == {E42.abstract_mesh}
    abstract = AbstractMesh((3,), ("x",))
    with jax.sharding.use_abstract_mesh(abstract):
        assert compat.abstract_context_mesh() == abstract and compat.context_meshes() == (None, None)
    seen: list[Any] = []

    def body(x: Any) -> Any:
        seen.append(compat.abstract_context_mesh())
        return x

    jax.jit(jax.shard_map(body, mesh=M42, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}))(counting(8))
    assert {n: t.name for n, t in zip(seen[0].axis_names, seen[0].axis_types, strict=True)} == {
        "data": "Manual",
        "model": "Auto",
    }


def in_force() -> tuple[Any, Any]:
    return compat.abstract_context_mesh(), compat.context_meshes()[0]


def test_no_context_mesh_hides_both_and_brings_them_back() -> None:
    def hidden() -> Any:
        before = in_force()
        with compat.no_context_mesh():
            inside = in_force()
            made = jnp.ones(2) + 1
            at_once = not isinstance(made, jax.core.Tracer) and len(made.sharding.device_set) == 1
        try:
            with compat.no_context_mesh():
                raise ZeroDivisionError
        except ZeroDivisionError:
            pass
        return before, inside, at_once, in_force()

    assert set(traced(hidden).values()) == {((None, None), (None, None), True, (None, None))}
    for where in (M8_REVERSED, E42):
        own = (where.abstract_mesh, where)
        with jax.set_mesh(where):
            assert set(traced(hidden).values()) == {(own, (None, None), True, own)}
            assert jax.sharding.get_mesh() is where


def test_no_context_mesh_is_for_its_own_thread() -> None:
    seen: list[Any] = []
    with jax.set_mesh(M8), compat.no_context_mesh():

        def work() -> None:
            with jax.set_mesh(M42):
                seen.append(in_force())

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert in_force() == (None, None)
    assert seen == [(M42.abstract_mesh, M42)]


def test_without_it_jax_refuses_to_change_the_order_of_devices() -> None:
    """What `no_context_mesh` is for: it can go where JAX makes this move."""
    x = jax.device_put(counting(8), NamedSharding(M8, P("data")))
    with jax.set_mesh(M8):
        with pytest.raises(ValueError, match="Received incompatible devices"):
            jax.device_put(x, NamedSharding(M8_REVERSED, P("data")))
        with compat.no_context_mesh():
            moved = jax.device_put(x, NamedSharding(M8_REVERSED, P("data")))
    assert np.array_equal(np.asarray(moved), counting(8))


# --- tracing ----------------------------------------------------------------------------------------------------------


def test_what_is_traced_and_what_is_staged() -> None:
    clean = traced(lambda: compat.nothing_traced())
    assert clean == {**dict.fromkeys(clean, False), "nothing": True}
    staged = traced(lambda: compat.staging())
    assert staged == {
        "nothing": False,
        "vmap": False,
        "grad": False,
        "jit": True,
        "vmap in jit": True,
        "scan": True,
        "eval_shape": True,
    }

    def at_once(x: Any) -> Any:
        with jax.ensure_compile_time_eval():
            assert not compat.staging()
        assert compat.staging()
        return x

    jax.jit(at_once)(1.0)


def test_the_key_of_a_trace_changes_with_whatever_a_trace_depends_on() -> None:
    plain = compat.trace_key()
    assert plain == compat.trace_key() and hash(plain) == hash(compat.trace_key())
    keys = [plain]
    for where in (M8, M8_REVERSED, E8, M42):
        with jax.set_mesh(where):
            keys.append(compat.trace_key())
            assert keys[-1] == compat.trace_key()
    with jax.enable_x64(True):
        keys.append(compat.trace_key())
    with jax.numpy_dtype_promotion("strict"):
        keys.append(compat.trace_key())
    assert len(set(keys)) == len(keys)
    assert compat.trace_key() == plain


def test_64_bits_are_on_only_where_an_array_needs_them() -> None:
    for dtypes, on in [((), False), ((np.float32, jnp.bfloat16), False), ((np.int8, np.int64), True)]:
        with compat.keeping_bits(map(np.dtype, dtypes)):
            assert jax.config.jax_enable_x64 is on
    with compat.keeping_bits([jax.random.key(0).dtype]):
        assert not jax.config.jax_enable_x64


def test_how_many_executables_are_made() -> None:
    f = jax.jit(lambda x: x + 1)
    one, three = np.float32(1), np.ones(3, np.float32)
    with compat.count_compiles() as outer:
        with compat.count_compiles() as inner:
            f(one), f(one)
        assert inner == [1]
        f(three)
        other = threading.Thread(target=lambda: jax.jit(lambda x: x - 1)(one))
        other.start()
        other.join()
    f(np.ones(4, np.float32))
    assert (inner, outer) == ([1], [2])


def test_where_an_equation_was_written() -> None:
    line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
    jaxpr = jax.make_jaxpr(lambda x: jnp.sin(x))(1.0)
    assert compat.user_source(jaxpr.jaxpr.eqns[0]) == f"{__file__}:{line}"


def test_equations_are_run_as_jax_runs_them() -> None:
    @jax.custom_jvp
    def odd(x: Any) -> Any:
        return x * 3

    odd.defjvp(lambda primals, tangents: (odd(*primals), tangents[0]))

    def f(x: Any) -> Any:
        a, b = jax.lax.top_k(x, 2)
        y = jax.lax.cond(x.sum() > 0, lambda v: v + 1, lambda v: v - 1, a) + jax.jit(jnp.cos)(a)
        return odd(y), jax.lax.scan(lambda c, v: (c + v, c), 0.0, y)[0], b

    x = jnp.array([3.0, 1.0, 2.0])
    closed = jax.make_jaxpr(f)(x)
    values: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    values |= dict(zip(closed.jaxpr.invars, [x], strict=True))
    read = lambda v: v.val if hasattr(v, "val") else values[v]  # noqa: E731
    for eqn in closed.jaxpr.eqns:
        out = compat.run_equation(eqn, [read(v) for v in eqn.invars])
        assert isinstance(out, list)
        values.update(zip(eqn.outvars, out, strict=True))
    for got, want in zip([read(v) for v in closed.jaxpr.outvars], f(x), strict=True):
        assert np.array_equal(got, want)


def test_an_equation_runs_under_the_options_of_its_trace_but_another_mesh() -> None:
    def f(key: Any) -> Any:
        with jax.threefry_partitionable(False):
            return jax.random.split(key)

    key = jax.random.key(0)
    with jax.set_mesh(M8):
        (eqn,) = (e for e in jax.make_jaxpr(f)(key).jaxpr.eqns if e.primitive.name == "random_split")
    meshes: list[Any] = []

    def run(key: Any) -> Any:
        (out,) = compat.run_equation(eqn, [key], eqn.params | {"shape": (3,)})
        meshes.append(jax.typeof(out).sharding.mesh)
        return out

    assert jax.jit(run)(key).shape == (3,)
    assert meshes[0].empty
    (out,) = compat.run_equation(eqn, [key])
    assert jax.config.jax_threefry_partitionable
    assert (jax.random.key_data(out) == jax.random.key_data(f(key))).all()
    assert (jax.random.key_data(out) != jax.random.key_data(jax.random.split(key))).any()
    (same,) = compat.bind(eqn.primitive, eqn.params, [key])
    assert (jax.random.key_data(same) == jax.random.key_data(jax.random.split(key))).all()
    other = jax.make_jaxpr(jax.random.split)(key).jaxpr.eqns[0]
    assert compat.equation_options(eqn) != compat.equation_options(other)
    assert compat.equation_options(other) == compat.equation_options(jax.make_jaxpr(jnp.sin)(1.0).jaxpr.eqns[0])


def test_the_jaxprs_within_an_equation() -> None:
    def f(x: Any) -> Any:
        y = jax.lax.cond(x > 0, jnp.sin, jnp.cos, x)
        return jax.lax.while_loop(lambda c: c < 3, lambda c: c + 1, y)

    found = [[j.eqns[0].primitive.name for j in compat.inner_jaxprs(e.params)] for e in jax.make_jaxpr(f)(1.0).eqns]
    assert [sorted(names) for names in found if names] == [["cos", "sin"], ["add", "lt"]]
    mapped = jax.shard_map(jnp.sin, mesh=M8, in_specs=P("data"), out_specs=P("data"))
    (eqn,) = jax.make_jaxpr(mapped)(jnp.ones(8)).eqns
    assert [j.eqns[0].primitive.name for j in compat.inner_jaxprs(eqn.params)] == ["sin"]


def test_the_jaxpr_that_an_equation_only_runs() -> None:
    wrapped = jax.custom_jvp(jnp.sin)
    wrapped.defjvp(lambda x, dx: (jnp.sin(x[0]), dx[0]))
    for call in (jax.jit(jnp.sin), jax.checkpoint(jnp.sin), wrapped):
        (eqn,) = jax.make_jaxpr(call)(1.0).eqns
        inner: Any = compat.called(eqn)
        assert [e.primitive.name for e in inner.eqns] == ["sin"]
    for call in (
        jnp.sin,
        lambda x: jax.lax.map(jnp.sin, x),
        jax.shard_map(jnp.sin, mesh=M8, in_specs=P(), out_specs=P()),
    ):
        assert [compat.called(eqn) for eqn in jax.make_jaxpr(call)(jnp.ones(8)).eqns] == [None]


def test_clear_caches_clears_ours_too() -> None:
    class Cache:
        cleared = 0

        def cache_clear(self) -> None:
            self.cleared += 1

    cache = Cache()
    compat.clear_with_jax(cache)
    jax.clear_caches()
    assert cache.cleared == 1


# --- arrays, shardings and memory -------------------------------------------------------------------------------------


def test_the_order_of_shards() -> None:
    for where in (M42, M8_REVERSED):
        x = jax.device_put(counting(8, 8), NamedSharding(where, P(where.axis_names[0])))
        index_of = x.sharding.addressable_devices_indices_map(x.shape)
        for shard, (device, index) in zip(compat.shards_of(x), index_of.items(), strict=True):
            assert shard.devices() == {device}
            assert bits(shard) == bits(counting(8, 8)[index])


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool"])
def test_an_array_of_host_shards(dtype: str) -> None:
    value = counting(8, 4, dtype=dtype)
    sharding = NamedSharding(M8_REVERSED, P("data"))
    shards = {d: value[index] for d, index in sharding.addressable_devices_indices_map(value.shape).items()}
    x = compat.put_shards(value.shape, value.dtype, sharding, shards)
    assert (x.sharding, x.committed, x.dtype) == (sharding, True, value.dtype)
    assert bits(x) == bits(value)


def test_the_class_of_arrays() -> None:
    assert type(jnp.ones(3)) is compat.ArrayImpl
    assert type(jax.device_put(counting(8), NamedSharding(M8, P("data")))) is compat.ArrayImpl
    assert type(jax.random.key(0)) is not compat.ArrayImpl
    classes: list[type] = []
    jax.jit(lambda x: classes.append(type(x)) or x)(1.0)
    assert compat.ArrayImpl not in classes and len(classes) == 1


def test_the_order_of_a_shardings_devices() -> None:
    for where in (M8, M8_REVERSED, M42, mesh((2, 2), "x y", EXPLICIT, DEVICES[[5, 1, 7, 2]])):
        want = list(where.devices.flat)
        for spec in (P(), P(where.axis_names[0])):
            assert list(compat.device_order(NamedSharding(where, spec))) == want
    assert compat.device_order(SingleDeviceSharding(DEVICES[3])) == (DEVICES[3],)
    assert compat.device_order(jnp.ones(3).sharding) == (DEVICES[0],)


def test_twins() -> None:
    for where in (M42, E42, MIXED42):
        assert compat.twin(where, AUTO) == M42 and compat.twin(where, EXPLICIT) == E42
        assert compat.twin(where.abstract_mesh, EXPLICIT) == E42.abstract_mesh


def test_explicit_axes_and_the_types_they_make() -> None:
    assert [compat.any_explicit(m) for m in (M42, E42, MIXED42, E42.abstract_mesh)] == [False, True, True, True]
    x = jax.device_put(counting(8), NamedSharding(E8, P("data")))
    assert compat.any_explicit(x.aval.sharding.mesh) and x.aval.sharding.spec == P("data")
    assert not compat.any_explicit(jax.device_put(counting(8), NamedSharding(M8, P("data"))).aval.sharding.mesh)
    auto = jax.device_put(counting(8), NamedSharding(M8, P("data"))).aval
    assert [compat.is_explicitly_sharded(a) for a in (x.aval, auto, jnp.ones(3).aval)] == [True, False, False]


def test_the_memory_that_a_type_names() -> None:
    seen: list[Any] = []

    def look(x: Any) -> Any:
        seen.append((compat.memory_kind_of_traced(x), compat.space_of_type(jax.typeof(x))))
        return x

    for kind, space in (("device", DEVICE), ("pinned_host", HOST)):
        x = jax.device_put(counting(8), NamedSharding(M8, P("data"), memory_kind=kind))
        jax.jit(look)(x)
        assert seen.pop() == (kind, space)
        assert compat.space_of_type(x.aval) == compat.space_of_kind(kind) == space
        jax.jit(lambda x, space=space: look(jax.device_put(x, space)))(counting(8))
        assert seen.pop() == (kind, space)
    assert compat.space_of_kind(None) == DEVICE


@pytest.mark.parametrize("types", [("Auto", "Auto"), ("Explicit", "Auto"), ("Explicit", "Explicit")])
def test_what_memory_a_compiled_program_writes_to(types: tuple[str, str]) -> None:
    where = mesh((4, 2), "data model", tuple(jax.sharding.AxisType[t] for t in types))
    x = jax.device_put(counting(8, 4), NamedSharding(where, P("data"), memory_kind="pinned_host"))

    def step(x: Any, keys: Any) -> Any:
        device = jax.device_put(x, DEVICE)
        return device, jax.device_put(device + 1, HOST), x, jax.device_put(keys, HOST)

    with jax.set_mesh(where):
        compiled = jax.jit(step).lower(x, jax.random.split(jax.random.key(0), 4)).compile()
    assert compat.output_memory_kinds(compiled) == ["device", "pinned_host", "pinned_host", "pinned_host"]


def test_structs_in_host_memory() -> None:
    one = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    seen: list[Any] = []

    def look(x: Any) -> Any:
        seen.append(compat.space_of_type(jax.typeof(x)))
        return x

    jax.jit(look).lower(struct := jax.ShapeDtypeStruct((2,), "float32", sharding=one))
    jax.jit(look).lower(typed := compat.typed_struct(struct))
    # `typed_struct` can go once both are the host's.
    assert seen == [DEVICE, HOST]
    assert typed.sharding.is_equivalent_to(one, 1)
    assert compat.typed_struct(typed) is typed and compat.typed_struct(1) == 1
    kinds = [compat.memory_kind_of_struct(s) for s in (struct, typed, jax.ShapeDtypeStruct((2,), "float32"))]
    assert kinds == ["pinned_host", "pinned_host", None]
    traced = jax.eval_shape(lambda: jax.device_put(jnp.zeros(2), HOST))
    kept = "_memory_space" in jax.ShapeDtypeStruct.__slots__
    assert compat.memory_kind_of_struct(traced) == ("pinned_host" if kept else None)


def test_what_is_an_argument_of_a_trace() -> None:
    seen: list[bool] = []

    def look(x: Any) -> Any:
        seen.append(compat.is_argument(x))
        return x

    def step(x: Any) -> Any:
        look(jax.device_put(look(x) * 2, HOST))
        return jax.lax.scan(lambda c, _: (look(c) + 1, None), x, None, length=2)[0] + jax.jit(look)(look(x * 2))

    jax.jit(step)(jnp.ones(3))
    assert seen == [True, False, True, False, True]


def test_keys() -> None:
    assert compat.is_key_array(jax.random.key(0)) and compat.is_key_array(jax.eval_shape(jax.random.key, 0))
    assert not compat.is_key_array(jax.random.PRNGKey(0)) and not compat.is_key_array(np.ones(3))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_the_data_of_keys(impl: str) -> None:
    keys = jax.random.split(jax.random.key(0, impl=impl), 3)
    assert compat.key_data_shape(keys) == jax.random.key_data(keys).shape
    assert compat.key_impl(keys) == jax.random.key_impl(keys)
    assert compat.key_impl(keys.aval) == jax.random.key_impl(keys)


def test_weak_arrays_of_the_same_buffers() -> None:
    x = jax.device_put(np.float32(2), NamedSharding(M8, P()))
    weak = compat.as_weak(x)
    assert weak.weak_type and not x.weak_type
    assert weak.sharding == x.sharding and weak.committed and float(weak) == 2
    assert compat.first_buffer(weak) == compat.first_buffer(x)
    assert (weak + jnp.ones((), jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize("where", [M42, E42, MIXED42])
@pytest.mark.parametrize("spec", [P("data", "model"), P(None, "data"), P()])
@pytest.mark.parametrize("kind", ["device", "pinned_host"])
def test_shards_put_on_devices_as_by_the_callback(where: Any, spec: P, kind: str) -> None:
    value = counting(8, 4)
    sharding = NamedSharding(where, spec, memory_kind=kind)
    wanted = jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
    shards = {d: value[i].copy() for d, i in sharding.addressable_devices_indices_map(value.shape).items()}
    made = compat.put_shards(value.shape, value.dtype, sharding, shards)
    assert made.sharding == sharding and made.committed and made.aval == wanted.aval
    assert np.array_equal(np.asarray(made), value)
    weak = compat.put_shards(value.shape, value.dtype, sharding, shards, weak=True)
    assert weak.weak_type and weak.sharding == sharding and np.array_equal(np.asarray(weak), value)
    assert all(np.array_equal(np.asarray(s.data), value[s.index]) for s in made.addressable_shards)


def test_deleted_arrays_are_refused_where_they_are_said_to_be() -> None:
    assert (jax.__version_info__ < (0, 12)) == compat.CRASHES_ON_DELETED
    if not compat.CRASHES_ON_DELETED:
        f, x = jax.jit(lambda x: x + 1), jax.device_put(counting(8), NamedSharding(M8, P("data")))
        f(x)
        x.delete()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="deleted"):
                f(x)


def test_what_arrays_are_and_where() -> None:
    arrays = [jnp.ones(8), jax.device_put(counting(8), NamedSharding(M8, P("data"))), jnp.int32(3)]
    assert compat.placements(arrays) == (
        [x.aval for x in arrays],
        [x.sharding for x in arrays],
        [x.committed for x in arrays],
    )
    for other in (np.ones(3), 1, None, max, jax.random.key(0)):
        with pytest.raises(AttributeError):
            compat.placements([other])
    spread = arrays[1]
    devices = list(spread.sharding.addressable_devices_indices_map(spread.shape))
    assert [shard.device for shard in compat.shards_of(spread)] == devices
    assert not compat.any_deleted(arrays) and not compat.any_deleted([])
    arrays[2].delete()
    assert compat.any_deleted(arrays)
    failed: list[bool] = []

    def look(x: Any) -> Any:
        with pytest.raises(AttributeError):
            compat.placements([x])
        failed.append(True)
        return x * 1.0

    jax.jit(look)(1.0), jax.vmap(look)(jnp.ones(3)), jax.grad(look)(1.0)
    assert failed == [True] * 3


def test_the_address_of_the_first_shard() -> None:
    for x in (jnp.ones(8), jax.device_put(counting(8), NamedSharding(M8_REVERSED, P("data")))):
        assert compat.first_buffer(x) == x.addressable_shards[0].data.unsafe_buffer_pointer()


def test_one_process_has_no_coordination_client() -> None:
    assert not jax.distributed.is_initialized()
    assert compat.coordination_client() is None


def test_what_jax_raises_on_explicit_axes() -> None:
    with jax.set_mesh(E42), pytest.raises(compat.ShardingTypeError):
        x = jax.device_put(counting(8, 8), NamedSharding(E42, P(None, "data")))
        jax.jit(lambda x: x @ x.T)(x)


def test_devices_of_this_process_are_attached() -> None:
    """Those of a topology, in tests/tpu, have a client of this class; this process's have another."""
    assert compat.is_attached(DEVICES[0])
    assert isinstance(compat._jaxlib.CompileOnlyPyClient, type)
