"""EFFECTS. Where bytes come from: local files, or anything that fsspec can open.

fsspec reaches HTTP, S3, Google Storage, the Hugging Face Hub and more.
"""

import contextlib
import functools
import itertools
import os
import stat
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

from namedshard._errors import CheckpointError
from namedshard._safetensors.ranges import LOCAL, REMOTE

T = TypeVar("T")
ATTEMPTS = 5
FIRST_DELAY_S = 0.1
_REFUSED = (400, 401, 403, 405)
_FINAL = (PermissionError, NotImplementedError, TypeError, ValueError, IsADirectoryError)


class LocalFile:
    """A file of this machine, read at offsets, without a file position that threads would share."""

    settings = LOCAL

    def __init__(self, path: str):
        self.name = path
        try:
            # Without O_NONBLOCK, opening a FIFO waits for a writer.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be opened: {error.strerror}") from error
        status = os.fstat(self._fd)
        self.size = status.st_size
        if not stat.S_ISREG(status.st_mode):
            self.close()
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "no regular file"
            raise CheckpointError(f"{path} is {kind}, where a file is expected")

    def read(self, start: int, into: memoryview) -> None:
        """Fill a buffer with the bytes from ``start`` on."""
        at = 0
        while at < len(into):
            got = os.preadv(self._fd, [into[at:]], start + at)
            if not got:
                raise CheckpointError(
                    f"{self.name}: {len(into)} bytes were to be read from byte {start}, but only {at} are there",
                    fix="the file changed while it was read: load it again once it is complete",
                )
            at += got

    def close(self) -> None:
        """Release the file."""
        os.close(self._fd)


def is_url(path: str) -> bool:
    """True for what fsspec has to open: ``protocol://...``, also chained with ``::``."""
    return "://" in path


def filesystem(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path within it."""
    try:
        import fsspec.core
    except ImportError as error:
        raise CheckpointError(
            "reading from URLs needs fsspec, which is not installed", fix="pip install 'namedshard[remote]'"
        ) from error
    try:
        return fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise CheckpointError(f"{url} cannot be opened: {error}") from error


def _status(error: BaseException | None) -> int | None:
    """The HTTP status that a request failed with, which fsspec hides behind errors of its own."""
    found = getattr(error, "status", None) or getattr(getattr(error, "__cause__", None), "status", None)
    return found if isinstance(found, int) else None


def _absent(error: Exception) -> bool:
    """True if a file is known not to exist. fsspec raises the same error for an HTTP server that is overloaded."""
    if not isinstance(error, FileNotFoundError):
        return False
    return error.__cause__ is None or _status(error) in (404, 410)


def retrying(call: Callable[[], T], what: str) -> T:
    """Call until it succeeds, with growing pauses, as long as a failure may pass; `FileNotFoundError` is final."""
    for attempt in itertools.count(1):
        try:
            return call()
        except Exception as error:
            if _absent(error):
                raise FileNotFoundError(what) from error
            status = _status(error)
            if attempt == ATTEMPTS or isinstance(error, _FINAL) or status in _REFUSED:
                tried = f" after {attempt} attempts" if attempt > 1 else ""
                answer = f"HTTP status {status}" if status else f"{type(error).__name__}: {error}"
                raise CheckpointError(f"{what} cannot be read{tried}: {answer.rstrip(': ')}") from error
        time.sleep(FIRST_DELAY_S * 2 ** (attempt - 1))
    raise AssertionError


def names_in(directory: str, likely: Sequence[str]) -> list[str]:
    """The first of some likely files that is there, alone; else the names of all, if the file system can list them.

    Not every server lists its files, but each can be asked for one. A store without permission to list answers 403 for
    a file that does not exist.
    """
    base = directory.removesuffix("/") + "/"
    refused: CheckpointError | None = None
    for name in likely:
        fs, path = filesystem(base + name)
        try:
            if retrying(functools.partial(fs.info, path), base + name)["type"] == "file":
                return [name]
        except FileNotFoundError:
            continue
        except CheckpointError as error:
            if _status(error.__cause__) != 403:
                raise
            refused = refused or error
    fs, path = filesystem(directory)
    try:
        found = retrying(lambda: fs.ls(path, detail=False), directory)
    except (CheckpointError, FileNotFoundError):
        found = []
    if refused is not None and not found:
        raise refused
    return sorted({str(name).rstrip("/").rpartition("/")[2] for name in found})


class RemoteFile:
    """A file that is read by range requests, each tried again when it fails."""

    settings = REMOTE

    def __init__(self, url: str):
        self.name = url
        self._fs, self._path = filesystem(url)
        try:
            info = retrying(functools.partial(self._fs.info, self._path), url)
        except FileNotFoundError as error:
            raise CheckpointError(f"{url} cannot be opened: no such file") from error
        if info["type"] != "file":
            raise CheckpointError(f"{url} is a directory, where a file is expected")
        if info.get("size") is None:
            raise CheckpointError(
                f"{url}: the server does not tell the file's size", fix="download the file and load it locally"
            )
        self.size = int(info["size"])

    def read(self, start: int, into: memoryview) -> None:
        """Fill a buffer with the bytes from ``start`` on."""
        if not len(into):
            return
        where = f"{self.name} (bytes {start} to {start + len(into)})"

        def fetch() -> bytes:
            data = self._fs.cat_file(self._path, start=start, end=start + len(into))
            if len(data) < len(into):
                raise OSError(f"{len(into)} bytes were asked for, {len(data)} came")
            return data

        try:
            data = retrying(fetch, where)
        except FileNotFoundError as error:
            raise CheckpointError(f"{where} cannot be read: the file is gone") from error
        if len(data) > len(into):
            raise CheckpointError(
                f"{self.name}: the server ignores byte ranges: asked for {len(into)} bytes, it sent {len(data)}",
                fix="download the file and load it locally",
            )
        into[:] = data

    def close(self) -> None:
        """Nothing is held open."""


Source: TypeAlias = LocalFile | RemoteFile
"""One open file. ``read`` may be called from several threads at once."""
Opener: TypeAlias = Callable[[str], Source]


def open_source(name: str) -> Source:
    """Open a path or URL."""
    return RemoteFile(name) if is_url(name) else LocalFile(name)


class OpenFiles(contextlib.ExitStack):
    """Files that stay open together, so that what was checked is what is read, whatever takes their names meanwhile."""

    def __init__(self, opener: Opener = open_source):
        super().__init__()
        self._opener = opener
        self._open: dict[str, Source] = {}

    def __getitem__(self, name: str) -> Source:
        """The open file of that name."""
        if name not in self._open:
            self._open[name] = self._opener(name)
            self.callback(self._open[name].close)
        return self._open[name]
