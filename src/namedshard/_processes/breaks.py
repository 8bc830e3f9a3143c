"""EFFECTS. Has an exchange of arrays between processes broken off? All processes are told of it, and for good."""

import contextlib
import hashlib
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh

from namedshard import _jaxcompat as compat
from namedshard._errors import ExchangeError, message
from namedshard._plan.mesh import MeshLike
from namedshard._types import Device, Tracer

GLANCE_S = 1.0
"""How often one who waits looks up: whether it is interrupted, and whether the others are still there."""

BROKEN: list[str] = []
"""The reason, once this process knows that an exchange broke off."""

_PLACE = "namedshard/broken/"
_met: set[tuple[Device, ...]] = set()

T = TypeVar("T")


def first_line(error: BaseException) -> str:
    """An error, for the messages of the other processes."""
    return printable(f"{type(error).__name__}: {error}".removesuffix(": ").splitlines()[0])


def printable(text: str) -> str:
    """The text without halves of surrogate pairs, which the store does not take."""
    return text.encode("utf-8", "backslashreplace").decode()


def heard(get: Callable[[str, int], T], key: str, seconds: float) -> T | None:
    """What the store has under a key, by one of its blocking functions, or None if it has nothing in this time.

    Inside of it a process cannot be interrupted: who waits for longer asks again and again.
    """
    try:
        return get(key, int(seconds * 1000))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
    return None


def noticed() -> str:
    """Why an exchange broke off, on whatever process, or nothing."""
    client = compat.coordination_client()
    if client is not None and not BROKEN:
        # The service may be what died: JAX ends the job.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            BROKEN.extend(text for _, text in client.key_value_dir_get(_PLACE))
    return BROKEN[0] if BROKEN else ""


def tell(error: BaseException) -> None:
    """Tell the other processes that this one broke off; the first reason told stands."""
    line = f"process {jax.process_index()}: {first_line(error)}"
    client = compat.coordination_client()
    if client is not None and not BROKEN:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            client.key_value_set(f"{_PLACE}first", line)
    if not noticed():
        BROKEN.append(line)


@contextlib.contextmanager
def breaking_off() -> Generator[None, None, None]:
    """Tell the other processes if what is done here together with them fails here.

    Those who wait for this process go no further, and no later exchange could tell their pieces from its own.
    """
    try:
        yield
    except ExchangeError:
        raise
    except BaseException as error:
        tell(error)
        raise


def watched(call: Callable[[], T]) -> T:
    """Make a call that waits for other processes, for as long as none of them says that it broke off.

    A process that breaks off stays connected, so that those who wait for it alone would not notice.

    Raises:
        ExchangeError: The call failed here, or an exchange broke off on another process.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(GLANCE_S)
        if thread.is_alive() and noticed():
            raise broke_off()
    if errors:
        # The connection may have been lost because another process broke off.
        tell(errors[0])
        raise broke_off() from errors[0]
    return results[0]


def meet(devices: Sequence[Device]) -> None:
    """Wait until all processes that own these devices are here, the first time that they are to exchange arrays.

    They connect then, for which they have no more than half a minute, and one of them may still be writing to a disk.

    Raises:
        ExchangeError: A process broke off.
    """
    group = tuple(devices)
    client = compat.coordination_client()
    if client is None or group in _met:
        return
    place = f"namedshard/met/{hashlib.sha256(str([d.id for d in group]).encode()).hexdigest()}"
    client.key_value_set(f"{place}/{jax.process_index()}", "", allow_overwrite=True)
    for process in sorted({d.process_index for d in group}):
        while heard(client.blocking_key_value_get, f"{place}/{process}", GLANCE_S) is None:
            if noticed():
                raise broke_off()
    _met.add(group)


def ended(headline: str) -> ExchangeError:
    """The error for what an exchange that broke off has ended, with the reason."""
    return ExchangeError(
        message(headline, BROKEN, fix="look for the first error among all processes, and start the job again")
    )


def broke_off() -> ExchangeError:
    """The error for an exchange that broke off just now."""
    return ended("the exchange of arrays between processes broke off: a process died, or failed, or the network did")


def no_more(what: str) -> ExchangeError:
    """The error for a call after an exchange broke off."""
    return ended(
        f"{what}: an earlier exchange of arrays between processes broke off, and there can be no other in this job"
    )


def refuse_compiled(what: str, arrays: Iterable[Any], mesh: MeshLike | None) -> None:
    """Raise for a program of several processes: it could receive what the exchange that broke off has sent.

    Raises:
        ExchangeError: An exchange broke off, and the arrays or the mesh span processes.
    """
    if not BROKEN:
        return
    spans = isinstance(mesh, Mesh) and mesh.is_multi_process
    if spans or any(
        isinstance(x, jax.Array) and not isinstance(x, Tracer) and not x.is_fully_addressable for x in arrays
    ):
        raise no_more(what)
