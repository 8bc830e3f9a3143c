"""EFFECTS. Files that appear under their names only when they are whole: written beside, synced, renamed.

Until the checkpoint that it belongs to is in place a file is locked, and so one that nobody holds a lock on is what a
crash has left.
"""

import contextlib
import fcntl
import os
import secrets
from collections.abc import Callable

from namedshard._safetensors.folder import partial_of


class PartialFile:
    """A file on its way: `write` at any offset from any thread, then `commit`, and in any case `close`."""

    def __init__(self, final: str, size: int):
        directory, name = os.path.split(final)
        self.final = final
        self.name = f".{name}.{secrets.token_hex(6)}.partial"
        self._path = os.path.join(directory, self.name)
        self._committed = False
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
        self._committed = True

    def withdraw(self) -> None:
        """Take the file away again, also after `commit`: only for names that nothing refers to yet."""
        self._remove(self.final if self._committed else self._path)

    def close(self) -> None:
        """Give up the lock; what was not committed is removed."""
        if not self._committed:
            self._remove(self._path)
        elif self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _remove(self, path: str) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.unlink(path)
            os.close(self._fd)
            self._fd = None


def sync_directory(directory: str) -> None:
    """Bring a directory's names to the disk."""
    fd = os.open(directory or ".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove_leftovers(directory: str, mine: Callable[[str], bool]) -> None:
    """Remove partial files for names of some kind that no living process writes."""
    for name in os.listdir(directory or "."):
        wanted = partial_of(name)
        if wanted is not None and mine(wanted):
            remove_unlocked(os.path.join(directory, name))


def remove_unlocked(path: str) -> None:
    """Remove a file, unless a process that is still saving holds it."""
    with contextlib.suppress(OSError):
        # Some network file systems lock only what is open for writing; files that are not for writing are removed too.
        fd = os.open(path, (os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY) | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
        finally:
            os.close(fd)
