"""PURE. Selects by name which files of a folder are its checkpoint, and which an unfinished save has left."""

import collections
import dataclasses
import re
from collections.abc import Collection, Iterable, Sequence

from namedshard._errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors", re.DOTALL)
_PARTIAL = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{12}\.partial", re.DOTALL)
_OUR_STEM = re.compile(r"model(-(?P<generation>\d+))?")


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class ShardSet:
    """The files of a folder whose names say that they are parts of one checkpoint. Ordered by age, as far as known."""

    generation: int
    count: int
    stem: str
    files: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """True if no file is missing."""
        return len(self.files) == self.count

    @property
    def pattern(self) -> str:
        """The files' names, for a message."""
        return f"{self.stem}-*-of-{self.count:05d}{SUFFIX}"


def _shard_sets(names: Iterable[str]) -> list[ShardSet]:
    found: dict[tuple[str, int], list[str]] = collections.defaultdict(list)
    for name in sorted(names):
        match = _SHARD.fullmatch(name)
        if match and int(match["count"]) > 1:
            found[match["stem"], int(match["count"])].append(name)
    return sorted(ShardSet(_generation(stem) or 0, count, stem, tuple(files)) for (stem, count), files in found.items())


def _generation(stem: str) -> int | None:
    """The number in a name that `shard_names` gives; None for those of others."""
    match = _OUR_STEM.fullmatch(stem)
    return None if match is None else int(match["generation"] or 1)


def is_ours(name: str) -> bool:
    """True for all names that a save in a folder gives."""
    return name in (SINGLE, INDEX) or is_our_shard(name)


def is_our_shard(name: str) -> bool:
    """True for names that `shard_names` gives."""
    match = _SHARD.fullmatch(name)
    return match is not None and _generation(match["stem"]) is not None


def partial_of(name: str) -> str | None:
    """Which name a file is to have that is still being written, going by that which it has; None for others."""
    match = _PARTIAL.fullmatch(name)
    return None if match is None else match["name"]


def shard_names(taken: Collection[str], count: int) -> list[str]:
    """Names in Hugging Face's pattern that no file of the folder has yet."""
    generation = 1
    while True:
        stem = "model" if generation == 1 else f"model-{generation}"
        names = [f"{stem}-{i + 1:05d}-of-{count:05d}{SUFFIX}" for i in range(count)]
        if not any(name in taken for name in names):
            return names
        generation += 1


def select_files(directory: str, names: Collection[str]) -> tuple[str, ...]:
    """The index of the folder's checkpoint, or all of its files if it has no index.

    Raises:
        CheckpointError: There is no checkpoint, or only some of its files, or there are several.
    """
    indices = sorted(name for name in names if name.endswith(INDEX_SUFFIX))
    if (decisive := _decisive_file(names, indices)) is not None:
        return (decisive,)
    files = sorted(name for name in names if name.endswith(SUFFIX))
    if not files:
        raise CheckpointError(
            f"{directory} holds no checkpoint: neither {INDEX} nor {SINGLE} nor another {SUFFIX} file is in it"
        )
    sets = _shard_sets(files)
    # While a save is at its index, its shards are there too, but the checkpoint is still the one before.
    saving = any(map(_is_partial_index, names))
    replacing = [found for found in sets if saving and found.complete and found.generation]
    candidates = _candidates(indices, files, sets, replacing)
    if len(candidates) == 1:
        return candidates[0][1]
    if replacing and not candidates:
        return replacing[0].files
    raise _undecided(directory, sets, indices or [name for name, _ in candidates])


def _decisive_file(names: Collection[str], indices: Sequence[str]) -> str | None:
    """The file that makes the folder a checkpoint, whatever else is in it."""
    if INDEX in indices:
        return INDEX
    if SINGLE in names:
        return SINGLE
    return indices[0] if len(indices) == 1 else None


def _candidates(
    indices: Sequence[str], files: Sequence[str], sets: Sequence[ShardSet], replacing: Sequence[ShardSet]
) -> list[tuple[str, tuple[str, ...]]]:
    """What may be the folder's checkpoint: its name for a message, and its files."""
    in_sets = {name for found in sets for name in found.files}
    alone = [*indices, *(name for name in files if name not in in_sets)]
    complete = [found for found in sets if found.complete and found not in replacing]
    return [*((name, (name,)) for name in alone), *((found.pattern, found.files) for found in complete)]


def _undecided(directory: str, sets: Sequence[ShardSet], candidates: Sequence[str]) -> CheckpointError:
    if not candidates:
        return CheckpointError(
            f"{directory} holds only parts of a checkpoint, and no {INDEX}",
            [f"{found.pattern}: {len(found.files)} of {found.count} files are there" for found in sets],
            fix="fetch the missing files and the index; if a save was broken off here, save again",
        )
    return CheckpointError(
        f"{directory} holds several {SUFFIX} files and no {INDEX} that says which belong together",
        candidates,
        fix="pass the path of one of them, or fetch the index",
    )


def _is_partial_index(name: str) -> bool:
    """True for the file that a save writes before it names its shards, and that becomes the index after that."""
    return partial_of(name) == INDEX


def select_abandoned(names: Collection[str], named: Collection[str]) -> list[str]:
    """Shards left by a save that did not finish: no index names them, and no reader takes them.

    A complete set without an index stays as long as nothing else in the folder is taken for its checkpoint.
    """
    try:
        kept = set(select_files("", names))
    except CheckpointError:
        kept = {*names} - {name for found in _shard_sets(names) if not found.complete for name in found.files}
    return sorted(name for name in names if is_our_shard(name) and name not in {*kept, *named})
