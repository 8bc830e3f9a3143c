"""Every error namedshard raises, and the one builder of their messages.

A message has a headline, one indented line per offending leaf (all of them, so that one run shows the whole damage),
and a ``fix:`` line.
"""

import difflib
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

MAX_LISTED = 50


class NamedShardError(Exception):
    """Base of every error raised by namedshard. Its arguments are those of `message`."""

    def __init__(self, headline: str, lines: Iterable[str] = (), fix: str | None = None):
        super().__init__(message(headline, lines, fix))


class PlanError(NamedShardError, ValueError):
    """A tree, a mapping and a mesh do not go together. Raised before any array moves."""


class MappingError(PlanError):
    """An axis mapping is not well formed."""


class AxisNamesError(PlanError):
    """Names given to arrays don't fit them, or no array has a name."""


class IndivisibleAxisError(PlanError):
    """A named axis cannot be split evenly over the mesh axes it is mapped to."""


class MeshAxisNotFoundError(PlanError):
    """A mapping names a mesh axis that the mesh does not have."""


class MeshAxisConflictError(PlanError):
    """Two named axes of one array are mapped to the same mesh axis."""


class NoCandidateError(PlanError):
    """No candidate of a ``first(...)`` rule fits an array."""


class NoMeshError(PlanError):
    """A mapping was given, but there is no mesh to place arrays on."""


class NoMappingError(PlanError):
    """An operation needs an axis mapping, and there is none."""


class AmbiguousMeshError(PlanError):
    """``with mesh:`` and ``jax.set_mesh`` are both in force, with different meshes."""


class MixedAxesError(PlanError):
    """One array dimension is mapped to both Auto and Explicit mesh axes, which tracing cannot express."""


class TopologyError(PlanError):
    """A topology is unknown, its compiler isn't installed, or a mesh's axes don't fit it."""


class PlaceError(NamedShardError, ValueError):
    """An array cannot be moved where the plan wants it."""


class DeletedArrayError(PlaceError):
    """An array was donated or deleted before it was to be moved."""


class UnsupportedArrayError(PlaceError):
    """An array of a kind that can't be moved without losing something."""


class MemoryKindError(PlaceError):
    """The devices do not offer the requested memory kind."""


class TracedMoveError(PlaceError):
    """A traced array was asked to leave the devices it is traced for. JAX ignores such moves without a word."""


class UnattachedDevicesError(PlaceError):
    """Devices of a topology, which are for compiling only, were to run something or to hold data."""


class MismatchError(PlaceError):
    """Arguments of a compiled function are not placed as it needs them."""


class IgnoredTransferError(PlaceError):
    """Traced code holds a ``device_put`` that the compiler will ignore."""


class DonationError(NamedShardError, ValueError):
    """A donated argument cannot be donated, is passed twice, or was donated before."""


class OffloadError(PlaceError):
    """Leaves that are to live in host memory do not, or none are selected."""


class SettingError(NamedShardError, ValueError):
    """An environment variable of this library has a value that it can't have."""


class OutOfStepError(NamedShardError, RuntimeError):
    """The processes of a job do not make the same call."""


class ExchangeError(NamedShardError, RuntimeError):
    """An exchange of arrays between processes broke off."""


class HostValueError(PlaceError):
    """A host value that every process passes is not the same on each of them."""


class LocalArrayError(PlaceError):
    """Each process passes an array of its own, committed to its own devices, where one global array is needed."""


class CheckpointError(NamedShardError, ValueError):
    """A checkpoint cannot be read or written as asked."""


class HeaderError(CheckpointError):
    """A safetensors file or index does not describe its own contents."""


class MissingTensorError(CheckpointError):
    """A checkpoint lacks tensors, holds unexpected ones, or holds them in other shapes."""


class NarrowingError(CheckpointError):
    """JAX would silently narrow a tensor's 64-bit values."""


class StaticArgumentError(NamedShardError, TypeError):
    """A non-array argument of a compiled function cannot be used as a static argument."""


def at(path: str) -> str:
    """A leaf path for a message; the only leaf of a tree has an empty one."""
    return path or "(root)"


def count_of(bad: int, total: int) -> str:
    """``"1 of 104 leaves"``, in the right number."""
    return f"{bad} of {total} {'leaf' if total == 1 else 'leaves'}"


def message(headline: str, lines: Iterable[str] = (), fix: str | None = None) -> str:
    """The layout of every message: headline, indented lines, fix."""
    listed = list(lines)
    shown = listed[:MAX_LISTED]
    if len(listed) > len(shown):
        shown.append(f"... and {len(listed) - len(shown)} more")
    out = [headline, *("  " + line for line in shown)]
    if fix is not None:
        out.append("  fix: " + fix)
    return "\n".join(out)


def deleted_arrays(what: str, paths: Sequence[str], total: int) -> DeletedArrayError:
    """The error for arrays that were donated or deleted; ``total`` counts the leaves looked at."""
    return DeletedArrayError(
        f"{what}: {count_of(len(paths), total)} donated or deleted",
        map(at, paths),
        fix="keep the result of the call that the array was donated to, and use that",
    )


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """``" (did you mean 'model'?)"`` when something close is known, else an empty string."""
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def check_one_of(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Raise `ValueError` if an option has a value that it cannot have."""
    if value not in allowed:
        *most, last = map(repr, allowed)
        raise ValueError(f"{name}={value!r}: use {', '.join(most)} or {last}")


def human_bytes(n: int) -> str:
    """``"1.5 MiB"``: three digits at most, binary units."""
    size = float(n)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{int(size)} B" if unit == "B" else f"{size:.3g} {unit}" if size < 999.5 else f"{size:.0f} {unit}"
        size /= 1024
    raise AssertionError


_NOT_THE_CALLERS = ("namedshard", "contextlib", "jax", "equinox", "haliax")

_warned: set[str] = set()


def warn_once(text: str, category: type[Warning] = UserWarning) -> None:
    """`warn_user`, once for each text."""
    if text not in _warned:
        _warned.add(text)
        warn_user(text, category)


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the caller's code that led here, whatever the depth."""
    level, frame = 1, sys._getframe(0)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_CALLERS:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)
