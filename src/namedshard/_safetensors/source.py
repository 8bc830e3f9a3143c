"""EFFECTS. Where bytes come from: local files, or anything that fsspec can open."""

import os
import stat
from collections.abc import Callable
from typing import Protocol, TypeAlias, runtime_checkable

from namedshard._errors import CheckpointError, message
from namedshard._safetensors.ranges import LOCAL, Habits
from namedshard._safetensors.remote import RemoteFile, is_url


@runtime_checkable
class Source(Protocol):
    """One open file. ``read`` may be called from several threads at once."""

    name: str
    size: int
    habits: Habits

    def read(self, start: int, into: memoryview) -> None:
        """Fill a buffer with the bytes from ``start`` on."""
        ...

    def close(self) -> None:
        """Release the file."""
        ...


Opener: TypeAlias = Callable[[str], Source]


def cut_off(name: str, start: int, wanted: int, got: int) -> CheckpointError:
    """The error for a file that ends while it is being read."""
    return CheckpointError(
        message(
            f"{name}: {wanted} bytes were to be read from byte {start}, but only {got} are there",
            fix="the file changed while it was read: load it again once it is complete",
        )
    )


class LocalFile:
    """A file of this machine, read at offsets, without a file position that threads would share."""

    habits = LOCAL

    def __init__(self, path: str):
        self.name = path
        try:
            # Without O_NONBLOCK, opening a FIFO waits for a writer.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise CheckpointError(message(f"{path} cannot be opened: {error.strerror}")) from error
        status = os.fstat(self._fd)
        self.size = status.st_size
        if not stat.S_ISREG(status.st_mode):
            self.close()
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "no regular file"
            raise CheckpointError(message(f"{path} is {kind}, where a file is expected"))

    def read(self, start: int, into: memoryview) -> None:
        """Fill a buffer with the bytes from ``start`` on."""
        at = 0
        while at < len(into):
            got = os.preadv(self._fd, [into[at:]], start + at)
            if not got:
                raise cut_off(self.name, start, len(into), at)
            at += got

    def close(self) -> None:
        """Release the file."""
        os.close(self._fd)


def open_source(name: str) -> Source:
    """Open a path or URL.

    Raises:
        CheckpointError: It cannot be opened, or is no regular file.
    """
    return RemoteFile(name) if is_url(name) else LocalFile(name)


class Files:
    """Files that stay open together, so that what was checked is what is read, whatever takes their names meanwhile."""

    def __init__(self, opener: Opener = open_source):
        self._opener = opener
        self._open: dict[str, Source] = {}

    def __getitem__(self, name: str) -> Source:
        """The open file of that name."""
        if name not in self._open:
            self._open[name] = self._opener(name)
        return self._open[name]

    def __enter__(self) -> "Files":
        return self

    def __exit__(self, *_: object) -> None:
        for source in self._open.values():
            source.close()
