"""A real checkpoint on a mesh over processes: each reads its part, and the embeddings are those of one process."""

import warnings

import demo
import jax
import numpy as np

import namedshard as ns
from mp.tools import DEVICES, equal, mesh


def case_the_embeddings_agree() -> None:
    script = demo.load()
    where = mesh((2, len(DEVICES) // 2), "data model")
    model = script.load(script.model_folder(), script.abstract_model(), where)
    equal(model.layers[0].up.weight.array.is_fully_addressable, False)
    ids, mask = script.tokenise(script.model_folder(), list(script.SENTENCES), where)
    with jax.set_mesh(where), warnings.catch_warnings():
        # The older Haliax uses it in `dot`.
        warnings.filterwarnings("ignore", "jax.core.is_constant_dim is deprecated", DeprecationWarning)
        embeddings = ns.to_host(script.embed(model, ids, mask)).array
    np.testing.assert_allclose(embeddings[0, :4], demo.BEGINNING, atol=1e-5)
    equal([f"{embeddings[0] @ embeddings[i]:.4f}" for i in (1, 2)], ["0.5894", "0.0308"])
