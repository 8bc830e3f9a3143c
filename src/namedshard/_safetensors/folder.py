"""PURE. Selects by name which files of a folder are its checkpoint."""

import collections
import itertools
import re
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from namedshard._errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors", re.DOTALL)
_PARTIAL = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{12}\.partial", re.DOTALL)
_OUR_STEM = re.compile(r"model(-(?P<generation>\d+))?")


class _ShardSet(NamedTuple):
    """The files of a folder whose names say that they are parts of one checkpoint. Ordered by age, as far as known."""

    generation: int
    total: int
    stem: str
    files: tuple[str, ...]

    @property
    def complete(self) -> bool:
        return len(self.files) == self.total

    @property
    def pattern(self) -> str:
        return f"{self.stem}-*-of-{self.total:05d}{SUFFIX}"


def _shard_sets(names: Iterable[str]) -> list[_ShardSet]:
    found: dict[tuple[str, int], list[str]] = collections.defaultdict(list)
    for name in sorted(names):
        match = _SHARD.fullmatch(name)
        if match and int(match["count"]) > 1:
            found[match["stem"], int(match["count"])].append(name)
    return sorted(_ShardSet(_generation(stem), count, stem, tuple(files)) for (stem, count), files in found.items())


def _generation(stem: str) -> int:
    """The number in a name that `shard_names` gives; 0 for those of others."""
    match = _OUR_STEM.fullmatch(stem)
    return 0 if match is None else int(match["generation"] or 1)


def is_ours(name: str) -> bool:
    """True for all names that a save in a folder gives."""
    return name in (SINGLE, INDEX) or _is_our_shard(name)


def _is_our_shard(name: str) -> bool:
    match = _SHARD.fullmatch(name)
    return match is not None and _OUR_STEM.fullmatch(match["stem"]) is not None


def partial_of(name: str) -> str | None:
    """Which name a file is to have that is still being written, going by that which it has; None for others."""
    match = _PARTIAL.fullmatch(name)
    return None if match is None else match["name"]


def shard_names(taken: Collection[str], count: int) -> list[str]:
    """Names in Hugging Face's pattern that no file of the folder has yet."""
    for generation in itertools.count(1):
        stem = "model" if generation == 1 else f"model-{generation}"
        names = [f"{stem}-{i + 1:05d}-of-{count:05d}{SUFFIX}" for i in range(count)]
        if not any(name in taken for name in names):
            return names
    raise AssertionError


def select_files(directory: str, names: Collection[str]) -> tuple[str, ...]:
    """The index of the folder's checkpoint, or all of its files if it has no index."""
    indices = sorted(name for name in names if name.endswith(INDEX_SUFFIX))
    for name in (INDEX, SINGLE):
        if name in names:
            return (name,)
    if len(indices) == 1:
        return (indices[0],)
    files = sorted(name for name in names if name.endswith(SUFFIX))
    if not files:
        raise CheckpointError(
            f"{directory} holds no checkpoint: neither {INDEX} nor {SINGLE} nor another {SUFFIX} file is in it"
        )
    sets = _shard_sets(files)
    candidates = _candidates(names, indices or files, sets)
    if len(candidates) == 1:
        return next(iter(candidates.values()))
    if not candidates:
        raise CheckpointError(
            f"{directory} holds only parts of a checkpoint, and no {INDEX}",
            [f"{found.pattern}: {len(found.files)} of {found.total} files are there" for found in sets],
            fix="fetch the missing files and the index; if a save was broken off here, save again",
        )
    raise CheckpointError(
        f"{directory} holds several {SUFFIX} files and no {INDEX} that says which belong together",
        indices or candidates,
        fix="pass the path of one of them, or fetch the index",
    )


def _candidates(names: Collection[str], alone: Sequence[str], sets: Sequence[_ShardSet]) -> dict[str, tuple[str, ...]]:
    """What may be the folder's checkpoint: its name for a message, and its files."""
    in_sets = {name for found in sets for name in found.files}
    complete = {found.pattern: found for found in sets if found.complete}
    # While a save is at its index, its shards are there too, but the checkpoint is still the one before.
    saving = any(partial_of(name) == INDEX for name in names)
    others = {name: found.files for name, found in complete.items() if not (saving and found.generation)}
    candidates = {name: (name,) for name in alone if name not in in_sets} | others
    return candidates or {name: found.files for name, found in list(complete.items())[:1]}
