"""PURE. Static arguments: what identifies a non-array leaf of a compiled function's arguments."""

from collections.abc import Hashable
from typing import Any

from namedshard._errors import StaticArgumentError, message


def static_key(x: Any, path: str) -> Hashable:
    """A key under which two leaves are equal only if a compiled function may treat them alike.

    Python holds ``1 == 1.0 == True`` and ``0.0 == -0.0``, which compile to different programs, and ``nan != nan``,
    which would compile at every call.
    """
    kind = type(x)
    if kind is float:
        return kind, x.hex()
    if kind is complex:
        return kind, x.real.hex(), x.imag.hex()
    try:
        hash(x)
    except TypeError as error:
        raise StaticArgumentError(
            message(
                f"argument {path} is neither an array nor hashable: {kind.__name__}",
                fix="pass an array, or make it hashable (a tuple, a frozen dataclass)",
            )
        ) from error
    return kind, x
