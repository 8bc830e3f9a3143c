"""`to_host` and `iter_to_host` in one process, and what needs no second one of the moves between processes."""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support import DEVICES, M8, M8_REVERSED, M42, bits, counting, na, sizes_copied, unreduced

import namedshard as ns
from namedshard import _jaxcompat as compat
from namedshard._place import reader
from namedshard._place.boxes import local_slices, whole
from namedshard._place.compiled import lowered
from namedshard._place.exchange import flat_range
from namedshard._place.gather import parse_bytes
from namedshard._place.rounds import CHUNK_BYTES
from namedshard._place.route import Placement, placement_of, transient_bytes
from namedshard._processes.agreement import fingerprint_value, waiting_seconds

DTYPES = (
    np.float32,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
    ml_dtypes.int4,
    np.bool_,
    np.complex64,
    np.int8,
)


def put(value: Any, spec: P, mesh: Any = M42, kind: str = "device") -> jax.Array:
    return jax.device_put(value, NamedSharding(mesh, spec, memory_kind=kind))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_every_dtype_and_placement_comes_back_exact(dtype: Any) -> None:
    value = counting(8, 4, dtype=np.int32).astype(dtype)
    tree = {
        "columns": put(value, P(None, "model")),
        "device": jax.device_put(value, DEVICES[3]),
        "empty": put(value[:0], P()),
        "named": na(put(value, P("data", "model")), "b f"),
        "numpy": value,
        "order": put(value, P("data"), M8_REVERSED),
        "pinned": put(value, P("data"), M8, "pinned_host"),
        "replicated": put(value, P()),
        "scalar": put(value[0, 3], P()),
        "text": "x",
        "uncommitted": jnp.asarray(value),
    }
    for got in (ns.to_host(tree), ns.to_host(tree, process=0), ns.to_host(tree, budget=1)):
        assert list(got) == list(tree)
        assert got["text"] == "x" and got["numpy"] is value
        assert got["named"].axes == tree["named"].axes
        for name in sorted({*tree} - {"text", "numpy"}):
            x = got[name].array if name == "named" else got[name]
            want = {"empty": value[:0], "scalar": value[0, 3]}.get(name, value)
            assert (type(x), x.dtype, x.shape, bits(x)) == (np.ndarray, value.dtype, want.shape, bits(want)), name


def test_keys_come_as_their_data() -> None:
    made = jax.random.split(jax.random.key(0), 8)
    for keys in (made, put(made, P("data"))):
        got = ns.to_host(keys)
        assert bits(got) == bits(jax.random.key_data(made)) and got.shape == (8, 2)
        assert bits(jax.random.key_data(jax.random.wrap_key_data(got))) == bits(got)


def test_what_comes_may_be_written_to_and_the_array_stays() -> None:
    for x in (put(counting(8), P("data")), put(counting(8), P()), jnp.asarray(counting(8)), put(counting(1), P())):
        before = bits(x)
        got = ns.to_host(x)
        got[...] = -1
        assert bits(x) == before


def test_a_stream_has_the_trees_order_and_its_arrays_alone() -> None:
    tree = {"b": put(counting(8), P("data")), "a": [np.ones(2), 3, None], "c": na(jnp.zeros(2), "x")}
    got = list(ns.iter_to_host(tree))
    assert [path for path, _ in got] == ["['a'][0]", "['b']", "['c']"]
    assert [bits(x) for _, x in got] == [bits(np.ones(2)), bits(counting(8)), bits(np.zeros(2, np.float32))]


def test_a_stream_checks_everything_before_it_begins() -> None:
    gone = put(counting(8), P("data"))
    gone.delete()
    with pytest.raises(ns.DeletedArrayError) as caught:
        ns.iter_to_host({"a": jnp.zeros(2), "b": gone, "c": 1})
    assert str(caught.value) == (
        "iter_to_host: 1 of 2 leaves donated or deleted\n"
        "  ['b']\n"
        "  fix: keep the result of the call that the array was donated to, and use that"
    )


def test_traced_arrays_have_no_values() -> None:
    with pytest.raises(ns.TracedMoveError) as caught:
        jax.jit(lambda x: ns.to_host({"x": x}))(jnp.zeros(2))
    assert str(caught.value) == (
        "to_host: 1 of 1 leaf traced, so there are no values to bring to the host\n"
        "  ['x']\n"
        "  fix: call it on the result, outside of compiled code"
    )


def test_processes_are_numbered_from_zero() -> None:
    for process in (1, -1):
        with pytest.raises(ValueError) as caught:
            ns.to_host(jnp.zeros(2), process=process)
        assert str(caught.value) == f"to_host: there is no process {process}; this job has 1"


@pytest.mark.parametrize(
    ("text", "size"),
    [("1GiB", 1 << 30), ("500 MB", 500_000_000), ("1.5kib", 1536), ("7", 7), (12, 12), (" 2 TiB ", 2 << 40)],
)
def test_sizes(text: Any, size: int) -> None:
    assert parse_bytes(text) == size


def test_what_is_no_size() -> None:
    for text in ("1 GiBB", "", "GiB", "-1", "1e9", "1 parsec"):
        with pytest.raises(ValueError) as caught:
            ns.to_host(jnp.zeros(2), budget=text)
        assert str(caught.value) == f'{text!r} is not a size: use a number of bytes, or text like "1GiB" or "500MB"'
    for number, shown in ((0, 0), (-3, -3), ("0", 0)):
        with pytest.raises(ValueError) as caught:
            ns.to_host(jnp.zeros(2), budget=number)
        assert str(caught.value) == f"a size must be positive, not {shown}"


def test_the_limit_of_collectives_must_be_positive() -> None:
    for seconds in (0, -1.5):
        with pytest.raises(ValueError) as caught, ns.collective_timeout(seconds):
            pass
        assert str(caught.value) == f"collective_timeout must be positive, not {seconds}"


def test_host_values_are_compared_bit_by_bit_in_the_order_of_their_elements() -> None:
    value = counting(30, 40, 5)
    fingerprint = fingerprint_value(value)
    assert fingerprint == fingerprint_value(np.asfortranarray(value)) == fingerprint_value(value[:, ::-1][:, ::-1])
    assert fingerprint != fingerprint_value(value.transpose(1, 0, 2))
    assert fingerprint_value(np.zeros(3)) != fingerprint_value(-np.zeros(3))
    for dtype in DTYPES:
        x = counting(70_000, dtype=np.int32).astype(dtype)
        assert fingerprint_value(x) == fingerprint_value(np.concatenate([x, x])[: len(x)])
        assert fingerprint_value(x[::2]) == fingerprint_value(np.ascontiguousarray(x[::2]))
        y = x.copy()
        y[-1] = x[-2]
        assert (fingerprint_value(x) == fingerprint_value(y)) == (bits(x) == bits(y))
    assert fingerprint_value(np.zeros((0, 3))) == fingerprint_value(np.zeros(0))
    assert fingerprint_value(np.array(3)) == fingerprint_value(np.array([3]))


def test_bytes_on_a_device_while_a_leaf_moves() -> None:
    want = NamedSharding(M42, P("data", "model"))

    def needs(x: Any) -> int:
        return transient_bytes(placement_of(x, False), want, (8, 4), 4)

    value = counting(8, 4)
    assert needs(jax.ShapeDtypeStruct((8, 4), np.float32)) == 0
    assert needs(put(value, P("data", "model"))) == 0
    assert needs(value) == needs(jnp.asarray(value)) == 8 * 4 * 4 // 8
    assert needs(put(value, P("data"))) == 8 * 4 * 4 // 4 + 8 * 4 * 4 // 8
    assert needs(put(value, P(), M8_REVERSED)) == 8 * 4 * 4 + 8 * 4 * 4 // 8


def test_bytes_on_a_device_of_an_accelerator_are_those_of_its_programs() -> None:
    places = [
        NamedSharding(M42, P("data", "model")),
        NamedSharding(M8_REVERSED, P(None, "data")),
        NamedSharding(M42, P()),
        NamedSharding(Mesh(M42.devices[1:3], ("x", "y")), P("x")),
    ]
    shape = (512, 512)
    for have, want in itertools.permutations(places, 2):
        now = Placement("array", have, True, True, "device")
        with ns.testing.accelerator_routes():
            told = transient_bytes(now, want, shape, 4)
        needed = [x.compile().memory_analysis() for x in lowered(shape, np.float32, have, want)]
        most = max(m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes for m in needed)
        shards = 4 * sum(math.prod(s.shard_shape(shape)) for s in (have, want))
        assert shards < told <= shards + CHUNK_BYTES
        assert most <= told


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what is copied off devices, where these are as accelerators."""
    monkeypatch.setattr(reader, "on_cpus", lambda sharding: False)
    return sizes_copied(monkeypatch)


def test_boxes_are_read_from_accelerators_in_blocks_by_one_program(copied: list[int]) -> None:
    values = counting(1000, 700)
    x = jax.device_put(values, jax.devices()[0])
    held = whole(values.shape)
    in_order = [box for first in range(0, 700_000, 5000) for _, box in flat_range(held, first, first + 5000)]
    anywhere = [((a, a + n), (700 - n, 700)) for a in (0, 3, 999 - 650) for n in (1, 2, 5, 600, 650)]
    anywhere += [((0, 0), (3, 9)), ((999, 1000), (699, 700)), held]
    read_by = reader.ShardReader(1 << 20)
    with compat.count_compiles() as programs:
        for boxes in (in_order, anywhere):
            for box in boxes:
                read = read_by.read(x, held, box)
                assert read.dtype == values.dtype
                np.testing.assert_array_equal(read, values[local_slices(box, held)])
            if boxes is in_order:
                # Each block once; the last overlaps the one before.
                assert x.nbytes <= sum(copied) <= x.nbytes + max(copied)
                assert max(copied) <= (1 << 20) // reader.KEPT
    assert programs[0] == 1


def test_what_is_small_enough_is_copied_whole_and_not_kept(copied: list[int]) -> None:
    x = put(counting(16, 8), P("data", "model"))
    with compat.count_compiles() as programs:
        assert bits(ns.to_host(x)) == bits(counting(16, 8))
    assert programs[0] == 0 and copied == [16 * 8 * 4 // 8] * 8
    assert all(s.data._npy_value is None for s in x.addressable_shards)


def test_host_memory_is_read_as_it_is(copied: list[int]) -> None:
    x = put(counting(16, 8), P("data"), kind="pinned_host")
    assert bits(ns.to_host(x)) == bits(counting(16, 8))
    assert copied == [16 * 8 * 4 // 4] * 4


def test_an_array_that_is_still_to_be_summed() -> None:
    x = counting(8, 4)
    assert bits(ns.to_host(unreduced(x))) == bits(x)
    (((path, found)),) = ns.iter_to_host({"w": unreduced(x)})
    assert path == "['w']" and bits(found) == bits(x)


@pytest.mark.parametrize(("text", "seconds"), [("600", 600), ("2.5", 2.5), ("90s", 90), (" 5m ", 300), ("1.5 H", 5400)])
def test_the_timeout_in_the_environment(monkeypatch: pytest.MonkeyPatch, text: str, seconds: float) -> None:
    monkeypatch.setenv("NAMEDSHARD_COLLECTIVE_TIMEOUT", text)
    assert waiting_seconds() == seconds
    with ns.collective_timeout(7):
        assert waiting_seconds() == 7


@pytest.mark.parametrize("text", ["", "soon", "5 weeks", "0", "-1", "nan", "inf", "m"])
def test_a_timeout_in_the_environment_that_is_none(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("NAMEDSHARD_COLLECTIVE_TIMEOUT", text)
    with pytest.raises(ns.SettingError) as caught:
        waiting_seconds()
    assert str(caught.value) == (
        f'NAMEDSHARD_COLLECTIVE_TIMEOUT={text!r} is not a time\n  fix: use seconds, or text like "90s", "5m" or "1.5h"'
    )
