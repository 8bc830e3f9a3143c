"""One process is killed in the middle of something; the others end with an error in bounded time."""

import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from multiprocess import die

import namedshard as ns
from mp.checkpoints import folder
from mp.moves import PLACES
from mp.tools import COUNT, ME, equal, mesh, message_of, named, own, put, together, values
from namedshard._place import compiled, rounds
from namedshard._place import transfer as collective
from namedshard._processes.coordination import Channel

# The cases are alone in their job, and its processes cannot meet at its end.
ALONE = True
VICTIM = COUNT - 1
LAST = mesh((len(own(VICTIM)),), "x", devices=own(VICTIM))


def at_step(number: int, what: Callable[[], None]) -> None:
    """Let the victim do this when it comes to this step of the next exchange."""
    real = collective._compile_rounds

    def program(*args: Any) -> Any:
        step = real(*args)

        def stepping(outgoing: Any) -> Any:
            steps.append(1)
            if ME == VICTIM and len(steps) == number:
                what()
            return step(outgoing)

        return stepping

    def compiled_step(*args: Any) -> Any:
        steps.append(1)
        if ME == VICTIM and len(steps) == number:
            what()
        return on_devices(*args)

    steps: list[int] = []
    on_devices = compiled._Step.__call__
    collective._compile_rounds = program
    compiled._Step.__call__ = compiled_step


def in_small_steps() -> None:
    """Let moves take many steps, by way of the hosts or not."""
    collective.CHUNK_BYTES = rounds.CHUNK_BYTES = 1 << 16
    rounds.plan_between.cache_clear()
    compiled._steps.cache_clear()


def big() -> dict[str, Any]:
    value = values(np.float32, (240, 64, 10))
    return {str(i): named(put(value, PLACES["all"][0], PLACES["all"][2]), "a b c") for i in range(4)}


def ends(call: Any) -> None:
    """Check the error that a call ends with: at once where the connection is lost, soon after it on the others."""
    started = time.monotonic()
    lines = message_of(ns.ExchangeError, call).splitlines()
    # JAX itself would end the job only when the dead process has sent no sign of life for a minute.
    equal(time.monotonic() - started < 40, True)
    equal(lines[0], "the exchange of arrays between processes broke off: a process died, or failed, or the network did")
    who, kind, what = lines[1].strip().split(": ", 2)
    equal(who in [f"process {p}" for p in range(COUNT) if p != VICTIM], True)
    equal(kind in ("JaxRuntimeError", "ValueError"), True)
    equal(what.startswith("UNKNOWN: Gloo collective permute failed"), True)
    equal(lines[2:], ["  fix: look for the first error among all processes, and start the job again"])


def broke_off(why: str) -> str:
    return (
        "the exchange of arrays between processes broke off: a process died, or failed, or the network did\n"
        f"  {why}\n"
        "  fix: look for the first error among all processes, and start the job again"
    )


def no_more(error: str = "MemoryError: no more of it") -> None:
    """Check that whatever is called next is refused, and stay until all have: a process's end ends its connections."""
    started = time.monotonic()
    said = message_of(ns.ExchangeError, lambda: ns.to_host(big()))
    equal(time.monotonic() - started < 30, True)
    rest = (
        ": an earlier exchange of arrays between processes broke off, and there can be no other in this job\n"
        f"  process {VICTIM}: {error}\n"
        "  fix: look for the first error among all processes, and start the job again"
    )
    equal(said, f"to_host{rest}")
    # Compiled code would receive what the exchange has sent.
    double = ns.named_jit(lambda x: x * 2)
    everywhere = PLACES["all"][0]
    equal(
        message_of(ns.ExchangeError, lambda: double(put(np.ones(24, np.float32), everywhere, P("x")))),
        f"<lambda>{rest}",
    )
    with jax.set_mesh(everywhere):
        equal(message_of(ns.ExchangeError, lambda: double(np.ones(24, np.float32))), f"<lambda>{rest}")
    equal(message_of(ns.ExchangeError, lambda: ns.init(jnp.ones, (24,), mapping={}, mesh=everywhere)), f"init{rest}")
    if ME == VICTIM:
        # Devices of the others may be waiting for it still.
        here = mesh((len(own(ME)),), "x", devices=own(ME))
        equal(float(double(put(np.ones(24, np.float32), here, P()))[0]), 2.0)
        equal(float(ns.init(jnp.ones, (24,), mapping={}, mesh=here)[0]), 1.0)
    together()


def case_during_a_move() -> None:
    tree, (where, mapping, _) = big(), PLACES["interleaved"]
    ns.shard(tree, mapping, where)
    in_small_steps()
    at_step(3, die)
    ends(lambda: ns.shard(tree, mapping, where))


def case_during_a_gather() -> None:
    tree = big()
    ns.to_host(tree, process=0)
    at_step(3, die)
    ends(lambda: ns.to_host(tree, process=0, budget="200KB"))


def case_during_a_save() -> None:
    tree, path = big(), folder() / "model.safetensors"
    at_step(3, die)
    ends(lambda: ns.save_safetensors(tree, path, budget="200KB"))
    equal([n for n in os.listdir(folder()) if n.endswith((".partial", ".safetensors"))], [])


def case_before_a_call() -> None:
    """The others wait for it no longer than they would for one that is late."""
    tree = big()
    ns.to_host(tree)
    if ME == VICTIM:
        die()
    with ns.collective_timeout(2):
        said = message_of(ns.OutOfStepError, lambda: ns.to_host(tree))
    equal(said.splitlines()[0], f"to_host: process {VICTIM} did not make this call within 2 s")


def case_a_failure_in_a_move() -> None:
    """A process that lives, but does not go on."""

    def fail() -> None:
        raise MemoryError("no more of it")

    tree, (where, mapping, _) = big(), PLACES["interleaved"]
    in_small_steps()
    at_step(3, fail)
    if ME == VICTIM:
        equal(message_of(MemoryError, lambda: ns.shard(tree, mapping, where)), "no more of it")
    else:
        said = message_of(ns.ExchangeError, lambda: ns.shard(tree, mapping, where))
        equal(said, broke_off(f"process {VICTIM}: MemoryError: no more of it"))
    no_more()


def case_a_failure_in_a_compiled_move() -> None:
    """Elsewhere than on CPUs compiled programs move arrays, and results come before they are computed."""

    def fail(*_: Any) -> None:
        raise MemoryError("no more of it")

    tree, where = big(), PLACES["all"][0]
    at_step(1, fail)
    with ns.testing.accelerator_routes():
        if ME == VICTIM:
            equal(message_of(MemoryError, lambda: ns.shard(tree, {"a": "y"}, where)), "no more of it")
        else:
            said = message_of(ns.ExchangeError, lambda: ns.shard(tree, {"a": "y"}, where))
            equal(said, broke_off(f"process {VICTIM}: MemoryError: no more of it"))
    no_more()


def case_during_a_compiled_move() -> None:
    with ns.testing.accelerator_routes():
        case_during_a_move()


def case_a_failure_before_anything_is_sent() -> None:
    """The others would wait for it; who has no part in the exchange comes to know at its next call."""
    tree = {str(i): put(values(np.float32), LAST, P("x")) for i in range(2)}

    def fail(*_: Any) -> None:
        raise MemoryError("no more of it")

    if ME == VICTIM:
        collective.ex.schedule = fail
        equal(message_of(MemoryError, lambda: ns.to_host(tree, process=0)), "no more of it")
    elif ME == 0:
        said = message_of(ns.ExchangeError, lambda: ns.to_host(tree, process=0))
        equal(said, broke_off(f"process {VICTIM}: MemoryError: no more of it"))
    else:
        equal(ns.to_host(tree, process=0), {"0": None, "1": None})
    no_more()


def case_a_failure_when_all_have_agreed() -> None:
    """It is interrupted, and the others go on."""
    tree = big()
    real = Channel.wait

    def wait(*args: Any, **options: Any) -> Any:
        real(*args, **options)
        Channel.wait = real
        raise KeyboardInterrupt

    if ME == VICTIM:
        Channel.wait = wait
        message_of(KeyboardInterrupt, lambda: ns.to_host(tree))
    else:
        said = message_of(ns.ExchangeError, lambda: ns.to_host(tree))
        equal(said, broke_off(f"process {VICTIM}: KeyboardInterrupt"))
    no_more("KeyboardInterrupt")


def case_a_failure_between_two_files_of_a_save() -> None:
    """It is interrupted in the round that ends the first, and the others go on to the next."""
    tree, path = big(), folder() / "model"
    real = Channel.wait

    def wait(self: Channel, name: str, *args: Any) -> Any:
        if name.startswith("round/1/"):
            raise KeyboardInterrupt
        return real(self, name, *args)

    def save() -> None:
        ns.save_safetensors(tree, path, max_shard_size=tree["0"].array.nbytes + 1, writer="main")

    if ME == VICTIM:
        Channel.wait = wait
        message_of(KeyboardInterrupt, save)
    else:
        # They notice in the exchange, or in the round after it.
        said = message_of(ns.ExchangeError, save).splitlines()
        equal("exchange of arrays between processes broke off" in said[0], True)
        equal(said[1:], broke_off(f"process {VICTIM}: KeyboardInterrupt").splitlines()[1:])
    no_more("KeyboardInterrupt")
    equal(os.listdir(path), [])
    together()


def case_a_failure_in_the_exchange_of_others_while_saving() -> None:
    """Process 0 has a file of its own, and waits for the others in a round."""
    value = values(np.float32, (24, 24, 2))
    two = mesh((COUNT - 1,), "x", devices=[own(p)[0] for p in range(1, COUNT)])
    tree, path = {"a": value, "b": put(value, two, P("x"))}, folder() / "others"

    def fail() -> None:
        raise MemoryError("no more of it")

    def save() -> None:
        ns.save_safetensors(tree, path, max_shard_size=value.nbytes + 1)

    at_step(1, fail)
    if ME == VICTIM:
        equal(message_of(MemoryError, save), "no more of it")
    elif ME == 0:
        said = message_of(ns.ExchangeError, save).splitlines()
        untouched = "broke off; what was there before is untouched"
        equal(said[0].endswith(f"is not saved: an exchange of arrays between processes {untouched}"), True)
        equal(said[1:], broke_off(f"process {VICTIM}: MemoryError: no more of it").splitlines()[1:])
    else:
        said = message_of(ns.ExchangeError, save)
        equal(said, broke_off(f"process {VICTIM}: MemoryError: no more of it"))
    no_more()
    equal(os.listdir(path), [])
    together()


def case_a_failure_while_saving() -> None:
    def fail() -> None:
        raise MemoryError("no more of it")

    tree, path = big(), folder() / "model.safetensors"
    ns.save_safetensors({"x": values(np.float32)}, path)
    together()
    before = path.read_bytes()
    at_step(3, fail)
    if ME == VICTIM:
        equal(message_of(MemoryError, lambda: ns.save_safetensors(tree, path, budget="200KB")), "no more of it")
    else:
        said = message_of(ns.ExchangeError, lambda: ns.save_safetensors(tree, path, budget="200KB"))
        equal(said, broke_off(f"process {VICTIM}: MemoryError: no more of it"))
    equal(path.read_bytes(), before)
    # Its connection stays until it ends.
    together()
    equal([n for n in os.listdir(folder()) if n.endswith((".partial", ".safetensors"))], ["model.safetensors"])
    together()
