"""Saving: the very values, under the names that loading undoes, in files that are there whole or not at all."""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
from checkpoints import EVERY_DTYPE, arrays, model, raw, write
from haliax.state_dict import ModuleWithStateDictSerialization
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file
from support import E8, E42, M8, M8_REVERSED, M42, MIXED42, bits, counting, na, sizes_copied

import namedshard as ns
from namedshard import _jaxcompat as compat
from namedshard._safetensors import save as _save
from namedshard._safetensors.commit import PartialFile

VALUE = counting(8, 16)
INDEX = "model.safetensors.index.json"


def names_in(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def stored(path: Path) -> dict[str, bytes]:
    """Every tensor's bytes, as the header says where they are."""
    return {n: Path(i.file).read_bytes()[i.start : i.stop] for n, i in ns.read_header(path).items()}


@pytest.mark.parametrize("kind", ["device", "pinned_host"])
@pytest.mark.parametrize("spec", [P(), P("data"), P(None, "data"), P("data", "model"), P(("data", "model"))])
@pytest.mark.parametrize("where", [M42, E42, MIXED42], ids=["auto", "explicit", "mixed"])
def test_every_placement_saves_the_same_file(tmp_path, where, spec, kind):
    if where is MIXED42 and spec == P(("data", "model")):
        where = M42
    x = jax.device_put(VALUE, NamedSharding(where, spec, memory_kind=kind))
    ns.save_safetensors({"x": x, "n": na(x, "a b")}, tmp_path / "x.safetensors")
    wanted = write(tmp_path / "wanted.safetensors", {"n": VALUE, "x": VALUE}, {"format": "pt"})
    assert stored(tmp_path / "x.safetensors") == stored(wanted)
    with safetensors.safe_open(tmp_path / "x.safetensors", framework="np") as f:
        assert f.metadata() == {"format": "pt"}
        assert bits(f.get_tensor("x")) == bits(VALUE)


MEMORY = {
    "fortran": np.asfortranarray(VALUE),
    "transposed": VALUE.T,
    "every second": VALUE[::2],
    "every second column": VALUE[:, ::2],
    "backwards": VALUE[::-1, ::-1],
    "broadcast": np.broadcast_to(VALUE[0], (8, 16)),
    "big-endian": VALUE.astype(">f4"),
    "scalar": np.float32(2.5),
    "0-d": np.array(3, np.int16),
    "empty": np.zeros((0, 4), np.float32),
    "unaligned": np.frombuffer(b"\0" + VALUE.tobytes(), np.uint8)[1:].view(np.float32),
    "read-only": np.frombuffer(VALUE.tobytes(), np.float32),
}


def test_each_shard_of_an_accelerator_is_copied_off_it_once(tmp_path, monkeypatch):
    copied = sizes_copied(monkeypatch)
    x, replicated = (jax.device_put(counting(64, 128), NamedSharding(M42, spec)) for spec in (P("data", "model"), P()))
    with ns.testing.accelerator_routes(), compat.count_compiles() as programs:
        ns.save_safetensors({"x": x, "y": replicated, "z": x + 0}, tmp_path / "x.safetensors", budget="1MiB")
    assert sum(copied) == 3 * x.nbytes and len(copied) == 8 + 1 + 8
    assert programs[0] <= 1
    assert bits(load_file(tmp_path / "x.safetensors")["x"]) == bits(x)


def test_every_memory_layout_saves_its_values(tmp_path):
    ns.save_safetensors(MEMORY, tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    assert set(found) == set(MEMORY)
    for name, value in MEMORY.items():
        np.testing.assert_array_equal(found[name], value)
        assert found[name].dtype == np.asarray(value).dtype.newbyteorder("=")


@pytest.mark.parametrize("name", sorted(EVERY_DTYPE))
def test_every_dtype_round_trips(tmp_path, name):
    value = EVERY_DTYPE[name]
    ns.save_safetensors({"x": value, "y": jax.device_put(value, NamedSharding(M8, P("data")))}, tmp_path)
    assert stored(tmp_path) == {"x": bits(value), "y": bits(value)}
    loaded = ns.load_safetensors(tmp_path, {"x": value, "y": value}, mesh=M8)
    assert all(x.dtype == value.dtype and bits(x) == bits(value) for x in loaded.values())


def test_64_bit_arrays_of_the_host_are_saved_as_they_are(tmp_path):
    tree = {"i": np.array([2**40, -1]), "u": np.array([2**63], np.uint64), "f": np.array([1e300])}
    ns.save_safetensors(tree, tmp_path)
    assert {n: bits(x) for n, x in load_file(tmp_path / "model.safetensors").items()} == {
        n: bits(x) for n, x in tree.items()
    }


@pytest.mark.parametrize("limit", ["5GB", 600, 1])
def test_load_save_load_is_bit_equal_on_other_meshes(tmp_path, limit):
    tree = model()
    mapping = {"embed": "data", "mlp": "model"}
    ns.save_safetensors(ns.shard(tree, mapping, M42), tmp_path / "a", max_shard_size=limit)
    loaded = ns.load_safetensors(tmp_path / "a", tree, mapping={"mlp": "data"}, mesh=M8_REVERSED)
    assert [bits(x) for x in arrays(loaded)] == [bits(x) for x in arrays(tree)]
    ns.save_safetensors(loaded, tmp_path / "b", max_shard_size=limit)
    assert names_in(tmp_path / "a") == names_in(tmp_path / "b")
    for name in names_in(tmp_path / "a"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_directory_in_hugging_faces_layout(tmp_path):
    tree = {f"t{i}": counting(100) + i for i in range(5)}
    ns.save_safetensors(tree, tmp_path, max_shard_size=900, metadata={"step": "7"})
    assert names_in(tmp_path) == [*(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)), INDEX]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index == {
        "metadata": {"total_size": 2000},
        "weight_map": {
            "t0": "model-00001-of-00003.safetensors",
            "t1": "model-00001-of-00003.safetensors",
            "t2": "model-00002-of-00003.safetensors",
            "t3": "model-00002-of-00003.safetensors",
            "t4": "model-00003-of-00003.safetensors",
        },
    }
    for name in names_in(tmp_path)[:3]:
        with safetensors.safe_open(tmp_path / name, framework="np") as f:
            assert f.metadata() == {"format": "pt", "step": "7"}
            assert all(bits(f.get_tensor(n)) == bits(tree[n]) for n in f.keys())  # noqa: SIM118
    ns.save_safetensors(tree, tmp_path / "one.safetensors", max_shard_size=900)
    assert stored(tmp_path / "one.safetensors") == stored(tmp_path)


def test_tied_weights_are_written_under_each_name(tmp_path):
    w = ns.shard(na(jnp.asarray(VALUE), "a b"), {"a": "data"}, M8)
    ns.save_safetensors({"emb": w, "head": w}, tmp_path)
    assert stored(tmp_path) == {"emb": bits(VALUE), "head": bits(VALUE)}


def test_only_adapters_are_saved_from_a_tree_without_the_rest(tmp_path):
    tree = {
        "base": {"w": None},
        "a": ns.shard(na(jnp.asarray(counting(2, 8)), "r b"), {"b": "data"}, M8),
        "b": ns.shard(na(jnp.asarray(counting(8, 2) + 50), "o r"), {"o": "data"}, M8),
    }
    ns.save_safetensors(tree, tmp_path)
    assert stored(tmp_path) == {"a": bits(counting(2, 8)), "b": bits(counting(8, 2) + 50)}


def test_names_and_dtypes_can_be_given(tmp_path):
    tree = {"w": counting(3, 4), "i": np.arange(3)}
    options: dict[str, Any] = {"names": {"['w']": [f"w.{i}" for i in range(3)]}, "dtype": ml_dtypes.bfloat16}
    ns.save_safetensors(tree, tmp_path, **options)
    found = ns.read_header(tmp_path)
    assert {n: (i.shape, i.dtype) for n, i in found.items()} == {
        "i": ((3,), np.dtype(np.int64)),
        **{f"w.{i}": ((4,), np.dtype(ml_dtypes.bfloat16)) for i in range(3)},
    }
    assert stored(tmp_path)["w.2"] == bits(counting(3, 4)[2].astype(ml_dtypes.bfloat16))
    back = ns.load_safetensors(
        tmp_path, {"w": tree["w"], "i": tree["i"].astype(np.int32)}, names=options["names"], narrow="fit"
    )
    np.testing.assert_array_equal(np.asarray(back["w"]), tree["w"].astype(ml_dtypes.bfloat16))
    ns.save_safetensors({"i": np.arange(3)}, tmp_path, dtype={"['i']": np.int8})
    assert stored(tmp_path) == {"i": bytes([0, 1, 2])}
    with pytest.raises(ns.NarrowingError) as error:
        ns.save_safetensors({"i": np.arange(300)}, tmp_path, dtype=np.int8)
    assert str(error.value) == ("tensor 'i': int64 values from 0 to 299 do not fit int8\n  fix: pass a wider dtype=")
    assert stored(tmp_path) == {"i": bytes([0, 1, 2])}


NUMBERS = [
    (np.float32, [300, np.nan, 1e10], np.int8, "float32 value nan does not fit int8\n  fix: pass a floating dtype="),
    (
        np.float64,
        [0.5, -np.inf],
        np.int64,
        "float64 values from -inf to 0.5 do not fit int64\n  fix: pass a floating dtype=",
    ),
    (np.float32, [1, 128], np.int8, "float32 values from 1.0 to 128.0 do not fit int8\n  fix: pass a wider dtype="),
    (np.float32, [2**31], np.int32, "float32 value 2147483648.0 does not fit int32\n  fix: pass a wider dtype="),
    (ml_dtypes.bfloat16, [np.nan], np.uint8, "bfloat16 value nan does not fit uint8\n  fix: pass a floating dtype="),
    (ml_dtypes.float8_e5m2, [-1], np.uint8, "float8_e5m2 value -1.0 does not fit uint8\n  fix: pass a wider dtype="),
    (
        np.uint64,
        [2**64 - 1],
        np.int64,
        "uint64 value 18446744073709551615 does not fit int64\n  fix: pass a wider dtype=",
    ),
    (np.float32, [127, -128, 1.5], np.int8, ""),
    (np.float64, [2**53], np.int64, ""),
    (np.bool_, [True, False], np.int8, ""),
    (np.float32, [], np.int8, ""),
    # Rounding is what was asked for.
    (np.float64, [1e300, np.nan, 0.1], np.float32, ""),
    (np.int32, [2**31 - 1], np.float16, ""),
]


@pytest.mark.parametrize(("have", "values", "wanted", "why"), NUMBERS)
def test_numbers_that_an_integer_type_cannot_hold_are_not_stored_as_others(tmp_path, have, values, wanted, why):
    x = np.array(values, have)
    if why:
        with pytest.raises(ns.NarrowingError) as error:
            ns.save_safetensors({"x": x}, tmp_path, dtype={"['x']": wanted})
        assert str(error.value) == f"tensor 'x': {why}"
        assert names_in(tmp_path) == []
    else:
        ns.save_safetensors({"x": x}, tmp_path, dtype={"['x']": wanted})
        with np.errstate(over="ignore", invalid="ignore"):
            assert stored(tmp_path) == {"x": bits(x.astype(wanted))}


def test_a_scaled_tensor_is_checked_as_it_is_stored(tmp_path):
    class Doubling(ModuleWithStateDictSerialization):
        w: jax.Array

        def to_state_dict(self, prefix: str | None = None) -> dict[str, Any]:
            return {f"{prefix}.w": self.w * 2}

    tree = {"m": Doubling(jnp.asarray([1, 100], jnp.int8))}
    with pytest.raises(ns.NarrowingError) as error:
        ns.save_safetensors(tree, tmp_path)
    assert str(error.value) == (
        "tensor 'm.w': float64 values from 2.0 to 200.0 do not fit int8\n  fix: pass a wider dtype="
    )
    ns.save_safetensors(tree, tmp_path, dtype=np.int16)
    assert stored(tmp_path) == {"m.w": bits(np.array([2, 200], np.int16))}


def test_all_that_cannot_be_saved_is_listed_before_anything_is_written(tmp_path):
    gone = jnp.ones(2)
    gone.delete()
    tree = {
        "abstract": jax.ShapeDtypeStruct((2,), np.float32),
        "a": {"b": np.ones(1)},
        "a.b": np.ones(1),
        "__metadata__": np.ones(1),
        "bad\ud800": np.ones(1),
        "gone": gone,
        "int4": jnp.ones(2, jnp.int4),
        "key": jax.random.key(0),
        "object": np.array([None]),
        "step": 7,
        "rate": 1.5,
        "fine": None,
        "text": "also fine",
    }
    with pytest.raises(ns.CheckpointError) as error:
        ns.save_safetensors(tree, tmp_path / "x")
    assert str(error.value) == (
        "the tree cannot be saved: 10 problems\n"
        "  ['rate']: the Python number 1.5 is no array\n"
        "  ['step']: the Python number 7 is no array\n"
        "  ['abstract']: is abstract: it has no values\n"
        "  ['gone']: was donated or deleted\n"
        "  ['key']: is an array of typed keys; save its jax.random.key_data\n"
        "  ['__metadata__']: the name '__metadata__' is reserved\n"
        "  ['a']['b'], ['a.b']: 2 tensors would be called 'a.b'\n"
        "  ['bad\\ud800']: the name 'bad\\ud800' is not valid Unicode\n"
        "  ['int4']: safetensors has no dtype int4; save it as another, with dtype= or after a cast\n"
        "  ['object']: safetensors has no dtype object; save it as another, with dtype= or after a cast\n"
        "  fix: make arrays of numbers, convert what has no dtype in a file, or leave it out (equinox.filter)"
    )
    assert not (tmp_path / "x").exists()
    with pytest.raises(ns.CheckpointError, match=r"^the tree has no arrays: there is nothing to save$"):
        ns.save_safetensors({"a": None, "b": "text"}, tmp_path / "x")
    with pytest.raises(ns.CheckpointError, match="is traced: it has no values yet"):
        jax.jit(lambda x: ns.save_safetensors({"x": x}, tmp_path / "x"))(jnp.ones(2))
    with pytest.raises(ValueError) as wrong:
        _save.owners_of("mian", 2)
    assert str(wrong.value) == 'writer must be "all" or "main", not \'mian\''
    with pytest.raises(ns.CheckpointError) as error:
        _save.checked_metadata({"n": 1, 2: "x"})
    assert str(error.value) == (
        "metadata is not text to text\n  'n': 1\n  2: 'x'\n  fix: turn keys and values into str"
    )
    with pytest.raises(ns.CheckpointError) as error:
        ns.save_safetensors({"a": np.ones(1)}, "s3://bucket/x")
    assert str(error.value) == (
        "s3://bucket/x: checkpoints are saved to local paths only\n  fix: save to a local path, and upload that"
    )


def test_numbers_that_are_a_modules_own_are_not_missed(tmp_path):
    ns.save_safetensors({"m": model()}, tmp_path)
    loaded = ns.load_safetensors(tmp_path, {"m": eqx.filter_eval_shape(model)})
    assert loaded["m"].layers.stacked.rate == 0.5


def test_progress_and_budget(tmp_path):
    told: list[tuple[int, int]] = []
    x = jax.device_put(counting(1024, 512), NamedSharding(E8, P(None, "data")))
    ns.save_safetensors({"x": x}, tmp_path, budget="1MiB", progress=lambda a, b: told.append((a, b)))
    assert stored(tmp_path) == {"x": bits(counting(1024, 512))}
    assert told[-1] == (2 << 20, 2 << 20)
    assert len(told) > 8


# --- replacing --------------------------------------------------------------------------------------------------------


def tree_of(value: int, count: int = 4) -> dict[str, np.ndarray]:
    return {f"t{i}": np.full(64, value, np.int32) for i in range(count)}


def value_in(path: Path) -> int:
    """The value that all tensors of a whole checkpoint have."""
    found = {int.from_bytes(data[i : i + 4], "little") for data in stored(path).values() for i in range(0, 256, 4)}
    (value,) = found
    return value


@pytest.mark.parametrize("order", [("5GB", 300), (300, "5GB"), (300, 300), ("5GB", "5GB"), (300, 600)])
def test_a_checkpoint_in_the_directory_is_replaced_and_other_files_stay(tmp_path, order):
    (tmp_path / "config.json").write_text("{}")
    write(tmp_path / "adapter.safetensors", {"x": VALUE})
    for value, limit in enumerate((*order, *order)):
        ns.save_safetensors(tree_of(value), tmp_path, max_shard_size=limit)
        assert value_in(tmp_path) == value
        files = 1 if limit == "5GB" else 4 if limit == 300 else 2
        ours = [n for n in names_in(tmp_path) if n.startswith("model")]
        assert len(ours) == files + (files > 1)
    assert {"config.json", "adapter.safetensors"} <= set(names_in(tmp_path))


def test_links_are_replaced_and_not_written_through(tmp_path):
    blob = write(tmp_path / "blob", {"x": VALUE})
    before = blob.read_bytes()
    (tmp_path / "model").mkdir()
    os.symlink(blob, tmp_path / "model" / "model.safetensors")
    ns.save_safetensors(tree_of(3), tmp_path / "model")
    assert blob.read_bytes() == before
    assert value_in(tmp_path / "model") == 3


def test_leftovers_of_a_crash_go_and_files_that_are_being_written_stay(tmp_path):
    ns.save_safetensors(tree_of(0), tmp_path)
    left = [".model.safetensors.0123456789ab.partial", f".{INDEX}.0123456789ab.partial"]
    others = ["model-2-00001-of-00009.safetensors", "model-00001-of-00009.safetensors"]
    others += [".model.safetensors.partial", ".other.safetensors.0123456789ab.partial", "model-1-of-2.safetensors"]
    for name in (*left, *others):
        (tmp_path / name).write_bytes(raw({}))
    living = PartialFile(str(tmp_path / "model.safetensors"), 10)
    ns.save_safetensors(tree_of(1), tmp_path)
    remaining = set(names_in(tmp_path))
    assert not remaining & set(left)
    assert set(others) <= remaining
    assert sum(bool(re.fullmatch(r"\.model\.safetensors\.[0-9a-f]{12}\.partial", n)) for n in remaining) == 1
    living.close()
    living.close()
    assert value_in(tmp_path) == 1


def test_a_failed_save_leaves_what_was_there(tmp_path, monkeypatch):
    ns.save_safetensors(tree_of(0), tmp_path, max_shard_size=300)
    before = {n: (tmp_path / n).read_bytes() for n in names_in(tmp_path)}

    def broken(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    for name in ("write", "finish", "commit"):
        with monkeypatch.context() as patch:
            patch.setattr(PartialFile, name, broken)
            with pytest.raises(ns.CheckpointError) as error:
                ns.save_safetensors(tree_of(1), tmp_path, max_shard_size=300)
        assert str(error.value) == (
            f"{tmp_path}: the checkpoint (1 KiB) cannot be written: Input/output error; what was there before is"
            " untouched\n  fix: free some space, or save elsewhere"
        )
        assert {n: (tmp_path / n).read_bytes() for n in names_in(tmp_path)} == before
    (tmp_path / "file").write_text("")
    with pytest.raises(ns.CheckpointError) as error:
        ns.save_safetensors(tree_of(1), tmp_path / "file")
    assert str(error.value) == f"{tmp_path}/file cannot be written to: File exists"


def test_a_full_disk_leaves_what_was_there(tmp_path):
    ns.save_safetensors(tree_of(0), tmp_path)
    script = f"""
        import resource, signal, numpy as np, namedshard as ns
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            ns.save_safetensors({{"x": np.zeros(1_000_000, np.int32)}}, {str(tmp_path)!r})
        except ns.CheckpointError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert done.stdout == (
        f"{tmp_path}: the checkpoint (3.81 MiB) cannot be written: File too large; what was there before is untouched\n"
        "  fix: free some space, or save elsewhere\n"
    )
    assert names_in(tmp_path) == ["model.safetensors"]
    assert value_in(tmp_path) == 0


KILLS = """
    import os, random, signal, sys, time, warnings
    import numpy as np, namedshard as ns
    warnings.simplefilter("ignore")  # JAX warns of fork; no backend is up here, and numpy is all that is saved.
    directory, kills = sys.argv[1], int(sys.argv[2])
    rng = random.Random(5)

    def tree(value):
        return {f"t{i}": np.full(20_000, value, np.int32) for i in range(4)}

    def whole():
        values = set()
        for info in ns.read_header(directory).values():
            with open(info.file, "rb") as f:
                f.seek(info.start)
                values |= set(np.unique(np.frombuffer(f.read(info.nbytes), np.int32)).tolist())
        (value,) = values
        return value

    ns.save_safetensors(tree(0), directory, max_shard_size=90_000)
    seen, kinds = {0}, set()
    for kill in range(kills):
        first = whole()
        saved, says = os.pipe()
        child = os.fork()
        if child == 0:
            value = first
            while True:
                value += 1
                ns.save_safetensors(tree(value), directory, max_shard_size=(90_000, 170_000, 10**9)[value % 3])
                os.write(says, b".")
                if kill % 10 == 9:
                    signal.pause()  # this one is killed between two saves
        # Every other child comes to its second save, however slow the machine is.
        if kill % 2:
            os.read(saved, 1)
        time.sleep(rng.uniform(0, 0.06))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(saved)
        os.close(says)
        last = whole()
        assert last >= first + kill % 2, (first, last)
        seen.add(last)
        kinds.add(tuple(n for n in os.listdir(directory) if n.endswith(".partial")) != ())
    for name in os.listdir(directory):
        assert name.endswith((".safetensors", ".json", ".partial")), name
    ns.save_safetensors(tree(-1), directory, max_shard_size=90_000)
    assert whole() == -1
    names = sorted(os.listdir(directory))
    assert len(names) == 5 and not any(n.endswith(".partial") for n in names), names
    print(len(seen), sorted(kinds))
"""


def test_fifty_kills_at_random_moments_leave_a_whole_checkpoint_each_time(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(KILLS), str(tmp_path), "50"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    saved, kinds = done.stdout.split(" ", 1)
    assert int(saved) > 25
    assert kinds.strip() == "[False, True]"
