"""Moves between the same devices in any order, as accelerators make them: from device to device."""

import itertools
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support import M8_REVERSED, M42, bits, counting

import namedshard as ns
from namedshard import _jaxcompat as compat
from namedshard._place import boxes, local, rounds
from namedshard._place.compiled import lowered
from namedshard._place.shard import place_leaves

GRIDS = {(8,): "z", (2, 4): "xy", (4, 2): "ab", (2, 2, 2): "pqr"}
DTYPES = [
    np.float32,
    np.int32,
    np.bool_,
    np.complex64,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.int4,
    ml_dtypes.int2,
    "keys",
]
SHAPES = [(), (8,), (0, 8), (16, 8), (8, 16, 8)]


def specs_of(names: str, ndim: int) -> list[P]:
    """Every spec of so many dimensions over these mesh axes, alone or all in one."""
    entries = [None, *names, *([tuple(names), tuple(reversed(names))] if len(names) > 1 else [])]
    found = []
    for spec in itertools.product(entries, repeat=ndim):
        used = [name for entry in spec if entry for name in entry]
        if len(used) == len(set(used)):
            found.append(P(*spec))
    return found


@st.composite
def shardings(draw: Any, ndim: int) -> NamedSharding:
    grid = draw(st.sampled_from(sorted(GRIDS)))
    devices = np.array(draw(st.permutations(jax.devices()))).reshape(grid)
    types = (draw(st.sampled_from([AxisType.Auto, AxisType.Explicit])),) * len(grid)
    spec = draw(st.sampled_from(specs_of(GRIDS[grid], ndim)))
    kind = draw(st.sampled_from(["device", "device", "pinned_host"]))
    return NamedSharding(Mesh(devices, tuple(GRIDS[grid]), axis_types=types), spec, memory_kind=kind)


def values(shape: tuple[int, ...], dtype: Any) -> Any:
    if dtype == "keys":
        return jax.random.split(jax.random.key(0), shape)
    size = int(np.prod(shape, dtype=int))
    if np.dtype(dtype).itemsize * size and dtype not in (np.bool_, ml_dtypes.int4, ml_dtypes.int2):
        # All bit patterns, also those that are no numbers, and -0.0.
        raw = np.random.default_rng(0).integers(0, 256, size * np.dtype(dtype).itemsize, dtype=np.uint8)
        return raw.view(dtype).reshape(shape)
    return (np.arange(size) % 2).reshape(shape).astype(dtype)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_order_of_the_same_devices(data: Any) -> None:
    shape, dtype = data.draw(st.sampled_from(SHAPES)), data.draw(st.sampled_from(DTYPES))
    have, want = data.draw(shardings(len(shape))), data.draw(shardings(len(shape)))
    value = values(shape, dtype)
    x = jax.device_put(value, have) if dtype == "keys" else place_leaves(["x"], [value], [(0, have)])[0]
    with ns.testing.accelerator_routes():
        (y,) = place_leaves(["x"], [x], [(0, want)])
    assert y.sharding.mesh == want.mesh and y.sharding.is_equivalent_to(want, len(shape))
    assert (y.dtype, y.sharding.memory_kind) == (x.dtype, want.memory_kind)
    raw, given_ = (jax.random.key_data(y), jax.random.key_data(value)) if dtype == "keys" else (y, value)
    for shard in raw.addressable_shards:
        piece = np.asarray(given_)[shard.index].astype(raw.dtype)
        assert shard.data.shape == piece.shape
        assert np.asarray(shard.data).tobytes() == piece.tobytes()


def test_weak_types_stay_weak() -> None:
    x = compat.as_weak(jax.device_put(counting(8), NamedSharding(M42, P("data"))))
    with ns.testing.accelerator_routes():
        (y,) = place_leaves(["x"], [x], [(0, NamedSharding(M8_REVERSED, P("data")))])
    assert x.weak_type and y.weak_type and bits(y) == bits(counting(8))


@pytest.mark.parametrize("kind", ["device", "pinned_host"])
def test_nothing_passes_through_the_host(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        pytest.fail("an array of numpy on the way from device to device")

    ways = [
        (NamedSharding(M42, P("data", "model")), NamedSharding(M8_REVERSED, P(None, "data"))),
        (NamedSharding(M8_REVERSED, P("data")), NamedSharding(M42, P("model", "data"))),
        (NamedSharding(M42, P()), NamedSharding(M8_REVERSED, P("data"))),
        (NamedSharding(M42, P("data")), NamedSharding(M8_REVERSED, P())),
        (NamedSharding(M42, P("data")), NamedSharding(M42, P("model"))),
    ]
    for have, want in ways:
        x = jax.device_put(counting(16, 8), have.with_memory_kind(kind))
        with monkeypatch.context() as patch, ns.testing.accelerator_routes():
            patch.setattr(compat.ArrayImpl, "_value", property(refused))
            patch.setattr(compat.ArrayImpl, "__array__", refused)
            patch.setattr(compat, "put_shards", refused)
            patch.setattr(boxes, "aligned_empties", refused)
            (y,) = place_leaves(["x"], [x], [(0, want)])
        assert bits(y) == bits(counting(16, 8))


def test_an_order_alone_is_one_permutation() -> None:
    have = NamedSharding(M42, P("data", "model"))
    turned = Mesh(M42.devices[::-1, ::-1], M42.axis_names)
    text = lowered((16, 8), np.float32, have, NamedSharding(turned, P("data", "model"))).as_text()
    assert text.count("collective_permute") == 1
    assert "all_gather" not in text and "all_to_all" not in text


def test_what_a_device_has_it_is_not_sent() -> None:
    def box(rows: tuple[int, int]) -> Any:
        return (rows, (0, 4))

    halves = [box((0, 8)), box((8, 16)), box((0, 8)), box((8, 16))]
    # Two processes; each has both halves.
    plan = rounds.plan(halves, halves[::-1], [0, 0, 1, 1])
    assert [r.pairs for r in plan] == [((0, 1), (1, 0), (2, 3), (3, 2))]
    kept = rounds.plan(halves, [boxes.whole((16, 4))] * 4, [0, 0, 1, 1])
    sent = [(s, r) for step in kept for s, r in step.pairs if s != r]
    assert sorted(sent) == [(0, 1), (1, 0), (2, 3), (3, 2)]


def test_accelerator_routes_end_with_their_block() -> None:
    where = NamedSharding(M42, P())
    assert local.on_cpus(where)
    with ns.testing.accelerator_routes():
        assert not local.on_cpus(where)
        with ns.testing.accelerator_routes():
            pass
        assert not local.on_cpus(where)
    assert local.on_cpus(where)
