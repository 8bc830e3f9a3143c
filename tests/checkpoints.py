"""What the checkpoint tests build on: files written byte by byte, a recording source, a model of every kind."""

import json
from collections.abc import Mapping
from pathlib import Path
from struct import pack
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from haliax.state_dict import ModuleWithStateDictSerialization

from namedshard._safetensors import load as _load
from namedshard._safetensors.source import LocalFile
from namedshard._safetensors.targets import LoadOptions

CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}


def raw(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A file's bytes from a header (an object, or bytes taken as they are) and what follows it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return pack("<Q", len(text) if length is None else length) + text + data


def encode(tensors: Mapping[str, np.ndarray], metadata: dict[str, str] | None = None) -> bytes:
    """A valid file, made without the library."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for name, value in tensors.items():
        payload = np.ascontiguousarray(value).tobytes()
        header[name] = {
            "dtype": CODES[value.dtype.name],
            "shape": list(value.shape),
            "data_offsets": [len(data), len(data) + len(payload)],
        }
        data += payload
    return raw(header, data)


def write(path: Path, tensors: Mapping[str, np.ndarray], metadata: dict[str, str] | None = None) -> Path:
    """Write a valid file."""
    path.write_bytes(encode(tensors, metadata))
    return path


def write_sharded(directory: Path, files: Mapping[str, Mapping[str, np.ndarray]]) -> Path:
    """Write files and the index that names them."""
    directory.mkdir(exist_ok=True)
    for name, tensors in files.items():
        write(directory / name, tensors)
    weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def structs(tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Abstract leaves for all tensors, by name."""
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in tensors.items()}


class Recorder:
    """Opens local files and writes down what is read of them."""

    def __init__(self) -> None:
        self.ranges: list[tuple[str, int, int]] = []

    def __call__(self, name: str) -> "RecordedFile":
        return RecordedFile(name, self)

    def data(self) -> list[tuple[str, int, int]]:
        """The reads after each file's header."""
        seen: dict[str, int] = {}
        out: list[tuple[str, int, int]] = []
        for name, start, stop in self.ranges:
            seen[name] = seen.get(name, 0) + 1
            if seen[name] > 2 and not name.endswith(".json"):
                out.append((name, start, stop))
        return out

    def data_bytes(self) -> int:
        """Bytes of tensors that were read."""
        return sum(stop - start for _, start, stop in self.data())


class RecordedFile(LocalFile):
    def __init__(self, name: str, recorder: Recorder) -> None:
        super().__init__(name)
        self._recorder = recorder

    def read(self, start: int, into: memoryview) -> None:
        self._recorder.ranges.append((self.name, start, start + len(into)))
        super().read(start, into)


EVERY_DTYPE = {
    name: (np.arange(16).reshape(8, 2) % 2 == 1 if name == "bool" else (np.arange(16).reshape(8, 2) + 1)).astype(
        getattr(ml_dtypes, name, None) or name
    )
    for name in CODES
    if name not in ("int64", "uint64", "float64")
}
"""One array of each dtype that JAX keeps, with values that each can hold or rounds alike."""

HEADS, SIZE, EMBED, MLP = hax.Axis("heads", 2), hax.Axis("head_size", 4), hax.Axis("embed", 8), hax.Axis("mlp", 16)
VOCAB, LAYERS = hax.Axis("vocab", 24), hax.Axis("layers", 3)


class Block(eqx.Module):
    """Flattened and multi-axis linears, a norm over two axes, a plain field, a hyperparameter."""

    attend: hnn.Linear
    up: hnn.Linear
    norm: hnn.LayerNorm
    gain: jax.Array
    rate: float

    @staticmethod
    def init(*, key: Any) -> "Block":
        return Block(
            hnn.Linear.init(EMBED, (HEADS, SIZE), key=key),
            hnn.Linear.init((HEADS, SIZE), MLP, key=key, use_bias=False, out_first=False),
            hnn.LayerNorm.init((HEADS, SIZE)),
            jax.random.normal(key, (6,)),
            0.5,
        )


class Model(ModuleWithStateDictSerialization):
    """Renamed fields, stacked layers, a sequence of blocks, modules in tuples and dicts."""

    embed: hnn.Embedding
    layers: hnn.Stacked
    tail: hnn.BlockSeq
    heads: tuple[hnn.Linear, ...]
    extra: dict[str, Any]
    act: Any = jax.nn.relu

    def _state_dict_key_map(self) -> dict[str, str | None]:
        return {"layers": "h", "embed": "wte", "extra": None}

    @staticmethod
    def init(key: Any) -> "Model":
        keys = jax.random.split(key, 8)
        return Model(
            hnn.Embedding.init(VOCAB, EMBED, key=keys[0]),
            hnn.Stacked.init(LAYERS, Block)(key=jax.random.split(keys[1], LAYERS.size)),
            hnn.BlockSeq.init(LAYERS, Block)(key=jax.random.split(keys[2], LAYERS.size)),
            (hnn.Linear.init(EMBED, MLP, key=keys[3]), hnn.Linear.init(MLP, EMBED, key=keys[4], out_first=False)),
            {"scale": jnp.float32(2.5), "ids": jnp.arange(5)},
        )


def arrays(tree: Any) -> list[Any]:
    """The array leaves of a tree."""
    return jax.tree_util.tree_leaves(eqx.filter(tree, eqx.is_array))


def model() -> Model:
    """A model with distinct values in every leaf."""
    shapes, statics = eqx.partition(
        eqx.filter_eval_shape(Model.init, jax.random.key(0)), lambda x: isinstance(x, jax.ShapeDtypeStruct)
    )
    leaves, treedef = jax.tree_util.tree_flatten(shapes)
    values = [
        jnp.asarray((np.arange(x.size) + 1000 * i).astype(x.dtype).reshape(x.shape)) for i, x in enumerate(leaves)
    ]
    return eqx.combine(jax.tree_util.tree_unflatten(treedef, values), statics)


def load_recorded(path: Any, like: Any, recorder: Recorder | None = None, **options: Any) -> tuple[Any, Recorder]:
    """Load, and what was read for it."""
    recorder = Recorder() if recorder is None else recorder
    options.setdefault("progress", False)
    return _load.load_with(recorder, path, like, LoadOptions(**options)), recorder


def struct(*shape: int, dtype: Any = np.float32, sharding: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
