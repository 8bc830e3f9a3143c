"""PURE. Sizes that people write: 65536, "1GiB", "5GB"."""

import re

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{p}{s}": base ** (i + 1) for s, base in (("B", 1000), ("IB", 1024)) for i, p in enumerate("KMGT")}


def parse_size(value: int | str, what: str) -> int:
    """A number of bytes.

    Raises:
        ValueError: Not a positive number, or not one with a known unit.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        size: float = value
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
        size = float(match[1]) * _UNITS[match[2].upper()] if match and match[2].upper() in _UNITS else 0
    if size < 1:
        raise ValueError(f'{what}={value!r} is no size: use a number of bytes, or one with a unit such as "1GiB"')
    return int(size)
