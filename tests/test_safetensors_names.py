"""Names and layouts: those of Haliax's own state dicts for its modules, and the obvious ones for every other tree."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import EMBED, HEADS, LAYERS, MLP, SIZE, Block, Model, arrays, model, write
from haliax.state_dict import ModuleWithStateDictSerialization, to_torch_compatible_state_dict
from support import M42, bits, counting, na

import namedshard as ns
from namedshard._safetensors.names import tensors_of


def filled(make: Any) -> Any:
    """A module with distinct values, without running its random numbers."""
    shapes, statics = eqx.partition(eqx.filter_eval_shape(make), lambda x: isinstance(x, jax.ShapeDtypeStruct))
    leaves, treedef = jax.tree_util.tree_flatten(shapes)
    values = [jnp.asarray(np.arange(x.size).astype(x.dtype).reshape(x.shape) + 100 * i) for i, x in enumerate(leaves)]
    return eqx.combine(jax.tree_util.tree_unflatten(treedef, values), statics)


KEY = jax.random.key(0)
KEYS = jax.random.split(KEY, 3)
INNER = hax.Axis("inner", 2)


class Nested(eqx.Module):
    inner: hnn.Stacked
    bias: hax.NamedArray

    @staticmethod
    def init(*, key: Any) -> "Nested":
        keys = jax.random.split(key, INNER.size)
        return Nested(hnn.Stacked.init(INNER, hnn.Linear)(EMBED, (HEADS, SIZE), key=keys), hax.zeros(EMBED))


class Renaming(ModuleWithStateDictSerialization):
    weight: hax.NamedArray
    rest: list[hax.NamedArray]

    def _state_dict_key_map(self) -> dict[str, str | None]:
        return {"weight": "gamma", "rest": None}


class Transposing(ModuleWithStateDictSerialization):
    """As some models do: their own code turns, splits and joins arrays on the way into the file."""

    w: hax.NamedArray
    qkv: jax.Array
    left: jax.Array
    right: jax.Array

    def to_state_dict(self, prefix: str | None = None) -> dict[str, Any]:
        q, k, v = jnp.split(self.qkv, 3, axis=0)
        return {
            f"{prefix}.w": self.w.array.T,
            f"{prefix}.q": q,
            f"{prefix}.k": k[:, :],
            f"{prefix}.v": v.reshape(2, 2, 4),
            f"{prefix}.both": jnp.concatenate([self.left, self.right], axis=1),
            f"{prefix}.row": self.left[0:1].squeeze(0),
        }


HALIAX = {
    "linear": lambda: hnn.Linear.init(EMBED, MLP, key=KEY),
    "linear, input first": lambda: hnn.Linear.init(EMBED, MLP, key=KEY, out_first=False),
    "linear, many outputs": lambda: hnn.Linear.init(EMBED, (HEADS, SIZE), key=KEY),
    "linear, many inputs, input first": lambda: hnn.Linear.init((HEADS, SIZE), (EMBED, MLP), key=KEY, out_first=False),
    "linear, no bias": lambda: hnn.Linear.init((HEADS, SIZE), (), key=KEY, use_bias=False),
    "norm": lambda: hnn.LayerNorm.init((HEADS, SIZE)),
    "norm without weight": lambda: hnn.LayerNorm.init(EMBED, use_weight=False),
    "embedding": lambda: hnn.Embedding.init(MLP, (HEADS, SIZE), key=KEY),
    "stacked": lambda: hnn.Stacked.init(LAYERS, Block)(key=KEYS),
    "sequence": lambda: hnn.BlockSeq.init(LAYERS, Block)(key=KEYS),
    "renaming": lambda: Renaming(hax.zeros(EMBED), [hax.zeros(MLP), hax.zeros(EMBED)]),
}


@pytest.mark.parametrize("which", HALIAX)
def test_tensors_of_haliax_modules_are_those_of_its_state_dict_both_ways(tmp_path, which):
    tree = {"m": filled(HALIAX[which])}
    state = {n: np.asarray(x) for n, x in to_torch_compatible_state_dict(tree).items()}
    assert {t.name: t.shape for t in tensors_of(tree)} == {n: x.shape for n, x in state.items()}
    ns.save_safetensors(tree, tmp_path / "out.safetensors")
    for name, info in ns.read_header(tmp_path / "out.safetensors").items():
        assert (tmp_path / "out.safetensors").read_bytes()[info.start : info.stop] == bits(state[name])
    path = write(tmp_path / "in.safetensors", state)
    either = ns.first("data", "model", None)
    mapping = {"head_size": either, "embed": either, "mlp": either, "layers": None}
    loaded = ns.load_safetensors(path, tree, mapping=mapping, mesh=M42)
    assert eqx.tree_equal(jax.tree.map(np.asarray, loaded), jax.tree.map(np.asarray, tree))


def test_stacks_in_stacks_are_numbered_from_the_outside(tmp_path):
    # Haliax's own state dict swaps the two numbers.
    tree = {"m": filled(lambda: hnn.Stacked.init(LAYERS, Nested)(key=KEYS))}
    ns.save_safetensors(tree, tmp_path)
    header = ns.read_header(tmp_path)
    assert sorted(header) == sorted(
        [f"m.{i}.bias" for i in range(3)]
        + [f"m.{i}.inner.{j}.{n}" for i in range(3) for j in range(2) for n in ("weight", "bias")]
    )
    info = header["m.2.inner.1.weight"]
    inner = tree["m"].stacked.inner.stacked.weight.array
    assert inner.shape == (3, 2, 2, 4, 8)
    data = (tmp_path / "model.safetensors").read_bytes()
    assert data[info.start : info.stop] == bits(inner[2, 1])
    assert eqx.tree_equal(ns.load_safetensors(tmp_path, tree), tree)


def test_modules_in_tuples_have_names_though_haliax_has_none(tmp_path):
    tree = filled(lambda: hnn.MLP.init(EMBED, MLP, 12, 2, key=KEY))
    assert {t.name: t.shape for t in tensors_of(tree)} == {
        "layers.0.weight": (12, 8),
        "layers.0.bias": (12,),
        "layers.1.weight": (12, 12),
        "layers.1.bias": (12,),
        "layers.2.weight": (16, 12),
        "layers.2.bias": (16,),
    }
    ns.save_safetensors(tree, tmp_path)
    assert eqx.tree_equal(ns.load_safetensors(tmp_path, tree), tree)


def test_a_module_at_the_root_has_no_prefix():
    for make in HALIAX.values():
        tree = filled(make)
        assert {t.name for t in tensors_of(tree)} == set(to_torch_compatible_state_dict(tree))


def test_what_a_module_copies_by_its_own_code_is_followed(tmp_path):
    tree = {
        "m": Transposing(
            na(jnp.asarray(counting(4, 6)), "a b"),
            jnp.asarray(counting(12, 4)),
            jnp.asarray(counting(3, 2)),
            jnp.asarray(counting(3, 5) + 50),
        )
    }
    ns.save_safetensors(tree, tmp_path / "x.safetensors")
    wanted = {name: np.asarray(x) for name, x in tree["m"].to_state_dict("m").items()}
    found = ns.read_header(tmp_path / "x.safetensors")
    assert {n: i.shape for n, i in found.items()} == {n: x.shape for n, x in wanted.items()}
    data = (tmp_path / "x.safetensors").read_bytes()
    for name, info in found.items():
        assert data[info.start : info.stop] == bits(wanted[name])
    loaded = ns.load_safetensors(tmp_path / "x.safetensors", tree, mapping={"b": "model"}, mesh=M42)
    assert eqx.tree_equal(jax.tree.map(np.asarray, loaded), jax.tree.map(np.asarray, tree))


class Scaling(ModuleWithStateDictSerialization):
    w: jax.Array

    def to_state_dict(self, prefix: str | None = None) -> dict[str, Any]:
        return {f"{prefix}.w": self.w * 0.25, f"{prefix}.half": 2.0 * self.w / 4}


class Computing(ModuleWithStateDictSerialization):
    w: jax.Array
    plain: jax.Array

    def to_state_dict(self, prefix: str | None = None) -> dict[str, Any]:
        return {f"{prefix}.w": self.w + 1, f"{prefix}.plain": self.plain}


class Deriving(ModuleWithStateDictSerialization):
    w: jax.Array

    def to_state_dict(self, prefix: str | None = None) -> dict[str, Any]:
        return {f"{prefix}.w": self.w, f"{prefix}.norm": jnp.sum(self.w * self.w)}


class Failing(ModuleWithStateDictSerialization):
    w: jax.Array

    def to_state_dict(self, prefix: str | None = None) -> dict[str, Any]:
        raise KeyError("no such thing")


def test_a_scale_is_undone_on_the_way_in(tmp_path):
    tree = {"m": Scaling(jnp.asarray(counting(4, 4)))}
    ns.save_safetensors(tree, tmp_path / "x.safetensors")
    data = (tmp_path / "x.safetensors").read_bytes()
    found = ns.read_header(tmp_path / "x.safetensors")
    for name, factor in (("m.w", 0.25), ("m.half", 0.5)):
        assert data[found[name].start : found[name].stop] == bits(counting(4, 4) * np.float32(factor))
    assert bits(ns.load_safetensors(tmp_path / "x.safetensors", tree)["m"].w) == bits(counting(4, 4))


def test_tensors_that_are_derived_from_leaves_matter_only_to_the_file(tmp_path):
    tree = {"m": Deriving(jnp.ones(2))}
    path = write(tmp_path / "x.safetensors", {"m.w": counting(2), "m.norm": np.ones((), np.float32)})
    loaded = ns.load_safetensors(path, tree, unexpected="ignore")
    assert bits(loaded["m"].w) == bits(counting(2))
    with pytest.raises(ns.CheckpointError) as error:
        ns.save_safetensors(tree, tmp_path / "y.safetensors")
    assert str(error.value) == (
        "1 names do not fit the tree\n"
        "  ['m'].w: Deriving computes tensor 'norm': mul is no copy\n"
        "  fix: correct names=, by leaf path as explain prints it"
    )


def test_what_cannot_be_followed_is_said_and_can_be_named(tmp_path):
    tree = {"c": Computing(jnp.ones(2), jnp.ones(3)), "f": Failing(jnp.ones(2))}
    with pytest.raises(ns.CheckpointError) as error:
        ns.save_safetensors(tree, tmp_path / "x.safetensors")
    assert str(error.value) == (
        "2 names do not fit the tree\n"
        "  ['c'].w: Computing computes tensor 'w': add is no copy\n"
        "  ['f'].w: Failing.to_state_dict raises KeyError: 'no such thing'\n"
        "  fix: correct names=, by leaf path as explain prints it"
    )
    ns.save_safetensors(tree, tmp_path / "x.safetensors", names={"['c'].w": "c.w", "['f'].w": "f.w"})
    assert set(ns.read_header(tmp_path / "x.safetensors")) == {"c.w", "c.plain", "f.w"}


class Applying(ModuleWithStateDictSerialization):
    w: jax.Array
    function: Any = eqx.field(static=True)

    def to_state_dict(self, prefix: str | None = None) -> dict[str, Any]:
        return {f"{prefix}.w": self.function(self.w)}


@pytest.mark.parametrize(
    ("operation", "function"),
    [
        ("scan", lambda w: jax.lax.map(lambda x: x.reshape(-1), w)),
        ("scan", lambda w: jax.lax.fori_loop(0, 2, lambda _, x: x.transpose(0, 2, 1), w)),
        ("while", lambda w: jax.lax.while_loop(lambda x: x[0, 0, 0] > 0, lambda x: x.transpose(0, 2, 1), w)),
        ("cond", lambda w: jax.lax.cond(True, lambda x: x.transpose(0, 2, 1), lambda x: x, w)),
    ],
)
def test_loops_and_branches_are_no_copies(tmp_path, operation, function):
    tree = {"m": Applying(jnp.asarray(counting(3, 4, 4)), function)}
    with pytest.raises(ns.CheckpointError) as error:
        ns.save_safetensors(tree, tmp_path / "x.safetensors")
    assert f"['m'].w: Applying computes tensor 'w': {operation} is no copy" in str(error.value)
    path = write(tmp_path / "x.safetensors", {"m.w": counting(3, 4, 4)})
    with pytest.raises(ns.CheckpointError) as error:
        ns.load_safetensors(path, tree)
    assert f"['m'].w: Applying computes tensor 'w': {operation} is no copy" in str(error.value)


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, jax.custom_vjp, jax.custom_jvp])
def test_calls_are_followed(tmp_path, wrap):
    function = wrap(lambda x: x.reshape(-1))
    if wrap is jax.custom_vjp:
        function.defvjp(lambda x: (x, None), lambda _, g: (g,))
    if wrap is jax.custom_jvp:
        function.defjvp(lambda x, dx: (x, dx))
    ns.save_safetensors({"m": Applying(jnp.asarray(counting(3, 4)), function)}, tmp_path / "x.safetensors")
    assert ns.read_header(tmp_path / "x.safetensors")["m.w"].shape == (12,)


class Pair(NamedTuple):
    first: Any
    second: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    step: Any
    params: Any


class Plain(eqx.Module):
    layers: tuple[Any, ...]
    gain: jax.Array
    rate: float = 0.1
    act: Any = jax.nn.relu


def test_names_of_other_trees_are_their_paths_with_dots():
    x = jnp.zeros(2)
    tree = {"s": State(x, Pair(x, [x, {"k": x, "3": x}])), "m": Plain((x, Plain((), x)), x)}
    assert [t.name for t in tensors_of(tree)] == [
        "m.layers.0",
        "m.layers.1.gain",
        "m.gain",
        "s.step",
        "s.params.first",
        "s.params.second.0",
        "s.params.second.1.3",
        "s.params.second.1.k",
    ]


def test_optimizer_states_of_haliax_models_have_names(tmp_path):
    params = eqx.filter(model(), eqx.is_inexact_array)
    state = Pair(jax.tree.map(lambda x: x + 1, params), params)
    ns.save_safetensors(state, tmp_path)
    loaded = ns.load_safetensors(tmp_path, state)
    assert eqx.tree_equal(loaded, state)
    assert "first.h.0.attend.weight" in ns.read_header(tmp_path)


def test_lora_trees_have_only_what_is_left_in_them(tmp_path):
    full = model()
    spec = jax.tree.map(lambda _: False, full)
    adapters = eqx.filter(full, eqx.tree_at(lambda m: m.layers.stacked.up.weight.array, spec, True))
    ns.save_safetensors(adapters, tmp_path)
    assert sorted(ns.read_header(tmp_path)) == [f"h.{i}.up.weight" for i in range(3)]
    loaded = ns.load_safetensors(tmp_path, adapters)
    assert bits(loaded.layers.stacked.up.weight.array) == bits(full.layers.stacked.up.weight.array)
    assert isinstance(full, Model)


def test_each_leaf_on_its_own_is_stored_as_within_the_whole(tmp_path):
    whole = model()
    ns.save_safetensors(whole, tmp_path / "whole.safetensors")
    wanted = {
        n: Path(i.file).read_bytes()[i.start : i.stop]
        for n, i in ns.read_header(tmp_path / "whole.safetensors").items()
    }
    leaves, treedef = jax.tree_util.tree_flatten(whole)
    path = tmp_path / "alone.safetensors"
    seen: list[str] = []
    for i in (i for i, leaf in enumerate(leaves) if eqx.is_array(leaf)):
        mask = jax.tree_util.tree_unflatten(treedef, [j == i for j in range(len(leaves))])
        alone, rest = eqx.partition(whole, mask)
        ns.save_safetensors(alone, path)
        found = {n: Path(info.file).read_bytes()[info.start : info.stop] for n, info in ns.read_header(path).items()}
        assert found == {n: wanted[n] for n in found}
        seen += found
        back = ns.load_safetensors(path, alone)
        assert [bits(x) for x in arrays(eqx.combine(back, rest))] == [bits(x) for x in arrays(whole)]
    assert sorted(seen) == sorted(wanted)
