"""The tensors to write for a tree, with their values and all errors before the first write."""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from namedshard import _jaxcompat as compat
from namedshard._errors import CheckpointError, at
from namedshard._place.route import unreduced_axes
from namedshard._plan.leaves import Leaf, is_array_like, named_leaves, native_dtype
from namedshard._safetensors.header import CODES, METADATA_KEY, PACKED_BITS, SURROGATES
from namedshard._safetensors.layout import Part
from namedshard._safetensors.names import Names, Tensor, tensors_of
from namedshard._safetensors.targets import DTypes, requested_dtype
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


def _loose_numbers(tree: PyTree, leaves: Sequence[Leaf]) -> list[str]:
    """Python numbers that are no module's own: they would not come back."""
    nodes = jax.tree_util.tree_leaves(tree, is_leaf=lambda x: isinstance(x, eqx.Module))
    owned = [isinstance(node, eqx.Module) for node in nodes for _ in jax.tree_util.tree_leaves(node)]
    return [
        f"{at(leaf.path)}: the Python number {leaf.value!r} is no array"
        for leaf, own in zip(leaves, owned, strict=True)
        if not own and isinstance(leaf.value, bool | int | float | complex) and not is_array_like(leaf.value)
    ]


def _why_not(value: Any) -> str:
    """Why an array cannot be written."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return "is abstract: it has no values"
    if isinstance(value, Tracer):
        return "is traced: it has no values yet"
    if isinstance(value, jax.Array) and value.is_deleted():
        return "was donated or deleted"
    if isinstance(value, jax.Ref):
        return "is a jax.Ref; save its value, ref[...]"
    if isinstance(value, jax.Array) and unreduced_axes(value.sharding):
        return "is still to be summed; shard it first, or use jax.sharding.reshard"
    if isinstance(value, np.ma.MaskedArray):
        return "is masked, and a file has no masks; fill it, or save data and mask"
    known = isinstance(value, jax.Array | np.ndarray | np.generic)
    if not known and not (hasattr(value, "__array__") and isinstance(value.dtype, np.dtype)):
        return f"is a {type(value).__name__}, which is no array of JAX or numpy"
    return "is an array of typed keys; save its jax.random.key_data" if compat.is_key_array(value) else ""


def resolve_outgoing(tree: PyTree, names: Names | None, dtypes: DTypes) -> list[Outgoing]:
    """The tensors to write for a tree; lists all leaves that cannot be written, and all bad names."""
    leaves = named_leaves(tree)
    lines = _loose_numbers(tree, leaves)
    values = {leaf.path: leaf.value for leaf in leaves if is_array_like(leaf.value)}
    bad = {path: why for path, value in values.items() if (why := _why_not(value))}
    lines += [f"{at(path)}: {why}" for path, why in bad.items()]
    tensors = tensors_of(tree, names, require_all=True)
    lines += _bad_names(tensors)
    out: list[Outgoing] = []
    for tensor in tensors:
        if not any(path in bad for path in tensor.paths):
            resolved, wrong = _resolve_tensor(tensor, values, dtypes)
            out.append(resolved)
            lines += wrong
    if lines:
        raise CheckpointError(
            f"the tree cannot be saved: {len(lines)} {'problem' if len(lines) == 1 else 'problems'}",
            dict.fromkeys(lines),
            fix="make arrays of numbers, convert what has no dtype in a file, or leave it out (equinox.filter)",
        )
    if not out:
        raise CheckpointError("the tree has no arrays: there is nothing to save")
    return out


def _resolve_tensor(tensor: Tensor, values: Mapping[str, Any], dtypes: DTypes) -> tuple[Outgoing, list[str]]:
    """A tensor with its leaves' values and their dtype, and what is wrong with that."""
    paths = tuple(path for path, _ in tensor.parts)
    lines: list[str] = []
    kinds: dict[np.dtype[Any], None] = {}
    for path in dict.fromkeys(paths):
        have = np.dtype(native_dtype(values[path].dtype))
        wanted = requested_dtype(dtypes, path, have) or have
        kinds[wanted] = None
        if wanted not in CODES or CODES[wanted] in PACKED_BITS:
            why = f"safetensors has no dtype {wanted}; save it as another, with dtype= or after a cast"
            lines.append(f"{at(path)}: {why}")
    if len(kinds) > 1:
        listed = ", ".join(sorted(map(str, kinds)))
        lines.append(f"tensor {tensor.name!r} would be of several dtypes: {listed}")
    parts = tuple((values[path], part) for path, part in tensor.parts)
    return Outgoing(tensor.name, tensor.shape, next(iter(kinds)), parts, paths, tensor.scale), lines


def _bad_names(tensors: Sequence[Tensor]) -> list[str]:
    """Names that a file cannot have, and tensors that leaves fill only partly."""
    lines: list[str] = []
    by_name: dict[str, list[Tensor]] = collections.defaultdict(list)
    for tensor in tensors:
        by_name[tensor.name].append(tensor)
    for name, same in by_name.items():
        paths = ", ".join(map(at, dict.fromkeys(path for tensor in same for path in tensor.paths)))
        if len(same) > 1:
            lines.append(f"{paths}: {len(same)} tensors would be called {name!r}")
        if name == METADATA_KEY:
            lines.append(f"{paths}: the name {METADATA_KEY!r} is reserved")
        if SURROGATES.search(name):
            lines.append(f"{paths}: the name {name!r} is not valid Unicode")
        if not all(math.prod(tensor.shape) == sum(part.size for _, part in tensor.parts) for tensor in same):
            lines.append(f"{paths}: tensor {name!r} is not wholly made of leaves")
    return lines
