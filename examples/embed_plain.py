"""Embed sentences with a checkpoint that is a plain dict of arrays: no model class, and no named axes in the model.

    python examples/embed_plain.py [SENTENCE ...]

The arrays get their axis names by the names of the checkpoint's tensors. The result is that of `embed_sentences.py`.
"""

import sys
from collections.abc import Sequence
from typing import TypeAlias

# Sets up eight virtual devices before JAX is imported.
import embed_sentences as demo  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np

import namedshard as ns

HEADS = 12
MAPPING = ns.AxisMapping(
    {"vocab": ns.first("model", "data", None), "heads": "model", "mlp": "model", "batch": "data"},
    axes={
        "word_embeddings.weight": "vocab embed",
        "self.*.weight": f"(heads={HEADS} head_size) embed",
        "self.*.bias": f"(heads={HEADS} head_size)",
        "attention.output.dense.weight": f"embed (heads={HEADS} head_size)",
        "intermediate.dense.weight": "mlp embed",
        "intermediate.dense.bias": "mlp",
        "layer.*.output.dense.weight": "embed mlp",
        # All others: layer norms, biases of the residual stream, small tables.
        "**": "... embed",
    },
)

Weights: TypeAlias = dict[str, jax.Array]


def dense(weights: Weights, name: str, x: jax.Array) -> jax.Array:
    """A linear layer."""
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def normalised(weights: Weights, name: str, x: jax.Array) -> jax.Array:
    """A layer norm."""
    centred = x - x.mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + demo.EPSILON) * weights[f"{name}.weight"] + weights[f"{name}.bias"]


@ns.named_jit(axes={"ids": "batch _", "mask": "batch _"})
def embed(weights: Weights, ids: jax.Array, mask: jax.Array) -> jax.Array:
    """One unit vector per sentence, shape (sentences, 384), of token ids and their mask, shape (sentences, tokens)."""
    table = {name: weights[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type")}
    x = table["word"][ids] + table["position"][: ids.shape[1]] + table["token_type"][0]
    x = normalised(weights, "embeddings.LayerNorm", x)
    for i in range(demo.LAYERS):
        layer, attention = f"encoder.layer.{i}", f"encoder.layer.{i}.attention"
        q, k, v = (
            dense(weights, f"{attention}.self.{name}", x).reshape(*x.shape[:2], HEADS, -1)
            for name in ("query", "key", "value")
        )
        mixed = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None, None, :]).reshape(x.shape)
        x = normalised(weights, f"{attention}.output.LayerNorm", x + dense(weights, f"{attention}.output.dense", mixed))
        hidden = ns.shard(dense(weights, f"{layer}.intermediate.dense", x), axes="batch _ mlp")
        hidden = jax.nn.gelu(hidden, approximate=False)
        x = normalised(weights, f"{layer}.output.LayerNorm", x + dense(weights, f"{layer}.output.dense", hidden))
    mean = x.mean(1, where=mask[..., None])
    return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)


def main(sentences: Sequence[str]) -> np.ndarray:
    """Load, embed, and print the cosine of each pair of sentences."""
    mesh, folder = demo.make_mesh(), demo.model_folder()
    tensors = ns.read_header(folder / "model.safetensors")
    like = {
        name: jax.ShapeDtypeStruct(info.shape, info.dtype)
        for name, info in tensors.items()
        if name != "embeddings.position_ids" and "pooler" not in name
    }
    print(ns.explain(like, MAPPING, mesh))
    weights = ns.load_safetensors(folder / "model.safetensors", like, MAPPING, mesh, unexpected="ignore")
    ids, mask = demo.tokenise(folder, sentences, mesh)
    with jax.set_mesh(mesh), ns.axis_mapping(MAPPING):
        vectors = np.asarray(embed(weights, ids.array, mask.array))[: len(sentences)]
    print("\ncosines")
    for row in vectors @ vectors.T:
        print("".join(f"{value:10.5f}" for value in row))
    return vectors


if __name__ == "__main__":
    main(sys.argv[1:] or demo.SENTENCES)
