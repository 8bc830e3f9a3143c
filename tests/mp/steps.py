"""Processes that do not make the same call, or pass what differs: errors in bounded time, and the job goes on."""

import time
from collections.abc import Callable
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import namedshard as ns
from mp.moves import PLACES, make
from mp.tools import COUNT, DEVICES, ME, check, equal, mesh, message_of, named, own, patched, put, together, values
from namedshard._jaxcompat import coordination_client
from namedshard._place import local
from namedshard._processes.agreement import agree
from namedshard._processes.coordination import Channel, wait_for_processes

ALL, MAPPING, _ = PLACES["all"]
OTHER = PLACES["reversed"][0]
SAME = "call with the same tree, mapping and mesh, in the same order, on every process"
ON_ALL = f"on devices {[d.id for d in ALL.devices.flat]} in device"
ON_OTHER = f"on devices {[d.id for d in OTHER.devices.flat]} in device"
AXES = dict(ALL.shape)


def x(name: str = "all", dtype: Any = np.float32) -> hax.NamedArray:
    return named(make(dtype, name), "a b c")


def still_works() -> None:
    """The next call of all processes is in step."""
    where, mapping, spec = PLACES["interleaved"]
    check(ns.shard(x(), mapping, where).array, values(np.float32), where, spec)
    got = ns.to_host(x("reversed"), process=0)
    equal(got.array is None, ME != 0)


def out_of_step(call: Callable[[], Any]) -> list[str]:
    lines = message_of(ns.OutOfStepError, call).splitlines()
    still_works()
    return lines


def case_another_mapping() -> None:
    mapping = {"a": "x"} if ME == 1 else {"b": "y"}
    equal(
        out_of_step(lambda: ns.shard({"w": x()}, mapping, OTHER)),
        [
            "shard: the processes make different calls; the first difference is",
            f"  process 0: ['w']: float32[24,24,2] from {P('x', 'y')} of {AXES} {ON_ALL}"
            f" to {P(None, 'y')} of {AXES} {ON_OTHER}",
            f"  process 1: ['w']: float32[24,24,2] from {P('x', 'y')} of {AXES} {ON_ALL}"
            f" to {P('x')} of {AXES} {ON_OTHER}",
            f"  fix: {SAME}",
        ],
    )


def case_another_mesh() -> None:
    where = PLACES["interleaved"][0] if ME == 1 else OTHER
    lines = out_of_step(lambda: ns.shard({"w": x()}, MAPPING, where))
    equal(lines[0], "shard: the processes make different calls; the first difference is")
    equal(lines[1].endswith(ON_OTHER), True)
    equal(lines[2].endswith(f"on devices {[d.id for d in PLACES['interleaved'][0].devices.flat]} in device"), True)


def case_another_tree() -> None:
    tree = {"a": x(), "b": x()} if ME == 1 else {"a": x()}
    equal(
        out_of_step(lambda: ns.shard(tree, MAPPING, OTHER)),
        [
            "shard: the processes make different calls; the first difference is",
            "  process 0: no more leaves",
            f"  process 1: ['b']: float32[24,24,2] from {P('x', 'y')} of {AXES} {ON_ALL}"
            f" to {P('x', 'y')} of {AXES} {ON_OTHER}",
            f"  fix: {SAME}",
        ],
    )


def case_another_dtype_name_and_order() -> None:
    for tree in (
        {"a": x(dtype=np.int8 if ME == 1 else np.float32)},
        {"b" if ME == 1 else "a": x()},
        {"b" if ME == 1 else "a": x(), "c": x(), **({"d": x()} if ME == 1 else {})},
        [x(), x(dtype=np.int8)][:: 1 if ME == 1 else -1],
    ):
        lines = out_of_step(lambda tree=tree: ns.shard(tree, MAPPING, OTHER))
        equal(lines[0], "shard: the processes make different calls; the first difference is")


def case_another_function() -> None:
    call = (lambda: ns.to_host(x(), process=0)) if ME == 1 else (lambda: ns.shard(x(), MAPPING, OTHER))
    name = "to_host" if ME == 1 else "shard"
    equal(
        out_of_step(call),
        [
            f"{name}: the processes make different calls; the first difference is",
            "  process 0 calls shard",
            f"  process 1 calls to_host(budget={1 << 30})",
            f"  fix: {SAME}",
        ],
    )


def case_another_keeper_and_budget() -> None:
    lines = out_of_step(lambda: ns.to_host(x(), process=1 if ME == 1 else 0))
    source = f": float32[24,24,2] from {P('x', 'y')} of {AXES} {ON_ALL}"
    equal(lines[1:3], [f"  process 0: (root){source} to process 0", f"  process 1: (root){source} to process 1"])
    lines = out_of_step(lambda: ns.to_host(x(), budget=100 if ME == 1 else 200))
    equal(lines[1:3], ["  process 0 calls to_host(budget=200)", "  process 1 calls to_host(budget=100)"])


def absent(function: str, seconds: float, *processes: int, missed: str = "") -> str:
    """The message for processes that make no call."""
    who = f"process {processes[0]}" if len(processes) == 1 else f"processes {', '.join(map(str, processes))}"
    note = f"  this process had not made {missed} that the others had stopped waiting for\n" if missed else ""
    return (
        f"{function}: {who} did not make this call within {seconds:g} s\n{note}"
        "  fix: make the same calls in the same order on every process, or wait longer: ns.collective_timeout"
    )


def without(missing: int) -> list[int]:
    return [p for p in range(COUNT) if p != missing]


def case_a_process_that_makes_no_call() -> None:
    for missing in range(COUNT):
        started = time.monotonic()
        if missing != ME:
            with ns.collective_timeout(1):
                said = message_of(ns.OutOfStepError, lambda: ns.shard(x(), MAPPING, OTHER))
            # The one that was absent last time is told so.
            equal(said, absent("shard", 1, missing, missed="one earlier call" if missing - 1 == ME else ""))
            equal(time.monotonic() - started < 30, True)
        together()
    # Each was absent once, and joins in.
    still_works()


def case_only_one_process_makes_a_call() -> None:
    for caller in range(COUNT):
        if caller == ME:
            with ns.collective_timeout(0.5):
                said = message_of(ns.OutOfStepError, lambda: ns.to_host(x()))
            missed = "one earlier call" if caller == 1 else f"{caller} earlier calls" if caller else ""
            equal(said, absent("to_host", 0.5, *without(caller), missed=missed))
        together()
    still_works()


def case_calls_that_one_process_leaves_out() -> None:
    """It is found at its next call, without waiting."""
    if ME != 1:
        said = message_of(ns.OutOfStepError, lambda: ns.shard(x(), MAPPING, OTHER))
    else:
        said = message_of(ns.OutOfStepError, lambda: ns.to_host(x(), process=0))
    equal(said.splitlines()[1:3], ["  process 0 calls shard", f"  process 1 calls to_host(budget={1 << 30})"])
    still_works()


def case_a_process_that_comes_late() -> None:
    """The others have given up; it waits for their next call, which it may well be in time for."""
    for again in (False, True):
        if ME == 1:
            together()
            with ns.collective_timeout(1 if not again else 60):
                if again:
                    check(ns.shard(x(), MAPPING, OTHER).array, values(np.float32), OTHER, P("x", "y"))
                else:
                    said = message_of(ns.OutOfStepError, lambda: ns.shard(x(), MAPPING, OTHER))
                    equal(said, absent("shard", 1, *without(1), missed="one earlier call"))
        else:
            with ns.collective_timeout(1):
                message_of(ns.OutOfStepError, lambda: ns.shard(x(), MAPPING, OTHER))
            together()
            if again:
                check(ns.shard(x(), MAPPING, OTHER).array, values(np.float32), OTHER, P("x", "y"))
        together()
    still_works()


def case_any_delays() -> None:
    """Whoever gives up when: no process waits for ever, and in the end all are in step."""
    draw = np.random.default_rng(ME)
    for _ in range(20):
        time.sleep(float(draw.uniform(0, 0.2)))
        try:
            with ns.collective_timeout(0.1):
                agree("any", [])
        except ns.OutOfStepError as error:
            equal("did not make this call within 0.1 s" in str(error), True)
    together()
    still_works()


def case_a_process_that_is_only_slow() -> None:
    if ME == 1:
        time.sleep(3)
    y = ns.shard(x(), MAPPING, OTHER).array
    check(y, values(np.float32), OTHER, P("x", "y"))


def case_a_stream_that_one_process_leaves() -> None:
    arrays = {f"{i}": make(np.float32, "all") for i in range(3)}
    stream = ns.iter_to_host(arrays)
    next(stream)
    if ME != 1:
        with ns.collective_timeout(1):
            equal(message_of(ns.OutOfStepError, lambda: next(stream)), absent("iter_to_host", 1, 1))
    together()
    still_works()


def case_a_process_that_is_interrupted_while_it_waits() -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    for process in (0, 1):
        if process == ME:
            with patched(Channel, "wait", interrupted):
                message_of(KeyboardInterrupt, lambda: ns.shard(x(), MAPPING, OTHER))
        together()
        if process != ME:
            # The default limit: it is known at once.
            said = message_of(ns.OutOfStepError, lambda: ns.shard(x(), MAPPING, OTHER))
            equal(said, absent("shard", 60, process))
        still_works()


def case_too_little_memory_is_found_before_anything_is_sent() -> None:
    def nothing_left(*_: Any) -> None:
        raise MemoryError

    y = x()
    for process in (*range(COUNT), ME):
        # On one process after the other, then on all of them.
        if process == ME:
            with patched(np, "empty", nothing_left):
                message_of(MemoryError, lambda: ns.to_host(y))
                if local.on_cpus(OTHER):
                    # Accelerators need none of the host's memory for this.
                    message_of(MemoryError, lambda: ns.shard(y, MAPPING, OTHER))
        together()
    still_works()


def case_sources_that_were_to_be_given_up_stay() -> None:
    """Those of a move in which this process has no part, too: the call may fail."""
    mine, theirs = (mesh((len(own(p)),), "x", devices=own(p)) for p in (0, 1))
    shape = (len(own(0)) * len(own(1)),)
    tree = {
        "a": named(put(values(np.float32, shape), theirs, P("x")), "a"),
        "b": named(put(values(np.float32, shape), mesh((len(DEVICES),), "x"), P()), "b"),
    }
    mapping = {"a": None, "b": "x" if ME == 1 else None}
    placed = tree | {"a": named(put(values(np.float32, shape), mine, P("x")), "a")}
    for given in (tree, placed):
        message_of(ns.OutOfStepError, lambda given=given: ns.shard(given, mapping, theirs, donate=True))
        equal([given[k].array.is_deleted() for k in "ab"], [False, False])
    moved = ns.shard(tree, {"a": None, "b": None}, theirs, donate=True)
    check(moved["a"].array, values(np.float32, shape), theirs, P())
    check(moved["b"].array, values(np.float32, shape), theirs, P())


def case_who_is_to_connect_waits_for_the_last() -> None:
    """However long it takes: connecting itself has a limit that a slow disk may exceed."""
    group = list(reversed(DEVICES))
    client = coordination_client()
    if ME == 1:
        time.sleep(2.5)
        client.key_value_set("last/is here", "yes")
    wait_for_processes(group)
    # Read without waiting.
    equal(dict(client.key_value_dir_get("last/")), {"last/is here": "yes"})


def case_an_error_before_the_call_on_one_process() -> None:
    y = x()
    if ME == 1:
        y.array.delete()
        message_of(ns.DeletedArrayError, lambda: ns.shard(y, MAPPING, OTHER))
    else:
        with ns.collective_timeout(1):
            message_of(ns.OutOfStepError, lambda: ns.shard(y, MAPPING, OTHER))
    together()
    still_works()


def case_host_values_that_differ() -> None:
    a, b = values(np.float32), values(np.float32)
    if ME == 1:
        b = b.copy()
        b[0, 0, 0] = 0
    tree = {"same": named(a, "a b c"), "other": named(b, "a b c"), "key": named(np.arange(8) + ME, "k")}
    said = message_of(ns.HostValueError, lambda: ns.shard(tree, MAPPING, ALL))
    equal(
        said,
        "shard: host values of 2 leaves differ between processes\n"
        "  ['key']: process 1 has another value than process 0\n"
        "  ['other']: process 1 has another value than process 0\n"
        "  fix: pass the same value on every process, or build the array with"
        " jax.make_array_from_process_local_data",
    )
    still_works()
    # Not a number in the same bits everywhere is the same value.
    same = named(np.full((24, 24, 2), np.nan, np.float32), "a b c")
    equal(bool(np.isnan(np.asarray(ns.shard(same, MAPPING, ALL).array.addressable_shards[0].data)).all()), True)
    said = message_of(ns.HostValueError, lambda: ns.shard(named(jnp.full((24, 24, 2), ME), "a b c"), MAPPING, ALL))
    equal(said.splitlines()[1], "  (root): process 1 has another value than process 0")
    # Minus zero and zero compare equal, and are not the same value.
    zero = np.zeros((24, 24, 2), np.float32)
    message_of(ns.HostValueError, lambda: ns.shard(named(-zero if ME == 1 else zero, "a b c"), MAPPING, ALL))
    # Under jax.set_mesh JAX calls an array replicated that each process made of values of its own.
    with jax.set_mesh(ALL):
        own_values = named(jnp.asarray(np.full((24, 24, 2), ME, np.float32)), "a b c")
        equal(own_values.array.sharding.is_fully_replicated and not own_values.array.is_fully_addressable, True)
        said = message_of(ns.HostValueError, lambda: ns.shard(own_values, MAPPING))
        equal(said.splitlines()[1], "  (root): process 1 has another value than process 0")
        ns.shard(own_values, MAPPING, check_replicas=False)
        equal(ns.shard(own_values, {}) is own_values, True)
        same = named(jnp.asarray(values(np.float32)), "a b c")
        check(ns.shard(same, MAPPING).array, values(np.float32), ALL, PLACES["all"][2])
    # On one process's own mesh nothing is compared.
    mine = mesh((len(own(ME)),), "x", devices=own(ME))
    equal(int(ns.shard(named(np.full((24,), ME), "a"), {"a": "x"}, mine).array[0]), ME)
    still_works()


def case_arrays_of_each_process() -> None:
    here = jax.local_devices()
    one = jax.device_put(values(np.float32), here[0])
    many = jax.device_put(values(np.float32), NamedSharding(mesh((len(here),), "x", devices=here), P()))
    tree = {"many": named(many, "a b c"), "one": named(one, "a b c"), "global": x("reversed")}
    said = message_of(ns.LocalArrayError, lambda: ns.shard(tree, MAPPING, ALL))
    equal(
        said,
        "shard: 2 leaves are not one global array: each process passes its own, committed to its own devices\n"
        "  ['many']\n"
        "  ['one']\n"
        "  fix: pass numpy (the same value on every process), or build a global array with"
        " jax.make_array_from_process_local_data",
    )
    still_works()
    # Where one process alone is meant, its arrays move.
    mine = mesh((len(here),), "x", devices=here)
    equal(ns.shard(named(one, "a b c"), {}, mine).array.is_fully_addressable, True)


def case_a_limit_must_be_positive() -> None:
    def enter() -> None:
        with ns.collective_timeout(0):
            pass

    equal(message_of(ValueError, enter), "collective_timeout must be positive, not 0")
