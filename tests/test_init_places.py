"""Where `init` runs and where its results go: contexts, meshes, memory kinds, arguments, tracing, planning only."""

import functools
from typing import Any

import equinox as eqx
import haliax as hax
import init_models
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from haliax import Axis
from jax.sharding import AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from support import (
    DEVICES,
    E42,
    M8,
    M42,
    MIXED42,
    ONE_OF_EACH,
    assert_exactly,
    bits,
    counting,
    mesh,
    na,
    nothing_compiled,
    nothing_moved,
    unreduced,
)

import namedshard as ns

MAPPING = {"embed": "data", "mlp": "model", "vocab": "model"}
Embed, Mlp = Axis("embed", 64), Axis("mlp", 128)


def weight(key: Any) -> hax.NamedArray:
    return hax.random.normal(key, (Embed, Mlp)) * 0.02


def wanted() -> bytes:
    return bits(jax.jit(weight)(jr.PRNGKey(0)).array)


# --- contexts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", ONE_OF_EACH.values(), ids=ONE_OF_EACH)
def test_in_the_context(on: Mesh) -> None:
    with jax.set_mesh(on), ns.axis_mapping(MAPPING):
        made = ns.init(weight, jr.PRNGKey(0))
        assert jax.sharding.get_mesh() == on
    assert_exactly(made, on, P("data", "model"))
    assert bits(made.array) == wanted()


@pytest.mark.parametrize(
    "on", [M42, E42, mesh((4, 2), "data model", devices=DEVICES[::-1]), mesh((2, 2), "data model")]
)
def test_another_mesh_than_the_context(on: Mesh) -> None:
    with jax.set_mesh(M8):
        made = ns.init(weight, jr.PRNGKey(0), mapping=MAPPING, mesh=on)
    assert_exactly(made, on, P("data", "model"))
    assert bits(made.array) == wanted()


def test_a_mapping_of_one_dimension_over_axes_of_both_types() -> None:
    made = ns.init(weight, jr.PRNGKey(0), mapping={"mlp": ("data", "model")}, mesh=MIXED42)
    assert_exactly(made, MIXED42, P(None, ("data", "model")))
    assert bits(made.array) == wanted()


def test_a_mapping_that_the_array_carries() -> None:
    def fn(key: Any) -> Any:
        return ns.with_mapping(weight(key), {"embed": "model"}), weight(key)

    own, plain = ns.init(fn, jr.PRNGKey(0), mesh=M42)
    assert_exactly(own, M42, P("model", None))
    assert_exactly(plain, M42, P())
    own, _ = ns.init(fn, jr.PRNGKey(0), mapping={"embed": "data", "mlp": "data"} | {"embed": None}, mesh=M42)
    assert_exactly(own, M42, P("model", "data"))


def test_an_initialiser_that_shards_for_itself() -> None:
    def fn(key: Any) -> Any:
        inner = ns.shard(weight(key), {"embed": "model"})
        return inner, jax.lax.with_sharding_constraint(inner.array, P())

    for on in (M42, E42):
        with jax.set_mesh(on), ns.axis_mapping(MAPPING):
            named, plain = ns.init(fn, jr.PRNGKey(0))
        assert_exactly(named, on, P("data", "model"))
        assert_exactly(plain, on, P())
        assert bits(named.array) == bits(plain) == wanted()


# --- memory kinds -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", ONE_OF_EACH.values(), ids=ONE_OF_EACH)
def test_host_memory(on: Mesh) -> None:
    fn, args = init_models.CATALOGUE["dense"]()
    made = ns.init(fn, *args, mapping=MAPPING, mesh=on, memory_kind="pinned_host")
    plan = ns.plan(made, MAPPING, on, memory_kind="pinned_host")
    for planned, x, y in zip(plan.leaves, jax.tree.leaves(made), jax.tree.leaves(fn(*args)), strict=True):
        if isinstance(y, jax.Array):
            assert x.sharding == plan.sharding_of(planned)
            assert x.sharding.memory_kind == "pinned_host"
            assert bits(x) == bits(y)


def test_moments_of_offloaded_parameters_are_made_beside_them() -> None:
    params = ns.init(weight, jr.PRNGKey(0), mapping=MAPPING, mesh=M42, memory_kind="pinned_host")
    state = ns.init(optax.adam(1e-3).init, params)
    assert_exactly(state[0].mu, M42, P("data", "model"), "pinned_host")


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", ONE_OF_EACH.values(), ids=ONE_OF_EACH)
@pytest.mark.parametrize("how", ["mapping", "nothing"])
def test_optimizer_states_are_sharded_like_the_parameters(on: Mesh, how: str) -> None:
    fn, args = init_models.CATALOGUE["dense"]()
    params = eqx.filter(ns.init(fn, *args, mapping=MAPPING, mesh=on), eqx.is_array)
    given: dict[str, Any] = {"mapping": MAPPING, "mesh": on} if how == "mapping" else {}
    state = ns.init(optax.adamw(1e-3).init, params, **given)
    for moments in (state[0].mu, state[0].nu):
        for x, y in zip(jax.tree.leaves(moments), jax.tree.leaves(params), strict=True):
            assert_exactly(x, on, y.sharding.spec)
            assert not x.any()
    assert_exactly(state[0].count, on, P())


@pytest.mark.parametrize("on", [M42, E42])
def test_plain_arrays_follow_the_argument_of_their_shape(on: Mesh) -> None:
    x = jax.device_put(counting(8, 16), NamedSharding(on, P("data", "model")))

    def fn(x: Any) -> Any:
        return {"zeros": jnp.zeros_like(x), "double": x * 2 + 1, "other": jnp.zeros((3,)), "same": x}

    made = ns.init(fn, x)
    assert made["same"] is x
    assert_exactly(made["zeros"], on, P("data", "model"))
    assert_exactly(made["double"], on, P("data", "model"))
    assert_exactly(made["other"], on, P())
    assert bits(made["double"]) == bits(counting(8, 16) * 2 + 1)


def test_the_longest_path_decides_whom_to_follow() -> None:
    params = {
        "a": {"w": jax.device_put(counting(8, 8), NamedSharding(M42, P("data")))},
        "b": {"w": jax.device_put(counting(8, 8), NamedSharding(M42, P(None, "model")))},
    }

    def fn(params: Any) -> Any:
        return {"mu": jax.tree.map(jnp.zeros_like, params), "w": jnp.zeros((8, 8))}

    made = ns.init(fn, params)
    assert_exactly(made["mu"]["a"]["w"], M42, P("data"))
    assert_exactly(made["mu"]["b"]["w"], M42, P(None, "model"))
    assert_exactly(made["w"], M42, P())


def test_arguments_on_other_devices_come_to_the_mesh() -> None:
    there = jax.device_put(counting(64, 128), DEVICES[3])
    reversed_mesh = mesh((8,), "data", devices=DEVICES[::-1])
    elsewhere = jax.device_put(counting(64, 128), NamedSharding(reversed_mesh, P("data")))
    for x in (there, elsewhere):
        made = ns.init(lambda x: hax.named(x * 2, (Embed, Mlp)), x, mapping=MAPPING, mesh=M42)
        assert_exactly(made, M42, P("data", "model"))
        assert bits(made.array) == bits(counting(64, 128) * 2)


def test_without_a_mesh_results_stay_with_the_argument() -> None:
    there = jax.device_put(counting(512, 8), DEVICES[3])
    made = ns.init(lambda x: x * 2, there)
    assert made.sharding == SingleDeviceSharding(DEVICES[3])
    assert bits(made) == bits(counting(512, 8) * 2)


def test_arguments_passed_through_are_placed_by_their_names_only() -> None:
    x = jnp.asarray(counting(64, 128))
    named, plain, text = ns.init(lambda x, t: (hax.named(x, (Embed, Mlp)), x, t), x, "text", mapping=MAPPING, mesh=M42)
    assert_exactly(named, M42, P("data", "model"))
    assert plain is x
    assert text == "text"


def test_statics_of_other_types_are_other_functions() -> None:
    def fn(key: Any, scale: Any) -> Any:
        return jnp.full((4,), scale), isinstance(scale, bool)

    made = [ns.init(fn, jr.PRNGKey(0), scale) for scale in (1, 1.0, True, 0.0, -0.0)]
    assert [x.dtype.name for x, _ in made] == ["int32", "float32", "bool", "float32", "float32"]
    assert [np.signbit(x[0]).item() for x, _ in made[3:]] == [False, True]


class _Config(eqx.Module):
    fill: Any = eqx.field(static=True)


def test_static_fields_of_other_types_are_other_functions() -> None:
    fills = (1, 1.0, True, 0.0, -0.0)
    for _ in range(2):
        made = [ns.init(_filled, _Config(fill)) for fill in fills]
        assert [x.dtype.name for x in made] == ["int32", "float32", "bool", "float32", "float32"]
        assert [bits(x) for x in made] == [bits(jnp.full((4,), fill)) for fill in fills]


def test_what_a_function_closes_over_is_read_when_it_is_traced() -> None:
    scale = 2.0

    def fn(key: Any) -> Any:
        return jr.normal(key, (32, 32)) * scale

    first = ns.init(fn, jr.PRNGKey(0))
    scale = 3.0
    assert bits(ns.init(fn, jr.PRNGKey(0))) == bits(first)


def _filled(config: _Config) -> Any:
    return jnp.full((4,), config.fill)


def test_partial_applications_made_anew_are_no_new_functions() -> None:
    traces = 0

    def fn(key: Any, *, scale: float) -> Any:
        nonlocal traces
        traces += 1
        return jr.normal(key, (32, 32)) * scale

    first = ns.init(functools.partial(fn, scale=2.0), jr.PRNGKey(0))
    second = ns.init(functools.partial(fn, scale=2.0), jr.PRNGKey(0))
    assert traces == 1
    assert bits(first) == bits(second)
    assert not np.shares_memory(np.asarray(first), np.asarray(second))


def test_effects_happen_once(capfd: Any) -> None:
    def fn(key: Any) -> Any:
        jax.debug.print("drawing with {}", key[1])
        return weight(key), jnp.zeros(4)

    made, zeros = ns.init(fn, jr.PRNGKey(0), mapping=MAPPING, mesh=M42)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("drawing with 0\n") == 1
    assert bits(made.array) == wanted()
    assert bits(zeros) == bits(np.zeros(4, np.float32))


# --- nothing computed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", [M42, AbstractMesh((4, 2), ("data", "model"))])
def test_described_arguments_give_described_results(on: Any) -> None:
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    with nothing_moved():
        made, report = ns.init(lambda k: (weight(k), 3, jnp.zeros(5)), key, mapping=MAPPING, mesh=on, report=True)
    assert made[0].array == jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=NamedSharding(on, P("data", "model")))
    assert made[0].axes == (Embed, Mlp)
    assert made[1] == 3
    assert made[2].sharding == NamedSharding(on, P())
    assert (report.leaves, report.bytes, report.bytes_per_device) == (2, 64 * 128 * 4 + 20, 64 * 128 * 4 // 8 + 20)
    assert report.programs == ()


def test_a_model_of_seventy_billion_parameters_is_planned_for_machines_that_are_not_there() -> None:
    sizes = {"embed": 8192, "mlp": 28672, "heads": 64, "kv_heads": 8, "head_size": 128, "vocab": 128256, "layers": 80}
    axes = {name: Axis(name, size) for name, size in sizes.items()}

    def llama(key: Any) -> Any:
        k = iter(jr.split(key, 9))

        def linear(*names: str) -> hax.NamedArray:
            return hax.random.normal(next(k), tuple(axes[n] for n in names), dtype=jnp.bfloat16) * jnp.bfloat16(0.02)

        attention = [linear("layers", "embed", h, "head_size") for h in ("heads", "kv_heads", "kv_heads")]
        mlp = [linear("layers", "embed", "mlp") for _ in range(3)]
        output = linear("layers", "heads", "head_size", "embed")
        norms = [hax.ones((axes["layers"], axes["embed"])) for _ in range(2)]
        norms.append(hax.ones(axes["embed"]))
        return attention, output, mlp, norms, [linear("vocab", "embed") for _ in range(2)]

    pod = AbstractMesh((32, 8), ("data", "model"))
    mapping = {"embed": "data", "mlp": "model", "heads": "model", "kv_heads": "model", "vocab": "model"}
    with nothing_moved():
        made, report = ns.init(llama, jax.ShapeDtypeStruct((2,), jnp.uint32), mapping=mapping, mesh=pod, report=True)
    assert sum(x.size for x in jax.tree.leaves(made)) == 70_553_706_496
    assert report.bytes_per_device < report.bytes / 255
    assert made[0][1].array.sharding.spec == P(None, "data", "model", None)
    assert ns.plan(made, mapping, pod).bytes_per_device == report.bytes_per_device


# --- traced -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", [M42, E42])
def test_under_jit_the_function_is_called_and_its_result_sharded(on: Mesh) -> None:
    with jax.set_mesh(on):
        made = jax.jit(lambda k: ns.init(weight, k, mapping=MAPPING))(jr.PRNGKey(0))
    assert_exactly(made, on, P("data", "model"))


def test_under_vmap_and_without_a_mapping() -> None:
    keys = jr.split(jr.PRNGKey(0), 3)
    made = jax.vmap(lambda k: ns.init(lambda k: jr.uniform(k, (4,)), k))(keys)
    assert bits(made) == bits(jax.vmap(lambda k: jr.uniform(k, (4,)))(keys))


def test_under_eval_shape() -> None:
    made = jax.eval_shape(lambda k: ns.init(weight, k, mapping=MAPPING, mesh=M42), jr.PRNGKey(0))
    assert (made.array.shape, made.array.dtype) == ((64, 128), jnp.float32)


def test_a_second_call_compiles_nothing() -> None:
    keys = [jr.PRNGKey(i) for i in range(2)]
    ns.init(weight, keys[0], mapping=MAPPING, mesh=M42)
    with nothing_compiled():
        made = ns.init(weight, keys[1], mapping=MAPPING, mesh=M42)
    assert bits(made.array) == bits(jax.jit(weight)(keys[1]).array)


# --- errors -----------------------------------------------------------------------------------------------------------


def fails(error: type[Exception], *args: Any, **kwargs: Any) -> str:
    with nothing_moved(), pytest.raises(error) as caught:
        ns.init(*args, **kwargs)
    return str(caught.value)


def test_a_mapping_or_a_memory_kind_without_a_mesh() -> None:
    key = jr.PRNGKey(0)
    assert fails(ns.NoMeshError, weight, key, mapping=MAPPING) == (
        "init: there is an axis mapping, but no mesh was given and none is in force\n"
        "  fix: pass mesh=, or enter jax.set_mesh"
    )
    assert fails(ns.NoMeshError, weight, key, memory_kind="pinned_host") == (
        "init: there is a memory kind, but no mesh was given and none is in force\n"
        "  fix: pass mesh=, or enter jax.set_mesh"
    )


def test_arguments_that_are_still_to_be_summed() -> None:
    x = counting(8, 4)
    with jax.set_mesh(E42):
        plain, named = ns.init(lambda w: (w * 2, na(w * 3, "a b")), unreduced(x), mapping={"a": "data"})
    assert_exactly(plain, E42, P())
    assert_exactly(named, E42, P("data"))
    assert bits(plain) == bits(x * 2) and bits(named.array) == bits(x * 3)


@pytest.mark.parametrize("dtype", ["int2", "uint2"])
def test_integers_that_the_compiler_scrambles(dtype: str) -> None:
    x = jax.device_put(counting(8, 16, dtype=np.int8) % 4, NamedSharding(M42, P("data", "model")))
    made = ns.init(lambda x: na(x.astype(dtype), "a b"), x, mapping={"b": "data"}, mesh=M42)
    assert_exactly(made, M42, P(None, "data"))
    assert bits(made.array) == bits((counting(8, 16, dtype=np.int8) % 4).astype(dtype))


def test_deleted_arguments() -> None:
    params = {"w": jnp.ones(3), "b": jnp.ones(4), "c": jnp.ones(5)}
    params["w"].delete()
    params["c"].delete()
    assert fails(ns.DeletedArrayError, lambda p: p, params) == (
        "init: 2 of 3 leaves donated or deleted\n"
        "  args[0]['c']\n"
        "  args[0]['w']\n"
        "  fix: keep the result of the call that the array was donated to, and use that"
    )


def test_what_the_planner_refuses() -> None:
    key = jr.PRNGKey(0)
    assert fails(
        ns.IndivisibleAxisError, lambda k: {"w": hax.zeros(Axis("mlp", 9))}, key, mapping=MAPPING, mesh=M42
    ) == (
        "1 of 1 leaf cannot be sharded by this mapping\n"
        "  ['w']: axis mlp=9 is not divisible by mesh axis 'model'=2 (9 = 2*4 + 1)\n"
        '  fix: pad the axis to 10, or pass indivisible="replicate"'
    )
    assert fails(ns.MemoryKindError, weight, key, mapping=MAPPING, mesh=M42, memory_kind="tape") == (
        "memory kind 'tape' is not offered by cpu devices, which have 'device', 'pinned_host', 'unpinned_host'\n"
        "  fix: use one of 'device', 'pinned_host', 'unpinned_host'"
    )


def test_an_initialiser_that_fails() -> None:
    def fn(key: Any) -> Any:
        raise RuntimeError("planted")

    assert fails(RuntimeError, fn, jr.PRNGKey(0), mapping=MAPPING, mesh=M42) == "planted"


# --- compiled ahead of time -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", ONE_OF_EACH.values(), ids=ONE_OF_EACH)
def test_lowered_and_compiled(on: Mesh) -> None:
    fn = init_models.dense
    lowered = ns.lower_init(fn, jax.ShapeDtypeStruct((2,), jnp.uint32), mapping=MAPPING, mesh=on)
    with nothing_moved():
        compiled = lowered.compile()
    assert all(isinstance(program, jax.stages.Compiled) for program in compiled.programs)
    # Two weights of a block, the table, and zeros and ones of two shapes.
    assert len(compiled.programs) == 5
    for seed in (0, 1):
        made, wanted = compiled(jr.PRNGKey(seed)), ns.init(fn, jr.PRNGKey(seed), mapping=MAPPING, mesh=on)
        for x, y in zip(jax.tree.leaves(made), jax.tree.leaves(wanted), strict=True):
            if isinstance(y, jax.Array):
                assert x.sharding == y.sharding
                assert bits(x) == bits(y)
    with pytest.raises(TypeError) as caught:
        compiled(jr.key(0), 3)
    assert str(caught.value) == (
        "init: the arguments differ from those it was lowered for\n"
        "  args[0]: ((), key<fry>, False), not ((2,), dtype('uint32'), False)\n"
        "  args[1]: 3, not expected\n"
        "  fix: pass arguments of the same types, or lower again"
    )


def test_a_partial_application_lowered() -> None:
    fn = functools.partial(lambda scale, key: hax.random.normal(key, (Embed, Mlp)) * scale, 0.02)
    compiled = ns.lower_init(fn, jr.PRNGKey(0), mapping=MAPPING, mesh=M42).compile()
    assert bits(compiled(jr.PRNGKey(0)).array) == wanted()


def test_lowering_without_devices() -> None:
    pod = AbstractMesh((4, 2), ("data", "model"))
    with pytest.raises(ns.NoMeshError) as caught:
        ns.lower_init(weight, jr.PRNGKey(0), mapping=MAPPING, mesh=pod)
    assert str(caught.value) == (
        "lower_init: an AbstractMesh has no devices to compile for\n"
        "  fix: pass a jax.sharding.Mesh; init itself plans for an AbstractMesh"
    )
    with pytest.raises(ns.NoMeshError, match="lower_init: there is an axis mapping, but no mesh was given"):
        ns.lower_init(weight, jr.PRNGKey(0), mapping=MAPPING)
