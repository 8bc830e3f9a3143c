"""Moves as accelerators make them: from device to device, by compiled programs."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from support import M8_REVERSED, M42, bits, counting

import namedshard as ns
from namedshard import _jaxcompat as compat
from namedshard._place import boxes, compiled, rounds, route
from namedshard._place.compiled import lowered
from namedshard._place.shard import place_leaves

HALF, OTHER_HALF = (Mesh(devices, ("x", "y")) for devices in (M42.devices[:2], M42.devices[:1:-1]))
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
# Overlapping, disjoint, larger and smaller than each other.
OTHER_GRIDS = {(1,): "z", (2,): "z", (3,): "z", (6,): "z", (2, 2): "xy", (3, 2): "ab", (2, 4): "xy"}
OTHER_SHAPES = [(), (24,), (24, 48), (0, 24)]
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
def shardings(draw: Any, ndim: int, grids: Mapping[tuple[int, ...], str] = GRIDS) -> NamedSharding:
    grid = draw(st.sampled_from(sorted(grids)))
    devices = np.array(draw(st.permutations(jax.devices()))[: math.prod(grid)]).reshape(grid)
    types = (draw(st.sampled_from([AxisType.Auto, AxisType.Explicit])),) * len(grid)
    spec = draw(st.sampled_from(specs_of(grids[grid], ndim)))
    kind = draw(st.sampled_from(["device", "device", "pinned_host"]))
    return NamedSharding(Mesh(devices, tuple(grids[grid]), axis_types=types), spec, memory_kind=kind)


def values(shape: tuple[int, ...], dtype: Any) -> Any:
    if dtype == "keys":
        return jax.random.split(jax.random.key(0), shape)
    size = int(np.prod(shape, dtype=int))
    if np.dtype(dtype).itemsize * size and dtype not in (np.bool_, ml_dtypes.int4, ml_dtypes.int2):
        # All bit patterns, also those that are no numbers, and -0.0.
        raw = np.random.default_rng(0).integers(0, 256, size * np.dtype(dtype).itemsize, dtype=np.uint8)
        return raw.view(dtype).reshape(shape)
    return (np.arange(size) % 2).reshape(shape).astype(dtype)


def check_moved(value: Any, have: NamedSharding, want: NamedSharding) -> None:
    keys = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
    x = jax.device_put(value, have) if keys else place_leaves(["x"], [value], [(0, have)])[0]
    with ns.testing.accelerator_routes():
        (y,) = place_leaves(["x"], [x], [(0, want)])
    assert y.sharding.mesh == want.mesh and y.sharding.is_equivalent_to(want, value.ndim)
    assert (y.dtype, y.sharding.memory_kind) == (x.dtype, want.memory_kind)
    raw, given_ = (jax.random.key_data(y), jax.random.key_data(value)) if keys else (y, value)
    for shard in raw.addressable_shards:
        piece = np.asarray(given_)[shard.index].astype(raw.dtype)
        assert shard.data.shape == piece.shape
        assert np.asarray(shard.data).tobytes() == piece.tobytes()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_order_of_the_same_devices(data: Any) -> None:
    shape, dtype = data.draw(st.sampled_from(SHAPES)), data.draw(st.sampled_from(DTYPES))
    have, want = data.draw(shardings(len(shape))), data.draw(shardings(len(shape)))
    check_moved(values(shape, dtype), have, want)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_other_devices(data: Any) -> None:
    shape, dtype = data.draw(st.sampled_from(OTHER_SHAPES)), data.draw(st.sampled_from(DTYPES))
    have, want = data.draw(shardings(len(shape), OTHER_GRIDS)), data.draw(shardings(len(shape), OTHER_GRIDS))
    check_moved(values(shape, dtype), have, want)


@pytest.fixture
def chunks_of_a_kib(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def forget() -> None:
        rounds.plan_between.cache_clear()
        compiled._steps.cache_clear()

    monkeypatch.setattr(rounds, "CHUNK_BYTES", 1 << 10)
    forget()
    yield
    forget()


@pytest.mark.usefixtures("chunks_of_a_kib")
@pytest.mark.parametrize("shape", [(24, 36), (12, 1, 60), (6, 12, 36), (2880,)], ids=str)
def test_large_arrays_are_sent_in_chunks(shape: tuple[int, ...]) -> None:
    places = [
        NamedSharding(M42, P(*["data", "model"][: len(shape)])),
        NamedSharding(M8_REVERSED, P(*[None] * (len(shape) - 1), "data")),
        NamedSharding(Mesh(M42.devices[:3, 0], ("x",)), P("x")),
        NamedSharding(Mesh(M42.devices[3:1:-1], ("x", "y")), P("y")),
        NamedSharding(M42, P()),
    ]
    divides = [p for p in places if all(n % d == 0 for n, d in zip(shape, split_of(p, len(shape)), strict=True))]
    assert len(divides) > 2
    for have, want in itertools.permutations(divides, 2):
        plan = rounds.plan_between(have, want, shape, 4)
        counts = [group.counts for step in plan.steps for group in step]
        check_moved(values(shape, np.float32), have, want)
        assert 4 * plan.elements <= rounds.CHUNK_BYTES // rounds._COPIES
    assert math.prod(counts[0]) > 1


def split_of(sharding: NamedSharding, ndim: int) -> list[int]:
    """Into how many parts a sharding splits each dimension."""
    shape = (2520,) * ndim
    return [n // part for n, part in zip(shape, sharding.shard_shape(shape), strict=True)]


@pytest.mark.parametrize("most", [1, 3, 7, 16, 50, 100, 1000, 10**6])
def test_chunks_fit_and_send_little_twice(most: int) -> None:
    for piece in [(7,), (64, 64), (1000, 3), (3, 1000, 5), (1, 1, 97), (5, 1, 2, 300)]:
        chunk = rounds.chunk_of(piece, most)
        assert math.prod(chunk) <= most
        counts = [-(-n // c) for n, c in zip(piece, chunk, strict=True)]
        sent = math.prod(c * n for c, n in zip(chunk, counts, strict=True))
        assert sent <= 1.1 * math.prod(piece) or most < 8


def test_a_program_serves_all_leaves_that_change_alike() -> None:
    have, want = NamedSharding(M42, P("data", "model")), NamedSharding(Mesh(M42.devices[:2], ("a", "b")), P("b", "a"))
    xs = [jax.device_put(counting(16, 8) + i, have) for i in range(5)]
    with ns.testing.accelerator_routes(), compat.count_compiles() as programs:
        out = place_leaves(list("abcde"), xs, [(i, want) for i in range(5)])
    assert [bits(y) for y in out] == [bits(x) for x in xs]
    assert programs[0] == 3


def test_the_number_of_programs_does_not_grow_with_the_number_of_boxes() -> None:
    def programs(n: int) -> int:
        have = NamedSharding(Mesh(M42.devices.ravel()[:n], ("x",)), P("x"))
        want = NamedSharding(Mesh(M42.devices.ravel()[-1:], ("x",)), P())
        x = jax.device_put(counting(16, 8), have)
        with ns.testing.accelerator_routes(), compat.count_compiles() as found:
            place_leaves(["x"], [x], [(0, want)])
        return found[0]

    assert programs(2) == programs(4) == 4


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
        (NamedSharding(HALF, P("x", "y")), NamedSharding(M42, P("data", "model"))),
        (NamedSharding(M42, P("data", "model")), NamedSharding(HALF, P("y"))),
        (NamedSharding(HALF, P("x")), NamedSharding(OTHER_HALF, P(None, "x"))),
        (NamedSharding(HALF, P("x")), NamedSharding(OTHER_HALF, P("x"))),
        (SingleDeviceSharding(jax.devices()[3]), NamedSharding(M42, P("data"))),
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
    (program,) = lowered((16, 8), np.float32, have, NamedSharding(turned, P("data", "model")))
    text = program.as_text()
    assert text.count("collective_permute") == 1
    assert "all_gather" not in text and "all_to_all" not in text and "dynamic_slice" not in text


def test_what_a_device_has_it_is_not_sent() -> None:
    @dataclasses.dataclass(frozen=True)
    class Fake:
        id: int
        process_index: int

    def box(rows: tuple[int, int]) -> Any:
        return (rows, (0, 4))

    devices = [Fake(i, i // 2) for i in range(4)]
    halves = [box((0, 8)), box((8, 16)), box((0, 8)), box((8, 16))]

    def sent(target: list[Any]) -> list[tuple[int, int]]:
        source, wanted = (boxes.layout(dict(zip(devices, held, strict=True)), 2) for held in (halves, target))
        plan = rounds.plan(source, wanted, 1000)
        pairs = [pair for step in plan.steps for group in step for r in group.rounds for pair in r.pairs]
        return sorted((s, r) for s, r in pairs if s != r)

    # Two processes; each has both halves.
    assert sent(halves[::-1]) == [(0, 1), (1, 0), (2, 3), (3, 2)]
    assert sent([boxes.whole((16, 4))] * 4) == [(0, 1), (1, 0), (2, 3), (3, 2)]


def test_accelerator_routes_end_with_their_block() -> None:
    where = NamedSharding(M42, P())
    assert route.on_cpus(where)
    with ns.testing.accelerator_routes():
        assert not route.on_cpus(where)
        with ns.testing.accelerator_routes():
            pass
        assert not route.on_cpus(where)
    assert route.on_cpus(where)
