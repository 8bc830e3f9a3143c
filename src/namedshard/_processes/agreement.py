"""EFFECTS. Checks that all processes make the same call, before a collective: there a difference would hang.

The processes compare fingerprints of the call by `coordination`, with a time limit.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import threading
import time
import zlib
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from namedshard import _jaxcompat as compat
from namedshard._errors import HostValueError, LocalArrayError, OutOfStepError, at
from namedshard._processes.coordination import (
    EXCHANGE_FAILURE,
    GRACE_S,
    Channel,
    Rounds,
    guard_exchange,
    later_exchange_error,
    publish_exchange_failure,
)

DEFAULT_TIMEOUT = 60.0

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
    local: bool = dataclasses.field(default=False, compare=False)
    host: bool = False

    def __str__(self) -> str:
        source = "a host value" if self.host else self.source
        return f"{at(self.path)}: {self.aval} from {source}" + (f" to {self.target}" if self.target else "")


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
        axes, entries = dict(sharding.mesh.shape), list(sharding.spec)
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


class _Limit(threading.local):
    def __init__(self) -> None:
        self.seconds = float(os.environ.get("NAMEDSHARD_COLLECTIVE_TIMEOUT", DEFAULT_TIMEOUT))


_limit = _Limit()


@contextlib.contextmanager
def collective_timeout(seconds: int | float) -> Generator[None, None, None]:
    """How long to wait for the other processes to make the same call, in this thread.

    The default is 60 s, or the environment variable ``NAMEDSHARD_COLLECTIVE_TIMEOUT``.

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
    before, _limit.seconds = _limit.seconds, float(seconds)
    try:
        yield
    finally:
        _limit.seconds = before


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


class _Calls:
    """Numbers the calls of this process: its n-th call belongs with the n-th call of every other process."""

    def __init__(self) -> None:
        self.count = 0
        self._channels: list[Channel] = []

    @property
    def scope(self) -> str:
        """The scope of the last call's messages."""
        return f"call/{self.count}"

    def agree(self, what: str, digest: bytes) -> tuple[Channel, bool | list[int], int]:
        """A call's channel and verdict, and how many calls of the others ended without this process."""
        end = time.monotonic() + _limit.seconds
        missed = 0
        while True:
            self.count += 1
            channel = Channel(self.scope, what)
            self._channels.append(channel)
            try:
                verdict = _verdict(channel, digest, end)
            except BaseException as error:
                _withdraw(channel, error)
                raise
            if isinstance(verdict, bool):
                # Every process has come to this call, so none still reads messages of earlier ones.
                for old in self._channels[:-1] if jax.process_index() == 0 else ():
                    old.delete()
                self._channels = [channel]
            elif jax.process_index() in verdict:
                missed += 1
                continue
            return channel, verdict, missed


_calls = _Calls()


def agree(
    what: str, leaves: Sequence[LeafDescription], note: str = "", *, local_arrays: bool = False
) -> frozenset[int]:
    """Make sure that all processes make this call with the same leaves.

    Once a process times out, late processes join the next call instead: after an error on every process the job is
    in step again.

    Args:
        what: The function called.
        leaves: This process's description of each leaf.
        note: Other arguments that must be the same, as text.
        local_arrays: Whether leaves may be arrays of each process's own.

    Returns:
        Indices of leaves that are an array of each process's own (fully local on every process).

    Raises:
        OutOfStepError: A process does not make the call in time, or makes another one; names the first difference.
        HostValueError: Host values differ between processes.
        LocalArrayError: Leaves are arrays of each process's own where one global array is needed.
        ExchangeError: An earlier exchange failed.
    """
    if EXCHANGE_FAILURE:
        raise later_exchange_error(what)
    call = f"{what}({note})" if note else what
    digest = hashlib.sha256(_encode(call, [dataclasses.replace(leaf, local=False) for leaf in leaves])).digest()
    if compat.coordination_client() is None:
        _agree_by_devices(what, digest)
        return frozenset()
    channel, verdict, missed = _calls.agree(what, digest)
    if verdict is True:
        return frozenset()
    if verdict:
        raise _absent(what, verdict, missed)
    # Other processes may get all texts and continue, even if this process does not.
    with guard_exchange():
        end = time.monotonic() + _limit.seconds + GRACE_S
        texts = channel.all_gather("text", zlib.compress(_encode(call, leaves)), range(jax.process_count()), end)
        if gone := [p for p, text in enumerate(texts) if text is None]:
            raise _absent(what, gone, missed)
    calls = [json.loads(zlib.decompress(text)) for text in texts if text is not None]
    return frozenset(_compare(what, calls, local_arrays))


def _encode(call: str, leaves: Sequence[LeafDescription]) -> bytes:
    return json.dumps([call, [dataclasses.astuple(leaf) for leaf in leaves]]).encode()


def _absent(what: str, processes: Sequence[int], missed: int) -> OutOfStepError:
    who = f"process {processes[0]}" if len(processes) == 1 else f"processes {', '.join(map(str, processes))}"
    calls = "one earlier call" if missed == 1 else f"{missed} earlier calls"
    return OutOfStepError(
        f"{what}: {who} did not make this call within {_limit.seconds:g} s",
        [f"this process had not made {calls} that the others had stopped waiting for"] if missed else [],
        fix="make the same calls in the same order on every process, or wait longer: ns.collective_timeout",
    )


def _agree_by_devices(what: str, digest: bytes) -> None:
    mine = np.frombuffer(digest, np.uint8)
    with compat.no_context_mesh():
        everyone = multihost_utils.process_allgather(mine)
    if not np.all(everyone == everyone[0]):
        raise OutOfStepError(
            f"{what}: the processes make different calls",
            fix="make the same calls in the same order on every process",
        )


def _compare(what: str, calls: Sequence[Any], local_arrays: bool) -> list[int]:
    """Indices of the leaves that are an array of each process's own; raises for any other difference."""
    for p, (name, _) in enumerate(calls):
        if name != calls[0][0]:
            raise _out_of_step(what, p, f" calls {calls[0][0]}", f" calls {name}")
    local: dict[int, str] = {}
    values: list[str] = []
    everyone = [[LeafDescription(*fields) for fields in leaves] for _, leaves in calls]
    for i, found in enumerate(itertools.zip_longest(*everyone)):
        p = next((p for p, leaf in enumerate(found) if leaf != found[0]), 0)
        if p == 0:
            continue
        # Leaves of one path, type and target may differ in their sources.
        alike = len({leaf and (leaf.path, leaf.aval, leaf.target) for leaf in found}) == 1
        if alike and all(leaf.host for leaf in found):
            values.append(f"{at(found[0].path)}: process {p} has another value than process 0")
        elif alike and all(leaf.local for leaf in found):
            local[i] = at(found[0].path)
        else:
            raise _out_of_step(what, p, *(f": {leaf or 'no more leaves'}" for leaf in (found[0], found[p])))
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


def _out_of_step(what: str, process: int, first: str, other: str) -> OutOfStepError:
    return OutOfStepError(
        f"{what}: the processes make different calls; the first difference is",
        [f"process 0{first}", f"process {process}{other}"],
        fix="call with the same tree, mapping and mesh, in the same order, on every process",
    )


@contextlib.contextmanager
def agreed_rounds(agreement: Callable[[], T]) -> Generator[tuple[Rounds, T]]:
    """Run ``agreement``, in which all processes `agree` on a call; yields rounds of that call and what it returned.

    An exception in it or in the context is published, since the others may have agreed and wait for this process.
    """
    before, rounds = _calls.count, None
    try:
        found = agreement()
        rounds = Rounds(f"{_calls.scope}/rounds")
        yield rounds, found
    except BaseException as error:
        if rounds is None and _calls.count > before:
            rounds = Rounds(f"{_calls.scope}/rounds")
        if rounds is not None and rounds.count > 1:
            if rounds.exchanging:
                publish_exchange_failure(error)
            rounds.publish_failure(error)
        raise
