"""EFFECTS. Checks that all processes make the same call, before a collective: there a difference would hang.

The processes compare fingerprints of the call by `coordination`, with a time limit.
"""

import contextlib
import contextvars
import dataclasses
import hashlib
import itertools
import json
import os
import re
import time
import zlib
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from namedshard import _jaxcompat as compat
from namedshard._errors import HostValueError, LocalArrayError, OutOfStepError, SettingError, at
from namedshard._plan.mapping import spec_entries
from namedshard._processes.coordination import (
    EXCHANGE_FAILURE,
    GRACE_S,
    Channel,
    Rounds,
    guard_exchange,
    later_exchange_error,
    publish_exchange_failure,
)

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class LeafDescription:
    """One process's description of a leaf.

    ``source`` is where the array is (or a hash of a host value). ``local`` is that all of it is on this process, which
    may rightly differ between processes.
    """

    path: str
    aval: str
    source: str
    target: str = ""
    local: bool = dataclasses.field(default=False, compare=False, repr=False)
    host: bool = False

    def __str__(self) -> str:
        source = "a host value" if self.host else self.source
        return f": {at(self.path)}: {self.aval} from {source}" + (f" to {self.target}" if self.target else "")


def describe_leaf(path: str, x: Any, target: Sharding | str = "", *, host: bool = False) -> LeafDescription:
    """Describe a leaf; ``host``: as a value that every process has, by its hash instead of its placement."""
    aval = f"{x.dtype}[{','.join(map(str, x.shape))}]"
    to = target if isinstance(target, str) else fingerprint_sharding(target)
    if not host:
        return LeafDescription(path, aval, fingerprint_sharding(x.sharding), to, local=x.is_fully_addressable)
    value = np.asarray(jax.random.key_data(x) if compat.is_key_array(x) else x)
    return LeafDescription(path, aval, fingerprint_value(value), to, host=True)


def fingerprint_sharding(sharding: Sharding) -> str:
    """A text that is equal on two processes only if the shardings are."""
    devices = [d.id for d in compat.device_order(sharding)]
    if isinstance(sharding, NamedSharding):
        axes, entries = dict(sharding.mesh.shape), list(spec_entries(sharding.spec))
        # JAX leaves out or adds dimensions that are not split, and not alike on all processes.
        while entries and not entries[-1]:
            entries.pop()
        return f"{PartitionSpec(*entries)} of {axes} on devices {devices} in {sharding.memory_kind}"
    kind = "device" if isinstance(sharding, SingleDeviceSharding) else type(sharding).__name__
    return f"{kind} {devices} in {sharding.memory_kind}"


def fingerprint_value(value: np.ndarray) -> str:
    """A hash of a value's bytes in C order, made in small parts."""
    found = hashlib.blake2b(digest_size=16)
    flags = ("external_loop", "buffered", "zerosize_ok")
    for part in np.nditer(value, flags, order="C", buffersize=1 << 16):
        found.update(np.ascontiguousarray(part).view(np.uint8))
    return found.hexdigest()


_limit = contextvars.ContextVar[float | None]("limit", default=None)
_VARIABLE = "NAMEDSHARD_COLLECTIVE_TIMEOUT"
_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600}


def waiting_seconds() -> float:
    """How long this thread waits for the other processes: as `collective_timeout` or the environment says."""
    limit, text = _limit.get(), os.environ.get(_VARIABLE, "60")
    if limit is not None:
        return limit
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-z]*)\s*", text.lower())
    seconds = float(match[1]) * _SECONDS.get(match[2], 0) if match else 0
    if seconds <= 0:
        raise SettingError(f"{_VARIABLE}={text!r} is not a time", fix='use seconds, or text like "90s", "5m" or "1.5h"')
    return seconds


@contextlib.contextmanager
def collective_timeout(seconds: int | float) -> Generator[None, None, None]:
    """How long to wait for the other processes to make the same call, in this thread.

    The default is 60 s, or the environment variable ``NAMEDSHARD_COLLECTIVE_TIMEOUT`` (seconds, or text like ``5m``).

    Args:
        seconds: The limit; processes that reach a call further apart than this are out of step.

    Raises:
        ValueError: The limit is not positive.

    Examples:
        >>> import namedshard as ns
        >>> with ns.collective_timeout(600):
        ...     pass  # e.g. while one process waits for a slow file system
    """
    if seconds <= 0:
        raise ValueError(f"collective_timeout must be positive, not {seconds}")
    before = _limit.set(float(seconds))
    try:
        yield
    finally:
        _limit.reset(before)


def _verdict(channel: Channel, digest: bytes, end: float) -> bool | list[int]:
    """True if all processes make the same call, False if not, or the processes that did not make it in time.

    The first verdict published holds for all processes, also for late ones.
    """
    me, members = jax.process_index(), range(jax.process_count())
    if me == 0:
        channel.all_gather("digest", digest, members, end)
    else:
        channel.publish(f"digest/{me}", digest)
        if (found := channel.wait("verdict", end)) is not None:
            return json.loads(found)
    digests = channel.published("digest")
    missing = [p for p in members if str(p) not in digests]
    return json.loads(channel.publish("verdict", json.dumps(missing or len(set(digests.values())) == 1).encode()))


def _withdraw(channel: Channel, error: BaseException) -> None:
    """Publish that this process does not make the call; if all have agreed already, publish a failed exchange."""
    # The service may be what died.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        if json.loads(channel.publish("verdict", json.dumps([jax.process_index()]).encode())) is True:
            publish_exchange_failure(error)


_numbers = itertools.count(1)
_channels: list[Channel] = []
"""Of this process's calls, whose n-th belongs with the n-th of every other process, from the last agreed one on."""


def _meet(what: str, digest: bytes) -> tuple[Channel, bool | list[int], int]:
    """A call's channel and verdict, and how many calls of the others ended without this process."""
    end = time.monotonic() + waiting_seconds()
    missed = 0
    while True:
        channel = Channel(f"call/{next(_numbers)}", what)
        _channels.append(channel)
        try:
            verdict = _verdict(channel, digest, end)
        except BaseException as error:
            _withdraw(channel, error)
            raise
        if isinstance(verdict, bool):
            # Every process has come to this call, so none still reads messages of earlier ones.
            for old in _channels[:-1] if jax.process_index() == 0 else ():
                old.delete()
            _channels[:] = [channel]
        elif jax.process_index() in verdict:
            missed += 1
            continue
        return channel, verdict, missed


def agree(
    what: str, leaves: Sequence[LeafDescription], note: str = "", *, local_arrays: bool = False
) -> frozenset[int]:
    """Make sure that all processes make this call with the same leaves.

    Once a process times out, late processes join the next call instead: after an error on every process the job is
    in step again. ``note`` has the other arguments that must be the same, as text.
    Returns the indices of leaves that are an array of each process's own, which ``local_arrays`` allows.

    Raises:
        OutOfStepError: A process does not make the call in time, or makes another one; names the first difference.
        HostValueError: Host values differ between processes.
        LocalArrayError: Leaves are arrays of each process's own where one global array is needed.
        ExchangeError: An earlier exchange failed.
    """
    if EXCHANGE_FAILURE:
        raise later_exchange_error(what)
    call = f"{what}({note})" if note else what
    digest = hashlib.sha256(ascii((call, *leaves)).encode()).digest()
    if compat.coordination_client() is None:
        _agree_by_devices(what, digest)
        return frozenset()
    channel, verdict, missed = _meet(what, digest)
    if verdict is True:
        return frozenset()
    if verdict:
        raise _absent(what, verdict, missed)
    # Other processes may get all texts and continue, even if this process does not.
    with guard_exchange():
        end = time.monotonic() + waiting_seconds() + GRACE_S
        text = zlib.compress(json.dumps([call, *map(dataclasses.astuple, leaves)]).encode())
        texts = channel.all_gather("text", text, range(jax.process_count()), end)
        if gone := [p for p, text in enumerate(texts) if text is None]:
            raise _absent(what, gone, missed)
    calls = [json.loads(zlib.decompress(text)) for text in texts if text is not None]
    return frozenset(_compare(what, calls, local_arrays))


def _absent(what: str, processes: Sequence[int], missed: int) -> OutOfStepError:
    who = f"process {processes[0]}" if len(processes) == 1 else f"processes {', '.join(map(str, processes))}"
    calls = "one earlier call" if missed == 1 else f"{missed} earlier calls"
    return OutOfStepError(
        f"{what}: {who} did not make this call within {waiting_seconds():g} s",
        [f"this process had not made {calls} that the others had stopped waiting for"] if missed else [],
        fix="make the same calls in the same order on every process, or wait longer: ns.collective_timeout",
    )


def _agree_by_devices(what: str, digest: bytes) -> None:
    with compat.no_context_mesh():
        everyone = multihost_utils.process_allgather(np.frombuffer(digest, np.uint8))
    if not np.all(everyone == everyone[0]):
        raise OutOfStepError(
            f"{what}: the processes make different calls",
            fix="make the same calls in the same order on every process",
        )


def _compare(what: str, calls: Sequence[Any], local_arrays: bool) -> list[int]:
    """Indices of the leaves that are an array of each process's own; raises for any other difference."""
    local: dict[int, str] = {}
    values: list[str] = []
    everyone = [[f" calls {call}", *(LeafDescription(*fields) for fields in leaves)] for call, *leaves in calls]
    for n, found in enumerate(itertools.zip_longest(*everyone, fillvalue=": no more leaves")):
        p = next((p for p, x in enumerate(found) if x != found[0]), 0)
        if p == 0:
            continue
        leaves = [x for x in found if isinstance(x, LeafDescription)]
        # Leaves of one path, type and target may differ in their sources.
        alike = len(leaves) == len(found) and len({(x.path, x.aval, x.target) for x in leaves}) == 1
        if alike and all(x.host for x in leaves):
            values.append(f"{at(leaves[0].path)}: process {p} has another value than process 0")
        elif alike and all(x.local for x in leaves):
            local[n - 1] = at(leaves[0].path)
        else:
            raise OutOfStepError(
                f"{what}: the processes make different calls; the first difference is",
                [f"process 0{found[0]}", f"process {p}{found[p]}"],
                fix="call with the same tree, mapping and mesh, in the same order, on every process",
            )
    _refuse_leaves(what, values, [] if local_arrays else list(local.values()))
    return list(local)


def _refuse_leaves(what: str, values: Sequence[str], local: Sequence[str]) -> None:
    """Raise for host values that differ, or else for arrays of each process's own."""
    if values:
        raise HostValueError(
            f"{what}: host values of {len(values)} {'leaf' if len(values) == 1 else 'leaves'} differ between processes",
            values,
            fix="pass the same value on every process, or build the array with jax.make_array_from_process_local_data",
        )
    if local:
        raise LocalArrayError(
            f"{what}: {len(local)} {'leaf is' if len(local) == 1 else 'leaves are'} not one global array: each"
            " process passes its own, committed to its own devices",
            local,
            fix="pass numpy (the same value on every process), or build a global array with"
            " jax.make_array_from_process_local_data",
        )


@contextlib.contextmanager
def agreed_rounds(agreement: Callable[[], T]) -> Generator[tuple[Rounds, T]]:
    """Run ``agreement``, in which all processes `agree` on a call; yields rounds of that call and what it returned.

    An exception in it or in the context is published, since the others may have agreed and wait for this process.
    """
    before, rounds = _channels[-1:], None
    try:
        found = agreement()
        rounds = _rounds()
        yield rounds, found
    except BaseException as error:
        if rounds is None and _channels[-1:] != before:
            rounds = _rounds()
        if rounds is not None and rounds.count > 1:
            if rounds.exchanging:
                publish_exchange_failure(error)
            rounds.publish_failure(error)
        raise


def _rounds() -> Rounds:
    """Rounds of the last call; a single process needs none."""
    return Rounds(f"{_channels[-1].scope}/rounds" if _channels else "rounds")
