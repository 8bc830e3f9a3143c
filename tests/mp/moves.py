"""Every source placement to every target placement, whatever the processes own."""

import contextlib
import itertools
import math
from collections.abc import Generator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import namedshard as ns
from mp.tools import (
    AUTO,
    COUNT,
    DEVICES,
    DTYPES,
    EXPLICIT,
    check,
    equal,
    interleaved,
    keys,
    mesh,
    named,
    own,
    patched,
    put,
    values,
)
from namedshard._place import compiled, rounds
from namedshard._place import transfer as collective

N = len(DEVICES)
WIDE = {2: 2, 4: 2, 6: 2, 8: 4}[N]
ALL = (N // WIDE, WIDE)

# Mesh, and the mapping of axes a=24, b=24, c=2 with the spec it gives.
PLACES: dict[str, tuple[Mesh, dict[str, Any], P]] = {
    "all": (mesh(ALL, "x y"), {"a": "x", "b": "y"}, P("x", "y", None)),
    "transposed": (mesh(ALL, "x y"), {"a": "y", "b": "x"}, P("y", "x", None)),
    "reversed": (mesh(ALL, "x y", devices=DEVICES[::-1]), {"a": "x", "b": "y"}, P("x", "y", None)),
    "interleaved": (mesh(ALL, "x y", devices=interleaved()), {"a": ("x", "y")}, P(("x", "y"), None, None)),
    "tuple turned": (mesh(ALL, "x y"), {"a": ("y", "x")}, P(("y", "x"), None, None)),
    "replicated": (mesh(ALL, "x y"), {}, P()),
    "partly replicated": (mesh(ALL, "x y", devices=interleaved()), {"a": "y"}, P("y", None, None)),
    "three axes": (mesh((N // 2, 1, 2), "x y z"), {"a": "x", "c": "z", "b": "y"}, P("x", "y", "z")),
    "three axes, tuple": (mesh((N // 2, 2, 1), "x y z"), {"a": ("z", "x"), "b": "y"}, P(("z", "x"), "y", None)),
    "some devices": (mesh((N - 2,), "x", devices=DEVICES[1:-1]), {"a": "x"}, P("x", None, None)),
    "one of each": (mesh((COUNT,), "x", devices=[own(p)[-1] for p in range(COUNT)]), {"a": "x"}, P("x", None, None)),
    "first process": (mesh((min(4, len(own(0))),), "x", devices=own(0)), {"a": "x"}, P("x", None, None)),
    "last process": (mesh((1,), "x", devices=own(COUNT - 1)), {"b": "x"}, P(None, "x", None)),
    "explicit": (mesh(ALL, "x y", EXPLICIT), {"a": "x", "b": "y"}, P("x", "y", None)),
    "explicit, reversed": (mesh(ALL, "x y", EXPLICIT, DEVICES[::-1]), {"a": "x", "b": "y"}, P("x", "y", None)),
    "mixed": (mesh(ALL, "x y", (AUTO, EXPLICIT), interleaved()), {"a": "x", "b": "y"}, P("x", "y", None)),
}


def make(dtype: Any, place: str, kind: str = "device") -> jax.Array:
    where, _, spec = PLACES[place]
    return put(values(dtype), where, spec, kind)


def some_pairs(share: int) -> list[tuple[str, str]]:
    """Pairs of places. Three other sets of devices than four of each process share them between them."""
    pairs = list(itertools.product(PLACES, PLACES))
    if [len(own(p)) for p in range(COUNT)] != [4, 4]:
        pairs = pairs[(N + COUNT) % 3 :: 3]
    return pairs[::share]


def case_placements_each_to_each(share: int = 1) -> int:
    pairs = some_pairs(share)
    # 13 dtypes and 16 places: each place sees many dtypes.
    for (source, target), dtype in zip(pairs, itertools.cycle(DTYPES), strict=False):
        where, mapping, spec = PLACES[target]
        x = make(dtype, source)
        y = ns.shard(named(x, "a b c"), mapping, where).array
        check(y, values(dtype), where, spec)
        check(x, values(dtype), PLACES[source][0], PLACES[source][2])
    return len(pairs)


def case_placements_of_whole_trees() -> None:
    tree = {
        f"{np.dtype(dtype).name} {place}": named(make(dtype, place), "a b c")
        for dtype, place in zip(itertools.cycle(DTYPES), PLACES, strict=False)
    }
    tree |= {"numpy": named(values(np.int8, seed=3), "a b c"), "other": 3, "plain": make(np.float32, "reversed")}
    for where, mapping, spec in PLACES.values():
        out = ns.shard(tree, mapping, where)
        equal(out["other"], 3)
        equal(out["plain"] is tree["plain"], True)
        check(out["numpy"].array, values(np.int8, seed=3), where, spec)
        for dtype, place in zip(itertools.cycle(DTYPES), PLACES, strict=False):
            check(out[f"{np.dtype(dtype).name} {place}"].array, values(dtype), where, spec)


def case_every_dtype_in_other_orders() -> None:
    for dtype, target in itertools.product(DTYPES, ("interleaved", "three axes", "first process")):
        where, mapping, spec = PLACES[target]
        check(ns.shard(named(make(dtype, "all"), "a b c"), mapping, where).array, values(dtype), where, spec)


def case_memory_kinds() -> None:
    places = ("all", "reversed", "some devices", "first process", "replicated", "explicit, reversed")
    for source, target in itertools.product(places, places):
        for before, after in (("pinned_host", "device"), ("device", "pinned_host"), ("pinned_host", "pinned_host")):
            where, mapping, spec = PLACES[target]
            x = named(make(np.float32, source, before), "a b c")
            check(ns.shard(x, mapping, where, memory_kind=after).array, values(np.float32), where, spec, after)
            # With no kind given the array keeps the one it has.
            check(ns.shard(x, mapping, where).array, values(np.float32), where, spec, before)


def case_keys() -> None:
    for impl, size in (("threefry2x32", 2), ("rbg", 4)):
        data = values(np.uint32, (24, size))
        for source, target in itertools.product(("all", "reversed", "some devices", "first process"), PLACES):
            where, mapping, spec = PLACES[target]
            from_mesh, _, from_spec = PLACES[source]
            x = keys(data, from_mesh, P(from_spec[0]), impl)
            mapping = {k: v for k, v in mapping.items() if k == "a"}
            y = ns.shard(named(x, "a"), mapping, where).array
            equal(y.dtype, x.dtype)
            check(y, data, where, P(spec[0] if spec and mapping else None))
    old = values(np.uint32, (24, 2))
    where, mapping, spec = PLACES["interleaved"]
    check(ns.shard(named(put(old, PLACES["all"][0], P("x")), "a k"), mapping, where).array, old, where, P(("x", "y")))
    # Keys that every process makes for itself, and keys in host memory.
    x = jax.random.split(jax.random.key(0), 24)
    y = ns.shard(named(x, "a"), mapping, where).array
    check(y, np.asarray(jax.random.key_data(x)), where, P(("x", "y")))
    z = ns.shard(named(y, "a"), mapping, where, memory_kind="pinned_host").array
    equal(z.sharding.memory_kind, "pinned_host")
    there, mapping, spec = PLACES["reversed"]
    back = ns.shard(named(z, "a"), {"a": "x"}, there, memory_kind="device").array
    check(back, np.asarray(jax.random.key_data(x)), there, P("x"))


def case_empty_and_scalar() -> None:
    for source, target in itertools.product(("all", "reversed", "first process", "explicit"), PLACES):
        where, mapping, spec = PLACES[target]
        empty = put(np.zeros((0, 24, 2), np.float32), PLACES[source][0], PLACES[source][2])
        check(ns.shard(named(empty, "a b c"), mapping, where).array, np.zeros((0, 24, 2), np.float32), where, spec)
        scalar = put(np.array(2.5, np.float32), PLACES[source][0], P())
        check(ns.shard(named(scalar, ""), mapping, where).array, np.array(2.5, np.float32), where, P())


def case_weak_types_stay_weak() -> None:
    weak = jnp.broadcast_to(1.5, (24, 24))
    equal(weak.weak_type, True)
    for target in ("all", "interleaved", "first process", "explicit"):
        there, mapping, spec = PLACES[target]
        y = ns.shard(named(weak, "a b"), mapping, there).array
        equal((y.weak_type, y.dtype), (True, np.float32))
        check(y, np.full((24, 24), 1.5, np.float32), there, P(*spec[:2]))
        back, mapping, spec = PLACES["reversed"]
        z = ns.shard(named(y, "a b"), mapping, back).array
        equal(z.weak_type, True)
        check(z, np.full((24, 24), 1.5, np.float32), back, P(*spec[:2]))


def case_tied_leaves_stay_tied() -> None:
    where, mapping, spec = PLACES["reversed"]
    for x in (make(np.float32, "all"), jnp.asarray(values(np.float32)), values(np.float32)):
        out = ns.shard({"a": named(x, "a b c"), "b": named(x, "a b c")}, mapping, where)
        equal(out["a"].array is out["b"].array, True)
        check(out["a"].array, values(np.float32), where, spec)


def case_in_place_is_kept() -> None:
    for where, mapping, spec in PLACES.values():
        x = named(put(values(np.float32), where, spec), "a b c")
        equal(ns.shard(x, mapping, where) is x, True)


def case_donation() -> None:
    for source, target in (
        ("all", "reversed"),
        ("all", "replicated"),
        ("first process", "all"),
        ("all", "last process"),
    ):
        where, mapping, spec = PLACES[target]
        x, kept = make(np.float32, source), make(np.int8, source)
        y = ns.shard(named(x, "a b c"), mapping, where, donate=True).array
        equal((x.is_deleted(), kept.is_deleted()), (True, False))
        check(y, values(np.float32), where, spec)
    where, mapping, spec = PLACES["all"]
    in_place = make(np.float32, "all")
    equal(ns.shard(named(in_place, "a b c"), mapping, where, donate=True).array is in_place, True)
    equal(in_place.is_deleted(), False)
    host = jnp.asarray(values(np.float32))
    check(ns.shard(named(host, "a b c"), mapping, where, donate=True).array, values(np.float32), where, spec)
    equal(host.is_deleted(), True)


def case_host_inputs() -> None:
    for where, mapping, spec in PLACES.values():
        for dtype in DTYPES:
            value = values(dtype)
            check(ns.shard(named(value, "a b c"), mapping, where).array, value, where, spec)
        value = values(np.float32)
        reordered = np.asfortranarray(value)
        y = ns.shard(named(reordered, "a b c"), mapping, where).array
        reordered[...] = 0
        check(y, value, where, spec)
        check(ns.shard(named(jnp.asarray(value), "a b c"), mapping, where).array, value, where, spec)
        backward = value.astype(">f4")
        check(ns.shard(named(backward, "a b c"), mapping, where).array, value, where, spec)


def case_placements_of_large_arrays_in_small_steps() -> None:
    before, collective.CHUNK_BYTES = collective.CHUNK_BYTES, 1 << 16
    try:
        big = values(np.float32, (240, 72, 10))
        for source, target in itertools.product(("all", "three axes", "first process", "partly replicated"), PLACES):
            x = put(big, PLACES[source][0], PLACES[source][2])
            where, mapping, spec = PLACES[target]
            check(ns.shard(named(x, "a b c"), mapping, where).array, big, where, spec)
    finally:
        collective.CHUNK_BYTES = before


def case_the_mesh_in_force_does_not_matter() -> None:
    for target in ("reversed", "explicit", "mixed", "first process", "some devices"):
        where, mapping, spec = PLACES[target]
        for context in ("all", "explicit, reversed", "interleaved"):
            with jax.set_mesh(PLACES[context][0]), ns.axis_mapping(mapping):
                y = ns.shard(named(make(np.float32, "all"), "a b c"), mesh=where).array
            check(y, values(np.float32), where, spec)


def case_explain_shows_what_a_move_takes() -> None:
    where, mapping, _ = PLACES["transposed"]
    x = make(np.float32, "all")
    row = ns.explain(named(x, "a b c"), mapping, where).rows[0]
    shards = (
        x.sharding.shard_shape(x.shape),
        jax.sharding.NamedSharding(where, PLACES["transposed"][2]).shard_shape(x.shape),
    )
    equal(row.transient_bytes, sum(4 * math.prod(s) for s in shards) + collective.CHUNK_BYTES)
    told = str(ns.explain(named(x, "a b c"), mapping, where))
    equal("1 move crosses processes, with at most 64 MiB of a leaf on a device at a time" in told, True)
    equal("cross" in str(ns.explain(named(values(np.float32), "a b c"), mapping, where)), True)
    in_place = ns.shard(named(x, "a b c"), mapping, where)
    equal("cross" in str(ns.explain(in_place, mapping, where)), False)
    struct = jax.ShapeDtypeStruct(x.shape, x.dtype)
    equal("cross" in str(ns.explain(named(struct, "a b c"), mapping, where)), False)


@contextlib.contextmanager
def from_device_to_device() -> Generator[None]:
    """Moves as accelerators make them, without a step through the hosts."""

    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError("an array of numpy on the way from device to device")

    with ns.testing.accelerator_routes(), patched(collective.ex, "schedule", refused):
        yield


def case_as_accelerators_move_them() -> None:
    with ns.testing.accelerator_routes():
        case_every_dtype_in_other_orders()
        case_memory_kinds()
        case_keys()
        case_empty_and_scalar()
        case_weak_types_stay_weak()
        case_tied_leaves_stay_tied()
        case_donation()
        case_host_inputs()


def case_placements_from_device_to_device() -> int:
    with from_device_to_device():
        # Programs are compiled for each.
        return case_placements_each_to_each(share=3)


def case_some_processes_have_no_part() -> None:
    both, first = mesh((2,), "x", devices=[DEVICES[0], DEVICES[-1]]), mesh((2,), "x")
    x = put(values(np.float32), both, P("x"))
    with from_device_to_device():
        for where in (both, first, both):
            for spec, mapping in ((P(None, "x"), {"b": "x"}), (P("x"), {"a": "x"})):
                x = ns.shard(named(x, "a b c"), mapping, where).array
                check(x, values(np.float32), where, spec)


def case_large_arrays_from_device_to_device() -> None:
    def forget() -> None:
        rounds.plan_between.cache_clear()
        compiled._steps.cache_clear()

    with patched(rounds, "CHUNK_BYTES", 1 << 13):
        forget()
        with from_device_to_device():
            for target in ("reversed", "replicated", "some devices", "first process"):
                where, mapping, spec = PLACES[target]
                check(
                    ns.shard(named(make(np.float32, "all"), "a b c"), mapping, where).array,
                    values(np.float32),
                    where,
                    spec,
                )
    forget()
