"""EFFECTS. Where a checkpoint is saved, and in which order, so that a crash at any moment leaves a whole one."""

import json
import os
from collections.abc import Sequence

from namedshard._errors import CheckpointError, human_bytes, message
from namedshard._safetensors.commit import PartialFile, remove_leftovers, remove_unlocked, sync_directory
from namedshard._safetensors.folder import INDEX, SINGLE, is_ours, shard_names
from namedshard._safetensors.index import own_files, remains
from namedshard._safetensors.write import File


class Destination:
    """Where a checkpoint is saved: a folder, or one file in it.

    Attributes:
        names: The names of its files, which `prepare` finds.
        placed: Whether readers find the new checkpoint.
    """

    def __init__(self, directory: str, single: str | None, nbytes: int) -> None:
        self.names: list[str] = []
        self.placed = False
        self._directory = directory
        self._single = single
        self._what = f"{directory}: the checkpoint ({human_bytes(nbytes)})"
        self._old: set[str] = set()
        self._index: PartialFile | None = None

    @property
    def indexed(self) -> bool:
        """Whether there will be an index, and names that nothing refers to before it is there."""
        return self._single is None and self.names != [SINGLE]

    def prepare(self, count: int) -> None:
        """Make the folder, remove what a crash has left there, and find names for this many files."""
        single = self._single
        try:
            os.makedirs(self._directory, exist_ok=True)
            if single is not None:
                remove_leftovers(self._directory, lambda name: name == single)
                self.names = [single]
                return
            # An index that was to come tells that these are remains: it goes after them.
            for name in remains(self._directory):
                remove_unlocked(self._path(name))
            remove_leftovers(self._directory, is_ours)
            self._old = own_files(self._directory)
            # Until it is replaced, an index refers to the very file that it names.
            alone = count == 1 and SINGLE not in self._old
            self.names = [SINGLE] if alone else shard_names(os.listdir(self._directory), count)
        except OSError as error:
            raise CheckpointError(message(f"{self._directory} cannot be written to: {error.strerror}")) from error

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
                message(
                    f"{self._what} is in place, but would not outlast a crash of the machine: {error.strerror}",
                    fix="see to the disk, and save again",
                )
            ) from error
        if self._single is None:
            self._remove_old()

    def close(self) -> None:
        """Remove an index that was not needed."""
        if self._index is not None:
            self._index.close()

    def _path(self, name: str) -> str:
        return os.path.join(self._directory, name)

    def _remove_old(self) -> None:
        """Remove the previous checkpoint, its index first: until that is gone, it is what readers find."""
        if not self.indexed and os.path.lexists(self._path(INDEX)):
            try:
                os.unlink(self._path(INDEX))
                sync_directory(self._directory)
            except OSError as error:
                raise CheckpointError(
                    message(
                        f"{self._what} is written, but readers go by the index of the one before, which cannot be"
                        f" removed: {error.strerror}",
                        fix=f"remove {INDEX}",
                    )
                ) from error
        lines: list[str] = []
        for name in sorted({*self._old, SINGLE} - set(self.names)):
            path = self._path(name)
            try:
                if os.path.islink(path) or os.path.isfile(path):
                    os.unlink(path)
            except OSError as error:
                lines.append(f"{name}: {error.strerror}")
        for name in remains(self._directory):
            remove_unlocked(self._path(name))
        if lines:
            raise CheckpointError(
                message(
                    f"{self._what} is in place, but files of the one before cannot be removed",
                    lines,
                    fix="remove them",
                )
            )
