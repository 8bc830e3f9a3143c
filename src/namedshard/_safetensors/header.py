"""PURE. Parses the header of one safetensors file into `TensorInfo`s, and trusts none of it.

The format is described at https://huggingface.co/docs/safetensors: eight bytes with the header's length, the header in
JSON, then the tensors' bytes, which must be covered by the tensors without gap or overlap.
"""

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import ml_dtypes
import numpy as np

from namedshard._errors import HeaderError

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
METADATA_KEY = "__metadata__"

DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "C64": np.dtype(np.complex64),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "F6_E2M3": np.dtype(ml_dtypes.float6_e2m3fn),
    "F6_E3M2": np.dtype(ml_dtypes.float6_e3m2fn),
    "F4": np.dtype(ml_dtypes.float4_e2m1fn),
}
"""The format's names of dtypes. The last three are packed: several values to a byte."""

CODES: dict[np.dtype[Any], str] = {dtype: code for code, dtype in DTYPES.items()}
PACKED_BITS = {"F6_E2M3": 6, "F6_E3M2": 6, "F4": 4}
SURROGATES = re.compile("[\ud800-\udfff]")
"""Characters that UTF-8 has not."""


@dataclasses.dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a checkpoint, as its header describes it.

    Attributes:
        shape: The tensor's shape.
        dtype: Its dtype; ``ml_dtypes`` has those that numpy lacks.
        file: The file that holds it, a path or URL.
        start: Where its bytes begin, counted from the beginning of the file.
        stop: Where they end.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    file: str
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.stop - self.start


def header_length(prefix: bytes, file: str, size: int) -> int:
    """The header's length, from a file's first eight bytes and its size."""
    if len(prefix) < LENGTH_BYTES or size < LENGTH_BYTES:
        raise HeaderError(
            f"{file} is no safetensors file: it has {size} bytes, and its header's length takes {LENGTH_BYTES}",
            fix="fetch the file again: it is empty or was cut off",
        )
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES or length > size - LENGTH_BYTES:
        looks = _looks_like(prefix)
        room = min(size - LENGTH_BYTES, MAX_HEADER_BYTES)
        raise HeaderError(
            f"{file} is no safetensors file, or is cut off: bytes 0 to 8 announce a header of {length} bytes, and"
            f" there is room for {room} in a file of {size} bytes{looks}",
            fix="fetch the file itself (`git lfs pull` for a Git LFS pointer)" if looks else "fetch the file again",
        )
    return length


def _looks_like(prefix: bytes) -> str:
    start = prefix.lstrip()[:5].lower()
    if start.startswith(b"versi"):
        return "; it looks like a Git LFS pointer"
    if start.startswith(b"<"):
        return "; it looks like a web page"
    return ""


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise ValueError(f"key {key!r} occurs twice")
        out[key] = value
    return out


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def parse_json(raw: bytes, what: str) -> dict[str, Any]:
    """A JSON object from untrusted bytes."""
    try:
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise HeaderError(f"{what} is not valid JSON: {reason}", fix="fetch the file again") from None
    if not isinstance(parsed, dict):
        raise HeaderError(f"{what} holds a JSON {type(parsed).__name__}, not an object", fix="fetch the file again")
    return cast("dict[str, Any]", parsed)


def _counts(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in cast("list[Any]", value)):
        return tuple(cast("list[int]", value))
    return None


def _shown(name: str) -> str:
    """A name for a message: one that would break the line, or command the terminal, is quoted."""
    return name if name.isprintable() else repr(name)


def _entry(name: str, entry: Any, file: str, data_start: int) -> TensorInfo | str:
    """The tensor, or what is wrong with its entry."""
    if SURROGATES.search(name):
        return "the name is not valid Unicode"
    if not isinstance(entry, dict):
        return f"the entry is {json.dumps(entry)[:40]}, not an object"
    fields = cast("dict[str, Any]", entry)
    if missing := [key for key in ("dtype", "shape", "data_offsets") if key not in fields]:
        return f"the entry has no {' and no '.join(missing)}"
    code = fields["dtype"]
    if not isinstance(code, str) or code not in DTYPES:
        return f"dtype {code!r} is not known"
    shape = _counts(fields["shape"])
    if shape is None:
        return f"shape {json.dumps(fields['shape'])[:80]} is not a list of sizes"
    offsets = _counts(fields["data_offsets"])
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"data_offsets {json.dumps(fields['data_offsets'])[:80]} are not a start and a stop"
    mismatch = _size_mismatch(code, shape, *offsets)
    return mismatch or TensorInfo(shape, DTYPES[code], file, data_start + offsets[0], data_start + offsets[1])


def _size_mismatch(code: str, shape: tuple[int, ...], start: int, stop: int) -> str:
    bits = 0
    if 0 not in shape:
        # A header may list many huge sizes, whose product would take long.
        huge = math.prod(map(float, shape)) >= 2.0**63
        bits = None if huge else math.prod(shape) * PACKED_BITS.get(code, 8 * DTYPES[code].itemsize)
    if bits == (stop - start) * 8:
        return ""
    need = f"over {2**63}" if bits is None else f"{bits // 8}" if bits % 8 == 0 else f"{bits}/8"
    listed = ",".join(map(str, shape[:16])) + (",..." if len(shape) > 16 else "")
    return f"{code}[{listed}] takes {need} bytes, but bytes {start} to {stop} are {stop - start}"


def _uncovered(tensors: Mapping[str, TensorInfo], data_start: int, size: int) -> list[str]:
    """Overlaps, gaps, and bytes beyond the file or beyond the last tensor."""
    lines = [
        f"{_shown(name)}: takes bytes {info.start} to {info.stop}, but the file ends at byte {size}"
        for name, info in tensors.items()
        if info.stop > size
    ]
    at, last = data_start, "the header"
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if info.start < at:
            lines.append(f"{_shown(name)}: begins at byte {info.start}, inside {last}, which ends at byte {at}")
        elif info.start > at:
            lines.append(f"{_shown(name)}: begins at byte {info.start}, but {last} ends at byte {at}")
        if info.stop >= at:
            at, last = info.stop, _shown(name)
    if at < size:
        lines.append(f"{size - at} bytes follow {last}, which ends at byte {at} of {size}")
    return lines


def parse_header(raw: bytes, file: str, size: int) -> dict[str, TensorInfo]:
    """The tensors of one file, in the header's order, from the header's bytes, the file's name and its size.

    All bad tensors are listed if the header is not valid, or does not cover the file's bytes exactly.
    """
    fields = parse_json(raw, f"{file}: the header")
    metadata = {} if (given := fields.pop(METADATA_KEY, None)) is None else given
    lines: list[str] = []
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in cast("dict[str, Any]", metadata).values()):
        lines.append(f"{METADATA_KEY}: not an object of strings")
    data_start = LENGTH_BYTES + len(raw)
    tensors: dict[str, TensorInfo] = {}
    for name, entry in fields.items():
        found = _entry(name, entry, file, data_start)
        if isinstance(found, TensorInfo):
            tensors[name] = found
        else:
            lines.append(f"{_shown(name)}: {found}")
    if lines := lines or _uncovered(tensors, data_start, size):
        raise HeaderError(
            f"{file}: the header does not describe the file's {size} bytes", lines, fix="fetch the file again"
        )
    return tensors


def encode_header(
    tensors: Sequence[tuple[str, np.dtype[Any], tuple[int, ...]]], metadata: dict[str, str]
) -> tuple[bytes, int]:
    """The bytes that a file of these tensors begins with, and the file's size.

    The tensors' bytes follow in the given order; the header is padded so that they begin at a multiple of eight.
    """
    sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in tensors]
    ends = list(itertools.accumulate(sizes, initial=0))
    fields: dict[str, Any] = {METADATA_KEY: metadata} if metadata else {}
    for (name, dtype, shape), start, stop in zip(tensors, ends, ends[1:], strict=False):
        fields[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text, LENGTH_BYTES + len(text) + ends[-1]
