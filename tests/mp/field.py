"""What people reported: arrays across processes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import namedshard as ns
from mp.tools import DEVICES, ME, check, equal, interleaved, mesh, message_of, named, put, same_bits

M8 = mesh((len(DEVICES),), "data")
FULL = np.arange(32, dtype=np.float32).reshape(8, 4)


def case_other_device_order() -> None:
    """An array on a mesh that lists the same devices in another order."""
    x = put(FULL, M8, P("data"))
    turned = mesh((len(DEVICES),), "data", devices=interleaved())
    y = ns.shard(named(x, "b f"), {"b": "data"}, turned)
    check(y.array, FULL, turned, P("data"))
    # Arrays on the same mesh go together, as they do not before.
    z = jax.jit(lambda a, b: a + b)(y.array, ns.shard(named(FULL, "b f"), {"b": "data"}, turned).array)
    check(z, FULL * 2, turned, P("data"))


def case_keys_from_the_host_and_back() -> None:
    made = jax.random.split(jax.random.key(0), 64)
    y = ns.shard(named(made, "k"), {"k": "data"}, M8).array
    equal((str(y.dtype), y.sharding.spec), ("key<fry>", P("data")))
    drawn = jax.jit(jax.vmap(jax.random.uniform))(y)
    equal(same_bits(ns.to_host(drawn), jax.vmap(jax.random.uniform)(made)), True)
    equal(same_bits(ns.to_host(y), jax.random.key_data(made)), True)


def case_a_mesh_given_inside_jit() -> None:
    """With no mesh in force, on an input that is on no mesh, and with no input at all."""

    def place(x: jax.Array) -> jax.Array:
        return ns.shard(named(x, "b"), {"b": "data"}, M8).array

    for made in (
        jax.jit(place)(jnp.ones(8)),
        jax.jit(place)(np.ones(8, np.float32)),
        jax.jit(lambda: place(jnp.ones(8)))(),
    ):
        check(made, np.ones(8, np.float32), M8, P("data"))


def case_partitioned_operations() -> None:
    """A watch list of wrong values: to the host by namedshard, which uses no reduction."""
    grid = mesh((len(DEVICES) // 2, 2), "data model")
    a = ns.shard(named(np.arange(4, dtype=np.float32), "b"), {"b": "model"}, grid).array
    b = ns.shard(named(np.arange(12, dtype=np.float32), "b"), {"b": "model"}, grid).array
    both = jax.jit(lambda a, b: jnp.concatenate([a, b]))(a, b)
    equal(ns.to_host(both).tolist(), [*range(4), *range(12)])
    c = ns.shard(named(FULL, "b f"), {"b": "data", "f": "model"}, grid).array
    equal(same_bits(ns.to_host(jax.jit(lambda x: jnp.cumsum(x, 0))(c)), np.cumsum(FULL, 0)), True)
    equal(same_bits(ns.to_host(jax.jit(lambda x: jnp.roll(x, 3, 0))(c)), np.roll(FULL, 3, 0)), True)
    shifted = jax.jit(lambda x: x.at[1:].set(x[:-1]))(c)
    want = FULL.copy()
    want[1:] = FULL[:-1]
    equal(same_bits(ns.to_host(shifted), want), True)
    summed = jax.jit(lambda x: x.sum(0), out_shardings=NamedSharding(grid, P("model")))(c)
    equal(same_bits(ns.to_host(summed), FULL.sum(0)), True)


def case_export_of_global_arrays() -> None:
    """numpy refuses arrays that are not all here."""
    for spec in (P("data"), P(None, None), P(None, None)):
        x = put(FULL, M8, spec)
        equal(same_bits(ns.to_host(x), FULL), True)
        got = ns.to_host(x, process=0)
        equal(got is None, ME != 0)
        equal(got is None or same_bits(got, FULL), True)


def case_the_host_array_has_the_arrays_own_shape() -> None:
    """Not one stacked over the processes, whatever the array is."""
    equal(ns.to_host(np.zeros(3)).shape, (3,))
    equal(ns.to_host(jnp.zeros(())).shape, ())
    equal(ns.to_host(jnp.zeros(3)).shape, (3,))
    equal(ns.to_host(put(FULL, M8, P("data"))).shape, (8, 4))
    equal(ns.to_host(put(FULL, M8, P())).shape, (8, 4))


def case_inputs_that_differ_or_are_local() -> None:
    def to(x: object) -> jax.Array:
        return ns.shard(named(x, "b f"), {"b": "data"}, M8).array

    check(to(FULL), FULL, M8, P("data"))
    check(to(jnp.asarray(FULL)), FULL, M8, P("data"))
    equal("\n  (root): process 1" in message_of(ns.HostValueError, lambda: to(FULL + (ME == 1))), True)
    here = jax.local_devices()
    local = jax.device_put(FULL, here[0])
    equal("\n  (root)\n" in message_of(ns.LocalArrayError, lambda: to(local)), True)
    spread = jax.device_put(FULL, NamedSharding(mesh((len(here),), "x", devices=here), P("x")))
    equal("\n  (root)\n" in message_of(ns.LocalArrayError, lambda: to(spread)), True)


def case_narrow_and_odd_types() -> None:
    for value in (
        np.arange(8).astype(ml_dtypes.bfloat16),
        np.arange(-8, 8).astype(ml_dtypes.int4),
        np.arange(8) % 2 == 0,
        np.zeros((0, 4), np.float32),
    ):
        x = put(value, M8, P("data") if len(value) else P())
        equal(same_bits(ns.to_host(x), value), True)


def case_arrays_made_under_a_mesh() -> None:
    """They are global and committed, and collide with local ones."""
    with jax.set_mesh(M8):
        key, zeros = jax.random.key(0), jnp.zeros(8)
    equal(zeros.is_fully_addressable, False)
    out = ns.shard({"k": named(key, ""), "z": named(zeros, "b")}, {"b": "data"}, M8)
    check(out["z"].array, np.zeros(8, np.float32), M8, P("data"))
    equal(same_bits(ns.to_host(out["k"].array), np.zeros(2, np.uint32)), True)


def case_closing_over_a_global_array() -> None:
    table = ns.shard(named(FULL, "b f"), {"b": "data"}, M8)
    params = {"w": table}

    class Trainer:
        def __init__(self) -> None:
            self.table = table.array

        def step(self, x: jax.Array) -> jax.Array:
            return self.table + x

    trainer = Trainer()
    for name, step in {
        "params['w']": lambda x: params["w"].array + x,
        "self.table": trainer.step,
    }.items():
        fn = ns.named_jit(step)
        with jax.set_mesh(M8):
            error = message_of(ns.MismatchError, lambda fn=fn: fn(FULL))
        equal(
            error.partition(": ")[2],
            "1 array that spans several processes is closed over by the function\n"
            f"  {name}: float32[8,4] over {len(DEVICES)} devices\n"
            "  fix: pass them to the function as arguments",
        )
    with jax.set_mesh(M8):
        out = ns.named_jit(lambda x, table: table.array + x, out_axis_resources={"b": "data"})(FULL, table)
    equal(same_bits(ns.to_host(out), FULL * 2), True)
