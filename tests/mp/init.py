"""Models made over several processes, each of which draws its own shards only."""

from typing import Any

import equinox as eqx
import init_models
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import namedshard as ns
from mp.tools import AUTO, DEVICES, EXPLICIT, ME, mesh, named, own

MAPPING = ns.AxisMapping({"embed": ns.first("x", None), "mlp": ns.first("y", None), "vocab": "y"})
MODELS = ("mixed_dtypes", "stacked", "tied", "fused", "closures_and_statics")


def over_all(types: Any = AUTO, reverse: bool = False) -> Mesh:
    """A mesh over all devices."""
    return mesh((len(DEVICES) // 2, 2), "x y", types, DEVICES[::-1] if reverse else DEVICES)


def assert_own_shards(made: Any, wanted: Any, on: Mesh) -> None:
    """This process has its parts of every array, bit by bit, and no others."""
    for x, y in zip(jax.tree.leaves(made), jax.tree.leaves(wanted), strict=True):
        if isinstance(x, jax.Array) and x.sharding.device_set == set(on.devices.flat):
            if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
                x, y = jax.random.key_data(x), jax.random.key_data(y)
            whole = np.asarray(y)
            assert {s.device for s in x.addressable_shards} == set(own(ME))
            for shard in x.addressable_shards:
                assert np.asarray(shard.data).tobytes() == np.ascontiguousarray(whole[shard.index]).tobytes()


def case_models() -> None:
    """Explicit axes and devices in another order as well."""
    for i, name in enumerate(MODELS):
        fn, args = init_models.CATALOGUE[name]()
        on = over_all(EXPLICIT if i % 2 else AUTO, reverse=i % 3 == 0)
        made = ns.init(fn, *args, mapping=MAPPING, mesh=on)
        assert_own_shards(made, init_models.jitted(name), on)
        plan = ns.plan(made, MAPPING, on)
        for planned, x in zip(plan.leaves, jax.tree.leaves(made), strict=True):
            assert planned.spec is None or x.sharding == plan.sharding_of(planned)


def case_keys_of_all_processes() -> None:
    """Under a mesh keys are arrays of all processes."""
    on = over_all()
    wanted = init_models.jitted("dense")
    for make_key in (jax.random.PRNGKey, jax.random.key):
        with jax.set_mesh(on), ns.axis_mapping(MAPPING):
            key = make_key(7)
            assert not key.is_fully_addressable
            made = ns.init(init_models.dense, key)
        assert_own_shards(made, wanted, on)


def case_states_and_host_memory() -> None:
    """Moments follow their parameters."""
    on = over_all()
    fn, args = init_models.CATALOGUE["dense"]()
    params = ns.init(fn, *args, mapping=MAPPING, mesh=on, memory_kind="pinned_host")
    state = ns.init(optax.adam(1e-3).init, eqx.filter(params, eqx.is_array))
    for x, y in zip(jax.tree.leaves(eqx.filter(params, eqx.is_array)), jax.tree.leaves(state[0].mu), strict=True):
        assert x.sharding.memory_kind == y.sharding.memory_kind == "pinned_host"
        assert x.sharding == y.sharding
    assert state[0].count.sharding.spec == P()


def case_data_of_all_processes() -> None:
    """A sum over an array that no process can read whole; in each process the same to the last bit."""
    on = over_all()
    data = ns.shard(named(np.arange(64 * 16, dtype=np.float32).reshape(64, 16), "x y"), {"x": "x"}, on)
    made = ns.init(lambda d: {"w": jnp.ones((8, 16)) * d.array.std(), "same": d}, data, exact=True)
    assert made["same"].array is data.array
    wanted = np.arange(64 * 16, dtype=np.float32).std()
    np.testing.assert_allclose(made["w"].addressable_shards[0].data, wanted, rtol=1e-5)
