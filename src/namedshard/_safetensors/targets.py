"""What each leaf is to become and which tensors it comes from: everything that can be wrong, found before any read."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jaxtyping import PyTree

from namedshard._errors import (
    CheckpointError,
    MissingTensorError,
    NarrowingError,
    NoMeshError,
    at,
    check_one_of,
    count_of,
    did_you_mean,
    message,
    warn_user,
)
from namedshard._place.shard import check_memory_kind, check_memory_of
from namedshard._plan.best_effort import best_effort_spec
from namedshard._plan.leaves import Leaf, is_array_like, named_leaves
from namedshard._plan.mapping import AxisMapping, MappingLike, Policy, resolve_mapping, thread_hint
from namedshard._plan.mesh import MeshLike, describe, resolve_mesh
from namedshard._plan.plan import plan_leaves, with_policy
from namedshard._safetensors.header import CODES, PACKED_BITS, TensorInfo
from namedshard._safetensors.layout import Part, covered
from namedshard._safetensors.names import Names, Tensor, tensors_of
from namedshard._types import PyTreeDef

Missing: TypeAlias = Literal["error", "keep"]
Unexpected: TypeAlias = Literal["error", "warn", "ignore"]
Narrow: TypeAlias = Literal["error", "fit"]
DTypes: TypeAlias = Any
"""A dtype, leaf path → dtype, or a function of leaf path and the file's dtype."""


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """Where some of a leaf's elements are: a part of a tensor."""

    name: str
    info: TensorInfo
    part: Part
    scale: float


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """What one leaf is to become.

    ``sharding`` is None for the default device, uncommitted. ``check`` says that values must fit the dtype.
    """

    index: int
    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: Sharding | None
    origins: tuple[Origin, ...]
    check: bool


def shardings_of(
    leaves: Sequence[Leaf],
    treedef: PyTreeDef,
    mapping: MappingLike | None,
    mesh: MeshLike | None,
    memory_kind: str | None,
    indivisible: Policy | None,
) -> list[Sharding | None]:
    """Where each leaf goes: as planned, else as an abstract leaf says, else by best effort (None: default device)."""
    found, where = resolve_mapping(mapping), resolve_mesh(mesh)
    carried = any(leaf.own is not None for leaf in leaves)
    if where is None and (found is not None or carried):
        raise NoMeshError(
            message(
                "load_safetensors: there is an axis mapping, but no mesh was given and none is in force"
                + thread_hint(),
                fix="pass mesh=, or enter jax.set_mesh",
            )
        )
    if isinstance(where, AbstractMesh):
        raise NoMeshError(
            message(
                f"load_safetensors: the mesh ({describe(where)}) is abstract and has no devices",
                fix="pass a jax.sharding.Mesh",
            )
        )
    if where is not None and memory_kind is not None:
        check_memory_kind(where, memory_kind)
    planned: list[Sharding | None] = [None] * len(leaves)
    if where is not None and (found is not None or carried):
        chosen = with_policy(found or AxisMapping(), indivisible)
        plan = plan_leaves(leaves, treedef, chosen, where, memory_kind=memory_kind, manual=frozenset())
        planned = [
            plan.sharding_of(p) if found is not None or leaf.own is not None else None
            for leaf, p in zip(leaves, plan.leaves, strict=True)
        ]
    return [p or _unplanned(leaf.value, where, memory_kind) for leaf, p in zip(leaves, planned, strict=True)]


def _unplanned(value: Any, mesh: Mesh | None, memory_kind: str | None) -> Sharding | None:
    if not is_array_like(value):
        return None
    own = getattr(value, "sharding", None)
    # Under a mesh, JAX itself makes arrays replicated; only of an abstract leaf is the sharding somebody's choice.
    chosen = isinstance(value, jax.ShapeDtypeStruct) or (mesh is None and getattr(value, "committed", False))
    if chosen and isinstance(own, Sharding) and not isinstance(getattr(own, "mesh", None), AbstractMesh):
        if memory_kind is None:
            return own
        check_memory_of(sorted(own.addressable_devices, key=lambda d: d.id), memory_kind)
        return own.with_memory_kind(memory_kind)
    if mesh is not None:
        return NamedSharding(mesh, best_effort_spec(tuple(value.shape), mesh), memory_kind=memory_kind)
    if memory_kind is None:
        return None
    device: Any = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    local = device if isinstance(device, jax.Device) else jax.local_devices(backend=device)[0]
    check_memory_of([local], memory_kind)
    return SingleDeviceSharding(local, memory_kind=memory_kind)


_KINDS = (np.bool_, np.integer, np.floating, np.complexfloating)


def _kind(dtype: Any) -> Any:
    return next((kind for kind in _KINDS if jnp.issubdtype(dtype, kind)), None)


def _asked(dtypes: DTypes, path: str, have: np.dtype[Any]) -> tuple[Any, bool]:
    """The dtype asked for, and whether for this very leaf."""
    if dtypes is None:
        return None, False
    if isinstance(dtypes, Mapping):
        return dtypes.get(path), True
    if callable(dtypes) and not isinstance(dtypes, type) and not hasattr(dtypes, "dtype"):
        return dtypes(path, have), True
    one: Any = dtypes
    return np.dtype(one), False


def _check_paths(dtypes: DTypes, paths: Sequence[str]) -> None:
    unknown = [path for path in dtypes if path not in paths] if isinstance(dtypes, Mapping) else []
    if unknown:
        raise CheckpointError(
            message(
                f"dtype= names {len(unknown)} {'leaf' if len(unknown) == 1 else 'leaves'} that the tree does not have",
                [f"{at(path)}{did_you_mean(path, paths)}" for path in unknown],
                fix="use the leaf paths that ns.explain(tree) prints",
            )
        )


def asked_dtype(dtypes: DTypes, path: str, have: np.dtype[Any]) -> np.dtype[Any] | None:
    """The dtype that is asked for a leaf, or None: one dtype for all is meant for those of its kind."""
    wish, for_this = _asked(dtypes, path, have)
    if wish is None or (not for_this and _kind(wish) is not _kind(have)):
        return None
    return np.dtype(wish)


def _dtype_of(leaf: Leaf, have: np.dtype[Any], dtypes: DTypes, narrow: Narrow) -> tuple[np.dtype[Any], bool, str]:
    """The leaf's dtype, whether its values have to be checked, and what is wrong with it."""
    if jnp.issubdtype(leaf.value.dtype, jax.dtypes.extended):
        return have, False, "a typed PRNG key has no dtype in a file; load its jax.random.key_data"
    wish = asked_dtype(dtypes, leaf.path, have)
    wanted = jax.dtypes.canonicalize_dtype(leaf.value.dtype if wish is None else wish)
    if CODES[have] in PACKED_BITS:
        return wanted, False, f"{CODES[have]} is packed and cannot be loaded"
    if _kind(have) is not _kind(wanted):
        bad = "" if wish is not None else f"{have} is not the kind of number that {wanted} is"
        return wanted, jnp.issubdtype(wanted, np.integer), bad
    allowed = wish is not None or narrow == "fit"
    if _kind(have) is np.integer:
        small = may_lose(have, wanted)
        return wanted, small, "" if allowed or not small else f"{have} values may not fit {wanted}"
    narrowed = jax.dtypes.canonicalize_dtype(have) != have and wanted != have
    bad = "" if allowed or not narrowed else f"{have} would be rounded to {wanted}"
    return wanted, narrowed and wish is None, bad


def may_lose(have: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    """True if not every integer of one type fits the other."""
    a, b = jax.numpy.iinfo(have), jax.numpy.iinfo(wanted)
    return int(a.min) < int(b.min) or int(a.max) > int(b.max)


def _match(
    leaf: Leaf, stored: Sequence[Tensor], found: Mapping[str, TensorInfo], spare: Sequence[str], missing: Missing
) -> tuple[list[Origin] | None, list[str]]:
    """Where a leaf's elements are (None: nowhere, and it is to be kept), and what is wrong."""
    where = at(leaf.path)
    absent = [t.name for t in stored if t.name not in found]
    why = ""
    if missing == "keep" and len(absent) == len(stored):
        if not isinstance(leaf.value, jax.ShapeDtypeStruct):
            return None, []
        why = ", and the leaf is abstract: there is nothing to keep"
    lines = [f"{where}: no tensor {name!r}{did_you_mean(name, spare)}{why}" for name in absent]
    if not covered([part for t in stored for path, part in t.parts if path == leaf.path], leaf.value.shape):
        lines.append(f"{where}: its module's state dict does not hold it{why}")
    origins: list[Origin] = []
    for tensor in stored:
        info = found.get(tensor.name)
        if info is None:
            continue
        if info.shape != tensor.shape:
            lines.append(
                f"{where}: tensor {tensor.name!r} has shape {_dims(info.shape)}, but {_dims(tensor.shape)} is needed"
            )
        parts = (part for path, part in tensor.parts if path == leaf.path)
        origins += (Origin(tensor.name, info, part, tensor.scale) for part in parts)
    return origins, lines


def _dims(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, shape))})"


def targets_of(
    like: PyTree,
    found: Mapping[str, TensorInfo],
    *,
    path: str,
    mapping: MappingLike | None,
    mesh: MeshLike | None,
    names: Names | None,
    dtype: DTypes,
    memory_kind: str | None,
    indivisible: Policy | None,
    missing: Missing,
    unexpected: Unexpected,
    narrow: Narrow,
) -> list[Target]:
    """Match a tree with a checkpoint; see `load_safetensors`."""
    leaves = named_leaves(like)
    treedef = jax.tree_util.tree_structure(like)
    wanted = [leaf for leaf in leaves if is_array_like(leaf.value)]
    check_one_of("missing", missing, get_args(Missing))
    check_one_of("unexpected", unexpected, get_args(Unexpected))
    check_one_of("narrow", narrow, get_args(Narrow))
    _check_paths(dtype, [leaf.path for leaf in wanted])
    shardings = shardings_of(leaves, treedef, mapping, mesh, memory_kind, indivisible)
    tensors = tensors_of(like, names)
    used = {tensor.name for tensor in tensors}
    spare = [name for name in found if name not in used]
    stored: dict[str, list[Tensor]] = {leaf.path: [] for leaf in wanted}
    for tensor in tensors:
        for leaf_path in dict.fromkeys(p for p, _ in tensor.parts):
            stored[leaf_path].append(tensor)
    lines: list[str] = []
    origins: dict[str, list[Origin]] = {}
    for leaf in wanted:
        mine, wrong = _match(leaf, stored[leaf.path], found, spare, missing)
        lines += wrong
        if mine is not None:
            origins[leaf.path] = mine
    if unexpected == "error":
        lines += [f"tensor {name!r} is for no leaf" for name in spare]
    if lines:
        raise MissingTensorError(
            message(
                f"{path} and the tree do not go together: {len(found)} tensors, {len(wanted)} leaves",
                lines,
                fix="correct names= (leaf path to tensor name), or the tree's shapes"
                + ("" if missing == "keep" else ', or pass missing="keep" for leaves to be left as they are'),
            )
        )
    if unexpected == "warn" and spare:
        warn_user(
            message(
                f"{path}: {len(spare)} of {len(found)} tensors are for no leaf of the tree",
                spare,
                fix='pass unexpected="ignore" if that is meant',
            )
        )
    return _with_dtypes(leaves, shardings, origins, dtype, narrow)


def _with_dtypes(
    leaves: Sequence[Leaf],
    shardings: Sequence[Sharding | None],
    origins: Mapping[str, list[Origin]],
    dtypes: DTypes,
    narrow: Narrow,
) -> list[Target]:
    out: list[Target] = []
    lines: list[str] = []
    total = 0
    for i, (leaf, sharding) in enumerate(zip(leaves, shardings, strict=True)):
        if not is_array_like(leaf.value) or leaf.path not in origins:
            continue
        total += 1
        mine = origins[leaf.path]
        resolved = {o.info.dtype: _dtype_of(leaf, o.info.dtype, dtypes, narrow) for o in mine}
        bad = [
            f"{at(leaf.path)}: tensor {o.name!r}: {resolved[o.info.dtype][2]}"
            for o in mine
            if resolved[o.info.dtype][2]
        ]
        lines += bad
        final = next(iter(resolved.values()))[0] if resolved else jax.dtypes.canonicalize_dtype(leaf.value.dtype)
        check = any(checked for _, checked, _ in resolved.values())
        out.append(Target(i, leaf.path, tuple(leaf.value.shape), final, sharding, tuple(mine), check))
    if lines:
        raise NarrowingError(
            message(
                f"{count_of(len(lines), total)} cannot take the checkpoint's dtypes",
                lines,
                fix='say with dtype= what they shall be, pass narrow="fit" if the values fit, or enable 64-bit types',
            )
        )
    return out
