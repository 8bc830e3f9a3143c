"""A real checkpoint on a mesh over processes: each reads its part, and the embeddings are those of one process."""

import importlib.util
import sys
import warnings
from pathlib import Path
from types import ModuleType

import jax
import numpy as np

import namedshard as ns
from mp.tools import DEVICES, equal, mesh

SCRIPT = Path(__file__).parent.parent.parent / "examples" / "embed_sentences.py"
BEGINNING = [0.126535, -0.032851, -0.029060, 0.044407]


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("embed_sentences", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def case_the_embeddings_agree() -> None:
    demo = _script()
    where = mesh((2, len(DEVICES) // 2), "data model")
    model = demo.load(demo.model_folder(), demo.abstract_model(), where)
    equal(model.layers[0].up.weight.array.is_fully_addressable, False)
    ids, mask = demo.tokenise(demo.model_folder(), list(demo.SENTENCES), where)
    with jax.set_mesh(where), warnings.catch_warnings():
        # The older Haliax uses it in `dot`.
        warnings.filterwarnings("ignore", "jax.core.is_constant_dim is deprecated", DeprecationWarning)
        embeddings = ns.to_host(demo.embed(model, ids, mask)).array
    np.testing.assert_allclose(embeddings[0, :4], BEGINNING, atol=1e-5)
    equal([f"{embeddings[0] @ embeddings[i]:.4f}" for i in (1, 2)], ["0.5894", "0.0308"])
