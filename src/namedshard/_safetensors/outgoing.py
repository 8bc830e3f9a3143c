"""What is to be written: a tree's tensors with their values, and everything that forbids it, found before any write."""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
from haliax import NamedArray
from jaxtyping import PyTree

from namedshard import _jaxcompat as compat
from namedshard._errors import CheckpointError, at, message
from namedshard._place import moves
from namedshard._plan.leaves import is_array_like, named_leaves, path_string
from namedshard._safetensors.header import CODES, METADATA_KEY, PACKED_BITS
from namedshard._safetensors.layout import Part
from namedshard._safetensors.names import Names, Tensor, tensors_of
from namedshard._safetensors.targets import DTypes, asked_dtype
from namedshard._types import Tracer


@dataclasses.dataclass(frozen=True, slots=True)
class Outgoing:
    """One tensor to write: ``parts`` holds (leaf's value, part), which together are all of it; ``paths`` the leaves."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    parts: tuple[tuple[Any, Part], ...]
    paths: tuple[str, ...]
    scale: float

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, slots=True)
class File:
    """One file to write: its name, tensors and owner."""

    name: str
    tensors: tuple[Outgoing, ...]
    owner: int


def _loose_numbers(tree: PyTree) -> list[str]:
    """Python numbers that are no module's own: they would not come back."""

    def stop(x: Any) -> bool:
        return isinstance(x, eqx.Module | NamedArray)

    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=stop)[0]
    return [
        f"{at(path_string(path))}: the Python number {x!r} is no array"
        for path, x in flat
        if isinstance(x, bool | int | float | complex) and not is_array_like(x)
    ]


def _why_not(value: Any) -> str:
    """Why an array cannot be written."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return "is abstract: it has no values"
    if isinstance(value, Tracer):
        return "is traced: it has no values yet"
    if isinstance(value, jax.Array) and value.is_deleted():
        return "was donated or deleted"
    if compat.is_key_array(value):
        return "is an array of typed keys; save its jax.random.key_data"
    return ""


def _dtype_of(path: str, value: Any, dtypes: DTypes) -> tuple[np.dtype[Any], str]:
    have = np.dtype(moves.native(value.dtype))
    wanted = asked_dtype(dtypes, path, have) or have
    code = CODES.get(wanted)
    if code is None or code in PACKED_BITS:
        return wanted, f"safetensors has no dtype {wanted}; save it as another, with dtype= or after a cast"
    return wanted, ""


def outgoing(tree: PyTree, names: Names | None, dtypes: DTypes) -> list[Outgoing]:
    """The tensors that a tree is written as.

    Raises:
        CheckpointError: Leaves that cannot be written, and names that are taken twice, reserved, or no text; all are
            listed.
    """
    lines = _loose_numbers(tree)
    values = {leaf.path: leaf.value for leaf in named_leaves(tree) if is_array_like(leaf.value)}
    bad = {path: why for path, value in values.items() if (why := _why_not(value))}
    lines += [f"{at(path)}: {why}" for path, why in bad.items()]
    tensors = tensors_of(tree, names, all_of_them=True)
    lines += _bad_names(tensors)
    out: list[Outgoing] = []
    for tensor in tensors:
        if any(path in bad for path, _ in tensor.parts):
            continue
        found = [(path, *_dtype_of(path, values[path], dtypes)) for path, _ in tensor.parts]
        lines += [f"{at(path)}: {why}" for path, _, why in found if why]
        kinds = {dtype for _, dtype, _ in found}
        if len(kinds) > 1:
            listed = ", ".join(sorted(map(str, kinds)))
            lines.append(f"tensor {tensor.name!r} would be of several dtypes: {listed}")
        parts = tuple((values[path], part) for path, part in tensor.parts)
        paths = tuple(path for path, _ in tensor.parts)
        out.append(Outgoing(tensor.name, tensor.shape, next(iter(kinds)), parts, paths, tensor.scale))
    if lines:
        raise CheckpointError(
            message(
                f"the tree cannot be saved: {len(lines)} {'problem' if len(lines) == 1 else 'problems'}",
                dict.fromkeys(lines),
                fix="make arrays of numbers, convert what has no dtype in a file, or leave it out (equinox.filter)",
            )
        )
    if not out:
        raise CheckpointError(message("the tree has no arrays: there is nothing to save"))
    return out


def _bad_names(tensors: Sequence[Tensor]) -> list[str]:
    lines: list[str] = []
    by_name: Mapping[str, list[Tensor]] = collections.defaultdict(list)
    for tensor in tensors:
        by_name[tensor.name].append(tensor)
    for name, same in by_name.items():
        paths = ", ".join(at(path) for path in dict.fromkeys(path for t in same for path, _ in t.parts))
        if len(same) > 1:
            lines.append(f"{paths}: {len(same)} tensors would be called {name!r}")
        if name == METADATA_KEY:
            lines.append(f"{paths}: the name {METADATA_KEY!r} is reserved")
        try:
            name.encode("utf-8")
        except UnicodeEncodeError:
            lines.append(f"{paths}: the name {name!r} is not valid Unicode")
        filled = {math.prod(t.shape) == sum(part.size for _, part in t.parts) for t in same}
        if False in filled:
            lines.append(f"{paths}: tensor {name!r} is not wholly made of leaves")
    return lines
