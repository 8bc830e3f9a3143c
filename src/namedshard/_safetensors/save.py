"""`save_safetensors`: from any placement to files that appear only when they are whole."""

import contextlib
import functools
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
from jaxtyping import PyTree

from namedshard._errors import CheckpointError, human_bytes
from namedshard._place.gather import parse_bytes
from namedshard._processes.agreement import LeafDescription, agree, agreed_rounds, describe_leaf
from namedshard._processes.coordination import processes
from namedshard._safetensors.commit import Destination, PartialFile
from namedshard._safetensors.folder import SUFFIX
from namedshard._safetensors.names import Names
from namedshard._safetensors.outgoing import File, Outgoing, resolve_outgoing
from namedshard._safetensors.progress import Progress, reporting
from namedshard._safetensors.source import is_url
from namedshard._safetensors.targets import DTypes
from namedshard._safetensors.write import Failures, FileWriter

Writer: TypeAlias = Literal["all", "main"]

VISIBLE_S = 5.0
"""How long a network file system may take to show one machine's file to another."""


def _group_by_file(tensors: Sequence[Outgoing], limit: int) -> list[list[Outgoing]]:
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


def _where(path: str | os.PathLike[str]) -> tuple[str, str | None]:
    """The directory, and the file's name if the path is a file's."""
    where = os.fspath(path)
    if is_url(where):
        raise CheckpointError(
            f"{where}: checkpoints are saved to local paths only", fix="save to a local path, and upload that"
        )
    if where.endswith(SUFFIX):
        directory, name = os.path.split(where)
        return directory or ".", name
    return where, None


def save_safetensors(  # noqa: PLR0913 - options of the public call
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
            in the directory is replaced; other files stay. Several processes must pass the same path, and share it
            unless ``writer="main"``.
        names: Leaf path to tensor name, as for `load_safetensors`.
        dtype: A dtype for all leaves of its kind (floating, integer, complex), or leaf path to dtype as a dict or a
            function of leaf path and the leaf's dtype. By default the leaves' own.
        max_shard_size: Bytes, or as in ``"5GB"``, that the tensors of one file of a directory may take.
        metadata: Text to keep in each file's header; ``{"format": "pt"}``, which other readers want, is added.
        writer: ``"all"`` for each process to write some of the files, ``"main"`` for process 0 to write all.
        budget: Host memory, in bytes or as in ``"1GiB"``, for what is gathered and converted.
        progress: True or None for a bar where stderr is a terminal, False for silence, or a function that is called
            with ``(bytes_done, bytes_total)``.

    Raises:
        ValueError: ``writer`` is neither, or a size is none.
        CheckpointError: Leaves cannot be saved (all are listed), names are taken twice or reserved, the files cannot be
            written, or another process has failed.
        NarrowingError: A value does not fit the integer ``dtype`` asked for.
        OutOfStepError: The processes do not make the same call.
        ExchangeError: An exchange of arrays between processes broke off, now or before.
        HostValueError: Host values (numpy, or arrays that nobody has placed) differ between processes.
        LocalArrayError: Each process passes an array of its own, committed to its own devices.

    Examples:
        >>> import jax.numpy as jnp, tempfile, namedshard as ns
        >>> with tempfile.TemporaryDirectory() as d:
        ...     ns.save_safetensors({"w": jnp.ones((2, 3))}, d)
        ...     print(ns.read_header(d)["w"].shape)
        (2, 3)
    """
    directory, single = _where(path)
    limit, memory = parse_bytes(max_shard_size), parse_bytes(budget)
    me, count = processes()
    owners = owners_of(writer, count)
    fields = {"format": "pt", **checked_metadata(metadata)}
    tensors = resolve_outgoing(tree, names, dtype)
    groups = [tensors] if single else _group_by_file(tensors, limit)
    what = f"{directory}: the checkpoint ({human_bytes(sum(t.nbytes for t in tensors))})"
    # All that decides what is written where, and which exchanges of arrays that takes.
    note = f"{os.fspath(path)!r}, {max_shard_size=}, {metadata=}, {writer=}, {budget=}"
    with agreed_rounds(functools.partial(shared_values, tensors, note, count)) as (rounds, shared):
        failures = Failures(rounds, what)
        destination = Destination(directory, single, what)
        with failures.caught():
            if me == 0:
                destination.prepare(len(groups))
        destination.names = failures.round({"names": destination.names}, exchanging=bool(shared))[0]["names"]
        files = [File(n, tuple(g), i % owners) for i, (n, g) in enumerate(zip(destination.names, groups, strict=True))]
        mine = sum(t.nbytes for file in files for t in file.tensors if file.owner == me)
        with (
            reporting(progress, mine, "saving") as advance,
            contextlib.closing(destination),
            contextlib.closing(FileWriter(directory, fields, memory, shared, failures, advance)) as writing,
        ):
            written = _write_files(writing, files, owners)
            with failures.caught(of_writing=True):
                if me == 0 and destination.indexed:
                    destination.write_index(files)
            _check_visible(failures, directory, written)
            _publish(failures, destination, writing.partials)


def owners_of(writer: str, count: int) -> int:
    """How many processes write files."""
    if writer not in ("all", "main"):
        raise ValueError(f'writer must be "all" or "main", not {writer!r}')
    return count if writer == "all" else 1


def checked_metadata(metadata: Mapping[Any, Any] | None) -> dict[str, str]:
    """The metadata, which must be text to text."""
    given: dict[Any, Any] = dict(metadata or {})
    bad = [f"{k!r}: {v!r}" for k, v in given.items() if not (isinstance(k, str) and isinstance(v, str))]
    if bad:
        raise CheckpointError("metadata is not text to text", bad, fix="turn keys and values into str")
    return given


def _on_host(value: Any) -> bool:
    """True for what `shard` too takes for a value that every process has: numpy, and arrays nobody has placed."""
    return not isinstance(value, jax.Array) or (not value.committed and value.is_fully_addressable)


def shared_values(tensors: Sequence[Outgoing], note: str, count: int) -> frozenset[int]:
    """Ids of the values that are one array of all processes, of which each has only some.

    A collective, which checks that all processes save the same tensors from the same leaves in the same way.
    """
    if count == 1:
        return frozenset()
    values: dict[str, Any] = {}
    for tensor in tensors:
        values |= zip(tensor.paths, (value for value, _ in tensor.parts), strict=True)
    described = [describe_leaf(path, value, host=_on_host(value)) for path, value in values.items()]
    described += [LeafDescription(t.name, f"{t.dtype}{list(t.shape)}", f"leaf {', '.join(t.paths)}") for t in tensors]
    agree("save_safetensors", described, note)
    placed = [value for value in values.values() if not _on_host(value)]
    whole = [x.is_fully_replicated and len({d.process_index for d in x.sharding.device_set}) == count for x in placed]
    return frozenset(id(x) for x, on_each in zip(placed, whole, strict=True) if not on_each)


def _write_files(writing: FileWriter, files: Sequence[File], owners: int) -> list[dict[str, str]]:
    """Write all files; returns each process's, by their names, with the names that they have until they are whole."""
    written: list[dict[str, str]] = []
    # A round for each file of each process, lest the others go on to the end when one has failed.
    for first in range(0, len(files), owners):
        for file in files[first : first + owners]:
            writing.write(file)
        writing.failures.rounds.exchanging = False
        more = any(map(writing.exchanged, files[first + owners :]))
        names_of = {os.path.basename(p.final): p.name for p in writing.partials}
        written = [said["files"] for said in writing.failures.round({"files": names_of}, exchanging=more)]
    return written


def _check_visible(failures: Failures, directory: str, written: Sequence[Mapping[str, str]]) -> None:
    """Make sure that process 0 sees the files of all the others, before it refers to them."""
    if not any(written[1:]):
        return
    rounds = failures.rounds
    with failures.caught(of_writing=True):
        unseen = _unseen(directory, written) if rounds.me == 0 and not failures else {}
        # A process that failed removes its files; the next round reports why.
        if unseen and not any(map(rounds.failure, unseen)):
            raise CheckpointError(
                f"{directory} is not one directory that all processes share: process 0 does not see files of"
                " others; what was there before is untouched",
                [f"process {process}: {name}" for process, names in unseen.items() for name in names],
                fix='save to a shared path, or pass writer="main" for process 0 to write all',
            )
    failures.round()


def _unseen(directory: str, written: Sequence[Mapping[str, str]]) -> dict[int, list[str]]:
    """Files that are not in the directory, by the process that has written them."""
    end = time.monotonic() + VISIBLE_S
    while True:
        here = set(os.listdir(directory))
        absent = ((p, [n for n, partial in files.items() if partial not in here]) for p, files in enumerate(written))
        unseen = {process: names for process, names in absent if names}
        if not unseen or time.monotonic() > end:
            return unseen
        time.sleep(0.1)


def _publish(failures: Failures, destination: Destination, partials: Sequence[PartialFile]) -> None:
    """Name the files, as nothing refers to yet; then the index, which does; then remove what was before."""
    main = failures.rounds.me == 0
    try:
        if destination.indexed:
            with failures.caught(of_writing=True):
                if not failures:
                    destination.name_shards(partials)
            failures.round()
        with failures.caught(of_writing=True):
            if main:
                destination.publish(partials)
        failures.round({"placed": destination.placed})
    except BaseException:
        # Files that an index may name stay: only process 0, which writes it, knows that there is none.
        if destination.indexed:
            for partial in partials:
                partial.close(placed=destination.placed if main else failures.placed)
        raise
