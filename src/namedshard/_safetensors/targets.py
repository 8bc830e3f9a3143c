"""Matches a tree with a checkpoint: each leaf's sharding, dtype and tensors, with all errors before the first read."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jaxtyping import PyTree

from namedshard import _errors as errors
from namedshard._place.boxes import volume
from namedshard._place.shard import check_memory_kind, check_memory_of
from namedshard._plan.best_effort import best_effort_spec
from namedshard._plan.leaves import Leaf, is_array_like, jax_can_hold, jax_dtype, named_leaves, native_dtype
from namedshard._plan.mapping import AxisMapping, MappingLike, Policy, resolve_mapping
from namedshard._plan.mesh import MeshLike, describe, is_unattached, require_attached, require_mesh, resolve_mesh
from namedshard._plan.names import AxesLike
from namedshard._plan.plan import plan_leaves, with_policy
from namedshard._safetensors.header import CODES, PACKED_BITS, TensorInfo
from namedshard._safetensors.layout import Part, boxes_in
from namedshard._safetensors.names import Names, Tensor, hold_leaf, tensors_by_leaf, tensors_of
from namedshard._safetensors.progress import Progress
from namedshard._types import Bounds, PyTreeDef

Missing: TypeAlias = Literal["error", "keep"]
Unexpected: TypeAlias = Literal["error", "warn", "ignore"]
Narrow: TypeAlias = Literal["error", "fit"]
DTypes: TypeAlias = Any
"""A dtype, leaf path → dtype, or a function of leaf path and the file's dtype."""


@dataclasses.dataclass(frozen=True, slots=True)
class LoadOptions:
    """The keyword arguments of `load_safetensors`, which documents them, in the same order."""

    mapping: MappingLike | None = None
    mesh: MeshLike | None = None
    names: Names | None = None
    dtype: DTypes = None
    memory_kind: str | None = None
    indivisible: Policy | None = None
    missing: Missing = "error"
    unexpected: Unexpected = "warn"
    narrow: Narrow = "error"
    budget: int | str = "1GiB"
    progress: Progress = None
    axes: AxesLike | None = None

    def __post_init__(self) -> None:
        errors.check_one_of("missing", self.missing, get_args(Missing))
        errors.check_one_of("unexpected", self.unexpected, get_args(Unexpected))
        errors.check_one_of("narrow", self.narrow, get_args(Narrow))

    @property
    def resolved_mapping(self) -> AxisMapping | None:
        """The mapping given, or the one in force, with names by leaf path."""
        return resolve_mapping(self.mapping, self.axes)


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """The part of a stored tensor that some of a leaf's elements come from; ``label`` is the tensor in messages."""

    label: str
    info: TensorInfo
    part: Part
    scale: float

    def nbytes_in(self, bounds: Bounds) -> int:
        """Bytes of the file that a shard is made of."""
        return self.info.dtype.itemsize * sum(map(volume, boxes_in(self.part, bounds)))


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """A leaf to load: its array's type and sharding, and the tensors it comes from.

    ``sharding`` is None for the default device, uncommitted. ``check`` says that values must fit the dtype.
    """

    index: int
    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: Sharding | None
    origins: tuple[Origin, ...]
    check: bool


def _resolve_shardings(
    leaves: Sequence[Leaf], treedef: PyTreeDef, path: str, options: LoadOptions
) -> list[Sharding | None]:
    """Each leaf's sharding: as planned, else an abstract leaf's own, else by best effort (None: the default device)."""
    mapping = options.resolved_mapping
    # Without a mapping, only leaves that carry their own are planned.
    planned = [mapping is not None or leaf.own is not None for leaf in leaves]
    mesh = _resolve_concrete_mesh(options.mesh, needed=mapping is not None or any(planned))
    kind = options.memory_kind
    if mesh is not None and kind is not None:
        check_memory_kind(mesh, kind)
    shardings: list[Sharding | None] = [None] * len(leaves)
    if mesh is not None and any(planned):
        policy = with_policy(mapping or AxisMapping(), options.indivisible)
        plan = plan_leaves(leaves, treedef, policy, mesh, memory_kind=kind, manual=frozenset(), source=path)
        shardings = [plan.sharding_of(p) if here else None for here, p in zip(planned, plan.leaves, strict=True)]
    _check_own(leaves, shardings, mesh)
    return [s or _unplanned_sharding(leaf.value, mesh, kind) for leaf, s in zip(leaves, shardings, strict=True)]


def _check_own(leaves: Sequence[Leaf], planned: Sequence[Sharding | None], mesh: Mesh | None) -> None:
    """Raise unless there is a mesh for the leaves' own shardings on abstract meshes, which fits them."""
    lines: list[str] = []
    for leaf, sharding in zip(leaves, planned, strict=True):
        own: Any = getattr(leaf.value, "sharding", None)
        if sharding is None and isinstance(leaf.value, jax.ShapeDtypeStruct) and _is_abstract(own):
            try:
                if mesh is None:
                    raise ValueError
                NamedSharding(mesh, own.spec).shard_shape(leaf.value.shape)
            except ValueError:
                shape = ", ".join(map(str, leaf.value.shape))
                lines.append(f"{errors.at(leaf.path)}: ({shape}) as {own.spec} on the mesh {describe(own.mesh)}")
    if lines and mesh is None:
        raise errors.NoMeshError(
            f"load_safetensors: {errors.count_of(len(lines), len(leaves))} sharded on an abstract mesh, and no mesh was"
            " given and none is in context",
            lines,
            fix="pass mesh=, or enter jax.set_mesh",
        )
    if lines and mesh is not None:
        raise errors.PlanError(
            f"load_safetensors: {errors.count_of(len(lines), len(leaves))} cannot be sharded as they say on the mesh"
            f" {describe(mesh)}",
            lines,
            fix="pass a mesh with these axes that divides the shapes, or other shardings in like",
        )


def check_attached(like: Any, given: MeshLike | None) -> None:
    """Raise `UnattachedDevicesError` if the devices to load onto aren't attached."""
    mesh = resolve_mesh(given)
    structs = [x for x in jax.tree_util.tree_leaves(like) if isinstance(x, jax.ShapeDtypeStruct) and mesh is None]
    require_attached("load_safetensors", mesh, *{getattr(x.sharding, "mesh", None) for x in structs})


def _is_abstract(sharding: Any) -> bool:
    if not isinstance(sharding, NamedSharding):
        return False
    return isinstance(sharding.mesh, AbstractMesh) or is_unattached(sharding.mesh)


def _resolve_concrete_mesh(given: MeshLike | None, *, needed: bool) -> Mesh | None:
    mesh = require_mesh(given, "load_safetensors") if needed else resolve_mesh(given)
    if isinstance(mesh, AbstractMesh):
        raise errors.NoMeshError(
            f"load_safetensors: the mesh ({describe(mesh)}) is abstract and has no devices",
            fix="pass a jax.sharding.Mesh",
        )
    return mesh


def _unplanned_sharding(value: Any, mesh: Mesh | None, memory_kind: str | None) -> Sharding | None:
    if not is_array_like(value):
        return None
    sharding = _chosen_sharding(value, mesh)
    if sharding is None and mesh is not None:
        return NamedSharding(mesh, best_effort_spec(tuple(value.shape), mesh), memory_kind=memory_kind)
    if memory_kind is None:
        return sharding
    if sharding is None:
        device: Any = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
        local = device if isinstance(device, jax.Device) else jax.local_devices(backend=device)[0]
        sharding = SingleDeviceSharding(local)
    check_memory_of(sorted(sharding.addressable_devices, key=lambda d: d.id), memory_kind)
    return sharding.with_memory_kind(memory_kind)


def _chosen_sharding(value: Any, mesh: Mesh | None) -> Sharding | None:
    """The sharding that a leaf already has, if somebody chose it: on the mesh, if its own is abstract."""
    own = getattr(value, "sharding", None)
    # Under a mesh, JAX itself makes arrays replicated; only of an abstract leaf is the sharding somebody's choice.
    chosen = isinstance(value, jax.ShapeDtypeStruct) or (mesh is None and getattr(value, "committed", False))
    if not chosen or not isinstance(own, NamedSharding) or not _is_abstract(own):
        return own if chosen and isinstance(own, Sharding) else None
    # Under an Explicit mesh, JAX makes structs replicated too.
    if mesh is None or all(axes is None for axes in own.spec):
        return None
    return NamedSharding(mesh, own.spec, memory_kind=own.memory_kind)


_KINDS = (np.bool_, np.integer, np.floating, np.complexfloating)


def _kind(dtype: Any) -> type[np.generic] | None:
    return next((kind for kind in _KINDS if jnp.issubdtype(dtype, kind)), None)


def _check_paths(dtypes: DTypes, paths: Sequence[str]) -> None:
    unknown = [path for path in dtypes if path not in paths] if isinstance(dtypes, Mapping) else []
    if unknown:
        raise errors.CheckpointError(
            f"dtype= names {len(unknown)} {'leaf' if len(unknown) == 1 else 'leaves'} that the tree does not have",
            [f"{errors.at(path)}{errors.did_you_mean(path, paths)}" for path in unknown],
            fix="use the leaf paths that ns.explain(tree) prints",
        )


def requested_dtype(dtypes: DTypes, path: str, have: np.dtype[Any]) -> np.dtype[Any] | None:
    """The dtype requested for a leaf, or None: a dtype for all leaves applies to those of its kind."""
    requested: Any = dtypes
    if isinstance(dtypes, Mapping):
        requested = cast("Mapping[str, Any]", dtypes).get(path)
    elif callable(dtypes) and not isinstance(dtypes, type) and not hasattr(dtypes, "dtype"):
        requested = dtypes(path, have)
    elif dtypes is not None and _kind(np.dtype(requested)) is not _kind(have):
        return None
    return None if requested is None else np.dtype(requested)


class _Conversion(NamedTuple):
    """From a tensor's dtype to a leaf's: whether values must be checked to fit, and why it is refused (else "")."""

    dtype: np.dtype[Any]
    check: bool
    refusal: str = ""


def _jax_dtype(dtype: Any) -> Any:
    """The dtype of the JAX array, or None if JAX has none."""
    try:
        return jax_dtype(dtype) if jax_can_hold(native_dtype(dtype)) else None
    except TypeError:
        return None


def _resolve_conversion(leaf: Leaf, have: np.dtype[Any], options: LoadOptions) -> _Conversion:
    requested = requested_dtype(options.dtype, leaf.path, have)
    asked = leaf.value.dtype if requested is None else requested
    wanted = _jax_dtype(asked)
    if wanted is None:
        return _Conversion(have, False, f"JAX has no dtype {asked}")
    if jnp.issubdtype(wanted, jax.dtypes.extended):
        return _Conversion(have, False, "a typed PRNG key has no dtype in a file; load its jax.random.key_data")
    if CODES[have] in PACKED_BITS:
        return _Conversion(wanted, False, f"{CODES[have]} is packed and cannot be loaded")
    if _kind(have) is _kind(wanted):
        return _resolve_narrowing(have, wanted, requested is not None, options.narrow)
    refusal = "" if requested is not None else f"{have} is not the kind of number that {wanted} is"
    return _Conversion(wanted, jnp.issubdtype(wanted, np.integer), refusal)


def _resolve_narrowing(have: np.dtype[Any], wanted: np.dtype[Any], requested: bool, narrow: Narrow) -> _Conversion:
    """A conversion between dtypes of one kind."""
    if _kind(have) is np.integer:
        a, b = jnp.iinfo(have), jnp.iinfo(wanted)
        lossy, refusal = a.min < b.min or a.max > b.max, f"{have} values may not fit {wanted}"
        check = lossy
    else:
        lossy = jax.dtypes.canonicalize_dtype(have) != have and wanted != have
        refusal = f"{have} would be rounded to {wanted}"
        # Rounding to a dtype that was asked for is no error, even to infinity.
        check = lossy and not requested
    return _Conversion(wanted, check, refusal if lossy and not requested and narrow != "fit" else "")


def _find_mismatches(
    leaf: Leaf, tensors: Sequence[Tensor], found: Mapping[str, TensorInfo], spare: Sequence[str], note: str
) -> list[str]:
    """What keeps a leaf from being loaded: tensors that are absent or of another shape, elements in no tensor."""
    where = errors.at(leaf.path)
    absent = [tensor.name for tensor in tensors if tensor.name not in found]
    lines = [f"{where}: no tensor {name!r}{errors.did_you_mean(name, spare)}{note}" for name in absent]
    if not hold_leaf(tensors, leaf.path, leaf.value.shape):
        lines.append(f"{where}: its module's state dict does not hold it{note}")
    for tensor in tensors:
        info = found.get(tensor.name)
        if info is not None and info.shape != tensor.shape:
            have, need = (f"({', '.join(map(str, shape))})" for shape in (info.shape, tensor.shape))
            lines.append(f"{where}: tensor {tensor.name!r} has shape {have}, but {need} is needed")
    return lines


def resolve_targets(like: PyTree, found: Mapping[str, TensorInfo], path: str, options: LoadOptions) -> list[Target]:
    """Match a tree with the tensors found at a path; see `load_safetensors`."""
    leaves = named_leaves(like, options.resolved_mapping)
    arrays = [leaf for leaf in leaves if is_array_like(leaf.value)]
    _check_paths(options.dtype, [leaf.path for leaf in arrays])
    shardings = _resolve_shardings(leaves, jax.tree_util.tree_structure(like), path, options)
    tensors = tensors_of(like, options.names)
    used = {tensor.name for tensor in tensors}
    spare = [name for name in found if name not in used]
    origins = _match(arrays, tensors, found, spare, path, options)
    if options.unexpected == "warn" and spare:
        errors.warn_user(
            errors.message(
                f"{path}: {len(spare)} of {len(found)} tensors are for no leaf of the tree",
                spare,
                fix='pass unexpected="ignore" if that is meant',
            )
        )
    return _convert(leaves, shardings, origins, path, options)


def _match(
    arrays: Sequence[Leaf],
    tensors: Sequence[Tensor],
    found: Mapping[str, TensorInfo],
    spare: Sequence[str],
    path: str,
    options: LoadOptions,
) -> dict[str, list[Origin]]:
    """Where each leaf's elements are, by leaf path; leaves that ``missing="keep"`` leaves as they are have no entry."""
    by_leaf = tensors_by_leaf(tensors)
    lines: list[str] = []

    def origin(tensor: Tensor, part: Part) -> Origin:
        info = found[tensor.name]
        of = "" if info.file == path else f" of {os.path.basename(info.file)}"
        return Origin(f"tensor {tensor.name!r}{of}", info, part, tensor.scale)

    origins: dict[str, list[Origin]] = {}
    for leaf in arrays:
        mine = by_leaf.get(leaf.path, [])
        present = [tensor for tensor in mine if tensor.name in found]
        keep = options.missing == "keep" and not present
        if keep and not isinstance(leaf.value, jax.ShapeDtypeStruct):
            continue
        note = ", and the leaf is abstract: there is nothing to keep" if keep else ""
        lines += _find_mismatches(leaf, mine, found, spare, note)
        origins[leaf.path] = [origin(t, p) for t in present for p in t.parts_of(leaf.path)]
    if options.unexpected == "error":
        lines += [f"tensor {name!r} is for no leaf" for name in spare]
    if lines:
        or_keep = "" if options.missing == "keep" else ', or pass missing="keep" for leaves to be left as they are'
        raise errors.MissingTensorError(
            f"{path} and the tree do not go together: {len(found)} tensors, {len(arrays)} leaves",
            lines,
            fix="correct names= (leaf path to tensor name), or the tree's shapes" + or_keep,
        )
    return origins


def _convert(
    leaves: Sequence[Leaf],
    shardings: Sequence[Sharding | None],
    origins: Mapping[str, list[Origin]],
    path: str,
    options: LoadOptions,
) -> list[Target]:
    """The targets, once each leaf's dtype is known."""
    out: list[Target] = []
    lines: list[str] = []
    for i, (leaf, sharding) in enumerate(zip(leaves, shardings, strict=True)):
        mine = origins.get(leaf.path)
        if mine is None or not is_array_like(leaf.value):
            continue
        resolved = {origin.info.dtype: _resolve_conversion(leaf, origin.info.dtype, options) for origin in mine}
        for origin in mine:
            if refusal := resolved[origin.info.dtype].refusal:
                lines.append(f"{errors.at(leaf.path)}: {origin.label}: {refusal}")
        # A leaf without elements may have no origin.
        dtype = next(iter(resolved.values())).dtype if mine else _jax_dtype(leaf.value.dtype)
        if dtype is None:
            lines.append(f"{errors.at(leaf.path)}: JAX has no dtype {leaf.value.dtype}")
            continue
        check = any(c.check for c in resolved.values())
        out.append(Target(i, leaf.path, tuple(leaf.value.shape), dtype, sharding, tuple(mine), check))
    if lines:
        raise errors.NarrowingError(
            f"{path}: {errors.count_of(len(lines), len(origins))} cannot take the checkpoint's dtypes",
            lines,
            fix='say with dtype= what they shall be, pass narrow="fit" if the values fit, or enable 64-bit types',
        )
    return out
