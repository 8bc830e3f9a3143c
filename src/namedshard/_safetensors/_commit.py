"""EFFECTS. Files that appear under their names only when they are whole: written beside, synced, renamed.

While it is written a file is locked, and so one that nobody holds a lock on is what a crash has left.
"""

import contextlib
import fcntl
import os
import re
import secrets
from collections.abc import Iterator

_PARTIAL = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{12}\.partial")


class PartialFile:
    """A file on its way: `write` at any offset from any thread, then `commit` or `discard`."""

    def __init__(self, final: str, size: int):
        directory, name = os.path.split(final)
        self.final = final
        self._path = os.path.join(directory, f".{name}.{secrets.token_hex(6)}.partial")
        self._fd: int | None = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
        with contextlib.suppress(OSError):
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._size = size

    def write(self, offset: int, data: memoryview) -> None:
        """Put bytes at an offset."""
        assert self._fd is not None
        while len(data):
            done = os.pwrite(self._fd, data, offset)
            offset, data = offset + done, data[done:]

    def finish(self) -> None:
        """Bring all bytes to the disk."""
        assert self._fd is not None
        os.ftruncate(self._fd, self._size)
        os.fsync(self._fd)

    def commit(self) -> None:
        """Give the file its name."""
        os.replace(self._path, self.final)
        self._close()

    def discard(self) -> None:
        """Remove what was written; nothing happens after `commit`."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            self._close()

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def sync_directory(directory: str) -> None:
    """Bring a directory's names to the disk."""
    fd = os.open(directory or ".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove_leftovers(directory: str, mine: re.Pattern[str]) -> None:
    """Remove partial files for names of a pattern that no living process writes."""
    for path in _partial_files(directory, mine):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)
            finally:
                os.close(fd)


def _partial_files(directory: str, mine: re.Pattern[str]) -> Iterator[str]:
    for name in os.listdir(directory or "."):
        match = _PARTIAL.fullmatch(name)
        if match and mine.fullmatch(match["name"]):
            yield os.path.join(directory, name)
