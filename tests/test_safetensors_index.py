"""Which files make up a checkpoint: indices, Hugging Face's cache of links, and what must not be followed."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import Recorder, raw, structs, write, write_sharded
from support import bits, counting, nothing_moved

import namedshard as ns

INDEX = "model.safetensors.index.json"
TENSORS = {"a": counting(4), "b": counting(2, 3) + 10, "c": counting(5) + 100}


def loads(path: Any, tensors: dict[str, np.ndarray] = TENSORS) -> None:
    tree = ns.load_safetensors(path, structs(tensors))
    assert {n: bits(x) for n, x in tree.items()} == {n: bits(x) for n, x in tensors.items()}
    assert {n: i.shape for n, i in ns.read_header(path).items()} == {n: x.shape for n, x in tensors.items()}


def refuses(path: Any, kind: type[Exception], message: str) -> None:
    for call in (lambda: ns.read_header(path), lambda: ns.load_safetensors(path, structs(TENSORS))):
        with nothing_moved(), pytest.raises(kind) as error:
            call()
        assert str(error.value) == message


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    files = {
        "part one.safetensors": {"a": TENSORS["a"], "b": TENSORS["b"]},
        "weights_2.safetensors": {"c": TENSORS["c"]},
    }
    return write_sharded(tmp_path / "model", files)


def test_a_file_a_directory_and_an_index_are_paths(sharded, tmp_path, monkeypatch):
    loads(sharded)
    loads(str(sharded) + "/")
    loads(sharded / INDEX)
    loads(write(tmp_path / "single.safetensors", TENSORS))
    monkeypatch.chdir(sharded)
    loads(".")
    loads(INDEX)
    loads("part one.safetensors", {"a": TENSORS["a"], "b": TENSORS["b"]})


def test_the_index_decides_and_stray_files_are_ignored(sharded):
    write(sharded / "model.safetensors", {"a": TENSORS["a"] * 0})
    write(sharded / "stray.safetensors", {"a": TENSORS["a"] * 0})
    write(sharded / "weights_2.safetensors", {"c": TENSORS["c"], "not in the index": TENSORS["a"]})
    loads(sharded)


def test_directories_without_index(tmp_path):
    write(tmp_path / "adapter_model.safetensors", TENSORS)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / ".adapter_model.safetensors.0123456789ab.partial").write_bytes(b"")
    loads(tmp_path)
    write(tmp_path / "other.safetensors", {"x": TENSORS["a"]})
    refuses(
        tmp_path,
        ns.CheckpointError,
        f"{tmp_path} holds several .safetensors files and no {INDEX} that says which belong together\n"
        "  adapter_model.safetensors\n  other.safetensors\n"
        "  fix: pass the path of one of them, or fetch the index",
    )
    write(tmp_path / "model.safetensors", TENSORS)
    loads(tmp_path)
    (tmp_path / "empty").mkdir()
    refuses(
        tmp_path / "empty",
        ns.CheckpointError,
        f"{tmp_path}/empty holds no checkpoint: neither {INDEX} nor model.safetensors nor another"
        " .safetensors file is in it",
    )
    refuses(tmp_path / "absent", ns.CheckpointError, f"{tmp_path}/absent cannot be opened: No such file or directory")


def test_an_index_of_another_name_is_found_if_it_is_the_only_one(sharded):
    os.rename(sharded / INDEX, sharded / "pytorch.safetensors.index.json")
    loads(sharded)


def test_files_of_the_index_that_are_not_there_are_listed_at_once(sharded):
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"] |= {"d": "gone-1.safetensors", "e": "gone-1.safetensors", "f": "gone-2.safetensors"}
    (sharded / INDEX).write_text(json.dumps(index))
    where = sharded / INDEX
    refuses(
        sharded,
        ns.CheckpointError,
        f"{where}: 2 of 4 files of the index cannot be read\n"
        f"  gone-1.safetensors (2 tensors): {sharded}/gone-1.safetensors cannot be opened: No such file or directory\n"
        f"  gone-2.safetensors (1 tensor): {sharded}/gone-2.safetensors cannot be opened: No such file or directory\n"
        "  fix: fetch the missing files into the index's directory",
    )


def test_a_stale_index_lists_its_tensors(sharded):
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"] |= {"d": "weights_2.safetensors"}
    (sharded / INDEX).write_text(json.dumps(index))
    refuses(
        sharded,
        ns.HeaderError,
        f"{sharded / INDEX}: the index and its files do not agree on 1 of 4 tensors\n"
        "  d: not in weights_2.safetensors\n"
        "  fix: fetch index and files again, from one revision",
    )


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("../secret.safetensors", "'../secret.safetensors' leaves the checkpoint's directory"),
        ("sub/../../secret.safetensors", "'sub/../../secret.safetensors' leaves the checkpoint's directory"),
        ("..\\secret.safetensors", "'..\\\\secret.safetensors' leaves the checkpoint's directory"),
        ("%2e%2e/secret.safetensors", "'%2e%2e/secret.safetensors' leaves the checkpoint's directory"),
        ("..", "'..' leaves the checkpoint's directory"),
        ("/etc/passwd", "'/etc/passwd' is not a relative path"),
        ("\\\\host\\share", "'\\\\\\\\host\\\\share' is not a relative path"),
        ("C:secret", "'C:secret' is not a relative path"),
        ("http://elsewhere/x", "'http://elsewhere/x' is not a relative path"),
        ("", "'' is not a relative path"),
        ("a\0b", "'a\\x00b' is not a file name"),
        (7, "7 is not a file name"),
        (None, "null is not a file name"),
        (["a"], '["a"] is not a file name'),
    ],
)
def test_an_index_may_only_name_files_in_its_directory(tmp_path, entry, reason):
    write(tmp_path / "secret.safetensors", TENSORS)
    inside = tmp_path / "model"
    inside.mkdir()
    (inside / INDEX).write_text(json.dumps({"weight_map": {"a": entry}}))
    refuses(inside, ns.HeaderError, f"{inside / INDEX}: the index names files that may not be read\n  a: {reason}")


def test_files_below_the_directory_may_be_named(tmp_path):
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub" / "x.safetensors", TENSORS)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(TENSORS, "sub/x.safetensors")}))
    loads(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "nonsense",
            "the index is not valid JSON: Expecting value: line 1 column 1 (char 0)\n  fix: fetch the file again",
        ),
        ("[]", "the index holds a JSON list, not an object\n  fix: fetch the file again"),
        ("{}", "the index has no weight_map from tensor to file"),
        ('{"weight_map": []}', "the index has no weight_map from tensor to file"),
    ],
)
def test_an_index_that_is_none(tmp_path, text, message):
    (tmp_path / INDEX).write_text(text)
    refuses(tmp_path, ns.HeaderError, f"{tmp_path / INDEX}: {message}")


def test_hugging_faces_cache_of_symbolic_links_is_followed(tmp_path):
    """``models--org--name/snapshots/<revision>/file -> ../../blobs/<hash>``."""
    repo = tmp_path / "models--org--name"
    snapshot = repo / "snapshots" / "0123456789abcdef"
    (repo / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    write_sharded(
        tmp_path / "source",
        {
            "model-00001-of-00002.safetensors": {"a": TENSORS["a"], "b": TENSORS["b"]},
            "model-00002-of-00002.safetensors": {"c": TENSORS["c"]},
        },
    )
    for i, file in enumerate(sorted((tmp_path / "source").iterdir())):
        blob = repo / "blobs" / f"{i:064x}"
        os.rename(file, blob)
        os.symlink(f"../../blobs/{blob.name}", snapshot / file.name)
    loads(snapshot)
    os.symlink(snapshot, tmp_path / "link")
    loads(tmp_path / "link")


def test_a_loop_of_links_a_directory_and_a_fifo_in_a_files_place(tmp_path):
    where = tmp_path / "model"
    where.mkdir()
    path = where / "model.safetensors"
    os.symlink("other", path)
    os.symlink("model.safetensors", where / "other")
    refuses(where, ns.CheckpointError, f"{path} cannot be opened: Too many levels of symbolic links")
    path.unlink()
    path.mkdir()
    refuses(where, ns.CheckpointError, f"{path} is a directory, where a file is expected")
    path.rmdir()
    os.mkfifo(path)
    refuses(where, ns.CheckpointError, f"{path} is no regular file, where a file is expected")
    path.unlink()
    refuses("/dev/zero", ns.CheckpointError, "/dev/zero is no regular file, where a file is expected")
    path.write_bytes(raw({}))
    assert ns.read_header(where) == {}


def test_headers_alone_are_read_for_headers(tmp_path):
    from namedshard._safetensors.index import find_tensors
    from namedshard._safetensors.source import OpenFiles

    path = write(tmp_path / "x.safetensors", {"a": counting(10_000)})
    recorder = Recorder()
    with OpenFiles(recorder) as files:
        find_tensors(str(path), files)
    assert recorder.data_bytes() == 0
    assert sum(stop - start for _, start, stop in recorder.ranges) == path.stat().st_size - 40_000


def test_a_checkpoint_that_is_replaced_while_it_is_loaded_is_loaded_as_it_was(tmp_path):
    path = write(tmp_path / "x.safetensors", TENSORS)
    from namedshard._safetensors.index import find_tensors
    from namedshard._safetensors.source import OpenFiles

    with OpenFiles() as files:
        found = find_tensors(str(path), files)
        ns.save_safetensors({n: x * 0 for n, x in TENSORS.items()}, path)
        buffer = bytearray(found["c"].nbytes)
        files[str(path)].read(found["c"].start, memoryview(buffer))
        assert bytes(buffer) == bits(TENSORS["c"])
    loads(path, {n: x * 0 for n, x in TENSORS.items()})
