"""Axis names by leaf path: patterns, names written as in einops, and all that takes ``axes=``."""

import dataclasses
import pickle
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support import E42, EXPLICIT, M42, MIXED42, ONE_OF_EACH, assert_exactly, bits, counting, mesh, na

import namedshard as ns
from namedshard._plan.names import dotted, fit_names, matches, parse_names

RULES = {"mlp": "model", "embed": "data", "batch": "data", "heads": "model"}
AXES = {"layers.0.weight": "mlp embed", "layers.*.weight": "embed mlp", "bias": "_"}
MESH = AbstractMesh((4, 2), ("data", "model"))


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def spec(names: str, *shape: int, mapping: Any = RULES) -> P:
    return ns.plan(struct(*shape), mapping, MESH, axes=names).leaves[0].spec


def model(key: int = 0) -> eqx.nn.MLP:
    return eqx.nn.MLP(8, 8, 16, 1, key=jax.random.key(key))


# --- patterns ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("layers.*.weight", "layers[0].weight", True),
        ("layers.*.weight", "['layers']['0']['weight']", True),
        ("layers[0].weight", "['layers']['0']['weight']", True),
        ("layers.*.weight", "[0].mu.layers[12].weight", True),
        ("layers.*.weight", "layers[0].mlp.weight", False),
        ("layers.*.weight", "layers[0].weight.extra", False),
        ("weight", "model.layers[0].weight", True),
        ("eight", "weight", False),
        ("*_proj.weight", "attn.q_proj.weight", True),
        ("*_proj", "attn.q_proj.weight", False),
        ("?_proj", "qk_proj", False),
        ("encoder.**.weight", "encoder.weight", True),
        ("encoder.**.weight", "model.encoder.a.b.weight", True),
        ("encoder.**", "encoder", True),
        ("encoder.**", "encoder.a.b", True),
        ("encoder.**", "decoder.a", False),
        ("**", "a.b", True),
        ("kernel", "['params']['dense']['kernel'].value", True),
        ("kernel.value", "['params']['dense']['kernel'].value", True),
        ("kernel", "dense.kernel.raw_value", True),
        ("re:.*(query|key)", "a.key", True),
        ("re:key", "a.key", False),
        ("encoder.*.w", "['encoder.3.w']", True),
        ("a.b", "", False),
    ],
)
def test_patterns(pattern: str, path: str, expected: bool) -> None:
    assert matches(pattern, path) is expected


@given(
    st.recursive(
        st.just(0),
        lambda inner: (
            st.dictionaries(st.sampled_from("abc"), inner, min_size=1) | st.lists(inner, min_size=1, max_size=3)
        ),
    )
)
def test_every_dotted_path_is_a_pattern_for_its_leaf(tree: Any) -> None:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    paths = [jax.tree_util.keystr(path) for path, _ in leaves]
    for path in filter(None, paths):
        assert matches(dotted(path), path) and matches(path, path)
        assert matches("**." + dotted(path), f".state[0]{path}")
        assert len([other for other in paths if matches("re:" + dotted(path).replace(".", "\\."), other)]) == 1


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "shape", "expected"),
    [
        ("mlp embed", (16, 8), P("model", "data")),
        ("mlp, embed", (16, 8), P("model", "data")),
        (("mlp", "embed"), (16, 8), P("model", "data")),
        ("_ embed", (3, 8), P(None, "data")),
        ("_ _", (3, 8), P(None, None)),
        ("batch ... mlp", (8, 3, 5, 16), P("data", None, None, "model")),
        ("batch ... mlp", (8, 16), P("data", "model")),
        ("...", (8, 16), P(None, None)),
        ("... mlp", (16,), P("model")),
        ("", (), P()),
        ("(heads=12 head_size) embed", (768, 8), P("model", "data")),
        ("(heads head_size=64) embed", (768, 8), P("model", "data")),
        ("(heads=3 head_size=2) embed", (6, 8), None),
        ("(head_size=2 heads=4) embed", (8, 8), P(None, "data")),
        ("(q heads=4 _) embed", (8, 8), P(None, "data")),
        ("(mlp) embed", (16, 8), P("model", "data")),
    ],
)
def test_names(names: Any, shape: tuple[int, ...], expected: P | None) -> None:
    if expected is None:
        # Three heads don't divide over two, though six rows would: no head is ever split.
        with pytest.raises(ns.IndivisibleAxisError, match="axis heads=3 is not divisible by mesh axis 'model'=2"):
            spec(names, *shape)
    else:
        assert spec(names, *shape) == expected


def test_sizes_that_are_not_known_leave_a_dimension_whole() -> None:
    (leaf,) = ns.plan(struct(6, 8), RULES, MESH, axes="(heads head_size) embed").leaves
    assert (leaf.spec, leaf.axes) == (P(None, "data"), (("_", 6), ("embed", 8)))
    assert leaf.note == "(heads head_size) is not sharded: its sizes are not known"


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ("mlp mlp", "mlp is there more than once"),
        ("(mlp a) mlp a", "mlp, a are there more than once"),
        ("((a b) c)", "parentheses are nested or not closed"),
        ("(a b", "parentheses are nested or not closed"),
        ("a)", "parentheses are nested or not closed"),
        ("()", "() holds no axes"),
        ("(a ...)", "(a ...) holds no axes"),
        ("... a ...", "'...' may be there once"),
        ("a=3", "'a=3': sizes are for axes in parentheses"),
        ("(a=x b)", "'a=x' is not an axis with its size: write heads=12"),
        ("(a=0 b)", "'a=0' is not an axis with its size: write heads=12"),
    ],
)
def test_names_that_cannot_be_read(names: str, why: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_names(names)
    assert str(caught.value) == why


def test_all_names_that_cannot_be_read_are_listed() -> None:
    with pytest.raises(ns.MappingError) as caught:
        ns.AxisMapping(RULES, axes={"a": "x x", "b": "x", "c..d": "x", "e": 3, "re:(": "x"})
    assert str(caught.value) == (
        "axes=: 4 of 5 cannot be read\n"
        "  'a': 'x x': x is there more than once\n"
        "  'c..d': 'x': a part between dots is empty\n"
        "  'e': 3: use a pattern, and names as a string or a tuple of strings\n"
        "  're:(': 'x': not a regular expression: missing ), unterminated subpattern at position 0\n"
        '  fix: name each dimension, as in "mlp embed", "batch ... embed", "_ embed" or "(heads=12 head_size) embed"'
    )
    with pytest.raises(ns.MappingError) as caught:
        spec("a a", 2, 2)
    assert str(caught.value).splitlines()[1] == "  'a a': a is there more than once"


def test_names_that_do_not_fit_their_arrays_are_all_listed() -> None:
    tree = {"a": {"w": struct(4, 4), "b": struct(4)}, "c": {"w": struct(6, 4)}, "d": struct(2, 2, 2)}
    with pytest.raises(ns.AxisNamesError) as caught:
        ns.plan(tree, RULES, MESH, axes={"d": "mlp embed", "w": "(heads=4 head_size) embed", "b": "_"})
    assert str(caught.value) == (
        "2 of 4 leaves named wrongly by axes=\n"
        "  ['c']['w']: (6, 4): the sizes of (heads=4 head_size) do not multiply to 6, in '(heads=4 head_size) embed' of"
        " pattern 'w'\n"
        "  ['d']: (2, 2, 2): the names 'mlp embed' of pattern 'd' do not fit rank 3\n"
        "  fix: name every dimension (_ for one without a name, ... for several), and put narrower patterns first"
    )


def test_a_pattern_may_fit_some_of_its_leaves() -> None:
    # Adafactor's factored states have the parameter's path and another rank.
    tree = {"v": {"w": struct(16, 8)}, "v_row": {"w": struct(16)}}
    p = ns.plan(tree, RULES, MESH, axes={"w": "mlp embed"})
    assert [leaf.spec for leaf in p.leaves] == [P("model", "data"), None]
    assert p.leaves[1].note == "the names 'mlp embed' of pattern 'w' do not fit rank 1; left as it is"


@pytest.mark.parametrize("kind", ["auto", "mixed"])
def test_factored_states_alone_are_left(kind: str) -> None:
    where, mapping = ONE_OF_EACH[kind], ns.AxisMapping({"mlp": "data"}, axes={"w": "mlp embed"})
    optimizer = optax.adafactor(1e-2, min_dim_size_to_factor=4)
    update = ns.named_jit(lambda p, s, g: optimizer.update(g, s, p))
    with jax.set_mesh(where), ns.axis_mapping(mapping):
        params = ns.shard({"w": counting(16, 8)})
        state = ns.init(optimizer.init, params)
        updates, state = update(params, state, params)
        # Names in context are for other calls, too.
        jax.block_until_ready(ns.named_jit(lambda s: s)(state))
        assert_exactly(updates["w"], where, P("data", None))
    with pytest.raises(ns.AxisNamesError):
        ns.shard(state, mapping, where)


def test_the_first_pattern_and_own_names_come_first() -> None:
    tree = {"w": struct(16, 8), "h": hax.NamedArray(struct(16, 8), (hax.Axis("a", 16), hax.Axis("mlp", 8)))}
    p = ns.plan(tree, RULES, MESH, axes={"w": "mlp _", "*": "_ embed"})
    assert [(leaf.path, leaf.spec) for leaf in p.leaves] == [("['h']", P(None, "model")), ("['w']", P("model", None))]


def test_a_string_is_for_a_single_array() -> None:
    with pytest.raises(ns.AxisNamesError) as caught:
        ns.plan({"a": struct(8), "b": struct(8)}, RULES, MESH, axes="mlp")
    assert str(caught.value) == (
        "axes='mlp' names a single array, but there are 2\n  fix: name them by leaf path, as in axes={'a': 'mlp'}"
    )


# --- mappings with names ----------------------------------------------------------------------------------------------


def test_mappings_with_names_are_values() -> None:
    one, other = ns.AxisMapping(RULES, axes=AXES), ns.AxisMapping(RULES, axes=dict(AXES))
    assert one == other and hash(one) == hash(other) and one != ns.AxisMapping(RULES) and one != RULES
    assert pickle.loads(pickle.dumps(one)) == one and one.axes == AXES
    assert repr(ns.AxisMapping({"a": "x"}, axes={"w": ("a", "b")}, unmatched="error")) == (
        "AxisMapping({'a': 'x'}, axes={'w': 'a b'}, unmatched='error')"
    )
    merged = ns.AxisMapping({"a": "x"}, axes={"w": "a", "v": "b"}) | ns.AxisMapping({"b": "y"}, axes={"w": "b"})
    assert (dict(merged), merged.axes) == ({"a": "x", "b": "y"}, {"w": "b", "v": "b"})
    assert (ns.AxisMapping({"a": "x"}, axes={"w": "a"}) | {"b": "y"}).axes == {"w": "a"}


def test_names_travel_with_the_context() -> None:
    tree = {"w": struct(16, 8)}
    with ns.axis_mapping(ns.AxisMapping(RULES, axes={"w": "mlp embed"})):
        assert ns.plan(tree, mesh=MESH).leaves[0].spec == P("model", "data")
        # A plain dict, and a mapping of its own, inherit the names.
        assert ns.plan(tree, {"mlp": "data"}, MESH).leaves[0].spec == P("data", None)
        assert ns.plan(tree, ns.AxisMapping({"embed": "model"}), MESH).leaves[0].spec == P(None, "model")
        # Those of a call come first.
        assert ns.plan(tree, mesh=MESH, axes={"w": "_ mlp"}).leaves[0].spec == P(None, "model")
        with ns.axis_mapping({"mlp": None}, merge=True):
            assert ns.plan(tree, mesh=MESH).leaves[0].spec == P(None, "data")


# --- all that takes them ----------------------------------------------------------------------------------------------


# On Explicit axes JAX itself asks models for the sharding of what they contract.
@pytest.mark.parametrize("kind", ["auto", "mixed"])
def test_an_equinox_model_is_sharded_trained_and_its_states_follow(kind: str) -> None:
    where, mapping = ONE_OF_EACH[kind], ns.AxisMapping({"mlp": "data"}, axes=AXES)
    optimizer = optax.adamw(1e-2)

    @ns.named_jit(donate_args=(True, True, False))
    def step(model: Any, state: Any, x: Any) -> Any:
        loss, grads = eqx.filter_value_and_grad(lambda m: jnp.mean(jax.vmap(m)(x) ** 2))(model)
        updates, state = optimizer.update(grads, state, model)
        return eqx.apply_updates(model, updates), state, loss

    def weights(tree: Any) -> list[Any]:
        return [tree.layers[0].weight, tree.layers[1].weight]

    with jax.set_mesh(where), ns.axis_mapping(mapping):
        trained = ns.shard(model())
        state = ns.init(optimizer.init, eqx.filter(trained, eqx.is_array))
        assert [x.sharding.spec for x in weights(trained)] == [P("data", None), P(None, "data")]
        for tree in (trained, state[0].mu, state[0].nu):
            ns.testing.assert_placed(eqx.filter(tree, eqx.is_array))
        losses = []
        for _ in range(3):
            trained, state, loss = step(trained, state, np.ones((8, 8), np.float32))
            losses.append(float(loss))
        for tree in (trained, state[0].mu, state[0].nu):
            for x, want in zip(weights(tree), (P("data", None), P(None, "data")), strict=True):
                assert x.sharding.is_equivalent_to(NamedSharding(where, want), 2)
        assert losses == sorted(losses, reverse=True) and step.report().traces == 1


def test_init_names_its_result() -> None:
    with pytest.raises(ns.AxisNamesError):
        ns.init(model, 0, mapping={"mlp": "model"}, mesh=M42, axes={"layers.0.weight": "a mlp embed"})
    made = ns.init(model, 0, mapping={"mlp": "model"}, mesh=M42, axes=AXES)
    lowered = ns.lower_init(model, 0, mapping={"mlp": "model"}, mesh=M42, axes=AXES)
    assert_exactly(lowered.compile()(0).layers[0].weight, M42, P("model", None))
    assert_exactly(made.layers[0].weight, M42, P("model", None))
    assert bits(made.layers[0].weight) == bits(model().layers[0].weight)


def test_loading_names_a_plain_dict(tmp_path: Path) -> None:
    value = counting(16, 8)
    ns.save_safetensors({"layers.0.weight": value, "bias": value[0]}, tmp_path / "x.safetensors")
    like = {"layers.0.weight": struct(16, 8), "bias": struct(8)}
    got = ns.load_safetensors(tmp_path / "x.safetensors", like, {"mlp": "model"}, M42, axes=AXES)
    assert_exactly(got["layers.0.weight"], M42, P("model", None))
    assert bits(got["layers.0.weight"]) == bits(value)


def test_specs_by_names() -> None:
    assert ns.pspec_for("batch ... embed", {"batch": "data"}, shape=(8, 2, 4)) == P("data", None, None)
    assert ns.pspec_for("embed", {"embed": "data"}, shape=(8,)) == P("data")
    assert ns.pspec_for("embed", {"embed": "data"}) == P("data")
    assert ns.sharding_for("_ embed", {"embed": "data"}, MESH, shape=(3, 8)) == NamedSharding(MESH, P(None, "data"))
    tree = ns.pspec_for({"w": struct(16, 8)}, {"mlp": "model"}, MESH, axes={"w": "mlp _"})
    assert tree == {"w": P("model", None)}
    with pytest.raises(ns.AxisNamesError) as caught:
        ns.pspec_for("batch ... embed", {"batch": "data"})
    assert str(caught.value) == ("'batch ... embed' needs a shape\n  fix: pass shape=, or one axis for each dimension")


@pytest.mark.parametrize("where", [M42, E42, MIXED42], ids=["auto", "explicit", "mixed"])
def test_plain_arrays_in_model_code(where: Any) -> None:
    def constrained(x: Any) -> Any:
        return ns.shard(x, axes="batch ... mlp") + 1

    with jax.set_mesh(where), ns.axis_mapping(RULES):
        x = ns.shard(jnp.zeros((8, 3, 16)), axes="batch ... mlp")
        assert_exactly(x, where, P("data", None, "model"))
        y = jax.jit(constrained)(jnp.zeros((8, 3, 16)))
        assert y.sharding.is_equivalent_to(NamedSharding(where, P("data", None, "model")), 3)
        if where is E42:
            seen: list[Any] = []
            jax.jit(lambda x: seen.append(jax.typeof(constrained(x)).sharding.spec))(jnp.zeros((8, 3, 16)))
            assert seen == [P("data", None, "model")]
        # Under vmap the array has one dimension less, and in a scan it is a slice.
        jax.jit(jax.vmap(lambda x: ns.shard(x, axes="_ mlp")))(jnp.zeros((8, 3, 16)))
        jax.jit(lambda: jax.lax.scan(lambda c, a: (c, ns.shard(a, axes="_ mlp")), 0, jnp.zeros((8, 3, 16))))()
        # Axes that a shard_map holds are split already.
        mapped = jax.shard_map(constrained, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
        if where is M42:
            y = jax.jit(mapped)(jnp.zeros((8, 3, 16)))
            assert y.sharding.is_equivalent_to(NamedSharding(where, P("data", None, "model")), 3)
        with pytest.raises(ns.IndivisibleAxisError, match="axis batch=6"):
            jax.jit(constrained)(jnp.zeros((6, 3, 16)))


def test_a_transformer_of_plain_functions_on_explicit_axes() -> None:
    mapping = ns.AxisMapping(
        {"batch": "data", "heads": "model", "mlp": "model"},
        axes={
            "table": "vocab embed",
            "qkv": "_ embed heads head_size",
            "out": "heads head_size embed",
            "up": "embed mlp",
            "down": "mlp embed",
            "tokens": "batch position",
        },
    )
    types: dict[str, P] = {}

    def seen(name: str, x: Any) -> Any:
        types[name] = jax.typeof(x).sharding.spec
        return x

    def spec(names: str, *shape: int) -> P:
        return ns.pspec_for(names, shape=shape)

    @ns.named_jit(in_axis_resources=mapping)
    def forward(params: Any, tokens: Any) -> Any:
        # Names only where types can't be derived: lookups, and sums over a sharded axis.
        stream = spec("batch ... embed", *tokens.shape, 16)
        x = seen("x", params["table"].at[tokens].get(out_sharding=stream))
        q, k, v = jnp.einsum("bpe,sehd->sbphd", x, params["qkv"])
        weights = seen("weights", jax.nn.softmax(jnp.einsum("bphd,bqhd->bhpq", q, k)))
        mixed = jnp.einsum("bhpq,bqhd->bphd", weights, v)
        x = x + seen("attention", jnp.einsum("bphd,hde->bpe", mixed, params["out"], out_sharding=stream))
        hidden = seen("hidden", jax.nn.relu(jnp.einsum("bpe,em->bpm", x, params["up"])))
        x = x + seen("mlp", jnp.einsum("bpm,me->bpe", hidden, params["down"], out_sharding=stream))
        return jnp.einsum("bpe,ve->bpv", x, params["table"])

    draw = np.random.default_rng(0)
    shapes = {"table": (32, 16), "qkv": (3, 16, 4, 4), "out": (4, 4, 16), "up": (16, 64), "down": (64, 16)}
    params = {name: draw.normal(size=shape).astype(np.float32) / 4 for name, shape in shapes.items()}
    tokens = draw.integers(0, 32, (8, 6)).astype(np.int32)
    with jax.set_mesh(mesh((1, 1), "data model", EXPLICIT)), ns.axis_mapping(mapping):
        alone = np.asarray(forward(params, tokens))
    with jax.set_mesh(E42), ns.axis_mapping(mapping):
        out = forward(ns.shard(params), tokens)
    assert types == {
        "x": P("data", None, None),
        "weights": P("data", "model", None, None),
        "attention": P("data", None, None),
        "hidden": P("data", None, "model"),
        "mlp": P("data", None, None),
    }
    np.testing.assert_allclose(np.asarray(out), alone, rtol=2e-4, atol=2e-5)


def test_arguments_and_results_of_compiled_functions() -> None:
    rules = {"mlp": "model"}

    @ns.named_jit(
        in_axis_resources=rules, out_axis_resources=rules, axes={"model.**.weight": "mlp _", "x": "_ mlp", "y": "mlp"}
    )
    def step(model: Any, x: Any) -> Any:
        return {"y": x.sum(0), "model": model}

    with jax.set_mesh(M42):
        out = step({"a": {"weight": counting(8, 4)}}, counting(4, 8))
        assert_exactly(out["model"]["a"]["weight"], M42, P("model", None))
        assert_exactly(out["y"], M42, P("model"))
        with pytest.raises(ns.MismatchError) as caught:
            step({"a": {"weight": jax.device_put(counting(8, 4), NamedSharding(M42, P("data")))}}, counting(4, 8))
    assert "fix: model = ns.shard(model, {'mlp': 'model'})" in str(caught.value)


def test_mappings_by_argument() -> None:
    step = ns.named_jit(lambda w, x, n: (w, x), in_axis_resources={"w": {"a": "model"}, "x": {"a": "data"}})
    with jax.set_mesh(M42):
        w, x = step(na(counting(8), "a"), na(counting(8), "a"), counting(3))
        assert_exactly(w.array, M42, P("model"))
        assert_exactly(x.array, M42, P("data"))
        wrong = ns.named_jit(lambda w, x: (w, x), in_axis_resources={"y": {"a": "model"}})
        with pytest.raises(ns.MappingError) as caught:
            wrong(na(counting(8), "a"), na(counting(8), "a"))
    assert str(caught.value) == (
        "<lambda>: in_axis_resources names y, but the arguments with arrays are w, x\n"
        "  fix: use the names of the function's parameters"
    )


# The older Haliax uses it in `dot`.
@pytest.mark.filterwarnings("ignore:jax.core.is_constant_dim is deprecated:DeprecationWarning")
def test_the_batch_of_fsdp_has_the_compute_mapping() -> None:
    parameters, compute = {"embed": "data", "mlp": "model"}, {"batch": "data", "mlp": "model"}
    step = ns.fsdp(lambda w, x: hax.dot(x, w, axis="embed"), parameters, compute)
    plain = ns.fsdp(lambda w, x: x @ w, parameters, compute, axes={"w": "embed mlp", "x": "batch embed"})
    with jax.set_mesh(M42):
        w, x = ns.shard(na(counting(8, 4), "embed mlp"), parameters), na(counting(16, 8), "batch embed")
        for batch in (x, ns.shard(x, compute)):
            assert_exactly(step(w, batch).array, M42, P("data", "model"))
        out = plain(w.array, ns.shard(x, compute).array)
        assert np.array_equal(np.asarray(out), counting(16, 8) @ counting(8, 4))
        other = ns.fsdp(lambda w, x: (w, x), parameters, compute, in_axis_resources={"x": {"embed": "model"}})
        got = other(w, na(counting(8, 8), "batch embed"))
        assert_exactly(got[0].array, M42, P("data", "model"))
        with pytest.raises(ns.MismatchError, match=re.escape("fix: x = ns.shard(x, {'embed': 'model'})")):
            other(w, ns.shard(na(counting(8, 8), "batch embed"), compute))


def test_what_jax_asks_for_on_explicit_axes_gets_a_note() -> None:
    step = ns.named_jit(lambda x: x @ x.T)
    with jax.set_mesh(E42), pytest.raises(Exception, match="Contracting dimensions are sharded") as caught:
        step(jax.device_put(counting(8, 8), NamedSharding(E42, P(None, "data"))))
    assert (
        "<lambda> is traced on a mesh with Explicit axes, on which JAX asks for the sharding of results that it can't"
        " derive: give out_sharding=, for which ns.pspec_for makes specs, or use a mesh of Auto axes,"
        " jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(shape))"
    ) in caught.value.__notes__


# --- types that have names --------------------------------------------------------------------------------------------


class Linear(eqx.Module):
    weight: jax.Array = eqx.field(metadata={"axis_names": "mlp embed"})
    bias: jax.Array = eqx.field(metadata={"axis_names": ("mlp",)})


def test_equinox_metadata_as_a_string_and_of_stacked_modules() -> None:
    layer = eqx.filter_eval_shape(lambda: Linear(jnp.zeros((16, 8)), jnp.zeros(16)))
    assert [x.spec for x in ns.plan(layer, RULES, MESH).leaves] == [P("model", "data"), P("model")]
    stacked = eqx.filter_eval_shape(eqx.filter_vmap(lambda _: Linear(jnp.zeros((16, 8)), jnp.zeros(16))), jnp.zeros(3))
    assert [x.spec for x in ns.plan(stacked, RULES, MESH).leaves] == [P(None, "model", "data"), P(None, "model")]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Box:
    inner: Any
    names: Any = dataclasses.field(metadata={"static": True})


def test_registered_types() -> None:
    ns.register_axis_names(Box, lambda box: box.names)
    tree = {
        "one": Box(struct(16, 8), ("mlp", None)),
        "fields": Box(struct(16, 8), {"inner": "_ embed"}),
        "none": Box(struct(16, 8), None),
        "inside": Box({"x": Box(struct(16, 8), "mlp embed")}, None),
        "misfit": Box(struct(16), "mlp embed"),
    }
    p = ns.plan(tree, RULES, MESH)
    assert {leaf.path: (leaf.spec, leaf.note) for leaf in p.leaves} == {
        "['fields'].inner": (P(None, "data"), ""),
        "['inside'].inner['x'].inner": (P("model", "data"), ""),
        "['misfit'].inner": (None, "names (mlp, embed) do not fit rank 1; left as it is"),
        "['none'].inner": (None, ""),
        "['one'].inner": (P("model", None), ""),
    }


# --- nothing is ignored silently --------------------------------------------------------------------------------------


def warnings_of(call: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught]


def test_arrays_without_names_are_warned_of_once() -> None:
    tree = {"never_named": jnp.zeros((8, 4)), "n": 3}
    mapping = ns.AxisMapping({"mlp": "model", "off": None}, axes={"other": "mlp"})
    said = [
        "shard: none of 1 arrays has axis names, so the mapping places none\n"
        "  rules: mlp\n"
        "  axes pattern: 'other'\n"
        "  leaf: ['never_named']: (8, 4)\n"
        '  fix: name them by leaf path with axes={"layers.*.weight": "mlp embed"}, or pass unmatched="ignore"'
    ]
    assert warnings_of(lambda: ns.shard(tree, mapping, M42)) == said
    assert warnings_of(lambda: ns.shard(tree, mapping, M42)) == []
    with pytest.raises(ns.AxisNamesError) as caught:
        ns.shard(tree, mapping, M42, unmatched="error")
    assert [str(caught.value)] == said
    fsdp = ns.fsdp(lambda model: model, {"mlp": "model"}, {"mlp": "model"}, unmatched="error")
    with jax.set_mesh(M42), pytest.raises(ns.AxisNamesError) as caught:
        fsdp(tree)
    assert str(caught.value).startswith("<lambda>: none of 1 arrays has axis names")
    with pytest.raises(ns.AxisNamesError):
        ns.init(lambda: jnp.zeros(8), mapping={"mlp": "model"}, mesh=M42, unmatched="error")


def test_names_in_the_wrong_form_are_warned_of() -> None:
    wrong = Linear(jnp.zeros((8,)), jnp.zeros(()))
    (said,) = warnings_of(lambda: ns.shard(wrong, {"mlp": "model"}, M42))
    assert "leaf: weight: names (mlp, embed) do not fit rank 1; left as it is" in said


def test_misspelled_rules_are_warned_of() -> None:
    x = na(counting(8, 4), "sequence features")
    said = "shard: 1 of 2 rules match no axis, but resemble one\n  'sequense' (did you mean 'sequence'?)\n"
    said += '  fix: use the name that the arrays have, or pass unmatched="ignore"'
    assert warnings_of(lambda: ns.shard(x, {"sequense": "model", "features": "data"}, M42)) == [said]


def test_what_is_meant_is_not_warned_of() -> None:
    tree = {"w": jnp.zeros((8, 4))}
    for call in (
        lambda: ns.shard(tree, {"mlp": "model"}, M42, unmatched="ignore"),
        lambda: ns.shard(tree, ns.AxisMapping({"mlp": "model"}, unmatched="ignore"), M42),
        lambda: ns.shard(tree, {}, M42),
        lambda: ns.shard(tree, {"mlp": None}, M42),
        lambda: ns.shard({"n": 3}, {"mlp": "model"}, M42),
        # Parameters under the rule of a batch, and axes under a rule that is like their own.
        lambda: ns.shard(na(counting(8, 4), "mlp embed"), {"batch": "data"}, M42),
        lambda: ns.shard(na(counting(8, 4), "mlp embed"), {"embed": "data", "embed2": "model"}, M42),
        lambda: jax.jit(lambda t: ns.shard(t, {"mlp": "model"}, M42))(tree),
    ):
        assert warnings_of(call) == []


def test_explain_tells_of_patterns_that_match_nothing() -> None:
    told = ns.explain({"weights": struct(8, 4)}, RULES, MESH, axes={"weight": "mlp embed", "weights": "mlp embed"})
    assert "axes pattern 'weight' matches no leaf (did you mean 'weights'?)" in str(told)


# --- misuse -----------------------------------------------------------------------------------------------------------


MISUSE = """
import haliax as hax, jax, numpy as np, namedshard as ns
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((1,), ("data",))
x = hax.NamedArray(np.zeros(8, np.float32), (hax.Axis("a", 8),))
for mapping in (mesh, P("data"), NamedSharding(mesh, P("data")), 3, {hax.Axis("a", 8): "data"}):
    try:
        ns.shard(x, mapping, mesh)
    except ns.MappingError as error:
        print(error)
for call in (
    lambda: ns.first(["data", "model"]),
    lambda: ns.first(["data", "model"], None),
    lambda: ns.AxisMapping({}, unmatched="never"),
    lambda: ns.register_axis_names(3, len),
    lambda: ns.plan({"up": x}, {"a": "data"}, mesh)["up"],
):
    try:
        call()
    except (ns.MappingError, TypeError, KeyError) as error:
        print(*error.args, sep="|")
"""

SAID = """\
a mesh was given as the mapping
  fix: pass the mapping before the mesh: shard(tree, mapping, mesh)
a PartitionSpec was given as the mapping, which is from axis names to mesh axes
  fix: name what each axis is split over, {"embed": "data"}, or use jax.device_put with a sharding
a NamedSharding was given as the mapping, which is from axis names to mesh axes
  fix: name what each axis is split over, {"embed": "data"}, or use jax.device_put with a sharding
3 is no mapping
  fix: use a dict from axis names to mesh axes, {"embed": "data"}
mapping key Axis(name='a', size=8) is not an axis name: use its name, 'a'
first() takes candidates one by one, not in a list
  fix: write first('data', 'model')
first() takes candidates one by one, not in a list
  fix: write first(('data', 'model'), None)
unmatched='never': use 'warn' or 'error' or 'ignore'
register_axis_names takes a type and a function of its nodes
no leaf 'up': it is "['up']"
"""


def test_misuse_is_told_of() -> None:
    """In a process whose calls nothing else checks."""
    done = subprocess.run([sys.executable, "-c", MISUSE], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == SAID


def test_fitted_names_are_those_of_the_shape() -> None:
    assert fit_names("a b", (2,)) is None
    fitted = fit_names("(a=2 b) ... c", (4, 5, 6))
    assert fitted is not None and (fitted.names, fitted.sizes) == (("a", "_", "c"), (2, 5, 6))
