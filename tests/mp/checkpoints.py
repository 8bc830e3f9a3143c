"""Checkpoints of several processes: each reads its share, and together they write one."""

import itertools
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from checkpoints import Recorder, write
from jax.sharding import PartitionSpec as P

import namedshard as ns
from mp.tools import (
    COUNT,
    DEVICES,
    EXPLICIT,
    ME,
    check,
    equal,
    interleaved,
    mesh,
    named,
    own,
    put,
    values,
)
from namedshard._jaxcompat import coordination_client
from namedshard._safetensors import load as _load
from namedshard._safetensors.commit import PartialFile
from namedshard._safetensors.targets import LoadOptions

N = len(DEVICES)
BARRIERS = itertools.count()
ALL = mesh((N // 2, 2), "x y")
LINE = mesh((N,), "x")
REVERSED = mesh((N // 2, 2), "x y", EXPLICIT, DEVICES[::-1])
MIXED_UP = mesh((N // 2, 2), "x y", devices=interleaved())
VALUE = np.arange(48 * 16 * N, dtype=np.float32).reshape(48, 16 * N)


def folder() -> Path:
    """A directory that all processes share."""
    return Path(os.environ["JOB_FOLDER"])


def everybody() -> None:
    coordination_client().wait_at_barrier(f"checkpoints {next(BARRIERS)}", 60_000)


def given(name: str, tensors: dict[str, np.ndarray]) -> Path:
    """A file that process 0 writes."""
    if ME == 0:
        write(folder() / name, tensors)
    everybody()
    return folder() / name


def load(path: Path, like: Any, **options: Any) -> tuple[Any, int]:
    recorder = Recorder()
    fixed: dict[str, Any] = {"unexpected": "error", "progress": False}
    tree = _load.load_with(recorder, path, like, LoadOptions(**fixed | options))
    return tree, recorder.data_bytes()


def share(x: jax.Array) -> int:
    """Bytes of the distinct shards that this process holds."""
    held = {str(s.index): s.data.nbytes for s in x.addressable_shards}
    return sum(held.values())


def case_each_process_reads_its_share() -> list[float]:
    path = given("load.safetensors", {"x": VALUE, "small": VALUE[0, :8]})
    like = {
        "x": named(jax.ShapeDtypeStruct(VALUE.shape, np.float32), "a b"),
        "small": jax.ShapeDtypeStruct((8,), np.float32),
    }
    parts = []
    for where in (ALL, LINE, REVERSED, MIXED_UP):
        for mapping in ({"a": "x"}, {"b": "x"}, {"a": "x", "b": "y"}, {"a": "y", "b": "x"}, {}):
            if "y" in mapping.values() and where is LINE:
                continue
            tree, count = load(path, like, mapping=mapping, mesh=where)
            spec = P(*(mapping.get(n) for n in "ab"))
            check(tree["x"].array, VALUE, where, spec)
            wanted = share(tree["x"].array) + share(tree["small"])
            assert wanted <= count + 32 and count <= 1.05 * wanted, (mapping, count, wanted)
            parts.append(count / VALUE.nbytes)
    # Split over all devices, each process reads its part of them.
    assert parts[0] <= 1.05 * (len(own(ME)) + 1) / N + 0.01
    return parts


def case_a_process_without_a_device_of_the_mesh_gets_arrays_without_shards() -> None:
    path = given("elsewhere.safetensors", {"x": VALUE, "empty": np.zeros((0, 8), np.float32)})
    for owner in range(COUNT):
        where = mesh((len(own(owner)),), "x", devices=own(owner))
        for leaf in (jax.ShapeDtypeStruct(VALUE.shape, np.float32), np.zeros_like(VALUE)):
            like = {"x": named(leaf, "a b"), "empty": jax.ShapeDtypeStruct((0, 8), np.float32)}
            tree, count = load(path, like, mapping={"a": "x"} if len(own(owner)) == 4 else {}, mesh=where)
            spec = P("x" if len(own(owner)) == 4 else None)
            check(tree["x"].array, VALUE, where, spec)
            assert len(tree["x"].array.addressable_shards) == (len(own(owner)) if owner == ME else 0)
            assert (count > 0) == (owner == ME)
            assert tree["empty"].shape == (0, 8)


def case_half_the_bytes_each_when_split_by_columns() -> float:
    path = given("columns.safetensors", {"x": VALUE})
    _, count = load(
        path, {"x": named(jax.ShapeDtypeStruct(VALUE.shape, np.float32), "a b")}, mapping={"b": "x"}, mesh=LINE
    )
    assert count == VALUE.nbytes * len(own(ME)) // N
    return count / VALUE.nbytes


def placed() -> dict[str, Any]:
    places = {
        "rows": (ALL, P("x", None)),
        "both": (ALL, P("x", "y")),
        "columns": (REVERSED, P(None, "y")),
        "line": (LINE, P(None, "x")),
        "mixed up": (MIXED_UP, P("y", "x")),
        "replicated": (ALL, P()),
    }
    return {name: put(VALUE + i, where, spec) for i, (name, (where, spec)) in enumerate(places.items())}


def verify(path: Path, wanted: dict[str, np.ndarray]) -> None:
    everybody()
    found = {n: Path(i.file).read_bytes()[i.start : i.stop] for n, i in ns.read_header(path).items()}
    equal({n: data == wanted[n].tobytes() for n, data in found.items()}, dict.fromkeys(wanted, True))
    everybody()


def case_any_placement_is_saved_by_all_or_by_one() -> None:
    tree = placed() | {"host": VALUE[:2], "narrow": put(values(jnp.bfloat16, (8, N)), LINE, P(None, "x"))}
    wanted = {n: VALUE + i for i, n in enumerate(placed())}
    wanted |= {"host": VALUE[:2], "narrow": values(jnp.bfloat16, (8, N))}
    for writer in ("all", "main"):
        for limit in ("5GB", VALUE.nbytes + 1):
            path = folder() / f"saved-{writer}"
            ns.save_safetensors(tree, path, writer=writer, max_shard_size=limit, budget="1MiB")
            verify(path, wanted)
            assert not [n for n in os.listdir(path) if n.endswith(".partial")]
    ns.save_safetensors(tree, folder() / "one.safetensors")
    verify(folder() / "one.safetensors", wanted)


def case_stacked_arrays_are_saved_layer_by_layer() -> None:
    stacked = values(np.float32, (3, 8, 2 * N))
    tree = {"w": put(stacked, LINE, P(None, None, "x")), "v": put(stacked, mesh((3, 1), "l m"), P("l"))}
    names = {f"['{k}']": [f"{k}.{i}" for i in range(3)] for k in "wv"}
    ns.save_safetensors(tree, folder() / "stacked", names=names)
    verify(folder() / "stacked", {f"{k}.{i}": stacked[i] for k in "wv" for i in range(3)})


def case_adapters_alone() -> None:
    a, b = values(np.float32, (2, 4 * N)), values(np.float32, (4 * N, 2), seed=1)
    tree = {"base": None, "A": named(put(a, ALL, P(None, "x")), "r b"), "B": named(put(b, ALL, P("y", None)), "o r")}
    ns.save_safetensors(tree, folder() / "lora", writer="main")
    verify(folder() / "lora", {"A": a, "B": b})


def case_a_failure_on_one_process_is_told_to_all_and_leaves_what_was_there() -> str:
    path = folder() / "saved-all"
    before = {n: (path / n).read_bytes() for n in os.listdir(path)}
    everybody()
    original = PartialFile.write
    if ME == COUNT - 1:

        def broken(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        PartialFile.write = broken
    try:
        ns.save_safetensors(placed(), path, max_shard_size=VALUE.nbytes + 1)
        told = "nothing"
    except ns.CheckpointError as error:
        told = str(error).splitlines()[0].removeprefix(f"{path}: ")
    finally:
        PartialFile.write = original
    everybody()
    equal({n: (path / n).read_bytes() == data for n, data in before.items()}, dict.fromkeys(before, True))
    equal(sorted(os.listdir(path)), sorted(before))
    return told


def case_processes_that_save_different_trees_are_told() -> str:
    try:
        ns.save_safetensors({f"x{ME}": put(VALUE, LINE, P("x"))}, folder() / "different")
    except ns.OutOfStepError as error:
        return str(error)
    return ""
