"""EFFECTS. What each process has to say, heard by all: by way of the key-value store, with no device involved."""

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar

import jax

from namedshard import _jaxcompat as compat
from namedshard._errors import ExchangeError, NamedShardError, OutOfStepError, message
from namedshard._processes.breaks import GLANCE_S, heard, noticed, printable

PATIENCE_S = 24 * 3600
"""How long to wait for processes that are still writing. The job itself notices, and ends, when one has died."""

_NUMBERS = "namedshard/save-number/"

T = TypeVar("T")


class Left(Exception):
    """A process will not come to this round."""

    def __init__(self, process: int, why: str):
        super().__init__(f"process {process}: {why}")
        self.process = process
        self.why = why


class Meeting:
    """Rounds, in each of which all processes say a word (JSON) and hear those of the others. Each is a barrier too."""

    def __init__(self, client: Any, me: int, count: int, number: int):
        self.me, self.count = me, count
        self._client = client
        self._number = number
        self._rounds = itertools.count()

    def say(self, word: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Each process's word of this round, in the processes' order.

        Raises:
            Left: A process has left the meeting.
            OutOfStepError: A process has not come for a day.
        """
        if self.count == 1:
            return [word]
        number = next(self._rounds)
        place = f"namedshard/save/{self._number}/{number}/"
        self._client.key_value_set(f"{place}{self.me}", json.dumps(word))
        words = [json.loads(self._hear(f"{place}{p}", p)) for p in range(self.count)]
        if self.me == 0 and number == 0:
            # All are here, so nobody still reads what was said before.
            self._client.key_value_delete(f"namedshard/save/{self._number - 1}/")
        return words

    def leave(self, why: str) -> None:
        """Tell those who wait, or will, that this process says no more."""
        if self.count > 1:
            # The service may be what died.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._client.key_value_set(self._left(self.me), printable(why), allow_overwrite=True)

    def join(self) -> None:
        """Take back what `leave` has said in a meeting that did not come about."""
        if self.count > 1:
            self._client.key_value_delete(self._left(self.me))

    def has_left(self, process: int) -> str:
        """Why a process has left, or nothing."""
        if self.count == 1:
            return ""
        gone = dict(self._client.key_value_dir_get(f"namedshard/save/{self._number}/left/"))
        return gone.get(self._left(process), "")

    def _left(self, process: int) -> str:
        return f"namedshard/save/{self._number}/left/{process}"

    def _hear(self, key: str, process: int) -> str:
        end = time.monotonic() + PATIENCE_S
        why = ""
        while True:
            found = heard(self._client.blocking_key_value_get, key, GLANCE_S)
            if found is not None:
                return found
            if why:
                raise Left(process, why)
            if broken := noticed():
                # No process that had a part in the exchange comes to another round.
                raise Left(process, broken)
            # What it said before it left still counts, and may have come in between.
            why = self.has_left(process)
            if time.monotonic() > end:
                raise OutOfStepError(
                    message(
                        f"save_safetensors: process {process} has not come to the end of its part in {PATIENCE_S} s",
                        fix="make the same calls in the same order on every process",
                    )
                )


class _Meetings:
    """The meetings of this process so far. Their numbers are in step although a process may have missed some."""

    def __init__(self) -> None:
        self._next = 0

    def open(self, me: int, count: int, agreement: Callable[[], T]) -> tuple[Meeting, T]:
        """A meeting of all processes, once they have come to an agreement."""
        client = compat.coordination_client()
        if client is None or count == 1:
            return Meeting(None, me, count, 0), agreement()
        client.key_value_set(f"{_NUMBERS}{me}", str(self._next), allow_overwrite=True)
        try:
            found = agreement()
        except BaseException as error:
            if isinstance(error, NamedShardError) and not isinstance(error, ExchangeError):
                raise
            # The others may have agreed nevertheless, and be waiting.
            Meeting(client, me, count, self._number(client)).leave(first_line(error))
            raise
        number = self._number(client)
        self._next = number + 1
        opened = Meeting(client, me, count, number)
        opened.join()
        return opened, found

    def _number(self, client: Any) -> int:
        return max([self._next, *(int(number) for _, number in client.key_value_dir_get(_NUMBERS))])


_meetings = _Meetings()


def processes() -> tuple[int, int]:
    """This process's number and how many there are, without waking a backend that is not up."""
    if compat.coordination_client() is None:
        return 0, 1
    return jax.process_index(), jax.process_count()


@contextlib.contextmanager
def meeting(agreement: Callable[[], T]) -> Generator[tuple[Meeting, T]]:
    """A meeting of all processes, once they have come to an agreement.

    Args:
        agreement: A collective; if it raises an error of this package, it does so on all processes, except for
            `ExchangeError`.

    Yields:
        The meeting, and what the agreement returned. The others are told if this process leaves by an exception.
    """
    opened, found = _meetings.open(*processes(), agreement)
    try:
        yield opened, found
    except BaseException as error:
        opened.leave(first_line(error))
        raise


def first_line(error: BaseException) -> str:
    """An error, for the messages of the other processes."""
    text = str(error) if isinstance(error, NamedShardError) else f"{type(error).__name__}: {error}".removesuffix(": ")
    return text.partition("\n")[0]
