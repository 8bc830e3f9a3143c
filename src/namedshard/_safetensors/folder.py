"""PURE. Which files of a folder are its checkpoint, by their names alone, and which are only remains of one."""

import collections
import dataclasses
import re
from collections.abc import Collection, Iterable

from namedshard._errors import CheckpointError, message

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
    def whole(self) -> bool:
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


def chosen(directory: str, names: Collection[str]) -> tuple[str, ...]:
    """The index of the folder's checkpoint, or all of its files if it has no index.

    Raises:
        CheckpointError: There is no checkpoint, or only some of its files, or there are several.
    """
    indices = [INDEX] if INDEX in names else sorted(n for n in names if n.endswith(INDEX_SUFFIX))
    if indices == [INDEX] or (len(indices) == 1 and SINGLE not in names):
        return (indices[0],)
    if SINGLE in names:
        return (SINGLE,)
    files = sorted(n for n in names if n.endswith(SUFFIX))
    if not files:
        raise CheckpointError(
            message(f"{directory} holds no checkpoint: neither {INDEX} nor {SINGLE} nor another {SUFFIX} file is in it")
        )
    sets = _shard_sets(files)
    parts = {name for found in sets for name in found.files}
    whole = [found for found in sets if found.whole]
    ours = [found for found in whole if found.generation] if any(map(_is_index_to_come, names)) else []
    rivals = [*indices, *(n for n in files if n not in parts), *(found for found in whole if found not in ours)]
    if len(rivals) == 1 or (ours and not rivals):
        (found,) = rivals or ours[:1]
        return found.files if isinstance(found, ShardSet) else (found,)
    if not rivals:
        raise CheckpointError(
            message(
                f"{directory} holds only parts of a checkpoint, and no {INDEX}",
                [f"{found.pattern}: {len(found.files)} of {found.count} files are there" for found in sets],
                fix="fetch the missing files and the index; if a save was broken off here, save again",
            )
        )
    raise CheckpointError(
        message(
            f"{directory} holds several {SUFFIX} files and no {INDEX} that says which belong together",
            indices or [found.pattern if isinstance(found, ShardSet) else found for found in rivals],
            fix="pass the path of one of them, or fetch the index",
        )
    )


def _is_index_to_come(name: str) -> bool:
    """True for the file that a save writes before it names its shards: until it has the index's name, they are none."""
    return partial_of(name) == INDEX


def left_over(names: Collection[str], named: Collection[str]) -> list[str]:
    """Shards that a save which was broken off has left: no index names them, and no reader takes them.

    A whole set without an index stays as long as nothing else in the folder is taken for its checkpoint.
    """
    try:
        taken = chosen("", names)
    except CheckpointError:
        broken = {name for found in _shard_sets(names) if not found.whole for name in found.files}
        taken = tuple(name for name in names if name not in broken)
    return sorted(n for n in names if is_our_shard(n) and n not in named and n not in taken)
