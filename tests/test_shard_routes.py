"""Every way an array can take: sources x targets x memory kinds, donation, ties, all or nothing."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
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
    to_device_memory,
    unreduced,
)

import namedshard as ns
from namedshard._place.route import Placement, Route, obstacle, placement_of, route_for

BASE = counting(8, 16)
MAPPING = {"a": "data", "b": "model"}
PERMUTED42 = mesh((4, 2), "data model", devices=DEVICES[[0, 4, 1, 5, 2, 6, 3, 7]])
HALF = mesh((2, 2), "data model", EXPLICIT)
OTHER_HALF = mesh((2, 2), "data model", devices=DEVICES[4:])
ONE = mesh((1, 1), "data model", devices=DEVICES[3:])


def put(x: Any, where: Any, *spec: Any, kind: str = "device") -> jax.Array:
    return jax.device_put(x, NamedSharding(where, P(*spec), memory_kind=kind))


SOURCES: dict[str, Callable[[Any], Any]] = {
    "numpy": lambda x: x,
    "uncommitted": jnp.asarray,
    "on one device": lambda x: jax.device_put(x, DEVICES[3]),
    "on another": lambda x: jax.device_put(x, DEVICES[7]),
    "there": lambda x: put(x, M42, "data", "model"),
    "same mesh": lambda x: put(x, M42, "model", "data"),
    "replicated": lambda x: put(x, M42),
    "same devices, other names": lambda x: put(x, M8, None, "data"),
    "explicit": lambda x: put(x, E42, "data", "model"),
    "mixed": lambda x: put(x, MIXED42, "model"),
    "permuted": lambda x: put(x, PERMUTED42, "data", "model"),
    "reversed": lambda x: put(x, M8_REVERSED, "data"),
    "half": lambda x: put(x, HALF, "data", "model"),
    "the other half": lambda x: put(x, OTHER_HALF, None, "data"),
    "pinned": lambda x: put(x, M42, "data", kind="pinned_host"),
    "pinned elsewhere": lambda x: put(x, PERMUTED42, None, "data", kind="pinned_host"),
    "unpinned": lambda x: put(x, M8_REVERSED, None, "data", kind="unpinned_host"),
    "to be summed": unreduced,
    "to be summed, pinned": lambda x: jax.device_put(y := unreduced(x), y.sharding.with_memory_kind("pinned_host")),
}
TARGETS = {
    "auto": M42,
    "explicit": E42,
    "mixed": MIXED42,
    "permuted": PERMUTED42,
    "half": HALF,
    "the other half": OTHER_HALF,
    "one": ONE,
}
KINDS = (None, "device", "pinned_host", "unpinned_host")


@pytest.fixture(params=["rebuilt from pieces", "as on accelerators"])
def either_way(request: pytest.FixtureRequest) -> Iterator[None]:
    """CPUs have a way of their own; the ones that other devices take must be right as well, and run here too."""
    as_accelerators = request.param == "as on accelerators"
    with ns.testing.accelerator_routes() if as_accelerators else contextlib.nullcontext():
        yield


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("source", SOURCES)
def test_from_everywhere_to_everywhere(source: str) -> None:
    for target, kind in itertools.product(TARGETS.values(), KINDS):
        x = SOURCES[source](BASE.copy())
        y = ns.shard(na(x, "a b"), MAPPING, target, memory_kind=kind)
        has = x.sharding.memory_kind if isinstance(x, jax.Array) and x.committed else "device"
        assert_exactly(y, target, P("data", "model"), kind or has)
        assert bits(y.array) == bits(BASE)
        again = ns.shard(y, MAPPING, target, memory_kind=kind)
        assert again is y


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("source", SOURCES)
def test_the_source_lives_on_by_itself(source: str) -> None:
    """Neither writing to a numpy source, nor deleting the source, nor donating the result reaches the other."""
    for target, kind, mapping in itertools.product(TARGETS.values(), ("device", "pinned_host"), (MAPPING, {})):
        own = np.empty(BASE.nbytes + 64, np.uint8)
        start = -own.ctypes.data % 64  # aligned, so that JAX would take it over
        base = own[start : start + BASE.nbytes].view(np.float32).reshape(BASE.shape)
        base[:] = BASE
        x = SOURCES[source](base)
        y = ns.shard(na(x, "a b"), mapping, target, memory_kind=kind)
        if y.array is x:
            continue
        z = ns.shard(na(x, "a b"), mapping, target, memory_kind=kind)
        z.array.delete()
        assert bits(ns.to_host(x)) == bits(BASE)
        # JAX itself lets its arrays alias numpy's memory: the move must have read it before it is written to.
        jax.block_until_ready(y.array)
        base[:] = -1
        if isinstance(x, jax.Array):
            x.delete()
        assert bits(y.array) == bits(BASE)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("source", [s for s in SOURCES if s != "numpy"])
def test_donation_gives_up_exactly_what_moves(source: str) -> None:
    for target, kind in itertools.product(TARGETS.values(), ("device", "pinned_host")):
        x = SOURCES[source](BASE.copy())
        y = ns.shard(na(x, "a b"), MAPPING, target, memory_kind=kind, donate=True)
        assert_exactly(y, target, P("data", "model"), kind)
        assert bits(y.array) == bits(BASE)
        assert x.is_deleted() == (y.array is not x)


@pytest.mark.usefixtures("either_way")
def test_moves_are_explicit_transfers() -> None:
    for make, target in itertools.product(SOURCES.values(), (M42, OTHER_HALF)):
        x = na(make(BASE.copy()), "a b")
        with jax.transfer_guard("disallow"):
            y = ns.shard(x, MAPPING, target)
        assert bits(y.array) == bits(BASE)


def test_calls_that_move_data_are_explicit_transfers(tmp_path: Path) -> None:
    tree = {"w": ns.shard(na(BASE, "a b"), MAPPING, M42)}
    struct = {"w": na(jax.ShapeDtypeStruct(BASE.shape, BASE.dtype), "a b")}
    ns.save_safetensors(tree, tmp_path / "a.safetensors")
    weight, key = (lambda key, x: na(jax.random.normal(key, BASE.shape) + x, "a b")), jax.random.key(0)
    unplaced = jnp.asarray(BASE)
    calls: list[Callable[[], Any]] = [
        lambda: ns.save_safetensors(tree, tmp_path / "b.safetensors"),
        lambda: ns.load_safetensors(tmp_path / "a.safetensors", struct, mapping=MAPPING),
        lambda: ns.load_safetensors(tmp_path / "a.safetensors", {"w": struct["w"].array}, mesh=None),
        lambda: ns.to_host(tree),
        lambda: list(ns.iter_to_host(tree)),
        lambda: ns.init(weight, key, BASE, mapping=MAPPING),
        lambda: ns.init(weight, key, BASE, mapping=MAPPING, exact=True),
        lambda: ns.offload({"numpy": BASE, "unplaced": unplaced, **tree}),
        lambda: ns.named_jit(lambda x, y: x * y, MAPPING)(np.float32(2), unplaced),
        lambda: ns.named_jit(lambda x: x * 1, in_axis_resources={"a": "model"}, on_mismatch="reshard")(tree["w"]),
    ]
    for call in calls:
        with jax.set_mesh(M42), jax.transfer_guard("disallow"):
            call()
    with jax.transfer_guard("disallow_explicit"), pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed"):
        ns.shard(na(BASE, "a b"), MAPPING, M42)


@pytest.mark.usefixtures("either_way")
def test_numpy_is_not_given_up() -> None:
    x = BASE.copy()
    assert bits(ns.shard(na(x, "a b"), MAPPING, M42, donate=True).array) == bits(x) == bits(BASE)


KEYS = {
    "typed": lambda: jax.random.split(jax.random.key(7), 8),
    "typed, another generator": lambda: jax.random.split(jax.random.key(7, impl="rbg"), 8),
    "old": lambda: jax.random.split(jax.random.PRNGKey(7), 8),
}


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("key", KEYS)
def test_keys_from_everywhere_to_everywhere(key: str) -> None:
    made = KEYS[key]()
    names = " ".join(["k", "z"][: made.ndim])
    sources: list[Any] = [
        made,
        jax.device_put(made, DEVICES[3]),
        put(made, M42),
        put(made, M8_REVERSED, "data"),
        put(made, M42, "data", kind="pinned_host"),
    ]
    for x, target, kind in itertools.product(sources, (M8, M8_REVERSED, E8, OTHER_HALF), ("device", "pinned_host")):
        y = ns.shard(na(x, names), {"k": "data"}, target, memory_kind=kind)
        assert_exactly(y, target, P("data"), kind)
        assert y.array.dtype == made.dtype and bits(y.array) == bits(made)
    wanted = jax.vmap(jax.random.uniform)(made)
    sharded = ns.shard(na(made, names), {"k": "data"}, M8).array
    assert bits(jax.vmap(jax.random.uniform)(sharded)) == bits(wanted)


WIDE = "float32 complex64 int32 uint32"
NARROW = "int2 uint2 int4 uint4 int8 uint8 int16 bool bfloat16 float16"
FLOATS = "float8_e4m3fn float8_e5m2 float8_e8m0fnu float4_e2m1fn"


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("dtype", f"{WIDE} {NARROW} {FLOATS}".split())
def test_every_dtype_keeps_its_bits(dtype: str) -> None:
    kind = jnp.dtype(dtype)
    if dtype in ("int2", "uint2", "int4"):
        x = np.arange(-8, 8).astype(kind)
    elif jnp.issubdtype(kind, jnp.floating):
        x = (2.0 ** (np.arange(16) % 4 - 1)).astype(kind)
    else:
        x = (np.arange(16) % 2).astype(kind)
    for source, mapping in itertools.product(
        (x, jnp.asarray(x), jax.device_put(x, DEVICES[3]), put(x, M42, "model", kind="pinned_host")),
        ({"a": "data"}, {}),
    ):
        y = ns.shard(na(source, "a"), mapping, M8).array
        assert y.dtype == kind and bits(y) == bits(x)
        for target in ({}, {"a": "data"}):
            assert bits(jax.jit(lambda v, t=target: ns.shard(na(v, "a"), t, M8).array)(y)) == bits(x)
            with jax.set_mesh(M8):
                assert bits(ns.named_jit(lambda v: v, out_axis_resources=target)(na(y, "a")).array) == bits(x)
    if dtype == "int4":
        assert np.asarray(y.astype(jnp.int8)).tolist() == list(range(-8, 8))


@pytest.mark.usefixtures("either_way")
def test_weak_types_are_kept() -> None:
    weak = jnp.asarray(1.5)
    assert weak.weak_type
    sources: list[Any] = [
        weak,
        jax.device_put(weak, DEVICES[3]),
        put(weak, M42),
        put(weak, M8_REVERSED),
        put(weak, M42, kind="pinned_host"),
    ]
    for x, target in itertools.product(sources, (M8, M8_REVERSED, E8, OTHER_HALF)):
        y = ns.shard(na(x, ""), {}, target).array
        assert y.weak_type and float(to_device_memory(y)) == 1.5
    assert jax.jit(lambda x: ns.shard(na(x, ""), {}, M8))(jnp.asarray(1.5)).array.weak_type
    struct = jax.ShapeDtypeStruct((), jnp.float32, weak_type=True)
    assert ns.shard(na(struct, ""), {}, M8).array.weak_type
    assert not ns.shard(na(jnp.float32(2), ""), {}, M8).array.weak_type


@pytest.mark.usefixtures("either_way")
def test_zero_size() -> None:
    empty = np.zeros((0, 16), np.float32)
    # JAX has no unreduced arrays without elements.
    sources = [source for name, source in SOURCES.items() if "summed" not in name]
    for source, target in itertools.product(sources, (M8, M8_REVERSED, E8, OTHER_HALF)):
        y = ns.shard(na(source(empty), "a b"), {"a": "data"}, target, memory_kind="device")
        assert_exactly(y, target, P("data"))
        assert y.array.shape == (0, 16)


def test_numpy_in_every_layout() -> None:
    layouts = {
        "fortran": np.asfortranarray(BASE),
        "transposed": np.ascontiguousarray(BASE.T).T,
        "backwards": BASE[::-1, ::-1],
        "strided": np.repeat(np.repeat(BASE, 2, 0), 3, 1)[::2, ::3],
        "broadcast": np.broadcast_to(np.float32(3), BASE.shape),
        "read only": BASE.copy(),
        "big endian": BASE.astype(">f4"),
        "masked": np.ma.masked_array(BASE),
    }
    layouts["read only"].setflags(write=False)
    for x, mapping in itertools.product(layouts.values(), (MAPPING, {})):
        y = ns.shard(na(x, "a b"), mapping, M42).array
        assert y.dtype == np.float32 and np.array_equal(np.asarray(y), np.asarray(x))
        assert np.array_equal(np.asarray(jax.jit(lambda x=x, m=mapping: ns.shard(na(x, "a b"), m, M42).array)()), x)


def test_what_cannot_be_moved() -> None:
    masked = np.ma.masked_array(BASE, mask=BASE > 3)
    spread = Placement("array", unreduced(BASE).sharding, True, False, "device")
    assert obstacle(unreduced(BASE), spread) == "still to be summed over mesh axes 'model', with other processes"
    tree = {"fine": na(BASE, "a b"), "masked": na(masked, "a b"), "plain": masked}
    for call in (
        lambda: ns.shard(tree, MAPPING, M42),
        lambda: jax.jit(lambda: ns.shard(tree, MAPPING, M42))(),
    ):
        with nothing_moved(), pytest.raises(ns.UnsupportedArrayError) as caught:
            call()
        assert str(caught.value) == (
            "shard: 1 of 3 leaves cannot be moved\n"
            "  ['masked']: a masked array, whose mask would be lost\n"
            "  fix: fill masked arrays (x.filled(...)), sum others by jax.sharding.reshard to a spec without unreduced"
        )
    with pytest.raises(ns.CheckpointError, match=r"\['w'\]: is still to be summed; shard it first"):
        ns.save_safetensors({"w": unreduced(BASE)}, "never.safetensors")
    for call in (lambda: ns.offload({"x": masked}), lambda: ns.named_jit(lambda x: x, MAPPING)(masked)):
        with jax.set_mesh(M42), pytest.raises(ns.UnsupportedArrayError, match="a masked array"):
            call()


def test_numpy_scalars() -> None:
    for x in (np.float32(4), np.array(4, np.int16), np.bool_(True)):
        y = ns.shard(na(x, ""), {"a": "data"}, M8).array
        assert_exactly(y, M8, P())
        assert y.dtype == x.dtype and np.asarray(y) == x


# --- the table --------------------------------------------------------------------------------------------------------


def route(x: Any, want: NamedSharding) -> Route:
    return route_for(placement_of(x, False), want, x.shape)


WANT = NamedSharding(M42, P("data", "model"))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("numpy", Route.FROM_HOST),
        ("uncommitted", Route.FROM_HOST),
        ("on one device", Route.DEVICE_PUT),
        ("there", Route.KEEP),
        ("same mesh", Route.CONSTRAIN),
        ("replicated", Route.CONSTRAIN),
        ("same devices, other names", Route.CONSTRAIN),
        ("explicit", Route.CONSTRAIN),
        ("permuted", Route.PERMUTE),
        ("reversed", Route.PERMUTE),
        ("half", Route.DEVICE_PUT),
        ("pinned", Route.DEVICE_PUT),
        ("pinned elsewhere", Route.PERMUTE),
    ],
)
def test_the_route_of_each_source(source: str, expected: Route) -> None:
    assert route(SOURCES[source](BASE), WANT) is expected


def test_the_route_of_structs_and_tracers() -> None:
    struct = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    assert route(struct, WANT) is Route.ANNOTATE
    assert route(jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=WANT), WANT) is Route.KEEP
    seen: list[Route] = []
    jax.eval_shape(lambda x: seen.append(route(x, WANT)), struct)
    jax.vmap(lambda x: seen.append(route(x, NamedSharding(M42, P("model")))))(BASE)
    jax.grad(lambda x: (seen.append(route(x, WANT)), x.sum())[1])(BASE)
    assert seen == [Route.TRACED] * 3
    assert route_for(placement_of(BASE, True), WANT, (8, 16)) is Route.TRACED


def test_the_routes_across_processes() -> None:
    """Arrays that other processes hold a part of, as this process sees them."""

    def far(sharding: NamedSharding) -> Placement:
        return Placement("array", sharding, True, False, "device")

    assert route_for(far(NamedSharding(M42, P("model"))), WANT, (8, 16)) is Route.CONSTRAIN_JIT
    assert route_for(far(NamedSharding(PERMUTED42, P())), WANT, (8, 16)) is Route.PERMUTE
    assert route_for(far(NamedSharding(HALF, P())), WANT, (8, 16)) is Route.COLLECTIVE
    assert route_for(far(NamedSharding(M42, P("data", "model"))), WANT, (8, 16)) is Route.KEEP


def test_equivalent_is_there_and_other_axis_types_are_not() -> None:
    for spec in (("data", None), ("data",), (("data",), None)):
        x = na(put(BASE, M42, *spec), "a b")
        assert ns.shard(x, {"a": "data"}, M42) is x
    x = na(put(BASE, mesh((4, 2), "data model"), "data"), "a b")
    assert ns.shard(x, {"a": "data"}, M42).array is x.array
    for other in (E42, MIXED42):
        y = ns.shard(x, {"a": "data"}, other)
        assert_exactly(y, other, P("data"))
    # Over a mesh axis of size 1, sharded and replicated are one.
    thin = mesh((8, 1), "data model")
    x = na(put(BASE, thin, "data"), "a b")
    assert ns.shard(x, MAPPING, thin).array is x.array
