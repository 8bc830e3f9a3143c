"""Arrays to the host: on every process or on one, in a bounded stream."""

from collections.abc import Iterator
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import namedshard as ns
from mp.moves import PLACES, make
from mp.tools import (
    COUNT,
    DEVICES,
    DTYPES,
    ME,
    check,
    equal,
    forget_peak,
    keys,
    memory,
    message_of,
    named,
    own,
    put,
    same_bits,
    together,
    values,
)
from namedshard._place import transfer as collective

GONE = (
    "iter_to_host: 1 of 1 leaf donated or deleted\n"
    "  ['1']\n"
    "  fix: keep the result of the call that the array was donated to, and use that"
)
PLACED = list(zip(DTYPES * 2, PLACES, strict=False))


def tree() -> dict[str, Any]:
    """An array of every dtype, each at a placement of its own, and what is no array."""
    here = jax.local_devices()[0]
    made: dict[str, Any] = {f"{i:02}": named(make(d, place), "a b c") for i, (d, place) in enumerate(PLACED)}
    return made | {
        "empty": put(np.zeros((0, 24), np.float32), PLACES["all"][0], P("x", "y")),
        "keys": keys(values(np.uint32, (24, 2)), PLACES["reversed"][0], P("x"), "threefry2x32"),
        "local": jax.device_put(np.full((3,), ME, np.int32), here),
        "numpy": np.full((2,), ME),
        "of one process": put(values(np.int8), PLACES["last process"][0], P()),
        "pinned": make(np.float32, "reversed", "pinned_host"),
        "scalar": put(np.array(7, np.int32), PLACES["all"][0], P()),
        "text": "as it is",
        "uncommitted": jnp.full((2, 2), ME),
    }


def expected(kept: bool) -> dict[str, Any]:
    """The same on the host."""
    arrays: dict[str, Any] = {f"{i:02}": values(d) for i, (d, _) in enumerate(PLACED)}
    arrays |= {
        "empty": np.zeros((0, 24), np.float32),
        "keys": values(np.uint32, (24, 2)),
        "local": np.full((3,), ME, np.int32),
        "of one process": values(np.int8),
        "pinned": values(np.float32),
        "scalar": np.array(7, np.int32),
        "uncommitted": np.full((2, 2), ME, np.int32),
    }
    return {k: v if kept else None for k, v in arrays.items()} | {"numpy": np.full((2,), ME), "text": "as it is"}


def compare(got: dict[str, Any], want: dict[str, Any]) -> None:
    equal(sorted(got), sorted(want))
    for name, value in want.items():
        x = got[name].array if isinstance(got[name], hax.NamedArray) else got[name]
        if isinstance(value, np.ndarray):
            equal(type(x), np.ndarray)
            if not same_bits(x, value):
                raise AssertionError(f"{name}: {x.dtype}{x.shape} for {value.dtype}{value.shape}, or other values")
        else:
            equal(x, value)


def case_on_every_process() -> None:
    compare(ns.to_host(tree()), expected(True))


def case_on_one_process() -> None:
    for keeper in range(COUNT):
        compare(ns.to_host(tree(), process=keeper), expected(keeper == ME))


def case_in_small_steps() -> None:
    big = {
        k: put(values(np.float32, (240, 64, 10)), PLACES[k][0], PLACES[k][2]) for k in ("all", "reversed", "explicit")
    }
    for keeper in (None, 0, COUNT - 1):
        for budget in (1, "100 KB", "1GiB"):
            got = ns.to_host(big, process=keeper, budget=budget)
            for x in got.values():
                equal(x is None or same_bits(x, values(np.float32, (240, 64, 10))), True)
                equal(x is None, keeper not in (None, ME))


def case_the_caller_may_change_what_it_gets() -> None:
    x = make(np.float32, "replicated")
    got = ns.to_host(x)
    got[...] = 0
    check(x, values(np.float32), *(PLACES["replicated"][i] for i in (0, 2)))


def case_a_stream() -> None:
    everything = tree()
    for keeper in (None, 0, COUNT - 1):
        want = expected(keeper in (None, ME))
        want["numpy"] = want["numpy"] if keeper in (None, ME) else None
        seen: dict[str, Any] = {}
        for path, x in ns.iter_to_host(everything, process=keeper):
            seen[path.removeprefix("['").partition("']")[0]] = x
        equal(list(seen), sorted(k for k in everything if k != "text"))
        compare(seen, {k: v for k, v in want.items() if k != "text"})
    equal([x is None for _, x in ns.iter_to_host({"a": jnp.ones(2)})], [ME != 0])


def case_a_stream_has_one_array_at_a_time() -> None:
    arrays = {f"{i}": make(np.float32, "all") for i in range(3)}
    stream: Iterator[Any] = ns.iter_to_host(arrays)
    next(stream)
    for x in arrays.values():
        x.delete()
    # The second is asked for only now, and its source is gone on every process.
    equal(message_of(ns.DeletedArrayError, lambda: next(stream)), GONE)


def case_a_stream_whose_source_is_gone_on_one_process() -> None:
    arrays = {f"{i}": make(np.float32, "all") for i in range(3)}
    stream: Iterator[Any] = ns.iter_to_host(arrays)
    next(stream)
    if ME == 1:
        arrays["1"].delete()
        equal(message_of(ns.DeletedArrayError, lambda: next(stream)), GONE)
    else:
        with ns.collective_timeout(3):
            said = message_of(ns.OutOfStepError, lambda: next(stream)).splitlines()
        equal(said[0], "iter_to_host: process 1 did not make this call within 3 s")
    # Nothing was sent, so that the job can go on.
    together()
    equal(same_bits(ns.to_host(arrays["2"]), values(np.float32)), True)


def case_no_such_process() -> None:
    said = f"to_host: there is no process {COUNT}; this job has {COUNT}"
    equal(message_of(ValueError, lambda: ns.to_host({}, process=COUNT)), said)
    equal(message_of(ValueError, lambda: ns.to_host({}, process=-1)), said.replace(f"process {COUNT};", "process -1;"))
    equal(message_of(ValueError, lambda: ns.iter_to_host({}, process=COUNT)), "iter_" + said)


def case_what_crosses_is_what_must() -> None:
    sent: list[tuple[int, int]] = []
    real = collective.ex.schedule

    def counted(*args: Any) -> Any:
        plan = real(*args)
        padded = sum(p.steps * p.slot_bytes * sum(map(len, p.rounds)) for p in plan.phases)
        sent.append((plan.crossing_bytes, padded))
        return plan

    x = put(values(np.float32, (240, 64, 10)), PLACES["all"][0], P("x", "y"))
    replicated = ns.shard(named(x, "a b c"), {}, PLACES["all"][0])
    collective.ex.schedule = counted
    try:
        ns.to_host(x, process=0)
        ns.to_host(replicated, process=0)
    finally:
        collective.ex.schedule = real
    crossing = [c for c, _ in sent if c]
    elsewhere = x.nbytes * (len(DEVICES) - len(own(0))) // len(DEVICES)
    equal(crossing, [elsewhere])  # the replicated array needs none


def case_peak_memory_stays_under_the_budget() -> None:
    """Beyond what is kept: what is kept is all of the arrays, on the keeper."""
    budget, shape = 16 << 20, (240, 1024, 16)
    tree = {str(i): put(values(np.int32, shape, i), PLACES["all"][0], PLACES["all"][2]) for i in range(5)}
    kept = sum(x.nbytes for x in tree.values())
    equal(kept > 4 * budget, True)
    for keeper in (None, 0, COUNT - 1):
        # Compilers take their share the first time.
        ns.to_host(tree, process=keeper, budget=budget)
        forget_peak()
        before = memory("VmRSS")
        got = ns.to_host(tree, process=keeper, budget=budget)
        grown = memory("VmHWM") - before - (kept if keeper in (None, ME) else 0)
        if grown >= budget:
            raise AssertionError(f"{grown} bytes more than what is kept, with a budget of {budget}")
        equal(all(x is None or same_bits(x, values(np.int32, shape, int(k))) for k, x in got.items()), True)


def case_peak_memory_of_moves() -> None:
    """Source and target shards are there anyway; beyond them a chunk for each device."""
    shape = (240, 1024, 16)
    before, collective.CHUNK_BYTES = collective.CHUNK_BYTES, 4 << 20
    try:
        tree = {str(i): put(values(np.int32, shape, i), PLACES["all"][0], PLACES["all"][2]) for i in range(5)}
        named_tree = {k: named(x, "a b c") for k, x in tree.items()}
        where, mapping, _ = PLACES["interleaved"]
        ns.shard(named_tree, mapping, where)
        forget_peak()
        start = memory("VmRSS")
        moved = ns.shard(named_tree, mapping, where)
        target = sum(s.data.nbytes for x in moved.values() for s in x.array.addressable_shards)
        grown = memory("VmHWM") - start - target
        limit = collective.CHUNK_BYTES * max(len(own(p)) for p in range(COUNT))
        if grown >= limit:
            raise AssertionError(f"{grown} bytes more than the result, with chunks of {limit} in all")
    finally:
        collective.CHUNK_BYTES = before
