"""Saves that go wrong on one process: all of them are told, what was there before stays, and the next save works."""

import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import namedshard as ns
from mp import tools
from mp.checkpoints import LINE, VALUE, everybody, folder, placed, verify
from mp.tools import COUNT, ME, equal, message_of, own, put
from namedshard._processes import coordination as _coordination
from namedshard._processes.coordination import Rounds
from namedshard._safetensors import save as _save
from namedshard._safetensors.commit import PartialFile
from namedshard._safetensors.write import FileWriter

_coordination.POLL_S = 0.1
_save.VISIBLE_S = 0.2
LAST = COUNT - 1
SHARD = VALUE.nbytes + 1
BEFORE = {"a": VALUE, "b": VALUE + 1}


def before(name: str) -> Path:
    """A folder with a checkpoint of several files."""
    path = folder() / name
    ns.save_safetensors(BEFORE, path, max_shard_size=SHARD)
    verify(path, BEFORE)
    return path


def listed(path: Path) -> dict[str, str]:
    """Each file, with a hash of what is in it."""
    return {n: hashlib.sha256((path / n).read_bytes()).hexdigest() for n in sorted(os.listdir(path))}


def told(path: Path, call: Callable[[], Any], remains: Sequence[str] = ()) -> str:
    """What a failing save says here, without the path; the folder must be as it was, and the next save work."""
    contents = listed(path)
    everybody()
    try:
        call()
        said = "nothing"
    except BaseException as error:
        said = f"{type(error).__name__}: {error}".replace(str(path), "PATH")
    everybody()
    # What remains has its mark beside it.
    equal({n: x for n, x in listed(path).items() if not any(name in n for name in remains)}, contents)
    verify(path, BEFORE)
    ns.save_safetensors(BEFORE | {"a": put(VALUE, LINE, P("x"))}, path, max_shard_size=SHARD)
    verify(path, BEFORE)
    equal(len(os.listdir(path)), 3)
    everybody()
    return said


def patched(where: Any, name: str, by: Any, *, process: int = LAST) -> AbstractContextManager[None]:
    """A function made from the one in a place, on one process."""
    original = getattr(where, name)
    return tools.patched(where, name, by(original) if process == ME else original)


def raising(error: BaseException, at: int = 1) -> Callable[[Any], Any]:
    """A function that does its work, and raises the n-th time."""

    def wrapped(original: Any) -> Any:
        calls: list[int] = []

        def call(*args: Any, **options: Any) -> Any:
            calls.append(1)
            if len(calls) == at:
                raise error
            return original(*args, **options)

        return call

    return wrapped


def case_a_callback_that_raises() -> list[str]:
    out: list[str] = []
    for i, error in enumerate((RuntimeError("no more bars"), BrokenPipeError(32, "Broken pipe"), KeyboardInterrupt())):

        def progress(done: int, total: int, error: BaseException = error) -> None:
            if ME == LAST:
                raise error

        path = before(f"callback {i}")
        options: Any = {"max_shard_size": SHARD, "progress": progress}
        out.append(told(path, lambda path=path, options=options: ns.save_safetensors(placed(), path, **options)))
    return out


def case_files_that_cannot_be_written_or_named() -> list[str]:
    out: list[str] = []
    for name in ("write", "finish", "commit"):
        path = before(name)
        with patched(PartialFile, name, raising(OSError(28, "No space left on device"))):
            # What was named before the failure is taken back.
            out.append(told(path, lambda path=path: ns.save_safetensors(placed(), path, max_shard_size=SHARD)))
    return out


def case_a_process_that_is_interrupted_in_a_file_of_its_own_goes_on_in_the_exchange_of_another() -> str:
    path = before("interrupted")
    tree = {"a": VALUE + 5, "b": put(VALUE, LINE, P("x"))}
    with patched(FileWriter, "_write_tensors", raising(KeyboardInterrupt())):
        return told(path, lambda: ns.save_safetensors(tree, path, max_shard_size=SHARD))


def case_values_that_do_not_fit() -> str:
    path = before("narrow")
    tree = {"fits": VALUE[:2] % 100, "large": VALUE[:2] + 128}
    dtypes = {f"['{name}']": np.int8 for name in tree}
    return told(path, lambda: ns.save_safetensors(tree, path, dtype=dtypes, max_shard_size=VALUE[:2].size))


def case_processes_that_leave_between_the_rounds() -> list[str]:
    """After preparing, writing, looking for the files of others, and naming them."""
    out: list[str] = []
    for process in (0, LAST):
        for at in range(1, 5):
            path = before(f"leave {process} {at}")
            tree = {"a": VALUE + 5, "b": VALUE + 6}
            # The last one cannot know that its word has not been heard, and the index not been written.
            kept = ["model-2-00002-of-00002.safetensors"] if (process, at) == (LAST, 4) else []
            with patched(Rounds, "next_round", raising(KeyboardInterrupt(), at), process=process):
                call = functools.partial(ns.save_safetensors, tree, path, max_shard_size=SHARD)
                out.append(told(path, call, kept))
    return out


def case_a_process_that_leaves_when_all_is_done() -> str:
    path = before("done")
    with patched(Rounds, "next_round", raising(KeyboardInterrupt(), 5), process=0):
        try:
            ns.save_safetensors({"a": VALUE + 5, "b": VALUE + 6}, path, max_shard_size=SHARD)
            said = "nothing"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}".replace(str(path), "PATH")
    verify(path, {"a": VALUE + 5, "b": VALUE + 6})
    return said


def case_a_process_that_is_interrupted_when_all_have_agreed() -> str:
    path = before("agreed")

    def interrupted(original: Any) -> Any:
        def call(*args: Any) -> Any:
            _save.shared_values = original
            original(*args)
            raise KeyboardInterrupt

        return call

    with patched(_save, "shared_values", interrupted):
        return told(path, lambda: ns.save_safetensors(placed(), path))


def case_a_folder_that_cannot_be_made() -> str:
    if ME == 0:
        (folder() / "plain").write_text("")
    everybody()
    return message_of(ns.CheckpointError, lambda: ns.save_safetensors(placed(), folder() / "plain")).replace(
        str(folder()), "FOLDER"
    )


def case_calls_that_differ() -> list[str]:
    path = before("differ")
    calls: list[Callable[[], Any]] = [
        lambda: ns.save_safetensors(BEFORE, path / str(ME)),
        lambda: ns.save_safetensors(BEFORE, path, metadata={"process": str(ME)}),
        lambda: ns.save_safetensors(BEFORE, path, max_shard_size=SHARD + ME),
        lambda: ns.save_safetensors(BEFORE, path, writer="main" if ME else "all"),
        lambda: ns.save_safetensors(BEFORE, path, budget=2**20 + ME),
        lambda: ns.save_safetensors({"x": VALUE[:2]}, path, names={"['x']": f"x{ME}"}),
    ]
    return [told(path, call) for call in calls]


def case_a_path_that_is_not_shared() -> str:
    """The same words, but another folder for each process."""
    home = os.getcwd()
    mine = folder() / f"home of {ME}"
    mine.mkdir()
    os.chdir(mine)
    try:
        tree = {name: put(value, LINE, P("x")) for name, value in BEFORE.items()}
        ns.save_safetensors(tree, "model", writer="main", max_shard_size=SHARD)
        here = sorted(os.listdir("model")) if ME == 0 else []
        said = message_of(ns.CheckpointError, lambda: ns.save_safetensors(placed(), "model", max_shard_size=SHARD))
        equal(sorted(os.listdir("model")), here)
        if ME == 0:
            equal(sorted(ns.read_header("model")), ["a", "b"])
    finally:
        os.chdir(home)
    return said


def case_values_that_are_not_the_same() -> list[str]:
    path = before("values")
    trees = [
        {"same": VALUE[0], "numpy": np.full(4, ME, np.float32), "loose": jnp.full(4, ME)},
        {"mine": jax.device_put(np.ones(4, np.float32), own(ME)[0]), "same": VALUE[0]},
        {"mine": put(VALUE[:4], LINE, P()), "one": VALUE[:4] if ME else put(VALUE[:4], LINE, P())},
    ]
    return [
        told(path, lambda tree=tree, writer=writer: ns.save_safetensors(tree, path, writer=writer))
        for tree in trees
        for writer in ("all", "main")
    ]


def case_equal_values_of_each_process_are_saved() -> None:
    wanted = {"numpy": VALUE, "loose": VALUE, "turned": VALUE.T.copy(), "half": VALUE.astype(jnp.bfloat16)}
    tree = wanted | ({"loose": jnp.asarray(VALUE), "turned": VALUE.T} if ME else {})
    for writer in ("all", "main"):
        ns.save_safetensors(tree, folder() / "equal", writer=writer, max_shard_size=SHARD)
        verify(folder() / "equal", wanted)


def case_a_writer_that_is_none() -> str:
    none: Any = "mian"
    return message_of(ValueError, lambda: ns.save_safetensors(BEFORE, folder() / "none", writer=none))
