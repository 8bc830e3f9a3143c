"""What a save finds in its folder, what it leaves there when it is killed at any moment, and what it may not touch."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from checkpoints import encode, structs, write
from support import bits, counting

import namedshard as ns
from namedshard._safetensors import commit as _commit
from namedshard._safetensors.commit import PartialFile

INDEX = "model.safetensors.index.json"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
TREE = {"a": counting(4), "b": counting(4) + 10}
FIRST, SECOND = {"a": TREE["a"]}, {"b": TREE["b"]}


def index(folder: Path, name: str = INDEX, **weight_map: str) -> None:
    (folder / name).write_text(json.dumps({"weight_map": weight_map}))


def listed(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def loads(folder: Path) -> None:
    found = ns.load_safetensors(folder, structs(TREE))
    assert {n: bits(x) for n, x in found.items()} == {n: bits(x) for n, x in TREE.items()}


def refusal(folder: Path) -> str:
    with pytest.raises(ns.CheckpointError) as error:
        ns.read_header(folder)
    return str(error.value).replace(str(folder), "FOLDER")


# --- shards without an index ------------------------------------------------------------------------------------------


def test_parts_of_a_checkpoint_are_none(tmp_path):
    write(tmp_path / "model-00002-of-00003.safetensors", FIRST)
    assert refusal(tmp_path) == (
        f"FOLDER holds only parts of a checkpoint, and no {INDEX}\n"
        "  model-*-of-00003.safetensors: 1 of 3 files are there\n"
        "  fix: fetch the missing files and the index; if a save was broken off here, save again"
    )
    write(tmp_path / "other-00001-of-00002.safetensors", FIRST)
    assert refusal(tmp_path).splitlines()[1:3] == [
        "  other-*-of-00002.safetensors: 1 of 2 files are there",
        "  model-*-of-00003.safetensors: 1 of 3 files are there",
    ]
    write(tmp_path / "model-00001-of-00001.safetensors", TREE)
    loads(tmp_path)


@pytest.mark.parametrize("stem", ["model", "pytorch_model"])
@pytest.mark.parametrize("first", [0, 1])
def test_all_files_of_a_checkpoint_are_one_without_an_index(tmp_path, stem, first):
    write(tmp_path / f"{stem}-0000{first}-of-00002.safetensors", FIRST)
    write(tmp_path / f"{stem}-0000{first + 1}-of-00002.safetensors", SECOND)
    loads(tmp_path)
    write(tmp_path / "model-2-00001-of-00002.safetensors", {"a": TREE["a"] * 0})
    loads(tmp_path)


SAVING = f".{INDEX}.0123456789ab.partial"
"""What is beside shards that a save has named, but not finished with."""


def test_of_several_whole_checkpoints_none_is_taken(tmp_path):
    write(tmp_path / ONE, FIRST)
    write(tmp_path / TWO, SECOND)
    write(tmp_path / "other-00001-of-00002.safetensors", FIRST)
    loads(tmp_path)
    write(tmp_path / "other-00002-of-00002.safetensors", SECOND)
    write(tmp_path / "weights.safetensors", TREE)
    several = (
        f"FOLDER holds several .safetensors files and no {INDEX} that says which belong together\n"
        "  weights.safetensors\n  other-*-of-00002.safetensors\n%s"
        "  fix: pass the path of one of them, or fetch the index"
    )
    assert refusal(tmp_path) == several % "  model-*-of-00002.safetensors\n"
    (tmp_path / SAVING).write_text("")
    assert refusal(tmp_path) == several % ""


def test_shards_of_a_save_that_was_broken_off_are_no_checkpoint_beside_another(tmp_path):
    (tmp_path / SAVING).write_text("")
    write(tmp_path / "model-2-00001-of-00002.safetensors", {"a": TREE["a"] * 0})
    write(tmp_path / "model-2-00002-of-00002.safetensors", {"b": TREE["b"] * 0})
    # Alone they are better than nothing: all of them are there.
    assert sorted(ns.read_header(tmp_path)) == ["a", "b"]
    write(tmp_path / ONE, FIRST)
    write(tmp_path / TWO, SECOND)
    loads(tmp_path)
    write(tmp_path / "weights.safetensors", {"c": counting(3)})
    assert list(ns.read_header(tmp_path)) == ["c"]


def test_a_tensor_in_two_files_without_an_index(tmp_path):
    write(tmp_path / ONE, TREE)
    write(tmp_path / TWO, FIRST)
    with pytest.raises(ns.HeaderError) as error:
        ns.read_header(tmp_path)
    assert str(error.value) == (
        f"{tmp_path} has no {INDEX}, and its files hold 1 tensors twice\n"
        f"  a: in {ONE} and {TWO}\n  fix: fetch the index"
    )


# --- what a save may not touch ----------------------------------------------------------------------------------------


def test_an_index_takes_no_files_along_that_are_not_the_checkpoints(tmp_path):
    folder, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    for place in (folder / "notes", elsewhere):
        place.mkdir(parents=True)
        write(place / "keep.safetensors", TREE)
    os.symlink(elsewhere, folder / "link")
    (folder / "config.json").write_text("{}")
    write(folder / "old.safetensors", FIRST)
    index(
        folder,
        a="config.json",
        b="notes/keep.safetensors",
        c="link/keep.safetensors",
        d="old.safetensors",
        e="./link/keep.safetensors",
    )
    ns.save_safetensors(TREE, folder)
    assert listed(folder) == ["config.json", "link", "model.safetensors", "notes"]
    assert listed(folder / "notes") == listed(elsewhere) == ["keep.safetensors"]
    loads(folder)


def test_what_another_index_names_stays(tmp_path):
    write(tmp_path / ONE, FIRST)
    write(tmp_path / TWO, SECOND)
    index(tmp_path, "theirs.safetensors.index.json", a=ONE, b=TWO)
    loads(tmp_path)
    ns.save_safetensors({"x": counting(3)}, tmp_path)
    assert listed(tmp_path) == [ONE, TWO, "model.safetensors", "theirs.safetensors.index.json"]
    assert list(ns.read_header(tmp_path)) == ["x"]
    loads(tmp_path / "theirs.safetensors.index.json")  # type: ignore[arg-type]
    (tmp_path / "theirs.safetensors.index.json").write_text("nonsense")
    ns.save_safetensors({"x": counting(3)}, tmp_path)
    assert {ONE, TWO} <= set(listed(tmp_path))


def test_a_folder_in_a_files_place_stays(tmp_path):
    (tmp_path / "model.safetensors").mkdir()
    ns.save_safetensors(TREE, tmp_path, max_shard_size=16)
    loads(tmp_path)
    assert listed(tmp_path) == [ONE, TWO, "model.safetensors", INDEX]


DOWNLOADS = {
    "some files": ["model-00001-of-00003.safetensors", "model-2-00003-of-00004.safetensors"],
    "all files": [ONE, TWO],
    "beside another": [ONE, TWO, "weights.safetensors"],
    "of another name": ["lora-00001-of-00002.safetensors", "adapter_model.safetensors"],
    "one of one": ["model-00001-of-00001.safetensors"],
    "an index first": [INDEX, TWO, "model-00003-of-00003.safetensors"],
    "of other tools": [
        "model.safetensors.part",
        "model.safetensors.aria2",
        "model-00001-of-00002.safetensors.incomplete",
        f"{TWO}.0123456789ab.partial",
        f".{TWO}.Ab3xYz",
        f".{TWO}.0123456789AB.partial",
        ".model-1-of-2.safetensors.0123456789ab.partial",
        ".other.safetensors.0123456789ab.partial",
        "model-00001-of-2.safetensors",
        ".cache",
    ],
}


@pytest.mark.parametrize("limit", ["5GB", 16])
@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("case", DOWNLOADS)
def test_an_unfinished_download_stays(tmp_path, case, crash, limit):
    for name in DOWNLOADS[case]:
        write(tmp_path / name, FIRST)
    kept = set(DOWNLOADS[case]) - {INDEX}
    if INDEX in DOWNLOADS[case]:
        index(tmp_path, a=ONE, b=TWO)
    if crash:
        # It had found names for its shards before the download began.
        for name in (ONE, "model-3-00001-of-00002.safetensors", "model.safetensors"):
            (tmp_path / f".{name}.0123456789ab.partial").write_bytes(b"cut off")
        (tmp_path / SAVING).write_text(json.dumps({"weight_map": {"a": ONE, "b": TWO}}))
    for path in (tmp_path, tmp_path / "one.safetensors"):
        ns.save_safetensors(TREE, path, max_shard_size=limit)
        loads(path)
    found = set(listed(tmp_path))
    assert kept <= found
    assert all((tmp_path / n).read_bytes() == encode(FIRST) for n in kept)
    if case != "of other tools":
        assert not [name for name in found if name.startswith(".")]


def test_a_link_to_a_checkpoint_elsewhere_goes_and_the_checkpoint_stays(tmp_path):
    elsewhere, folder = tmp_path / "blobs", tmp_path / "snapshot"
    ns.save_safetensors(TREE, elsewhere, max_shard_size=16)
    folder.mkdir()
    for name in listed(elsewhere):
        os.symlink(elsewhere / name, folder / name)
    ns.save_safetensors(TREE, folder)
    assert listed(folder) == ["model.safetensors"]
    loads(elsewhere)


def test_a_file_that_two_indices_name_stays(tmp_path):
    ns.save_safetensors(TREE, tmp_path, max_shard_size=16)
    index(tmp_path, "half.safetensors.index.json", a=ONE)
    ns.save_safetensors(TREE, tmp_path)
    assert listed(tmp_path) == ["half.safetensors.index.json", ONE, "model.safetensors"]
    index(tmp_path, "half.safetensors.index.json", a="model.safetensors")
    (tmp_path / ONE).unlink()
    ns.save_safetensors(TREE, tmp_path)
    assert listed(tmp_path) == [
        "half.safetensors.index.json",
        "model-00001-of-00001.safetensors",
        "model.safetensors",
        INDEX,
    ]


def test_shards_never_take_the_place_of_a_file_that_came_meanwhile(tmp_path, monkeypatch):
    def late(directory: str) -> None:
        if not (tmp_path / TWO).exists():
            write(tmp_path / TWO, SECOND)

    original = _commit.Destination.write_index

    def write_index(self: Any, files: Any) -> None:
        original(self, files)
        late("")

    monkeypatch.setattr(_commit.Destination, "write_index", write_index)
    with pytest.raises(ns.CheckpointError) as error:
        ns.save_safetensors(TREE, tmp_path, max_shard_size=16)
    assert str(error.value) == (
        f"{tmp_path}: the checkpoint (32 B) cannot be written: File exists; what was there before is untouched\n"
        "  fix: free some space, or save elsewhere"
    )
    assert listed(tmp_path) == [TWO]
    assert (tmp_path / TWO).read_bytes() == encode(SECOND)


def test_shards_of_a_save_that_is_under_way_stay(tmp_path):
    saving = PartialFile(str(tmp_path / TWO), 8)
    saving.write(0, memoryview(b"12345678"))
    saving.commit(True)
    ns.save_safetensors(TREE, tmp_path)
    assert listed(tmp_path) == [saving.name, TWO, "model.safetensors"]
    # Nobody told it whether its files are named by an index.
    saving.close(placed=None)
    assert listed(tmp_path) == [saving.name, TWO, "model.safetensors"]
    ns.save_safetensors(TREE, tmp_path)
    assert listed(tmp_path) == ["model.safetensors"]


def test_file_systems_without_hard_links(tmp_path, monkeypatch):
    def link(*args: Any, **options: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    for limit in (16, 16, "5GB"):
        ns.save_safetensors(TREE, tmp_path, max_shard_size=limit)
        loads(tmp_path)
    assert listed(tmp_path) == ["model.safetensors"]


# --- failures after the new checkpoint is in place --------------------------------------------------------------------


def failing(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, when: Any) -> None:
    original = getattr(module, name)

    def call(path: Any) -> Any:
        if when(os.path.basename(path)):
            raise OSError(13, "Permission denied")
        return original(path)

    monkeypatch.setattr(module, name, call)


def test_an_old_file_that_cannot_be_removed(tmp_path, monkeypatch):
    ns.save_safetensors({n: x * 0 for n, x in TREE.items()}, tmp_path, max_shard_size=16)
    failing(monkeypatch, _commit.os, "unlink", lambda name: name in (ONE, TWO))
    with pytest.raises(ns.CheckpointError) as error:
        ns.save_safetensors(TREE, tmp_path)
    assert str(error.value) == (
        f"{tmp_path}: the checkpoint (32 B) is in place, but files of the one before cannot be removed\n"
        f"  {ONE}: Permission denied\n  {TWO}: Permission denied\n  fix: remove them"
    )
    loads(tmp_path)


def test_an_old_index_that_cannot_be_removed(tmp_path, monkeypatch):
    ns.save_safetensors(TREE, tmp_path, max_shard_size=16)
    failing(monkeypatch, _commit.os, "unlink", lambda name: name == INDEX)
    with pytest.raises(ns.CheckpointError) as error:
        ns.save_safetensors({n: x * 0 for n, x in TREE.items()}, tmp_path)
    assert str(error.value) == (
        f"{tmp_path}: the checkpoint (32 B) is written, but readers go by the index of the one before, which cannot be"
        f" removed: Permission denied\n  fix: remove {INDEX}"
    )
    loads(tmp_path)


@pytest.mark.parametrize("limit", ["5GB", 16])
def test_a_disk_that_fails_when_the_new_checkpoint_is_in_place(tmp_path, monkeypatch, limit):
    ns.save_safetensors({n: x * 0 for n, x in TREE.items()}, tmp_path, max_shard_size=limit)
    calls: list[str] = []
    # Several files are brought to the disk before their index.
    failing(monkeypatch, _commit, "sync_directory", lambda name: calls.append(name) or len(calls) == 1 + (limit == 16))
    with pytest.raises(ns.CheckpointError) as error:
        ns.save_safetensors(TREE, tmp_path, max_shard_size=limit)
    assert str(error.value) == (
        f"{tmp_path}: the checkpoint (32 B) is in place, but would not outlast a crash of the machine: Permission"
        " denied\n  fix: see to the disk, and save again"
    )
    loads(tmp_path)


def test_files_that_were_named_already_are_taken_back(tmp_path, monkeypatch):
    ns.save_safetensors(TREE, tmp_path, max_shard_size=16)
    before = {n: (tmp_path / n).read_bytes() for n in listed(tmp_path)}
    failing(monkeypatch, _commit, "sync_directory", lambda name: True)
    with pytest.raises(ns.CheckpointError) as error:
        ns.save_safetensors({n: x * 0 for n, x in TREE.items()}, tmp_path, max_shard_size=16)
    assert str(error.value) == (
        f"{tmp_path}: the checkpoint (32 B) cannot be written: Permission denied; what was there before is untouched\n"
        "  fix: free some space, or save elsewhere"
    )
    assert {n: (tmp_path / n).read_bytes() for n in listed(tmp_path)} == before


# --- interrupted ------------------------------------------------------------------------------------------------------


def descriptors(folder: Path) -> list[str]:
    found = (f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd"))
    return [x for x in (os.readlink(fd) for fd in found if os.path.exists(fd)) if x.startswith(str(folder))]


@pytest.mark.parametrize("limit", ["5GB", 64 << 10])
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), RuntimeError("mine"), BrokenPipeError(32, "Broken pipe"), ns.CheckpointError("mine")]
)
def test_what_a_callback_raises_comes_out_and_nothing_is_left(tmp_path, error, limit):
    ns.save_safetensors(TREE, tmp_path)

    def progress(done: int, total: int) -> None:
        raise error

    tree = {"a": counting(1 << 20), "b": counting(1 << 20)}
    with pytest.raises(type(error)) as raised:
        ns.save_safetensors(tree, tmp_path, max_shard_size=limit, progress=progress)
    assert raised.value is error
    assert listed(tmp_path) == ["model.safetensors"]
    assert descriptors(tmp_path) == []
    loads(tmp_path)


# --- killed -----------------------------------------------------------------------------------------------------------

KILLS = """
    import itertools, json, os, shutil, signal, sys, warnings
    import numpy as np, namedshard as ns
    from safetensors.numpy import save_file
    warnings.simplefilter("ignore")  # JAX warns of fork; no backend is up here, and numpy is all that is saved.
    root = sys.argv[1]
    INDEX = "model.safetensors.index.json"

    def tree(value):
        return {name: np.full(3, value, np.int32) for name in "ab"}

    def whole(folder):
        found = ns.read_header(folder)
        assert sorted(found) == ["a", "b"], found
        (value,) = {int(np.fromfile(i.file, np.int32, 3, offset=i.start)[k]) for i in found.values() for k in range(3)}
        return value

    def parts(folder, names, index):
        for file, tensor in zip(names, "ab"):
            save_file({tensor: tree(1)[tensor]}, f"{folder}/{file}")
        if index:
            weight_map = dict(zip("ab", names))
            with open(f"{folder}/{index}", "w") as f:
                json.dump({"weight_map": weight_map}, f)

    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    BEFORE = {
        "nothing": lambda folder: None,
        "one file": lambda folder: ns.save_safetensors(tree(1), folder),
        "two files": lambda folder: ns.save_safetensors(tree(1), folder, max_shard_size=1),
        "another name": lambda folder: save_file(tree(1), f"{folder}/weights.safetensors"),
        "no index": lambda folder: parts(folder, shards, None),
        "another's without index": lambda folder: parts(folder, [f"pytorch_{n}" for n in shards], None),
        "another index": lambda folder: parts(folder, shards, "theirs.safetensors.index.json"),
        "an index that names the single file": lambda folder: parts(folder, ["model.safetensors", shards[1]], INDEX),
    }
    STEPS = ("replace", "link", "unlink", "fsync")

    def killed(folder, limit, nth):
        # Whether the save was killed before it came to its end.
        child = os.fork()
        if child == 0:
            steps = itertools.count(1)
            for name in STEPS:
                def step(*args, original=getattr(os, name), **options):
                    if next(steps) == nth:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return original(*args, **options)
                setattr(os, name, step)
            try:
                ns.save_safetensors(tree(2), folder, max_shard_size=limit)
            except BaseException as error:
                print(repr(error), flush=True)
                os._exit(1)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        assert os.WIFSIGNALED(status) or status == 0, status
        return os.WIFSIGNALED(status)

    count = 0
    for (name, prepare), limit in itertools.product(BEFORE.items(), ("5GB", 1)):
        seen = set()
        for nth in itertools.count(1):
            folder = f"{root}/{count}"
            count += 1
            os.mkdir(folder)
            prepare(folder)
            went_on = killed(folder, limit, nth)
            try:
                found = whole(folder)
            except ns.CheckpointError:
                assert name == "nothing", (name, limit, nth, os.listdir(folder))
                found = None
            assert found in (1, 2, None), found
            seen.add(found)
            ns.save_safetensors(tree(3), folder, max_shard_size=limit)
            assert whole(folder) == 3, (name, limit, nth, os.listdir(folder))
            ns.save_safetensors(tree(4), folder)
            ours = sorted(n for n in os.listdir(folder) if n.startswith((".", "model")))
            kept = shards if name in ("another index", "no index") else []
            assert ours == [*kept, "model.safetensors"], (name, limit, nth, ours)
            shutil.rmtree(folder)
            if not went_on:
                break
        assert found == 2 and seen == ({None, 2} if name == "nothing" else {1, 2}), (name, limit, seen)
    print(count)
"""


def test_killed_at_each_step_a_save_leaves_the_old_checkpoint_or_the_new(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(KILLS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout) > 80
