"""`fsdp`: parameters rest sharded one way and are used sharded another way."""

import equinox as eqx
import haliax as hax
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import M42, ONE_OF_EACH, assert_exactly, bits, counting, na

import namedshard as ns

PARAMETERS, COMPUTE = {"embed": "data"}, {"batch": "data", "mlp": "model"}


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_parameters_rest_in_one_mapping_and_are_used_in_another(kind: str) -> None:
    where, seen = ONE_OF_EACH[kind], []

    def step(w):
        seen.append(hax.partitioning.current_thread_local_mapping())
        return ns.auto_sharded(w) + 1

    with jax.set_mesh(where):
        w = ns.shard(na(counting(8, 4), "embed mlp"), PARAMETERS)
        for make in (
            ns.fsdp(step, PARAMETERS, COMPUTE),
            ns.fsdp(PARAMETERS, COMPUTE)(step),
            ns.fsdp(parameter_mapping=PARAMETERS, compute_mapping=COMPUTE)(step),
        ):
            out = make(w)
            assert_exactly(out, where, P("data", None))
            assert bits(out.array) == bits(counting(8, 4) + 1)
            assert make.report().traces == 1
        # One function and the same options: one trace for all three.
        assert [dict(m) for m in seen] == [COMPUTE]


def test_parameters_elsewhere_are_named() -> None:
    step = ns.fsdp(lambda model: model, PARAMETERS, COMPUTE)
    with jax.set_mesh(M42):
        w = ns.shard(na(counting(8, 4), "embed mlp"), COMPUTE)
        with pytest.raises(ns.MismatchError) as caught:
            step({"w": w})
    assert str(caught.value) == (
        "<lambda>: 1 of 1 argument leaf is not placed as the call needs\n"
        "  model['w']: [spec] spec P(None, 'model'), but expected P('data', None); a move costs 128 B\n"
        "  fix: model = ns.shard(model, {'embed': 'data'})\n"
        '  fix: or pass on_mismatch="reshard" to move them at each call'
    )


def test_a_training_step() -> None:
    class Model(eqx.Module):
        w: hax.NamedArray

    def loss(model, x):
        return ((x.array @ ns.auto_sharded(model.w).array) ** 2).sum()

    @ns.fsdp(PARAMETERS, COMPUTE)
    def step(model, x):
        grads = eqx.filter_grad(loss)(model, x)
        return jax.tree.map(lambda p, g: p - g / 1024, model, grads)

    w, x = counting(8, 4), counting(4, 8)
    expected = w
    with jax.set_mesh(M42):
        model = ns.shard(Model(na(w, "embed mlp")), PARAMETERS)
        for _ in range(3):
            model = step(model, na(x, "batch embed"))
            assert_exactly(model.w, M42, P("data", None))
            expected = expected - 2 * x.T @ (x @ expected) / 1024
        assert np.allclose(np.asarray(model.w.array), expected, rtol=1e-4)
        assert (step.report().traces, step.report().compiles) == (1, 1)


def test_both_mappings_are_needed() -> None:
    for call in (lambda: ns.fsdp(lambda x: x, PARAMETERS, None), lambda: ns.fsdp(None, PARAMETERS, None)):
        with pytest.raises(TypeError) as caught:
            call()
        assert str(caught.value) == "fsdp needs a parameter_mapping and a compute_mapping"
