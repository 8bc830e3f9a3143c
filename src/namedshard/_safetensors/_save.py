"""`save_safetensors`: from any placement to files that appear only when they are whole."""

import concurrent.futures
import dataclasses
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
import numpy as np
from jaxtyping import PyTree

from namedshard import _jaxcompat as compat
from namedshard._collective import sharding_text, type_text
from namedshard._errors import CheckpointError, NarrowingError, human_bytes, message
from namedshard._gather import parse_bytes
from namedshard._safetensors._commit import PartialFile, remove_leftovers, sync_directory
from namedshard._safetensors._header import encode_header
from namedshard._safetensors._index import INDEX, SINGLE, SUFFIX, referenced_files
from namedshard._safetensors._layout import leaf_bounds
from namedshard._safetensors._names import Names
from namedshard._safetensors._outgoing import Outgoing, outgoing
from namedshard._safetensors._progress import Progress, reporting
from namedshard._safetensors._pull import Pieces, gathered, pieces_of
from namedshard._safetensors._ranges import LOCAL, Chunk, Habits, chunks, run_offsets
from namedshard._safetensors._reader import scaled, within
from namedshard._safetensors._remote import is_url
from namedshard._safetensors._targets import DTypes
from namedshard._safetensors._together import everyone_says
from namedshard._sync import Line, agree

Writer: TypeAlias = Literal["all", "main"]
_SHARD = re.compile(r"model(-\d+)?-\d{5}-of-\d{5}\.safetensors")
_OURS = re.compile(rf"{re.escape(SINGLE)}|{re.escape(INDEX)}|{_SHARD.pattern}")


@dataclasses.dataclass(frozen=True, slots=True)
class _File:
    """One file to write: its name, tensors and owner."""

    name: str
    tensors: tuple[Outgoing, ...]
    owner: int


def _grouped(tensors: Sequence[Outgoing], limit: int) -> list[list[Outgoing]]:
    """Tensors per file, in order; a tensor that is larger than the limit has a file to itself."""
    groups: list[list[Outgoing]] = [[]]
    held = 0
    for tensor in tensors:
        if groups[-1] and held + tensor.nbytes > limit:
            groups.append([])
            held = 0
        groups[-1].append(tensor)
        held += tensor.nbytes
    return groups


def _shard_names(directory: str, count: int) -> list[str]:
    """Names in Hugging Face's pattern that no file of the directory has yet."""
    generation = 1
    while True:
        middle = "" if generation == 1 else f"-{generation}"
        names = [f"model{middle}-{i + 1:05d}-of-{count:05d}{SUFFIX}" for i in range(count)]
        if not any(os.path.lexists(os.path.join(directory, name)) for name in names):
            return names
        generation += 1


def _processes() -> tuple[int, int]:
    """This process's number and how many there are, without waking a backend that is not up."""
    if compat.coordination_client() is None:
        return 0, 1
    return jax.process_index(), jax.process_count()


class _Failures:
    """Errors of this process, kept until all processes have come to the same point: none may wait for one that left."""

    def __init__(self) -> None:
        self._first: Exception | None = None

    def __bool__(self) -> bool:
        return self._first is not None

    def add(self, error: Exception) -> None:
        """One more; the first is told of."""
        self._first = self._first or error

    def raise_together(self, where: str, nbytes: int) -> None:
        """Raise on every process if any has failed. A collective."""
        words = everyone_says("failed" if self else "fine")
        failed = [process for process, word in enumerate(words) if word == "failed"]
        if isinstance(self._first, NarrowingError):
            raise self._first
        if failed:
            raise CheckpointError(
                message(
                    f"{where}: the checkpoint ({human_bytes(nbytes)}) cannot be written: {self._why(failed)};"
                    " what was there before is untouched",
                    fix="free some space, or save elsewhere",
                )
            ) from self._first

    def _why(self, failed: Sequence[int]) -> str:
        if self._first is None:
            return f"it failed on process {failed[0]}"
        return str(getattr(self._first, "strerror", None) or self._first)


def _check_fits(tensor: Outgoing, data: np.ndarray) -> None:
    low, high = int(data.min()), int(data.max())
    if tensor.dtype.kind in "iu" and not (np.iinfo(tensor.dtype).min <= low and high <= np.iinfo(tensor.dtype).max):
        raise NarrowingError(
            message(
                f"tensor {tensor.name!r}: {data.dtype} values from {low} to {high} do not fit {tensor.dtype}",
                fix="pass a wider dtype=",
            )
        )


def _write_chunk(file: PartialFile, tensor: Outgoing, pieces: Pieces, index: int, chunk: Chunk) -> int:
    part = tensor.parts[index][1]
    data = pieces.read(part, chunk.box)
    if data.dtype != tensor.dtype and data.dtype.kind in "iu":
        _check_fits(tensor, data)
    if tensor.scale != 1:
        data = scaled(data, tensor.scale, tensor.dtype)
    flat = np.ascontiguousarray(data, dtype=tensor.dtype).reshape(-1).view(np.uint8)
    lines = memoryview(flat)
    for i, offset in enumerate(run_offsets(part, chunk, tensor.dtype.itemsize)):
        file.write(offset, lines[i * chunk.run_bytes : (i + 1) * chunk.run_bytes])
    return flat.nbytes


def _write_file(
    directory: str,
    file: _File,
    me: int,
    metadata: dict[str, str],
    budget: int,
    shared: frozenset[int],
    failures: _Failures,
    tell: Callable[[int], None],
) -> PartialFile | None:
    """Write one file beside its name, on its owner; the other processes take part in gathering."""
    head, size = encode_header([(t.name, t.dtype, t.shape) for t in file.tensors], metadata)
    partial: PartialFile | None = None
    if file.owner == me:
        try:
            partial = PartialFile(os.path.join(directory, file.name), size)
            partial.write(0, memoryview(head))
        except (OSError, NarrowingError) as error:
            failures.add(error)
    habits = within(LOCAL, budget // 2)
    gathering = dataclasses.replace(habits, read_bytes=max(1 << 16, min(64 << 20, budget // 4)))
    at = len(head)
    with concurrent.futures.ThreadPoolExecutor(habits.threads, thread_name_prefix="namedshard-write") as pool:
        for tensor in file.tensors:
            for i, (value, part) in enumerate(tensor.parts):
                everyone = id(value) in shared
                use: Habits = gathering if everyone else habits
                pieces = pieces_of(value) if partial is not None and not everyone else None
                pending: list[concurrent.futures.Future[int]] = []
                for chunk in chunks(part, [part.whole], tensor.dtype.itemsize, at, use):
                    if everyone:
                        pieces = gathered(value, leaf_bounds(part, chunk.box), file.owner, budget // 4)
                    if partial is None or pieces is None or failures:
                        continue
                    pending.append(pool.submit(_write_chunk, partial, tensor, pieces, i, chunk))
                    if everyone:
                        _settle(pending, failures, tell)
                _settle(pending, failures, tell)
            at += tensor.nbytes
    if partial is not None and not failures:
        try:
            partial.finish()
        except (OSError, NarrowingError) as error:
            failures.add(error)
    return partial


def _settle(pending: list["concurrent.futures.Future[int]"], failures: _Failures, tell: Callable[[int], None]) -> None:
    for future in pending:
        try:
            tell(future.result())
        except (OSError, NarrowingError) as error:
            failures.add(error)
    pending.clear()


def _write_index(directory: str, files: Sequence[_File]) -> None:
    weight_map = {tensor.name: file.name for file in files for tensor in file.tensors}
    total = sum(tensor.nbytes for file in files for tensor in file.tensors)
    fields = {"metadata": {"total_size": total}, "weight_map": weight_map}
    text = json.dumps(fields, indent=2, ensure_ascii=False).encode("utf-8")
    partial = PartialFile(os.path.join(directory, INDEX), len(text))
    try:
        partial.write(0, memoryview(text))
        partial.finish()
        partial.commit()
    finally:
        partial.discard()
    sync_directory(directory)


def _remove_old(directory: str, keep: set[str], old: set[str]) -> None:
    """Remove the previous checkpoint, its index first: until that is gone, it is what readers find."""
    stale = [] if INDEX in keep else [INDEX]
    stale += [name for name in sorted(os.listdir(directory)) if _SHARD.fullmatch(name)]
    stale += [*sorted(old), SINGLE]
    for name in dict.fromkeys(stale):
        path = os.path.join(directory, name)
        if name not in keep and os.path.lexists(path):
            os.unlink(path)
            if name == INDEX:
                sync_directory(directory)


def _where(path: str | os.PathLike[str]) -> tuple[str, str | None]:
    """The directory, and the file's name if the path is a file's."""
    where = os.fspath(path)
    if is_url(where):
        raise CheckpointError(
            message(f"{where}: checkpoints are saved to local paths only", fix="save to a local path, and upload that")
        )
    if where.endswith(SUFFIX):
        directory, name = os.path.split(where)
        return directory or ".", name
    return where, None


def _prepare(directory: str, pattern: re.Pattern[str]) -> None:
    try:
        os.makedirs(directory, exist_ok=True)
        remove_leftovers(directory, pattern)
    except OSError as error:
        raise CheckpointError(message(f"{directory} cannot be written to: {error.strerror}")) from error


def save_safetensors(
    tree: PyTree,
    path: str | os.PathLike[str],
    *,
    names: Names | None = None,
    dtype: DTypes = None,
    max_shard_size: int | str = "5GB",
    metadata: Mapping[str, str] | None = None,
    writer: Writer = "all",
    budget: int | str = "1GiB",
    progress: Progress = None,
) -> None:
    """Save the arrays of a tree as a safetensors checkpoint, from any placement.

    Tensors are gathered piece by piece, and nothing appears under its name before all of it is on the disk: a crash or
    a full disk leaves the checkpoint that was there before. With several processes it is a collective.

    Args:
        tree: Any pytree. JAX and numpy arrays of any placement and memory layout are saved; fields of modules that are
            no arrays, strings, functions and None are not, since `load_safetensors` takes them from its ``like``.
        path: A file (``*.safetensors``), which then holds everything, or a directory: ``model.safetensors``, or, above
            ``max_shard_size``, ``model-00001-of-0000N.safetensors`` and ``model.safetensors.index.json``. A checkpoint
            in the directory is replaced; other files stay. Several processes must share the path.
        names: Leaf path to tensor name, as for `load_safetensors`.
        dtype: A dtype for all leaves of its kind (floating, integer, complex), or leaf path to dtype as a dict or a
            function of leaf path and the leaf's dtype. By default the leaves' own.
        max_shard_size: Bytes, or as in ``"5GB"``, that the tensors of one file of a directory may take.
        metadata: Text to keep in each file's header; ``{"format": "pt"}``, which other readers want, is added.
        writer: ``"all"`` for each process to write some of the files, ``"main"`` for process 0 to write all.
        budget: Host memory, in bytes or as in ``"1GiB"``, for what is gathered and converted.
        progress: True or None for a bar where stderr is a terminal, False for silence, or a function that is told the
            bytes done and in all.

    Raises:
        CheckpointError: Leaves cannot be saved (all are listed), names are taken twice or reserved, or the files cannot
            be written.
        NarrowingError: An integer does not fit the ``dtype`` asked for.
        OutOfStepError: The processes do not make the same call.

    Examples:
        >>> import jax.numpy as jnp, tempfile, namedshard as ns
        >>> with tempfile.TemporaryDirectory() as d:
        ...     ns.save_safetensors({"w": jnp.ones((2, 3))}, d)
        ...     print(ns.read_header(d)["w"].shape)
        (2, 3)
    """
    directory, single = _where(path)
    limit, memory = parse_bytes(max_shard_size), parse_bytes(budget)
    words = {"format": "pt", **checked_metadata(metadata)}
    tensors = outgoing(tree, names, dtype)
    groups = [tensors] if single else _grouped(tensors, limit)
    me, count = _processes()
    _prepare(directory, re.compile(re.escape(single)) if single else _OURS)
    old = set[str]() if single else referenced_files(os.path.join(directory, INDEX))
    file_names = [single or SINGLE] if len(groups) == 1 else _shard_names(directory, len(groups))
    shared = frozenset[int]()
    if count > 1:
        shared = _shared(tensors, f"{file_names}, writer={writer!r}", count)
    owners = count if writer == "all" else 1
    files = [_File(n, tuple(g), i % owners) for i, (n, g) in enumerate(zip(file_names, groups, strict=True))]
    total = sum(t.nbytes for t in tensors)
    failures = _Failures()
    partials: list[PartialFile] = []
    mine = sum(t.nbytes for file in files for t in file.tensors if file.owner == me)
    try:
        with reporting(progress, mine, "saving") as tell:
            for file in files:
                partial = _write_file(directory, file, me, words, memory, shared, failures, tell)
                partials += [partial] if partial is not None else []
        failures.raise_together(directory, total)
        _publish(directory, files, partials, failures, me, replace=not single, old=old, total=total)
    finally:
        for partial in partials:
            partial.discard()


def _publish(
    directory: str,
    files: Sequence[_File],
    partials: Sequence[PartialFile],
    failures: _Failures,
    me: int,
    *,
    replace: bool,
    old: set[str],
    total: int,
) -> None:
    """Name the files, as nothing refers to yet; then the index, which does; then remove what was before."""
    try:
        for partial in partials:
            partial.commit()
        sync_directory(directory)
    except OSError as error:
        failures.add(error)
    failures.raise_together(directory, total)
    if me == 0:
        try:
            keep = {file.name for file in files}
            if len(files) > 1:
                _write_index(directory, files)
                keep.add(INDEX)
            if replace:
                _remove_old(directory, keep, old)
        except OSError as error:
            failures.add(error)
    failures.raise_together(directory, total)


def checked_metadata(metadata: Mapping[Any, Any] | None) -> dict[str, str]:
    """The metadata, which must be text to text."""
    given: dict[Any, Any] = dict(metadata or {})
    bad = [f"{k!r}: {v!r}" for k, v in given.items() if not (isinstance(k, str) and isinstance(v, str))]
    if bad:
        raise CheckpointError(message("metadata is not text to text", bad, fix="turn keys and values into str"))
    return given


def _shared(tensors: Sequence[Outgoing], note: str, count: int) -> frozenset[int]:
    """Ids of the values that are one array of all processes, which it takes all of them to get at. A collective."""
    lines: dict[int, Line] = {}
    values: dict[int, Any] = {}
    for tensor in tensors:
        for value, _ in tensor.parts:
            if id(value) not in lines:
                kind = f"{type_text(value)} as {tensor.dtype}"
                own = not (isinstance(value, jax.Array) and value.committed)
                where = "this process" if own else sharding_text(value.sharding)
                lines[id(value)] = Line(tensor.name, kind, where, "", local=own or value.is_fully_addressable)
                values[id(value)] = value
    local = agree("save_safetensors", list(lines.values()), note=note)
    everywhere = set(range(count))
    return frozenset(
        key
        for i, (key, value) in enumerate(values.items())
        if i not in local and lines[key].source != "this process" and not _replicated(value, everywhere)
    )


def _replicated(value: jax.Array, processes: set[int]) -> bool:
    """True if each of these processes has all of an array."""
    return value.is_fully_replicated and {d.process_index for d in value.sharding.device_set} == processes
