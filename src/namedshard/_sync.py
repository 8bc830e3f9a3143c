"""Are all processes making the same call? Found out before any collective, where a difference would hang.

The processes compare fingerprints through the key-value store of ``jax.distributed``, which has time limits; no device
is involved.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from namedshard import _jaxcompat as compat
from namedshard._errors import HostValueError, LocalArrayError, OutOfStepError, message

DEFAULT_TIMEOUT = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """What one process says of one leaf.

    ``source`` is where the array is (or a hash of a host value). ``local`` is that all of it is on this process, which
    may rightly differ between processes.
    """

    path: str
    kind: str
    source: str
    target: str
    local: bool = dataclasses.field(default=False, compare=False)
    host: bool = False


class _Limit(threading.local):
    def __init__(self) -> None:
        self.seconds = float(os.environ.get("NAMEDSHARD_COLLECTIVE_TIMEOUT", DEFAULT_TIMEOUT))


_limit = _Limit()
_sequence = itertools.count()


@contextlib.contextmanager
def collective_timeout(seconds: float) -> Iterator[None]:
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


def _encode(lines: Sequence[Line]) -> str:
    return json.dumps([dataclasses.astuple(line) for line in lines])


class _Board:
    """One call's part of the key-value store."""

    def __init__(self, client: Any, number: int):
        self._client = client
        self._base = f"namedshard/{number}"
        self._previous = f"namedshard/{number - 1}/"
        self._deadline = time.monotonic() + _limit.seconds

    def post(self, name: str, text: str) -> None:
        self._client.key_value_set(f"{self._base}/{name}", text)

    def read(self, name: str, grace: float = 0.0) -> str | None:
        """What another process posted, or None if it did not in time."""
        left = max(0.001, self._deadline + grace - time.monotonic())
        try:
            return self._client.blocking_key_value_get(f"{self._base}/{name}", int(left * 1000))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise

    def forget_previous(self) -> None:
        self._client.key_value_delete(self._previous)


def agree(what: str, lines: Sequence[Line]) -> frozenset[int]:
    """Make sure that all processes make this call with the same leaves.

    Returns:
        Indices of leaves that are an array of each process's own (fully local on every process).

    Raises:
        OutOfStepError: A process does not make the call in time, or makes another one; names the first difference.
        HostValueError: Host values differ between processes.
    """
    text = what + _encode([dataclasses.replace(line, local=False) for line in lines])
    digest = hashlib.sha256(text.encode()).hexdigest()
    client = compat.coordination_client()
    if client is None:
        _agree_by_devices(what, digest)
        return frozenset()
    board = _Board(client, next(_sequence))
    me, count = jax.process_index(), jax.process_count()
    board.post(f"digest/{me}", digest)
    if me == 0:
        digests = [board.read(f"digest/{p}") for p in range(count)]
        missing = [p for p, d in enumerate(digests) if d is None]
        verdict = f"missing {missing}" if missing else ("same" if len(set(digests)) == 1 else "differ")
        board.post("verdict", verdict)
        if not missing:
            board.forget_previous()
    else:
        verdict = board.read("verdict", grace=5.0)
    if verdict == "same":
        return frozenset()
    if verdict != "differ":
        absent = "process 0" if verdict is None else f"processes {verdict.removeprefix('missing ')}"
        raise OutOfStepError(
            message(
                f"{what}: {absent} did not make this call within {_limit.seconds:g} s",
                fix="make the same calls in the same order on every process, or raise ns.collective_timeout",
            )
        )
    board.post(f"text/{me}", json.dumps([what, _encode(lines)]))
    texts = [board.read(f"text/{p}", grace=30.0) for p in range(count)]
    if any(t is None for t in texts):
        raise OutOfStepError(f"{what}: a process disappeared while the calls were compared")
    calls = [json.loads(t) for t in texts if t is not None]
    everyone = [[Line(*entry) for entry in json.loads(encoded)] for _, encoded in calls]
    return _compare(what, [name for name, _ in calls], everyone)


def _agree_by_devices(what: str, digest: str) -> None:
    mine = np.frombuffer(bytes.fromhex(digest), np.uint8)
    with compat.no_context_mesh():
        everyone = multihost_utils.process_allgather(mine)
    if not np.all(everyone == everyone[0]):
        raise OutOfStepError(
            message(
                f"{what}: the processes make different calls",
                fix="make the same calls in the same order on every process",
            )
        )


def _compare(what: str, names: Sequence[str], everyone: Sequence[Sequence[Line]]) -> frozenset[int]:
    for p, (name, lines) in enumerate(zip(names, everyone, strict=True)):
        if name != names[0]:
            raise _out_of_step(what, f"process 0 calls {names[0]}", f"process {p} calls {name}")
        if len(lines) != len(everyone[0]):
            raise _out_of_step(
                what, f"process 0 has {len(everyone[0])} leaves to move", f"process {p} has {len(lines)}"
            )
    local: set[int] = set()
    differing: list[str] = []
    for i, first in enumerate(everyone[0]):
        theirs = [lines[i] for lines in everyone]
        if all(line == first for line in theirs):
            continue
        p, other = next((p, line) for p, line in enumerate(theirs) if line != first)
        if (first.path, first.kind, first.target) != (other.path, other.kind, other.target):
            raise _out_of_step(what, f"process 0: {_say(first)}", f"process {p}: {_say(other)}")
        if all(line.host for line in theirs):
            differing.append(f"{first.path}: process {p} has another value than process 0")
        elif all(line.local for line in theirs):
            local.add(i)
        else:
            raise _out_of_step(what, f"process 0: {_say(first)}", f"process {p}: {_say(other)}")
    if differing:
        raise HostValueError(
            message(
                f"{what}: host values of {len(differing)} {'leaf' if len(differing) == 1 else 'leaves'} differ between"
                " processes",
                differing,
                fix="pass the same value on every process, or build the array with jax.make_array_from_process_local_data",
            )
        )
    return frozenset(local)


def _say(line: Line) -> str:
    source = "a host value" if line.host else line.source
    return f"{line.path}: {line.kind} from {source}" + (f" to {line.target}" if line.target else "")


def _out_of_step(what: str, *lines: str) -> OutOfStepError:
    return OutOfStepError(
        message(
            f"{what}: the processes make different calls; the first difference is",
            lines,
            fix="call with the same tree, mapping and mesh, in the same order, on every process",
        )
    )


def refuse_local(what: str, paths: Sequence[str]) -> None:
    """Raise for arrays of each process's own where one global array is needed."""
    if paths:
        raise LocalArrayError(
            message(
                f"{what}: {len(paths)} {'leaf is' if len(paths) == 1 else 'leaves are'} not one global array: each process"
                " passes its own, committed to its own devices",
                paths,
                fix="pass numpy (the same value on every process), or build a global array with"
                " jax.make_array_from_process_local_data",
            )
        )
