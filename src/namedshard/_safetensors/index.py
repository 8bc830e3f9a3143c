"""Which files make up a checkpoint, and the tensors of all of them."""

import json
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast
from urllib.parse import unquote

from namedshard._errors import CheckpointError, HeaderError
from namedshard._safetensors.folder import INDEX, INDEX_SUFFIX, SINGLE, SUFFIX, select_files
from namedshard._safetensors.header import (
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    SURROGATES,
    TensorInfo,
    header_length,
    parse_header,
    parse_json,
)
from namedshard._safetensors.source import OpenFiles, Source, is_url, names_in


def _read(source: Source, start: int, count: int) -> bytes:
    buffer = bytearray(count)
    source.read(start, memoryview(buffer))
    return bytes(buffer)


def _header_of(name: str, files: OpenFiles) -> dict[str, TensorInfo]:
    source = files[name]
    prefix = _read(source, 0, min(LENGTH_BYTES, source.size))
    length = header_length(prefix, name, source.size)
    return parse_header(_read(source, LENGTH_BYTES, length), name, source.size)


def _weight_map(name: str, files: OpenFiles) -> dict[str, str]:
    source = files[name]
    if source.size > MAX_HEADER_BYTES:
        raise HeaderError(f"{name}: {source.size} bytes are too many for an index")
    weight_map = parse_json(_read(source, 0, source.size), f"{name}: the index").get("weight_map")
    if not isinstance(weight_map, dict):
        raise HeaderError(f"{name}: the index has no weight_map from tensor to file")
    entries = cast("dict[str, Any]", weight_map)
    if bad := [f"{tensor}: {why}" for tensor, file in entries.items() if (why := _why_refused(file))]:
        raise HeaderError(f"{name}: the index names files that may not be read", bad)
    return cast("dict[str, str]", entries)


def _why_refused(file: object) -> str:
    """Why an index may not name this file: only files in or below its own directory are read."""
    if not isinstance(file, str):
        return f"{json.dumps(file)[:80]} is not a file name"
    plain = unquote(file)
    parts = re.split(r"[/\\]", plain)
    if ".." in parts:
        return f"{file!r} leaves the checkpoint's directory"
    if not plain or plain.startswith(("/", "\\")) or re.match(r"[A-Za-z]:", plain) or "://" in plain:
        return f"{file!r} is not a relative path"
    if "\0" in plain or SURROGATES.search(plain):
        return f"{file!r} is not a file name"
    return ""


def _plain(path: str) -> str:
    """A URL without its query."""
    return path.partition("?")[0] if is_url(path) else path


def _read_headers(name: str, weight_map: Mapping[str, str], files: OpenFiles) -> dict[str, dict[str, TensorInfo]]:
    """The header of each file of an index."""
    directory, slash, _ = _plain(name).rpartition("/")
    paths = {file: f"{directory}{slash}{file}" for file in weight_map.values()}
    headers: dict[str, dict[str, TensorInfo]] = {}
    absent: list[str] = []

    def read(path: str) -> dict[str, TensorInfo] | CheckpointError:
        try:
            return _header_of(path, files)
        except HeaderError:
            raise
        except CheckpointError as error:
            return error

    # Of a remote checkpoint, the headers of many files take long to arrive one by one.
    with ThreadPoolExecutor(8, thread_name_prefix="namedshard-headers") as pool:
        for file, found in zip(paths, pool.map(read, paths.values()), strict=True):
            if isinstance(found, CheckpointError):
                count = list(weight_map.values()).count(file)
                absent.append(f"{file} ({count} tensor{'s' * (count != 1)}): {str(found).splitlines()[0]}")
            else:
                headers[file] = found
    if absent:
        raise CheckpointError(
            f"{name}: {len(absent)} of {len(paths)} files of the index cannot be read",
            absent,
            fix="fetch the missing files into the index's directory",
        )
    return headers


def _from_index(name: str, files: OpenFiles) -> dict[str, TensorInfo]:
    weight_map = _weight_map(name, files)
    headers = _read_headers(name, weight_map, files)
    stale = [f"{tensor}: not in {file}" for tensor, file in weight_map.items() if tensor not in headers[file]]
    if stale:
        raise HeaderError(
            f"{name}: the index and its files do not agree on {len(stale)} of {len(weight_map)} tensors",
            stale,
            fix="fetch index and files again, from one revision",
        )
    return {tensor: headers[file][tensor] for tensor, file in weight_map.items()}


def _files_beside(index: str) -> set[str]:
    """The checkpoint files that a local index names and that lie beside it; none if there is no index.

    What is anywhere else, or of another kind, is not the checkpoint's own, whatever an index says.
    """
    if not os.path.lexists(index):
        return set()
    with OpenFiles() as files:
        named = map(os.path.normpath, _weight_map(index, files).values())
        return {name for name in named if name.endswith(SUFFIX) and not re.search(r"[/\\]", name)}


def replaceable_files(directory: str) -> set[str]:
    """The files of the directory's index, which go with it. Unless all are there, they are an unfinished download."""
    try:
        files = _files_beside(os.path.join(directory, INDEX))
    except CheckpointError:
        return set()
    return files if all(os.path.lexists(os.path.join(directory, name)) for name in files) else set()


def indexed_files(directory: str) -> set[str]:
    """The files that any index of the directory names: all of its files if an index cannot be read."""
    names = _listing(directory)
    try:
        return {f for n in names if n.endswith(INDEX_SUFFIX) for f in _files_beside(os.path.join(directory, n))}
    except CheckpointError:
        return set(names)


def _listing(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be opened: {error.strerror}") from error


def _from_directory(directory: str, files: OpenFiles) -> dict[str, TensorInfo]:
    base = directory.removesuffix("/") + "/"
    names = names_in(directory, (INDEX, SINGLE)) if is_url(directory) else _listing(directory)
    selected = select_files(directory, names)
    if selected[0].endswith(INDEX_SUFFIX):
        return _from_index(base + selected[0], files)
    found: dict[str, TensorInfo] = {}
    twice: list[str] = []
    for name in selected:
        header = _header_of(base + name, files)
        twice += [f"{t}: in {os.path.basename(found[t].file)} and {name}" for t in header if t in found]
        found |= header
    if twice:
        raise HeaderError(
            f"{base.rstrip('/')} has no {INDEX}, and its files hold {len(twice)} tensors twice",
            twice,
            fix="fetch the index",
        )
    return found


def find_tensors(path: str, files: OpenFiles) -> Mapping[str, TensorInfo]:
    """All tensors of a checkpoint, by name; see `read_header`."""
    plain = _plain(path)
    if plain.endswith(INDEX_SUFFIX):
        return _from_index(path, files)
    if os.path.isdir(path) or (is_url(path) and not plain.endswith(SUFFIX)):
        return _from_directory(plain, files)
    return _header_of(path, files)


def read_header(path: str | os.PathLike[str]) -> dict[str, TensorInfo]:
    """What a checkpoint holds, from its headers alone: no tensor is read, and no device is touched.

    Args:
        path: A safetensors file, an index (``*.safetensors.index.json``), or a directory with one of them: a path, or a
            URL that fsspec can open (extra ``namedshard[remote]``). Without an index, the files of a directory are one
            checkpoint if their names (``...-00001-of-00002.safetensors``) say so, and none is missing.

    Returns:
        For each tensor name its shape, dtype, file, and bytes within the file.

    Raises:
        CheckpointError: A file is missing, is no regular file, or the directory holds no checkpoint, several, or parts
            of one.
        HeaderError: A file or index is cut off, or does not describe its own contents: every bad tensor is listed.

    Examples:
        >>> import numpy as np, tempfile, namedshard as ns
        >>> from safetensors.numpy import save_file
        >>> with tempfile.TemporaryDirectory() as d:
        ...     save_file({"w": np.zeros((2, 3), np.float32)}, f"{d}/model.safetensors")
        ...     info = ns.read_header(d)["w"]
        >>> info.shape, info.dtype, info.stop - info.start
        ((2, 3), dtype('float32'), 24)
    """
    with OpenFiles() as files:
        return dict(find_tensors(os.fspath(path), files))
