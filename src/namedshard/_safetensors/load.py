"""`load_safetensors`: from bytes to the final placement in one step."""

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
from jaxtyping import PyTree

from namedshard._errors import NarrowingError, at
from namedshard._place import boxes, local
from namedshard._place.gather import parse_bytes
from namedshard._place.route import on_cpus
from namedshard._plan.mapping import MappingLike, Policy
from namedshard._plan.mesh import MeshLike
from namedshard._plan.names import AxesLike
from namedshard._safetensors.index import find_tensors
from namedshard._safetensors.layout import boxes_in
from namedshard._safetensors.names import Names
from namedshard._safetensors.progress import Progress, reporting
from namedshard._safetensors.ranges import ReadSettings, coalesce, plan_chunks
from namedshard._safetensors.reader import Job, Read, ShardBuffer, execute_reads, limit_buffers
from namedshard._safetensors.source import Opener, OpenFiles, open_source
from namedshard._safetensors.targets import (
    DTypes,
    LoadOptions,
    Missing,
    Narrow,
    Target,
    Unexpected,
    check_attached,
    resolve_targets,
)
from namedshard._types import Bounds


def _batches(
    targets: Sequence[Target], needed: Mapping[int, list[Bounds]], limit: int | None
) -> Iterator[list[tuple[Target, Bounds]]]:
    """Shards to read together: all of them, or as many as fit in host memory until they are on their devices."""
    batch: list[tuple[Target, Bounds]] = []
    held = 0
    for target in targets:
        for bounds in needed[target.index]:
            size = target.dtype.itemsize * boxes.volume(bounds)
            if batch and limit is not None and held + size > limit:
                yield batch
                batch, held = [], 0
            batch.append((target, bounds))
            held += size
    yield batch


Batch: TypeAlias = Sequence[tuple[Target, ShardBuffer]]


def _jobs(batch: Batch, settings: Mapping[str, ReadSettings]) -> Iterator[tuple[str, Job]]:
    """Each file's name with one chunk to read from it."""
    # The shards of a leaf follow one another in the batch.
    for target, group in itertools.groupby(batch, key=lambda item: item[0]):
        shards = [shard for _, shard in group]
        for origin in target.origins:
            requests = [(box, shard) for shard in shards for box in boxes_in(origin.part, shard.bounds)]
            info, wanted = origin.info, [box for box, _ in requests]
            for chunk in plan_chunks(origin.part, wanted, info.dtype.itemsize, info.start, settings[info.file]):
                served = tuple(requests[i] for i in chunk.requests)
                yield info.file, Job(chunk, origin.part, origin.label, info.dtype, origin.scale, served)


def _plan_reads(batch: Batch, files: OpenFiles, budget: int) -> list[Read]:
    """The reads that fill a batch of shards, in the order of their bytes."""
    names = dict.fromkeys(origin.info.file for target, _ in batch for origin in target.origins)
    settings = {name: limit_buffers(files[name].settings, budget) for name in names}
    by_file: dict[str, list[Job]] = {name: [] for name in names}
    for name, job in _jobs(batch, settings):
        by_file[name].append(job)
    out: list[Read] = []
    for name, jobs in by_file.items():
        out += (Read(files[name], together) for together in _group_jobs(jobs, settings[name]))
    return sorted(out, key=lambda read: (read.source.name, read.start))


def _group_jobs(jobs: Sequence[Job], settings: ReadSettings) -> Iterator[tuple[Job, ...]]:
    """Jobs to read at once: contiguous ones next to each other, and each strided one alone."""
    contiguous = sorted((job for job in jobs if not job.chunk.outer), key=lambda job: job.chunk.start)
    for group in coalesce([(job.chunk.start, job.chunk.stop) for job in contiguous], settings):
        yield tuple(contiguous[i] for i in group)
    yield from ((job,) for job in jobs if job.chunk.outer)


def _raise_unfit(batch: Batch, where: str) -> None:
    found: dict[tuple[str, str, str], list[Any]] = {}
    for target, shard in batch:
        for label, values in shard.unfit.items():
            found.setdefault((target.path, label, str(target.dtype)), []).extend(values)
    lines: list[str] = []
    for (path, label, dtype), values in found.items():
        low, high = str(min(values)), str(max(values))
        shown = f"{low} does" if low == high else f"{low} and {high} do"
        lines.append(f"{at(path)}: {label}: {shown} not fit {dtype}")
    if lines:
        raise NarrowingError(
            f"{where}: {len(lines)} {'tensor holds' if len(lines) == 1 else 'tensors hold'} values that do not fit",
            lines,
            fix="pass a wider dtype=, or enable 64-bit types",
        )


def _read_batch(
    wanted: Sequence[tuple[Target, Bounds]], files: OpenFiles, where: str, budget: int, advance: Callable[[int], None]
) -> Batch:
    batch: list[tuple[Target, ShardBuffer]] = []
    for target, bounds in wanted:
        memory = boxes.aligned_empty(boxes.shape_of(bounds), target.dtype)
        batch.append((target, ShardBuffer(bounds, memory, target.check)))
    execute_reads(_plan_reads(batch, files, budget), advance)
    _raise_unfit(batch, where)
    return batch


def _load(
    targets: Sequence[Target], files: OpenFiles, where: str, budget: int, progress: Progress
) -> dict[int, jax.Array]:
    # Where the devices' memory is this host's, the buffers that are read into become the shards.
    staged = not all(on_cpus(t.sharding) for t in targets)
    # The distinct shards of each leaf that this process's devices need.
    needed = {
        t.index: [boxes.whole(t.shape)] if t.sharding is None else list(boxes.distinct_shards(t.shape, t.sharding))
        for t in targets
    }
    # Where no device of this process is in the mesh, a leaf has no shards here, but it still has an array.
    arrays = {t.index: local.from_pieces(t.shape, t.dtype, t.sharding, {}) for t in targets if not needed[t.index]}
    shards: dict[int, dict[Bounds, Any]] = {t.index: {} for t in targets}
    total = sum(origin.nbytes_in(bounds) for t in targets for bounds in needed[t.index] for origin in t.origins)
    # While one batch is on its way to the devices, the next is read.
    in_flight: list[jax.Array] = []
    with reporting(progress, total, "loading") as advance:
        for wanted in _batches(targets, needed, budget // 4 if staged else None):
            placed: list[jax.Array] = []
            for target, shard in _read_batch(wanted, files, where, budget // 2, advance):
                data = shard.array
                if staged:
                    data = local.onto_devices(target.shape, target.sharding, shard.bounds, data)
                    placed += data
                shards[target.index][shard.bounds] = data
                if len(shards[target.index]) == len(needed[target.index]):
                    found = shards.pop(target.index)
                    arrays[target.index] = local.from_pieces(target.shape, target.dtype, target.sharding, found)
            jax.block_until_ready(in_flight)
            in_flight = placed
    jax.block_until_ready(in_flight)
    return arrays


def load_with(opener: Opener, path: str | os.PathLike[str], like: PyTree, options: LoadOptions) -> PyTree:
    """`load_safetensors` from any source of bytes."""
    where = os.fspath(path)
    check_attached(like, options.mesh)
    limit = parse_bytes(options.budget)
    with OpenFiles(opener) as files:
        targets = resolve_targets(like, find_tensors(where, files), where, options)
        arrays = _load(targets, files, where, limit, options.progress) if targets else {}
    leaves, treedef = jax.tree_util.tree_flatten(like)
    return jax.tree_util.tree_unflatten(treedef, [arrays.get(i, leaf) for i, leaf in enumerate(leaves)])


T = TypeVar("T")


def load_safetensors(  # noqa: PLR0913 - options of the public call; one object inside
    path: str | os.PathLike[str],
    like: T,
    mapping: MappingLike | None = None,
    mesh: MeshLike | None = None,
    *,
    names: Names | None = None,
    dtype: DTypes = None,
    memory_kind: str | None = None,
    indivisible: Policy | None = None,
    missing: Missing = "error",
    unexpected: Unexpected = "warn",
    narrow: Narrow = "error",
    budget: int | str = "1GiB",
    progress: Progress = None,
    axes: AxesLike | None = None,
) -> T:
    """Load a safetensors checkpoint from its bytes straight to the final placement.

    Each process reads only the byte ranges that its own devices need, into the shards themselves. Everything that can
    be known to fail fails before the first tensor is read.

    Args:
        path: A safetensors file, an index (``*.safetensors.index.json``), or a directory with one of them: a path, or a
            URL that fsspec can open (extra ``namedshard[remote]``).
        like: A tree of arrays or ``jax.ShapeDtypeStruct``s (from ``equinox.filter_eval_shape``, say) of any shapes;
            gives structure, axis names, dtypes, and all that is no array.
        mapping: Named axis → mesh axes; the context's (`axis_mapping`) by default.
        mesh: A ``jax.sharding.Mesh``; the context's by default. Leaves that the mapping says nothing about because
            they have no names, and all leaves where there is no mapping, are placed by `best_effort_sharding`; without
            a mesh, arrays go where an abstract leaf's own sharding says, or to the default device.
        names: Leaf path to tensor name, as a dict or a function (None: the default); a leaf's value may also be a list
            of names, one for each index of its first dimension. By default, names and layouts are those of Haliax's
            state dicts: stacked layers are one tensor per layer, ``Linear`` axes are flattened.
        dtype: A dtype for all leaves of its kind (floating, integer, complex), or leaf path to dtype as a dict or a
            function of leaf path and the file's dtype. By default those of ``like``.
        memory_kind: ``"device"``, ``"pinned_host"``, ...; None is the devices' own memory.
        indivisible: Overrides the mapping's policy for axes that do not divide: ``"error"`` or ``"replicate"``.
        missing: ``"error"``, or ``"keep"`` to leave a leaf without tensor as it is in ``like``.
        unexpected: ``"error"``, ``"warn"`` or ``"ignore"`` tensors that are for no leaf.
        narrow: ``"error"`` for 64-bit tensors that JAX would narrow and integers that a smaller type may not hold, or
            ``"fit"`` to take them if every value fits. What ``dtype`` asks for needs no leave, but integers must fit.
        budget: Host memory, in bytes or as in ``"1GiB"``, for buffers and for shards on their way to accelerators.
        progress: True or None for a bar where stderr is a terminal, False for silence, or a function that is called
            with ``(bytes_done, bytes_total)``.
        axes: Names for arrays that carry none, by leaf path; see `AxisMapping`.

    Returns:
        A tree like ``like`` with its arrays in place.

    Raises:
        CheckpointError: A file is missing or no regular file, or ``names`` does not fit the tree.
        HeaderError: A file or index is cut off, or does not describe its own contents.
        MissingTensorError: Tensors are missing, unexpected, or of other shapes; all are listed.
        NarrowingError: Values would be narrowed; all tensors are listed.
        PlanError: The tree cannot be sharded so; see `plan`.
        MemoryKindError: The devices do not offer the memory kind.
        UnattachedDevicesError: The mesh is a `topology_mesh`; ``shard`` gives the structs of ``like`` their shardings.

    Examples:
        >>> import haliax as hax, jax, numpy as np, tempfile, namedshard as ns
        >>> from safetensors.numpy import save_file
        >>> axes = hax.Axis("mlp", 8), hax.Axis("embed", 4)
        >>> like = {"w": hax.NamedArray(jax.ShapeDtypeStruct((8, 4), "float32"), axes)}
        >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("model",))
        >>> with tempfile.TemporaryDirectory() as d:
        ...     save_file({"w": np.arange(32, dtype=np.float32).reshape(8, 4)}, f"{d}/model.safetensors")
        ...     tree = ns.load_safetensors(d, like, mapping={"mlp": "model"}, mesh=mesh)
        >>> float(tree["w"].array[7, 3]), tuple(tree["w"].array.sharding.spec)
        (31.0, ('model', None))
    """
    options = LoadOptions(
        mapping, mesh, names, dtype, memory_kind, indivisible, missing, unexpected, narrow, budget, progress, axes
    )
    return load_with(open_source, path, like, options)
