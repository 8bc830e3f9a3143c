"""The small values of an initialiser (keys above all), worked out by one compiled loop whatever their number.

Deriving keys is cheap to run and expensive to compile: each split in a jit is another threefry to optimise. Here every
small value has a place in one array of uint32 words, every operation on small values is one step of a tape, and a loop
runs the tape. What is compiled is the loop with one branch per *kind* of operation.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from namedshard import _jaxcompat as compat
from namedshard._init.jaxpr import Constant, Graph, Op, Ref, apply, aval_key, freeze_op

KEY_BYTES = 64 << 10
"""Arrays of keys up to this size are small values."""

SMALL_SIZE = 128
"""Other arrays up to this number of elements are small values."""

_KEY_OPS = frozenset(
    """
    random_wrap random_unwrap random_split random_fold_in random_seed slice squeeze unstack reshape expand_dims
    concatenate gather dynamic_slice broadcast_in_dim transpose rev
    """.split()  # noqa: SIM905
)


@functools.lru_cache(maxsize=64)
def key_impl(dtype: Any) -> Any:
    """What ``jax.random.key_impl`` says of keys of a dtype."""
    found: list[Any] = []

    def look(key: Array) -> tuple[()]:
        found.append(jax.random.key_impl(key))
        return ()

    jax.eval_shape(look, jax.ShapeDtypeStruct((), dtype))
    return found[0]


@functools.lru_cache(maxsize=64)
def _key_words(dtype: Any) -> int:
    return math.prod(jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype)).shape)


def has_words(aval: Any) -> bool:
    """True for values that are a whole number of uint32 words: keys, and all but complex and sub-byte dtypes."""
    return hasattr(aval, "dtype") and hasattr(aval, "shape") and _dtype_has_words(aval.dtype)


@functools.lru_cache(maxsize=256)
def _dtype_has_words(dtype: Any) -> bool:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return True
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits == dtype.itemsize * 8
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits == dtype.itemsize * 8
    return dtype == jnp.bool_


def element_words(aval: Any) -> int:
    """uint32 words per element."""
    if compat.is_key_array(aval):
        return _key_words(aval.dtype)
    return 2 if aval.dtype.itemsize == 8 else 1


def word_count(aval: Any) -> int:
    """uint32 words of a whole small value."""
    return math.prod(aval.shape) * element_words(aval)


def is_small(aval: Any, primitive: str | None = None) -> bool:
    """Small enough for the tape: keys (and, from operations on keys, their words) of some size, others of less."""
    if not has_words(aval):
        return False
    keys = compat.is_key_array(aval) or (aval.dtype == jnp.uint32 and (primitive is None or primitive in _KEY_OPS))
    return word_count(aval) * 4 <= KEY_BYTES if keys else math.prod(aval.shape) <= SMALL_SIZE


def decode(words: Array, aval: Any) -> Array:
    """The value that uint32 words, shape ``[word_count(aval)]``, stand for."""
    if compat.is_key_array(aval):
        data = words.reshape(*aval.shape, _key_words(aval.dtype))
        return jax.random.wrap_key_data(data, impl=key_impl(aval.dtype))
    dtype = aval.dtype
    if dtype == jnp.bool_:
        return (words != 0).reshape(aval.shape)
    if dtype.itemsize == 8:
        return jax.lax.bitcast_convert_type(words.reshape(*aval.shape, 2), dtype)
    if dtype.itemsize < 4:
        words = words.astype({1: jnp.uint8, 2: jnp.uint16}[dtype.itemsize])
    return jax.lax.bitcast_convert_type(words.reshape(aval.shape), dtype)


def encode(value: Array, aval: Any) -> Array:
    """The inverse of `decode`, traced."""
    if compat.is_key_array(aval):
        return jax.random.key_data(value).reshape(-1)
    if aval.dtype == jnp.bool_:
        return value.astype(jnp.uint32).reshape(-1)
    if aval.dtype.itemsize >= 4:
        return jax.lax.bitcast_convert_type(value, jnp.uint32).reshape(-1)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}[aval.dtype.itemsize]
    return jax.lax.bitcast_convert_type(value, unsigned).astype(jnp.uint32).reshape(-1)


def host_words(value: Any, aval: Any) -> np.ndarray:
    """The inverse of `decode`, for a literal or an array that this process can read."""
    if compat.is_key_array(aval):
        value = jax.random.key_data(value)
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        value = value.addressable_data(0)
    flat = np.asarray(value)
    if not compat.is_key_array(aval):
        flat = flat.astype(aval.dtype)
    flat = np.ascontiguousarray(flat).reshape(-1)
    if flat.dtype == np.bool_:
        return flat.astype(np.uint32)
    if flat.dtype.itemsize >= 4:
        return flat.view(np.uint32)
    return flat.view({1: np.uint8, 2: np.uint16}[flat.dtype.itemsize]).astype(np.uint32)


def host_value(words: np.ndarray, aval: Any) -> np.ndarray:
    """The value that words stand for, as numpy; for all but keys."""
    dtype = np.dtype(aval.dtype)
    if dtype == np.bool_:
        return (words != 0).reshape(aval.shape)
    if dtype.itemsize < 4:
        words = words.astype({1: np.uint8, 2: np.uint16}[dtype.itemsize])
    return np.ascontiguousarray(words).view(dtype).reshape(aval.shape)


def _view_offset(op: Op, source: Any, result: Any) -> int | None:
    """The words into its input at which an operation's result lies, if the result is just a part of it."""
    name = op.primitive.name
    if name in ("random_wrap", "random_unwrap", "reshape", "squeeze", "expand_dims", "copy", "copy_p"):
        return 0 if op.params.get("dimensions") is None or name != "reshape" else None
    if name != "slice" or (op.params["strides"] is not None and any(s != 1 for s in op.params["strides"])):
        return None
    starts, extents, whole = op.params["start_indices"], result.shape, source.shape
    partial = [d for d, (extent, n) in enumerate(zip(extents, whole, strict=True)) if extent != n]
    last = max(partial, default=0)
    if any(extents[d] != 1 for d in range(last)):
        return None
    flat = 0
    for start, n in zip(starts, whole, strict=True):
        flat = flat * n + start
    return flat * element_words(source)


@dataclasses.dataclass(slots=True, eq=False)
class _Kind:
    op: Op
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]

    def branch(self, words: Array, places: Array) -> Array:
        values = [
            decode(jax.lax.dynamic_slice(words, (places[i],), (word_count(aval),)), aval)
            for i, aval in enumerate(self.inputs)
        ]
        out = apply(self.op, values, None)
        made = jnp.concatenate([encode(v, aval) for v, aval in zip(out, self.outputs, strict=True)])
        return jax.lax.dynamic_update_slice(words, made, (places[-1],))


class Tape:
    """Places for small values and the steps that fill them."""

    def __init__(self, graph: Graph):
        self._avals = graph.avals
        self._initial: list[np.ndarray] = [np.zeros(1, np.uint32)]
        self._size = 1
        self.places: dict[int, int] = {}
        self._constants: dict[Any, int] = {}
        self._kinds: dict[Any, int] = {}
        self._branches: list[_Kind] = []
        self._steps: list[tuple[int, list[int], int]] = []
        self.inputs: list[int] = []

    ZERO = 0
    """The place of a word that is zero."""

    def _take(self, words: np.ndarray) -> int:
        place = self._size
        self._initial.append(words)
        self._size += len(words)
        return place

    def add_input(self, value: int) -> None:
        """A value that is read from an argument when the tape runs."""
        self.places[value] = self._take(np.zeros(word_count(self._avals[value]), np.uint32))
        self.inputs.append(value)

    def add_constant(self, value: int, content: Any) -> None:
        """A value known while tracing."""
        self.places[value] = self._take(host_words(content, self._avals[value]))

    def __contains__(self, value: int) -> bool:
        return value in self.places

    def place(self, ref: Ref) -> int:
        """The first word of a small value or literal."""
        if not isinstance(ref, Constant):
            return self.places[ref]
        words = host_words(ref.value, ref.aval)
        key = (aval_key(ref.aval), words.tobytes())
        if key not in self._constants:
            self._constants[key] = self._take(words)
        return self._constants[key]

    def add_op(self, op: Op) -> None:
        """An operation all of whose inputs are here."""
        source = None if not op.inputs or isinstance(op.inputs[0], Constant) else self._avals[op.inputs[0]]
        if source is not None:
            start = self.places[op.inputs[0]]  # pyright: ignore[reportArgumentType]
            if op.primitive.name == "unstack" and op.params["axis"] == 0:
                each = word_count(source) // source.shape[0]
                self.places.update({v: start + i * each for i, v in enumerate(op.outputs)})
                return
            offset = _view_offset(op, source, self._avals[op.outputs[0]]) if len(op.outputs) == 1 else None
            if offset is not None:
                self.places[op.outputs[0]] = start + offset
                return
        inputs = tuple(r.aval if isinstance(r, Constant) else self._avals[r] for r in op.inputs)
        outputs = tuple(self._avals[v] for v in op.outputs)
        key = (freeze_op(op), tuple(map(aval_key, inputs)), tuple(map(aval_key, outputs)))
        if key not in self._kinds:
            self._kinds[key] = len(self._branches)
            self._branches.append(_Kind(op, inputs, outputs))
        places = [self.place(ref) for ref in op.inputs]
        total = sum(map(word_count, outputs))
        start = self._take(np.zeros(total, np.uint32))
        at = start
        for value, aval in zip(op.outputs, outputs, strict=True):
            self.places[value] = at
            at += word_count(aval)
        self._steps.append((self._kinds[key], places, start))

    def finish(self) -> "Recording":
        """The tape as arrays, their sizes rounded up so that models of like depth share one program."""
        width = max(4, max((len(places) for _, places, _ in self._steps), default=0))
        steps = _round_up(max(len(self._steps), 1))
        kinds, places = np.zeros(steps, np.int32), np.zeros((steps, width + 1), np.int32)
        for i, (kind, sources, target) in enumerate(self._steps):
            kinds[i] = kind + 1
            places[i, : len(sources)] = sources
            places[i, -1] = target
        initial = np.zeros(_round_up(self._size), np.uint32)
        initial[: self._size] = np.concatenate(self._initial)
        inputs = tuple((v, self.places[v], self._avals[v]) for v in self.inputs)
        return Recording(
            (tuple(self._kinds), len(initial), steps, width),
            initial,
            kinds,
            places,
            inputs,
            tuple(self._branches),
            len(self._steps),
        )


def _round_up(n: int) -> int:
    return max(64, 1 << (n - 1).bit_length())


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """A finished tape.

    Attributes:
        key: What tells the program of a tape from those of others.
        initial: ``uint32[n]``, the words before the first step.
        kinds: ``int32[s]``, each step's kind counted from 1; 0 does nothing.
        places: ``int32[s, w]``, where each step's inputs are, and last where its output goes.
        inputs: (value, place, aval) of each argument.
        length: The number of steps that do something.
    """

    key: Any
    initial: np.ndarray
    kinds: np.ndarray
    places: np.ndarray
    inputs: tuple[tuple[int, int, Any], ...]
    branches: tuple[_Kind, ...]
    length: int

    @property
    def keys_only(self) -> bool:
        """True if no step computes with floating values."""
        return all(kind.op.primitive.name in _KEY_OPS for kind in self.branches)

    def loop(self) -> Callable[..., Any]:
        """The function to compile: from words, kinds and places to words."""
        branches: Sequence[Callable[..., Array]] = [lambda words, _: words, *(kind.branch for kind in self.branches)]

        def init_keys(words: Array, kinds: Array, places: Array) -> Array:
            def step(carry: Array, x: tuple[Array, Array]) -> tuple[Array, None]:
                return jax.lax.switch(x[0], branches, carry, x[1]), None

            return jax.lax.scan(step, words, (kinds, places))[0]

        return init_keys

    def load(self, arguments: dict[int, Any]) -> np.ndarray:
        """The words before the first step, with the arguments in their places."""
        words = self.initial.copy()
        for value, place, aval in self.inputs:
            content = host_words(arguments[value], aval)
            words[place : place + len(content)] = content
        return words
