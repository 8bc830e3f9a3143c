"""Donated arguments of compiled functions, and everything that can go wrong with them."""

from collections.abc import Callable
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support import M8, M8_REVERSED, M42, assert_exactly, bits, counting, na

import namedshard as ns


def put(*spec: Any, where: Mesh = M8, kind: str | None = None, shape: tuple[int, ...] = (8, 4)) -> jax.Array:
    return jax.device_put(counting(*shape), NamedSharding(where, P(*spec), memory_kind=kind))


def told(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ns.DonationError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def text(headline: str, *lines: str) -> str:
    return "\n".join([headline, *(f"  {line}" for line in lines)])


SHARED_FIX = "fix: pass a copy (jnp.copy), or do not donate it"
GONE_FIX = "fix: use the result of the call that they were donated to"
REUSE_FIX = "fix: give input and output the same mapping and memory kind, or do not donate it"


def test_by_keyword_and_by_position() -> None:
    by_name = ns.named_jit(lambda a, *, b: a + b, donate_kwargs={"b": True})
    a, b = put("data"), put("data")
    with jax.set_mesh(M8):
        assert bits(by_name(a, b=b)) == bits(counting(8, 4) * 2)
        assert (a.is_deleted(), b.is_deleted()) == (False, True)

        def step(state, x, **more):
            return state["w"] + x["w"], x["w"] * 2, state["b"] * 2, x["k"] * 2

        def fresh() -> list[dict[str, Any]]:
            state = {"w": put("data"), "b": put("data", shape=(8,)), "n": 3}
            return [state, {"w": put("data"), "k": put("data", shape=(16,))}]

        for spec, wanted in (
            ((True,), {"state.w", "state.b"}),
            ((True, False), {"state.w", "state.b"}),
            ((False, True), {"x.w", "x.k"}),
            (({"w": True, "b": False, "n": False}, None), {"state.w"}),
            ((lambda leaf: getattr(leaf, "ndim", 0) == 1,), {"state.b"}),
            (True, {"state.w", "state.b", "x.w", "x.k"}),
            (False, set()),
            (None, set()),
        ):
            state, x = fresh()
            ns.named_jit(step, donate_args=spec)(state, x)
            named = {"state.w": state["w"], "state.b": state["b"], "x.w": x["w"], "x.k": x["k"]}
            assert {name for name, leaf in named.items() if leaf.is_deleted()} == wanted, spec
        state, x = fresh()
        ns.named_jit(step, donate_kwargs=True)(state, x=x)
        assert not state["w"].is_deleted() and x["w"].is_deleted()


def test_an_argument_that_has_to_move_is_given_up_too() -> None:
    step = ns.named_jit(
        lambda x, y: (x + 1, y + 1), in_axis_resources={"a": "data"}, donate_args=(True, False), on_mismatch="reshard"
    )
    x, y = na(put(), "a b"), na(put(), "a b")
    uncommitted = na(jnp.asarray(counting(8, 4)), "a b")
    source = counting(8, 4)
    with jax.set_mesh(M8):
        out = step(x, y)
        assert (x.array.is_deleted(), y.array.is_deleted()) == (True, False)
        assert_exactly(ns.shard(out[0], {"a": "data"}), M8, P("data"))
        step(uncommitted, y)
        assert uncommitted.array.is_deleted()
        # What belongs to the caller outside of JAX stays as it is.
        assert bits(step(na(source, "a b"), y)[0].array) == bits(counting(8, 4) + 1)
        assert bits(source) == bits(counting(8, 4))


def test_one_array_donated_and_passed_again() -> None:
    @ns.named_jit(donate_args=(True,))
    def step(state, *rest, ema=None):
        return jax.tree.map(lambda x: x + 1, state), ema

    with jax.set_mesh(M8):
        x, y = put("data"), put("data", shape=(16,))
        assert told(step, {"w": x, "v": y}, y, ema={"w": x}) == text(
            "step: 2 donated arrays are passed more than once",
            "state['v'] and rest[0] are one array",
            "state['w'] and ema['w'] are one array",
            SHARED_FIX,
        )
        assert told(step, [x, x]) == text(
            "step: 1 donated array is passed more than once", "state[0] and state[1] are one array", SHARED_FIX
        )
        # Other objects, the same memory: device_put hands out its argument's buffers where it can.
        alias = jax.device_put(x, NamedSharding(M8, P("data", None)))
        assert alias is not x
        assert told(step, [x], alias) == text(
            "step: 1 donated array is passed more than once", "state[0] and rest[0] share their memory", SHARED_FIX
        )
        assert not x.is_deleted()
        # Not donated, or a copy: fine.
        out, _ = step({"w": jnp.copy(x)}, x, y, y)
        assert bits(out["w"]) == bits(counting(8, 4) + 1)
        # Arrays without elements have no memory to share.
        empty = [jax.device_put(np.zeros((0, 4), np.float32), NamedSharding(M8, P())) for _ in range(2)]
        assert step(empty)[0][0].shape == (0, 4)


def test_an_argument_that_was_donated_before() -> None:
    @ns.named_jit(donate_args=(True,))
    def step(state, x):
        return {k: v + x for k, v in state.items()}

    @ns.named_jit
    def look(state, key):
        return state["w"], key

    with jax.set_mesh(M8):
        x = put("data")
        state = {"w": put("data"), "v": put("data")}
        new = step(state, x)
        expected = text(
            "step: 2 argument leaves were donated or deleted before this call",
            "state['v']",
            "state['w']",
            GONE_FIX,
        )
        for _ in range(2):
            assert told(step, state, x) == expected
        assert told(look, state, 0) == text(
            "look: 2 argument leaves were donated or deleted before this call", "state['v']", "state['w']", GONE_FIX
        )
        # After the signature is known too, when no check but this one stands in the way.
        key = jax.random.key(0)
        look(new, key)
        new["w"].delete()
        assert told(look, new, key) == text(
            "look: 1 argument leaf was donated or deleted before this call", "state['w']", GONE_FIX
        )
        key.delete()
        assert told(look, {"w": put("data"), "v": put("data")}, key) == text(
            "look: 1 argument leaf was donated or deleted before this call", "key", GONE_FIX
        )
        # One that would have to move.
        gone = na(put("data", where=M8_REVERSED), "a b")
        gone.array.delete()
        moving = ns.named_jit(lambda x: x, on_mismatch="reshard")
        assert told(moving, gone) == text(
            "<lambda>: 1 argument leaf was donated or deleted before this call", "x", GONE_FIX
        )


def test_an_argument_that_cannot_become_an_output() -> None:
    mapping = {"a": "data"}

    @ns.named_jit(out_axis_resources=mapping, donate_args=(True,))
    def step(state):
        return {k: v + 1 for k, v in state.items()}

    with jax.set_mesh(M8):
        state = {"w": na(put(), "a b"), "v": na(put(shape=(4, 8)), "c d")}
        assert told(step, state) == text(
            "step: 1 donated argument leaf cannot become the output of the same shape",
            "state['w']: spec P(), but ['w'] has P('data', None)",
            REUSE_FIX,
        )
        assert not state["w"].array.is_deleted()
        # Looked at again for every placement, though the trace is the same.
        state["w"] = na(put("data"), "a b")
        step(state)
        assert state["w"].array.is_deleted()
        state = {"w": na(put(None, "data", shape=(8, 8)), "a b"), "v": na(put(shape=(8,)), "a")}
        assert told(step, state) == text(
            "step: 2 donated argument leaves cannot become the output of the same shape",
            "state['v']: spec P(), but ['v'] has P('data',)",
            "state['w']: spec P(None, 'data'), but ['w'] has P('data', None)",
            REUSE_FIX,
        )

        @ns.named_jit(donate_args=(True,))
        def bring(moments):
            return jax.device_put(moments, jax.memory.Space.Device)

        assert told(bring, put("data", kind="pinned_host")) == text(
            "bring: 1 donated argument leaf cannot become the output of the same shape",
            "moments: memory kind 'pinned_host', but the result is in 'device'",
            REUSE_FIX,
        )
        # Nothing of that shape comes out: it is merely freed.
        assert float(ns.named_jit(lambda x: x.sum(), donate_args=(True,))(put("data", shape=(24, 2)))) == 47 * 24


@pytest.mark.parametrize("donate", [(True, True, False), (True, True, True), (False, True, True)])
def test_each_output_can_use_one_donated_leaf(donate: tuple[bool, ...]) -> None:
    tx = optax.adam(1e-3)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), ns.offload(state, "mu|nu")

    params = {name: put("data") for name in "vw"}
    state = jax.tree.map(lambda x: x if x.ndim else jax.device_put(x, NamedSharding(M8, P())), tx.init(params))
    with jax.set_mesh(M8):
        fn = ns.named_jit(step, donate_args=donate)
        # One array donated twice would be another error.
        grads = jax.tree.map(jnp.copy, params)
        message = text(
            "step: 4 donated argument leaves cannot become the output of the same shape",
            *(
                f"state[0].{name}['{w}']: memory kind 'device', but [1][0].{name}['{w}'] is in 'pinned_host'"
                for name in ("mu", "nu")
                for w in "vw"
            ),
            REUSE_FIX,
        )
        assert told(fn, params, state, grads) == message
        with pytest.raises(ns.DonationError) as caught:
            fn.lower(params, state, grads)
        assert str(caught.value) == message


def test_donated_leaves_find_their_outputs_among_many() -> None:
    shapes = [(8, 8), (8, 4)]
    xs = [put("data", shape=shapes[i % 2]) for i in range(40)]
    with jax.set_mesh(M8):

        def turned(xs):
            return jax.lax.scan(lambda c, _: ([x + 1 for x in c], None), xs, None, length=2)[0][::-1]

        out = ns.named_jit(turned, donate_args=True)(xs)
    assert all(x.is_deleted() for x in xs)
    assert [x.shape for x in out] == [shapes[i % 2] for i in range(40)][::-1]


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_an_argument_whose_shape_merely_is_that_of_an_output() -> None:
    mapping = {"a": "data", "b": "model"}
    x, w = na(counting(8, 8), "c a"), na(counting(8, 8), "b c")
    with jax.set_mesh(M42):
        x, w = ns.shard((x, w), mapping)
        want = counting(8, 8).T @ counting(8, 8).T

        def product(x, w):
            return hax.named(x.array.T @ w.array.T, ("a", "b"))

        for step in (
            product,
            lambda x, w: (product(x, w) * 2) / 2,
            lambda x, w: jax.checkpoint(lambda w: product(x, w))(w),
        ):
            out = ns.named_jit(step, mapping, donate_args=(False, True))(
                x, ns.shard(na(counting(8, 8), "b c"), mapping)
            )
            assert bits(out.array) == bits(want)
        # Gradients that are another argument's update, in other shards.
        update = ns.named_jit(lambda w, g: w - g.rearrange(w.axes) * 0.5, mapping, donate_args=(False, True))
        g = ns.shard(na(counting(8, 8), "b c"), {"c": "data"})
        assert bits(update(w, g).array) == bits(counting(8, 8) * 0.5)
        # The result takes the place of one that is donated, too.
        both = ns.named_jit(lambda w, g: w - g * 0.5, mapping, donate_args=(True, True))
        again = ns.shard(na(counting(8, 8), "b c"), mapping)
        both(again, ns.shard(na(counting(8, 8), "b c"), {"c": "data"}))
        assert again.array.is_deleted()
        # In a loop, and by a jitted function, what is updated is still an update.
        for update in (
            lambda w: jax.jit(lambda x: x + 1)(w),
            lambda w: jax.lax.fori_loop(0, 3, lambda _, x: x + 1, w),
        ):
            fn = ns.named_jit(update, out_axis_resources=mapping, donate_args=True)
            assert told(fn, ns.shard(na(counting(8, 8), "b c"), {"c": "data"})) == text(
                "<lambda>: 1 donated argument leaf cannot become the output of the same shape",
                "w: spec P(None, 'data'), but the result has P('model', None)",
                REUSE_FIX,
            )


def test_names_are_found_however_the_argument_is_passed() -> None:
    fn = ns.named_jit(lambda state, batch, *, more=None: state + batch, donate_kwargs={"state": True, "more": True})
    state, batch = put("data"), put("data")
    fn(state, batch)
    assert (state.is_deleted(), batch.is_deleted()) == (True, False)
    state = put("data")
    fn(batch=batch, state=state)
    assert (state.is_deleted(), batch.is_deleted()) == (True, False)
    both = ns.named_jit(lambda a, b: (a + 1, b + 1), donate_args=(False, True), donate_kwargs={"a": True})
    a, b = put("data"), put("data")
    both(a, b)
    assert (a.is_deleted(), b.is_deleted()) == (True, True)


def test_names_that_are_no_arguments() -> None:
    x = put("data")
    fn = ns.named_jit(lambda state, batch: state + batch, donate_kwargs={"stat": True})
    assert told(fn, state=x, batch=x) == text(
        "<lambda>: donate_kwargs names an argument that the function does not have",
        "'stat' (did you mean 'state'?)",
        "fix: the arguments with names are state, batch",
    )
    fn = ns.named_jit(lambda *xs: xs, donate_kwargs={"a": True, "b": True})
    assert told(fn, x) == text(
        "<lambda>: donate_kwargs names arguments that the function does not have",
        "'a'",
        "'b'",
        "fix: the arguments with names are none",
    )
    anything = ns.named_jit(lambda **named: named["z"] + 1, donate_kwargs={"z": True})
    anything(z=x)
    assert x.is_deleted()


def test_specs_that_do_not_fit_the_call() -> None:
    def step(x, y):
        return x

    assert told(ns.named_jit(step, donate_args=(True, False, False)), put(), y=put()) == text(
        "step: donate_args has 3 entries, but the call has 1 positional arguments",
        "fix: give one entry per positional argument, and use donate_kwargs for keyword arguments",
    )
    said = told(ns.named_jit(step, donate_args=({"a": True}, False)), {"b": put()}, put())
    lines = said.splitlines()
    assert lines[0] == "step: a donation spec does not match the structure of its argument"
    assert lines[2] == (
        "  fix: give True, False, a function of a leaf, or a tree of these that is a prefix of the argument"
    )


def test_donation_works_in_a_loop_and_while_tracing() -> None:
    step = ns.named_jit(lambda x: x + 1, {"a": "data"}, donate_args=(True,))
    with jax.set_mesh(M8):
        x = na(put("data"), "a b")
        for _ in range(5):
            before = x
            x = step(x)
            assert before.array.is_deleted()
        assert bits(x.array) == bits(counting(8, 4) + 5)
        assert (step.report().traces, step.report().compiles) == (1, 1)
        kept = na(put("data"), "a b")
        assert bits(jax.jit(lambda x: step(x).array * 2)(kept)) == bits((counting(8, 4) + 1) * 2)
        assert not kept.array.is_deleted()


def test_nothing_is_given_up_by_a_call_that_fails() -> None:
    x = na(put(), "a b")
    with jax.set_mesh(M8):
        step = ns.named_jit(
            lambda x: x,
            in_axis_resources={"a": "data"},
            out_axis_resources={},
            donate_args=(True,),
            on_mismatch="reshard",
        )
        assert told(step, x).splitlines()[1] == "  x: spec P('data', None), but the result has P(None, None)"
        sends = ns.named_jit(
            lambda x: jax.device_put(x.array, jax.devices()[1]),
            in_axis_resources={"a": "data"},
            donate_args=(True,),
            on_mismatch="reshard",
        )
        with pytest.raises(ns.IgnoredTransferError):
            sends(x)
        assert not x.array.is_deleted()
