"""EFFECTS. Saves that readers see whole or not at all: files are written under other names, synced, renamed.

A file is locked until the checkpoint that it belongs to is in place, so an unlocked partial file is what a crash has
left. `Destination` has the order of these steps.
"""

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Iterable, Sequence

from namedshard._errors import CheckpointError
from namedshard._safetensors.folder import INDEX, SINGLE, is_ours, partial_of, shard_names
from namedshard._safetensors.index import find_abandoned, own_files
from namedshard._safetensors.outgoing import File


class PartialFile:
    """A file on its way: `write` at any offset from any thread, then `commit`, and in any case `close`."""

    def __init__(self, final: str, size: int):
        directory, name = os.path.split(final)
        self.final = final
        self.name = f".{name}.{secrets.token_hex(6)}.partial"
        self._path = os.path.join(directory, self.name)
        self._size = size
        self._fd = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
        with contextlib.suppress(OSError):
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def write(self, offset: int, data: memoryview) -> None:
        """Put bytes at an offset."""
        while len(data):
            done = os.pwrite(self._fd, data, offset)
            offset, data = offset + done, data[done:]

    def finish(self) -> None:
        """Bring all bytes to the disk."""
        os.ftruncate(self._fd, self._size)
        os.fsync(self._fd)

    def commit(self) -> None:
        """Give the file its name."""
        os.replace(self._path, self.final)
        self._path = self.final

    def close(self, *, withdraw: bool = False) -> None:
        """Give up the lock. Removes what was not committed; ``withdraw`` also what was, if nothing refers to it yet."""
        if self._fd < 0:
            return
        if withdraw or self._path != self.final:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        os.close(self._fd)
        self._fd = -1


def sync_directory(directory: str) -> None:
    """Bring a directory's names to the disk."""
    fd = os.open(directory or ".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Destination:
    """Where a checkpoint is saved: a folder, or one file in it.

    Attributes:
        names: The names of its files, which `prepare` finds.
        placed: Whether readers find the new checkpoint.
    """

    def __init__(self, directory: str, single: str | None, what: str) -> None:
        self.names: list[str] = []
        self.placed = False
        self._directory = directory
        self._single = single
        self._what = what
        self._old: set[str] = set()
        self._index: PartialFile | None = None

    @property
    def indexed(self) -> bool:
        """Whether there will be an index, and names that nothing refers to before it is there."""
        return self._single is None and self.names != [SINGLE]

    def prepare(self, count: int) -> None:
        """Make the folder, remove what a crash has left there, and find names for this many files."""
        try:
            os.makedirs(self._directory, exist_ok=True)
            partial = ((name, partial_of(name)) for name in os.listdir(self._directory))
            if self._single is not None:
                self._remove_unlocked(name for name, final in partial if final == self._single)
                self.names = [self._single]
                return
            # A partial index is what shows that shards were abandoned, so it is removed after them.
            self._remove_unlocked(find_abandoned(self._directory))
            self._remove_unlocked(name for name, final in partial if final is not None and is_ours(final))
            self._old = own_files(self._directory)
            # Until it is replaced, an index refers to the very file that it names.
            alone = count == 1 and SINGLE not in self._old
            self.names = [SINGLE] if alone else shard_names(os.listdir(self._directory), count)
        except OSError as error:
            raise CheckpointError(f"{self._directory} cannot be written to: {error.strerror}") from error

    def write_index(self, files: Sequence[File]) -> None:
        """Write the index beside its name, before anything has one that it refers to."""
        weight_map = {tensor.name: file.name for file in files for tensor in file.tensors}
        total = sum(tensor.nbytes for file in files for tensor in file.tensors)
        fields = {"metadata": {"total_size": total}, "weight_map": weight_map}
        text = json.dumps(fields, indent=2, ensure_ascii=False).encode("utf-8")
        self._index = PartialFile(self._path(INDEX), len(text))
        self._index.write(0, memoryview(text))
        self._index.finish()

    def name_shards(self, partials: Sequence[PartialFile]) -> None:
        """Give files their names, which nothing refers to yet."""
        for partial in partials:
            partial.commit()
        # Who writes nothing may not even have the folder.
        if partials:
            sync_directory(self._directory)

    def publish(self, partials: Sequence[PartialFile]) -> None:
        """Let readers find the new checkpoint, then remove the one before."""
        (partials[0] if self._index is None else self._index).commit()
        self.placed = True
        try:
            sync_directory(self._directory)
        except OSError as error:
            raise CheckpointError(
                f"{self._what} is in place, but would not outlast a crash of the machine: {error.strerror}",
                fix="see to the disk, and save again",
            ) from error
        if self._single is None:
            self._remove_old()

    def close(self) -> None:
        """Remove an index that was not needed."""
        if self._index is not None:
            self._index.close()

    def _path(self, name: str) -> str:
        return os.path.join(self._directory, name)

    def _remove_unlocked(self, names: Iterable[str]) -> None:
        """Remove files, unless a process that is still saving holds them."""
        for path in map(self._path, names):
            with contextlib.suppress(OSError):
                # Some network file systems lock only what is open for writing; read-only files are removed too.
                fd = os.open(path, (os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY) | os.O_CLOEXEC)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(path)
                finally:
                    os.close(fd)

    def _remove_old(self) -> None:
        """Remove the previous checkpoint, its index first: until that is gone, it is what readers find."""
        if not self.indexed and os.path.lexists(self._path(INDEX)):
            try:
                os.unlink(self._path(INDEX))
                sync_directory(self._directory)
            except OSError as error:
                raise CheckpointError(
                    f"{self._what} is written, but readers go by the index of the one before, which cannot be"
                    f" removed: {error.strerror}",
                    fix=f"remove {INDEX}",
                ) from error
        lines: list[str] = []
        for name in sorted({*self._old, SINGLE} - set(self.names)):
            path = self._path(name)
            try:
                if os.path.islink(path) or os.path.isfile(path):
                    os.unlink(path)
            except OSError as error:
                lines.append(f"{name}: {error.strerror}")
        self._remove_unlocked(find_abandoned(self._directory))
        if lines:
            raise CheckpointError(
                f"{self._what} is in place, but files of the one before cannot be removed",
                lines,
                fix="remove them",
            )
