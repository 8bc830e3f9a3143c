"""What the compiler would get wrong without a word: ignored transfers, and results placed otherwise than asked."""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from support import DEVICES, E8, M8, M8_REVERSED, M42, MIXED42, assert_exactly, bits, counting, mesh, na

import namedshard as ns

M4 = mesh((4,), "data")
ALL = "[0, 1, 2, 3, 4, 5, 6, 7]"
FIX = (
    '  fix: move the result after the call; for host memory, use ns.shard(..., memory_kind="pinned_host") or'
    " jax.device_put(x, jax.memory.Space.Host)"
)


def on(where: Mesh, *spec: Any, kind: str | None = None) -> NamedSharding:
    return NamedSharding(where, P(*spec), memory_kind=kind)


def line_of(fn: Callable[..., Any], mark: str) -> str:
    lines, start = inspect.getsourcelines(fn)
    return f"{__file__}:{start + next(n for n, line in enumerate(lines) if mark in line)}"


def told(call: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(ns.IgnoredTransferError) as caught:
        call(*args)
    return str(caught.value)


def warned(call: Callable[..., Any], *args: Any) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        out = call(*args)
    return out, [str(w.message) for w in found]


@pytest.mark.parametrize(
    ("target", "named"),
    [
        (DEVICES[3], "cpu devices [3]"),
        (DEVICES[0], "cpu devices [0]"),
        (SingleDeviceSharding(DEVICES[5]), "cpu devices [5]"),
        (on(M8_REVERSED, "data"), "cpu devices [7, 6, 5, 4, 3, 2, 1, 0]"),
        (on(M4, "data"), "cpu devices [0, 1, 2, 3]"),
        (on(M4, "data", kind="pinned_host"), "cpu devices [0, 1, 2, 3]"),
    ],
    ids=str,
)
def test_transfers_to_other_devices_raise_with_file_and_line(target: Any, named: str) -> None:
    def step(x):
        return jax.device_put(x + 1, target)  # here

    with jax.set_mesh(M8):
        assert told(ns.named_jit(step), jax.device_put(counting(8), on(M8, "data"))) == (
            "step: 1 device_put in traced code would be ignored by the compiler, which runs on cpu devices"
            f" {ALL}\n  {line_of(step, '# here')}: to {named}\n{FIX}"
        )


def test_nested_ones_are_found_too_all_at_once() -> None:
    def body(carry, x):
        carry = jax.device_put(carry, DEVICES[1])  # scan
        return carry, x

    def branch(x):
        return jax.device_put(x, DEVICES[2])  # cond

    inner = jax.jit(lambda x: jax.device_put(x, DEVICES[3]))  # jit

    @jax.checkpoint
    def remat(x):
        return jax.device_put(x, DEVICES[4])  # remat

    @jax.custom_jvp
    def custom(x):
        return jax.device_put(x, DEVICES[5])  # custom

    custom.defjvp(lambda x, t: (custom(*x), *t))

    def step(x):
        x, _ = jax.lax.scan(body, x, jnp.arange(3))
        x = jax.lax.cond(x[0] > 0, branch, lambda x: x, x)
        x = jax.lax.while_loop(lambda x: x[0] > 9, lambda x: jax.device_put(x, DEVICES[6]), x)  # while
        return custom(remat(inner(x)))

    said = told(ns.named_jit(step), jax.device_put(counting(8), on(M8)))
    here = test_nested_ones_are_found_too_all_at_once
    marks = ("# scan", "# cond", "# while", "# jit", "# remat", "# custom")
    ids = (1, 2, 6, 3, 4, 5)
    assert said == "\n".join(
        [
            f"step: 6 device_puts in traced code would be ignored by the compiler, which runs on cpu devices {ALL}",
            *(f"  {line_of(here, m)}: to cpu devices [{n}]" for m, n in zip(marks, ids, strict=True)),
            FIX,
        ]
    )


def test_transfers_that_work_pass() -> None:
    def memory(x):
        host = jax.device_put(x, jax.memory.Space.Host)
        again = jax.device_put(host, jax.memory.Space.Device)
        by_kind = jax.device_put(x, on(M8, "data", kind="pinned_host"))
        return host, again, by_kind, jax.device_put(x), jnp.asarray(np.arange(3))

    x = jax.device_put(counting(8), on(M8, "data"))
    with jax.set_mesh(M8):
        out, said = warned(ns.named_jit(memory), x)
        assert said == []
        assert [y.sharding.memory_kind for y in out[:3]] == ["pinned_host", "device", "pinned_host"]
    # Where nothing else decides the devices, a sharding in traced code does; a bare device never does.
    free = jnp.arange(8.0)
    assert ns.named_jit(lambda x: jax.device_put(x * 2, SingleDeviceSharding(DEVICES[3])))(free).devices() == {
        DEVICES[3]
    }
    assert told(ns.named_jit(lambda x: jax.device_put(x * 2, DEVICES[3])), free).startswith(
        "<lambda>: 1 device_put in traced code would be ignored by the compiler, which runs on cpu devices [0]\n"
    )
    assert ns.named_jit(lambda x: jax.device_put(x * 2, DEVICES[3]))(jax.device_put(free, DEVICES[3])).devices() == {
        DEVICES[3]
    }
    # A call that raised is checked again.
    refused = ns.named_jit(lambda x: jax.device_put(x, DEVICES[3]))
    for _ in range(2):
        told(refused, x)
    assert refused.report().calls == 0


def test_a_spec_that_the_compiler_ignores_is_named_once() -> None:
    def step(x):
        return jax.device_put(x * 2, on(M8, "data", None))  # here

    fn = ns.named_jit(step)
    x = jax.device_put(counting(8, 8), on(M8, None, "data"))
    with jax.set_mesh(M8):
        out, said = warned(fn, x)
        # The fact that the warning is about:
        assert out.sharding.is_equivalent_to(on(M8, None, "data"), 2)
        assert said == [
            "step: 1 device_put asks for a spec in traced code, which the compiler ignores on Auto axes\n"
            f"  {line_of(step, '# here')}: to P('data', None)\n"
            "  fix: use ns.shard, or jax.lax.with_sharding_constraint"
        ]
        assert warned(fn, x)[1] == []
    with jax.set_mesh(MIXED42):
        mixed = ns.named_jit(lambda x: jax.device_put(x * 2, on(MIXED42, "data")))
        assert len(warned(mixed, jax.device_put(counting(8, 8), on(MIXED42)))[1]) == 1


def test_specs_that_are_heeded_or_already_so_are_not_named() -> None:
    x = jax.device_put(counting(8, 8), on(M8, None, "data"))

    def fine(x):
        inner = jax.jit(lambda x: jax.device_put(x, on(M8, None, "data")))
        moved = jax.lax.with_sharding_constraint(x + 1, on(M8, "data"))
        return jax.device_put(x, on(M8, None, ("data",))), inner(x), jax.device_put(moved, on(M8, "data", None))

    with jax.set_mesh(M8):
        assert warned(ns.named_jit(fine), x)[1] == []
    one = mesh((1,), "data")
    with jax.set_mesh(one):
        put = ns.named_jit(lambda x: jax.device_put(x + 1, on(one, "data")))
        assert warned(put, jax.device_put(counting(8), on(one)))[1] == []
    with jax.set_mesh(E8):
        explicit = ns.named_jit(lambda x: jax.device_put(x * 2, on(E8, "data", None)))
        out, said = warned(explicit, jax.device_put(counting(8, 8), on(E8, None, "data")))
        assert said == []
        assert_exactly(out, E8, P("data", None))


@pytest.mark.parametrize("where", [M8, E8], ids=["auto", "explicit"])
def test_results_without_elements_go_where_they_belong_all_the_same(where: Mesh) -> None:
    def step(x):
        return x * 2, x.array[:0], na(x.array, "a b")

    x = na(np.zeros((0, 4), np.float32), "a b")
    # A plain jit forgets about them on Auto axes.
    fn = ns.named_jit(step, {"a": "data"})
    with jax.set_mesh(where):
        for _ in range(2):
            out, said = warned(fn, x)
            assert said == []
            assert out[0].array.shape == (0, 4)
            assert_exactly(out[0], where, P("data"))
            assert_exactly(out[2], where, P("data"))
        assert_exactly(fn.lower(x).compile()(x)[0], where, P("data"))
        assert fn.report().traces == 1
        assert jax.jit(lambda x: fn(x)[0].array.sum())(x) == 0


def test_a_result_that_came_out_otherwise_than_asked_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("namedshard._jit.program.Program._left_to_jit", lambda *_: False)
    monkeypatch.setattr("namedshard._jit.program.place_leaves", lambda paths, values, wanted: values)

    def step(x):
        return na(x * 2, "a"), x

    fn = ns.named_jit(step, {"a": "data"})
    x = jax.device_put(counting(8), on(M8))
    with jax.set_mesh(M8):
        _, said = warned(fn, x)
        assert said == [
            "step: the compiler placed 1 of 2 outputs otherwise than asked\n"
            "  [0]: P(), but its mapping asks for P('data',)\n"
            "  fix: move the result after the call with ns.shard"
        ]
        assert warned(fn, x)[1] == []
        assert warned(fn, counting(8))[1] == []


def test_random_keys_go_to_host_memory() -> None:
    def step(keys):
        return na(jax.device_put(keys, jax.memory.Space.Host), "a"), keys

    fn = ns.named_jit(step, {"a": "data"})
    keys = jax.random.split(jax.random.key(0), 8)
    with jax.set_mesh(M8):
        for _ in range(2):
            (out, device), said = warned(fn, jax.device_put(keys, on(M8, "data")))
            assert said == []
            assert out.array.sharding == on(M8, "data").with_memory_kind("pinned_host")
            assert device.sharding.memory_kind == "device"
            np.testing.assert_array_equal(jax.random.key_data(out.array), jax.random.key_data(keys))


def test_host_memory_in_and_out() -> None:
    @ns.named_jit(axis_resources={"a": "data"})
    def update(moment, grad):
        moment = jax.device_put(moment, jax.memory.Space.Device)
        return jax.device_put(moment + grad, jax.memory.Space.Host)

    with jax.set_mesh(M42):
        moment = na(jax.device_put(counting(8, 4), on(M42, "data", kind="pinned_host")), "a b")
        grad = na(jax.device_put(counting(8, 4), on(M42, "data")), "a b")
        for n in range(3):
            moment = update(moment, grad)
            assert_exactly(moment, M42, P("data"), "pinned_host")
            assert bits(jax.device_put(moment.array, on(M42))) == bits(counting(8, 4) * (n + 2))
        assert (update.report().traces, update.report().compiles) == (1, 1)
