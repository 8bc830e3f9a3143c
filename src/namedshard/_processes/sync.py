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
import zlib
from collections.abc import Generator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from namedshard import _jaxcompat as compat
from namedshard._errors import ExchangeError, HostValueError, LocalArrayError, OutOfStepError, at, message
from namedshard._processes import breaks

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
# For what another process is known to be about to post.
_GRACE = 30.0


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


def _encode(what: str, lines: Sequence[Line]) -> bytes:
    return json.dumps([what, [dataclasses.astuple(line) for line in lines]]).encode()


def _decode(text: bytes) -> tuple[str, list[Line]]:
    what, lines = json.loads(text)
    return what, [Line(*entry) for entry in lines]


class _Board:
    """One call's part of the key-value store.

    What is posted stands: the first verdict posted is the verdict of all processes, also of those that come later.
    """

    def __init__(self, client: Any, what: str, number: int, deadline: float):
        self._client = client
        self._what = what
        self._base = f"namedshard/{number}"
        self._deadline = deadline

    def post(self, name: str, text: bytes) -> bool:
        """Whether nothing was posted under this name before."""
        try:
            self._client.key_value_set_bytes(f"{self._base}/{name}", text)
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" in str(error):
                return False
            raise
        return True

    def read(self, name: str, grace: float = 0.0) -> bytes | None:
        """What another process posted, or None if it did not in time.

        Raises:
            ExchangeError: An exchange in which this process had no part broke off.
        """
        end = self._deadline + grace
        while True:
            left = max(0.001, min(breaks.GLANCE_S, end - time.monotonic()))
            found = breaks.heard(self._client.blocking_key_value_get_bytes, f"{self._base}/{name}", left)
            if found is not None:
                return found
            if breaks.noticed():
                raise breaks.no_more(self._what)
            if time.monotonic() >= end:
                return None

    def verdict(self, digest: bytes) -> str:
        """``"same"``, ``"differ"``, or ``"missing 1,3"``: the processes that did not make the call in time."""
        me, count = jax.process_index(), jax.process_count()
        self.post(f"digest/{me}", digest)
        if me == 0:
            for p in range(count):
                if self.read(f"digest/{p}") is None:
                    break
        elif (found := self.read("verdict")) is not None:
            return found.decode()
        posted = dict(self._client.key_value_dir_get_bytes(f"{self._base}/digest/"))
        missing = [str(p) for p in range(count) if f"{self._base}/digest/{p}" not in posted]
        mine = "same" if len(set(posted.values())) == 1 else "differ"
        mine = "missing " + ",".join(missing) if missing else mine
        if self.post("verdict", mine.encode()):
            return mine
        found = self.read("verdict", grace=_GRACE)
        return mine if found is None else found.decode()

    def leave(self, error: BaseException) -> None:
        """Say that this process does not make the call after all; if the others go on already, that it breaks off."""
        # The service may be what died.
        with contextlib.suppress(jax.errors.JaxRuntimeError, ExchangeError):
            first = self.post("verdict", f"missing {jax.process_index()}".encode())
            if not first and self.read("verdict", grace=_GRACE) == b"same":
                breaks.tell(error)

    def forget(self) -> None:
        self._client.key_value_delete(f"{self._base}/")


class _Calls:
    """The calls of this process so far: a process's n-th call meets the n-th calls of the others."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._boards: list[_Board] = []

    def meet(self, client: Any, what: str, digest: bytes) -> tuple[_Board, str, int]:
        """This call's board and verdict, and how many calls of the others ended without this process."""
        deadline = time.monotonic() + _limit.seconds
        missed = 0
        while True:
            board = _Board(client, what, next(self._numbers), deadline)
            try:
                verdict = board.verdict(digest)
            except BaseException as error:
                self._boards.append(board)
                board.leave(error)
                raise
            # All have come to this call, so none of them still reads what earlier calls posted.
            if not verdict.startswith("missing"):
                for old in self._boards if jax.process_index() == 0 else ():
                    old.forget()
                self._boards.clear()
            self._boards.append(board)
            if jax.process_index() not in _missing(verdict):
                return board, verdict, missed
            missed += 1


def _missing(verdict: str) -> list[int]:
    return [int(p) for p in verdict.removeprefix("missing ").split(",")] if verdict.startswith("missing") else []


_calls = _Calls()


def agree(what: str, lines: Sequence[Line], note: str = "") -> frozenset[int]:
    """Make sure that all processes make this call with the same leaves.

    A process that gives up waiting leaves that word for those that come later, who then join in the next call instead:
    after an error on every process the job is in step again.

    Args:
        what: The function called.
        lines: What this process says of each leaf.
        note: Other arguments that must be the same, in words.

    Returns:
        Indices of leaves that are an array of each process's own (fully local on every process).

    Raises:
        OutOfStepError: A process does not make the call in time, or makes another one; names the first difference.
        HostValueError: Host values differ between processes.
        ExchangeError: An earlier exchange broke off.
    """
    if breaks.BROKEN:
        raise breaks.no_more(what)
    call = f"{what}({note})" if note else what
    digest = hashlib.sha256(_encode(call, [dataclasses.replace(line, local=False) for line in lines])).digest()
    client = compat.coordination_client()
    if client is None:
        _agree_by_devices(what, digest)
        return frozenset()
    board, verdict, missed = _calls.meet(client, what, digest)
    if verdict == "same":
        return frozenset()
    if verdict != "differ":
        raise OutOfStepError(_absent(what, _missing(verdict), missed))
    try:
        board.post(f"text/{jax.process_index()}", zlib.compress(_encode(call, lines)))
        texts = [board.read(f"text/{p}", grace=_GRACE) for p in range(jax.process_count())]
        gone = [p for p, text in enumerate(texts) if text is None]
        if gone:
            raise OutOfStepError(_absent(what, gone, missed))
    except BaseException as error:
        # The others may have all texts by now, and go on.
        breaks.tell(error)
        raise
    calls = [_decode(zlib.decompress(text)) for text in texts if text is not None]
    return _compare(what, [name for name, _ in calls], [theirs for _, theirs in calls])


def _absent(what: str, processes: Sequence[int], missed: int) -> str:
    who = f"process {processes[0]}" if len(processes) == 1 else f"processes {', '.join(map(str, processes))}"
    calls = "one earlier call" if missed == 1 else f"{missed} earlier calls"
    return message(
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
            raise _out_of_step(what, *_first_without_partner(everyone[0], p, lines))
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
            differing.append(f"{at(first.path)}: process {p} has another value than process 0")
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
                fix="pass the same value on every process, or build the array with"
                " jax.make_array_from_process_local_data",
            )
        )
    return frozenset(local)


def _first_without_partner(first: Sequence[Line], p: int, other: Sequence[Line]) -> tuple[str, str]:
    i = next((i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a.path != b.path), None)
    if i is not None:
        return f"process 0: {_say(first[i])}", f"process {p}: {_say(other[i])}"
    more = max(first, other, key=len)[min(len(first), len(other))]
    nothing = "no more leaves"
    here, there = (_say(more), nothing) if len(first) > len(other) else (nothing, _say(more))
    return f"process 0: {here}", f"process {p}: {there}"


def _say(line: Line) -> str:
    source = "a host value" if line.host else line.source
    return f"{at(line.path)}: {line.kind} from {source}" + (f" to {line.target}" if line.target else "")


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
                f"{what}: {len(paths)} {'leaf is' if len(paths) == 1 else 'leaves are'} not one global array: each"
                " process passes its own, committed to its own devices",
                map(at, paths),
                fix="pass numpy (the same value on every process), or build a global array with"
                " jax.make_array_from_process_local_data",
            )
        )
