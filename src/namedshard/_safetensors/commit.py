"""EFFECTS. Saves that readers see whole or not at all: files are written under other names, synced, renamed.

A file is locked until the checkpoint that it belongs to is in place, so an unlocked partial file is what a crash has
left. A shard keeps its partial name too (a hard link) until readers find it, and so does one that is to be removed: a
whole file is deleted only if it has such a name, or belongs to the checkpoint that is replaced. `Destination` has the
order of these steps.
"""

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Iterable, Sequence

from namedshard._errors import CheckpointError
from namedshard._safetensors.folder import INDEX, SINGLE, SUFFIX, is_ours, partial_of, select_files, shard_names
from namedshard._safetensors.index import indexed_files, replaceable_files
from namedshard._safetensors.outgoing import File


def _partial_path(final: str) -> str:
    """A new partial name beside a file's name."""
    directory, name = os.path.split(final)
    return os.path.join(directory, f".{name}.{secrets.token_hex(6)}.partial")


class PartialFile:
    """A file on its way: `write` at any offset from any thread, then `commit`, and in any case `close`."""

    def __init__(self, final: str, size: int):
        self.final = final
        self._path = _partial_path(final)
        self.name = os.path.basename(self._path)
        self._named = False
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

    def commit(self, mark: bool = False) -> None:
        """Give the file its name. With ``mark`` it keeps its partial name too, where the file system has hard links."""
        if mark:
            try:
                os.link(self._path, self.final)
            except FileExistsError:
                raise
            except OSError:
                mark = False
        if not mark:
            os.replace(self._path, self.final)
            self._path = self.final
        self._named = True

    def close(self, *, placed: bool | None = True) -> None:
        """Give up the lock. Removes what was not committed, and marks; if not ``placed``, also what was committed.

        If it isn't known whether the checkpoint is placed (None), files stay with their marks.
        """
        if self._fd < 0:
            return
        doomed = [] if self._path == self.final or (placed is None and self._named) else [self._path]
        for path in [self.final, *doomed] if self._named and placed is False else doomed:
            with contextlib.suppress(OSError):
                os.unlink(path)
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
        self._marks: dict[str, str] = {}
        self._index: PartialFile | None = None

    @property
    def indexed(self) -> bool:
        """Whether there will be an index, and names that nothing refers to before it is there."""
        return self._single is None and self.names != [SINGLE]

    def prepare(self, count: int) -> None:
        """Make the folder, remove what a crash has left there, and find names for this many files."""
        try:
            os.makedirs(self._directory, exist_ok=True)
            if self._single is not None:
                self._remove_unlocked(n for n in os.listdir(self._directory) if partial_of(n) == self._single)
                self.names = [self._single]
                return
            self._remove_leftovers()
            self._old = replaceable_files(self._directory)
            # Until it is replaced, an index refers to the very file that it names.
            alone = count == 1 and SINGLE not in indexed_files(self._directory)
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
            partial.commit(True)
        # Who writes nothing may not even have the folder.
        if partials:
            sync_directory(self._directory)

    def publish(self, partials: Sequence[PartialFile]) -> None:
        """Let readers find the new checkpoint, then remove the one before."""
        for name in self._old:
            path, mark = self._path(name), _partial_path(self._path(SINGLE))
            with contextlib.suppress(OSError, NotImplementedError):
                os.link(path, mark, follow_symlinks=False)
                self._marks[path] = mark
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
        """Remove an index that was not needed, and the marks of files that are gone or to stay."""
        if self._index is not None:
            self._index.close()
        for path, mark in self._marks.items():
            if not (self.placed and os.path.lexists(path)):
                with contextlib.suppress(OSError):
                    os.unlink(mark)

    def _path(self, name: str) -> str:
        return os.path.join(self._directory, name)

    def _remove_leftovers(self) -> None:
        """Remove what crashed saves left: partial files, and files with a partial name too that no reader takes."""
        inodes: dict[str, tuple[int, int]] = {}
        for name in os.listdir(self._directory):
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(self._path(name))
                inodes[name] = status.st_dev, status.st_ino
        partials = {name: final for name in inodes if is_ours(final := partial_of(name) or "")}
        ours = {inodes[name] for name in partials}
        marked = {name for name in inodes if name.endswith(SUFFIX) and inodes[name] in ours}
        marked -= indexed_files(self._directory)
        with contextlib.suppress(CheckpointError):
            # What readers take without an index keeps its marks, and is removed once they find another checkpoint.
            kept = marked.intersection(select_files(self._directory, inodes))
            marked -= kept
            ours -= {inodes[name] for name in kept}
        self._remove_unlocked(marked)
        # A partial index is what tells readers not to take shards that it names, so it is removed after them.
        by_index = sorted((name for name in partials if inodes[name] in ours), key=lambda n: partials[n] == INDEX)
        self._remove_unlocked(by_index)

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
        for name in sorted({*self._old, SINGLE} - indexed_files(self._directory) - set(self.names)):
            path = self._path(name)
            try:
                if os.path.islink(path) or os.path.isfile(path):
                    os.unlink(path)
            except OSError as error:
                lines.append(f"{name}: {error.strerror}")
        self._remove_leftovers()
        if lines:
            raise CheckpointError(
                f"{self._what} is in place, but files of the one before cannot be removed",
                lines,
                fix="remove them",
            )
