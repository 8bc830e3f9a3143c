"""EFFECTS. Processes publish messages, wait for those of the others, and learn which process failed and why.

Messages go through the key-value store of ``jax.distributed``; no device is involved. An exchange of arrays that failed
is a failure of the whole job: every later call that needs other processes is refused.
"""

import concurrent.futures
import contextlib
import hashlib
import itertools
import json
import math
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh

from namedshard import _jaxcompat as compat
from namedshard._errors import ExchangeError, NamedShardError
from namedshard._plan.mesh import MeshLike
from namedshard._types import Device, Tracer

POLL_S = 1.0
"""Seconds after which a waiting process checks for an interrupt and for failures of the others."""

LONGEST_ROUND_S = 24 * 3600
"""How long to wait for processes that are still writing files. If one has died, JAX ends the job before that."""

EXCHANGE_FAILURE: list[str] = []
"""The reason, once this process knows that an exchange of arrays failed on any process."""

# For a message that another process is known to publish now.
GRACE_S = 30.0

_connected: set[tuple[Device, ...]] = set()

T = TypeVar("T")


class ProcessFailed(Exception):
    """A process failed before it published a message that this one waits for."""

    def __init__(self, process: int, reason: str):
        super().__init__(f"process {process}: {reason}")
        self.process, self.reason = process, reason


def first_line(error: BaseException) -> str:
    """One line about an error, for messages on other processes.

    Surrogates are escaped: the key-value store takes valid Unicode only.
    """
    text = str(error) if isinstance(error, NamedShardError) else f"{type(error).__name__}: {error}".removesuffix(": ")
    return text.partition("\n")[0].encode("utf-8", "backslashreplace").decode()


def processes() -> tuple[int, int]:
    """The index of this process and their number, without initializing a backend."""
    if compat.coordination_client() is None:
        return 0, 1
    return jax.process_index(), jax.process_count()


class Channel:
    """Messages that belong together, such as those of one call. The first message under a name is final.

    ``what`` is the function called, for the error after an earlier exchange of arrays failed; empty for messages that
    are part of an exchange.
    """

    def __init__(self, scope: str, what: str = ""):
        self.scope = scope
        self._client = compat.coordination_client()
        self._prefix = f"namedshard/{scope}/"
        self._what = what

    def publish(self, name: str, content: bytes) -> bytes:
        """Publish a message; returns the final one under this name."""
        try:
            self._client.key_value_set_bytes(self._prefix + name, content)
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise
            return self._client.blocking_key_value_get_bytes(self._prefix + name, int(GRACE_S * 1000))
        return content

    def wait(self, name: str, end: float = math.inf, process: int = -1) -> bytes | None:
        """Wait for a message until ``end`` (``time.monotonic()``), or return None.

        Raises:
            ProcessFailed: ``process``, which should publish the message, published its failure instead.
            ExchangeError: An exchange of arrays failed on any process.
        """
        reason = ""
        while True:
            # Ctrl-C does not interrupt a call of the client, so each is short.
            seconds = max(0.001, min(POLL_S, end - time.monotonic()))
            try:
                return self._client.blocking_key_value_get_bytes(self._prefix + name, int(seconds * 1000))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            if reason:
                raise ProcessFailed(process, reason)
            if exchange_failure():
                raise later_exchange_error(self._what) if self._what else exchange_error()
            # A message published before the failure counts, and may have come in between: look once more.
            reason = self.failure(process)
            if time.monotonic() >= end:
                return None

    def all_gather(
        self, name: str, content: bytes, members: Iterable[int], end: float = math.inf
    ) -> list[bytes | None]:
        """Publish this process's message, and `wait` for that of each of these processes."""
        self.publish(f"{name}/{jax.process_index()}", content)
        return [self.wait(f"{name}/{process}", end, process) for process in members]

    def published(self, name: str) -> dict[str, bytes]:
        """All messages so far whose names start with this one and a slash, by the rest of their names."""
        prefix = f"{self._prefix}{name}/"
        return {key.removeprefix(prefix): found for key, found in self._client.key_value_dir_get_bytes(prefix)}

    def publish_failure(self, error: BaseException) -> None:
        """Publish that this process sends no more messages, for the processes that wait for them or will."""
        # The service may be what died.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self.publish(f"failed/{jax.process_index()}", first_line(error).encode())

    def failure(self, process: int | str) -> str:
        """Why a process failed; empty if it did not."""
        return self.published("failed").get(str(process), b"").decode()

    def delete(self) -> None:
        """Delete all messages."""
        self._client.key_value_delete(self._prefix)


class Rounds(Channel):
    """Rounds of one call. In each, all processes publish a message (JSON) and wait for those of the others.

    ``exchanging``: other processes may be in an exchange of arrays, or start one before the next round.
    """

    def __init__(self, scope: str) -> None:
        super().__init__(scope)
        self.me, self.count = processes()
        self.exchanging = False
        self._numbers = itertools.count()

    def next_round(self, content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Publish this process's message, and return those of all; raises as `wait` does."""
        if self.count == 1:
            return [content]
        name, end = f"round/{next(self._numbers)}", time.monotonic() + LONGEST_ROUND_S
        found = self.all_gather(name, json.dumps(content).encode(), range(self.count), end)
        if None in found:
            raise ProcessFailed(found.index(None), f"it has not come to the end of its part in {LONGEST_ROUND_S} s")
        return [json.loads(text) for text in found if text is not None]


def exchange_failure() -> str:
    """Why an exchange of arrays failed on any process; empty if none did."""
    if not EXCHANGE_FAILURE and compat.coordination_client() is not None:
        # The service may be what died: JAX ends the job.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            if reason := Channel("exchange").failure("first"):
                EXCHANGE_FAILURE.append(reason)
    return EXCHANGE_FAILURE[0] if EXCHANGE_FAILURE else ""


def publish_exchange_failure(error: BaseException) -> None:
    """Publish that an exchange of arrays failed on this process; the first reason published is final."""
    reason = f"process {jax.process_index()}: {first_line(error)}"
    if not EXCHANGE_FAILURE and compat.coordination_client() is not None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            reason = Channel("exchange").publish("failed/first", reason.encode()).decode()
    if not EXCHANGE_FAILURE:
        EXCHANGE_FAILURE.append(reason)


@contextlib.contextmanager
def guard_exchange(shared: bool = True) -> Generator[None]:
    """Publish an error raised in the context, where processes exchange arrays; does nothing unless ``shared``.

    Processes that wait for this one cannot continue, and a later exchange could receive what this one has sent.
    """
    try:
        yield
    except BaseException as error:
        if shared:
            publish_exchange_failure(error)
        raise


def run_watched(call: Callable[[], T]) -> T:
    """Run a call that waits for other processes, until it returns or an exchange of arrays fails on any of them.

    A process that fails stays connected, so the call alone would not notice. Every failure is an `ExchangeError`.
    """
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    # A daemon, unlike an executor's thread: the job can end while the call still waits.
    threading.Thread(target=run, daemon=True).start()
    while not concurrent.futures.wait([outcome], POLL_S).done:
        if exchange_failure():
            raise exchange_error()
    if (error := outcome.exception()) is not None:
        # The connection may have been lost because another process failed.
        publish_exchange_failure(error)
        raise exchange_error() from error
    return outcome.result()


def wait_for_processes(devices: Sequence[Device]) -> None:
    """Wait until all processes that own these devices call this, before their first exchange of arrays.

    In that they connect, which times out after 30 s, but one of them may still be writing to a slow disk.
    """
    group = tuple(devices)
    if compat.coordination_client() is None or group in _connected:
        return
    channel = Channel(f"devices/{hashlib.sha256(str([d.id for d in group]).encode()).hexdigest()}")
    channel.all_gather("here", b"yes", sorted({d.process_index for d in group}))
    _connected.add(group)


def exchange_error(
    headline: str = "the exchange of arrays between processes broke off: a process died, or failed, or the network did",
) -> ExchangeError:
    """The error for what failed because an exchange did, with the reason."""
    return ExchangeError(
        headline, EXCHANGE_FAILURE, fix="look for the first error among all processes, and start the job again"
    )


def later_exchange_error(what: str) -> ExchangeError:
    """The error for a call after an exchange failed."""
    return exchange_error(
        f"{what}: an earlier exchange of arrays between processes broke off, and there can be no other in this job"
    )


def refuse_compiled(what: str, arrays: Iterable[Any], mesh: MeshLike | None) -> None:
    """Raise for a program of several processes: it could receive what the exchange that failed has sent."""
    if EXCHANGE_FAILURE and (
        (isinstance(mesh, Mesh) and mesh.is_multi_process)
        or any(isinstance(x, jax.Array) and not isinstance(x, Tracer) and not x.is_fully_addressable for x in arrays)
    ):
        raise later_exchange_error(what)
