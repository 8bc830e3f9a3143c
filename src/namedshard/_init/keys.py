"""Computes an initializer's keys and other small integers, before and apart from its leaves.

Deriving keys is cheap to run but expensive to compile, since each split in a ``jit`` is another threefry for the
compiler to optimize. Here each distinct operation is compiled once, and numpy takes arrays of keys apart. The results
are the same bits, since they are integers.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal

from namedshard import _jaxcompat as compat
from namedshard._cache import BoundedCache
from namedshard._init.tails import Graph, Op, array_type, contents_of, freeze_op, literal_data, values_of

SMALL_BYTES = 64 << 10


def is_exact(aval: Any) -> bool:
    """Small keys and integers."""
    if not hasattr(aval, "dtype") or not hasattr(aval, "shape"):
        return False
    if compat.is_key_array(aval):
        return int(np.prod(compat.key_data_shape(aval))) * 4 <= SMALL_BYTES
    integers = jnp.issubdtype(aval.dtype, jnp.integer) and jnp.iinfo(aval.dtype).bits == aval.dtype.itemsize * 8
    return (integers or aval.dtype == jnp.bool_) and aval.size * aval.dtype.itemsize <= SMALL_BYTES


def _view(op: Op) -> Callable[[np.ndarray], Sequence[np.ndarray]] | None:
    """How numpy does an operation that only takes an array apart or gives it another shape, on the data of keys too."""
    params: Mapping[str, Any] = op.eqn.params
    outputs = [v.aval for v in op.eqn.outvars]
    if op.name in ("random_wrap", "random_unwrap", "copy", "copy_p"):
        return lambda x: [x]
    if op.name == "unstack":
        return lambda x: list(np.moveaxis(x, params["axis"], 0))
    if op.name in ("squeeze", "expand_dims") or (op.name == "reshape" and params.get("dimensions") is None):
        return lambda x: [x.reshape(data_struct(outputs[0]).shape)]
    if op.name == "slice":
        bounds = zip(params["start_indices"], params["limit_indices"], strict=True)
        steps = params["strides"] or (1,) * len(params["start_indices"])
        index = tuple(slice(a, b, s) for (a, b), s in zip(bounds, steps, strict=True))
        return lambda x: [x[index]]
    return None


def data_struct(aval: Any) -> Any:
    """Shape and dtype of an array, or of the data of an array of keys."""
    return jax.ShapeDtypeStruct(compat.key_data_shape(aval), np.uint32) if compat.is_key_array(aval) else aval


def from_data(data: Any, aval: Any) -> Any:
    """The array, or the array of keys with this data."""
    return jax.random.wrap_key_data(data, impl=compat.key_impl(aval)) if compat.is_key_array(aval) else data


def host_data(value: Any) -> np.ndarray:
    """An array that this process can read, or the data of keys, as numpy."""
    if isinstance(value, jax.Array) and compat.is_key_array(value):
        with compat.no_context_mesh():
            value = jax.random.key_data(value)
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        value = value.addressable_data(0)
    return np.asarray(value)


def _on_data(eqn: JaxprEqn, avals: Sequence[Any]) -> Callable[..., Any]:
    """An operation from the data of its inputs to that of its results, compiled."""

    def init_keys(*data: Any) -> list[Any]:
        results = compat.run_equation(eqn, list(map(from_data, data, avals)))
        return [jax.random.key_data(x) if compat.is_key_array(x) else x for x in results]

    return jax.jit(init_keys)


_derivations: BoundedCache[Callable[..., Any]] = BoundedCache(256)
compat.clear_with_jax(_derivations)


@dataclasses.dataclass(slots=True, eq=False)
class KeySchedule:
    """The operations on keys and small integers, in order; ``values`` has what they make, and what is ``given``."""

    given: frozenset[int]
    values: frozenset[int]
    steps: list[tuple[Op, Callable[..., Sequence[Any]]]]

    def run(self, inputs: Mapping[int, Any]) -> dict[int, np.ndarray]:
        """All values as numpy, keys by their data."""
        made = {v: host_data(inputs[v]) for v in self.given}
        with compat.no_context_mesh():
            for op, run in self.steps:
                data = [literal_data(ref) if isinstance(ref, Literal) else made[ref] for ref in op.inputs]
                made.update(zip(op.outputs, map(np.asarray, run(*data)), strict=True))
        return made


def schedule(graph: Graph, readable: Iterable[int]) -> KeySchedule:
    """The operations on keys and small integers that start from inputs which this process can read."""
    given = frozenset(v for v in readable if is_exact(graph.avals[v]))
    known = set(given)
    # What starts from literals alone is computed here only where it meets a key; leaves compute it themselves.
    fixed: dict[int, Op] = {}
    steps: list[tuple[Op, Callable[..., Sequence[Any]]]] = []

    def add(op: Op) -> None:
        for value in values_of(op.inputs):
            if value not in known:
                add(fixed[value])
        run = _view(op) if [*values_of(op.inputs)] == [*op.inputs[:1]] else None
        if run is None:
            avals = [graph.aval(ref) for ref in op.inputs]
            key = freeze_op(op.eqn), tuple(map(array_type, avals))
            run = _derivations.get(key) or _derivations.put(key, _on_data(op.eqn, avals))
        steps.append((op, run))
        known.update(op.outputs)

    for op in filter(_is_on_integers, graph.ops):
        if not all(v in known or v in fixed for v in values_of(op.inputs)):
            continue
        if op.name == "random_seed" or any(v in known for v in values_of(op.inputs)):
            add(op)
        else:
            fixed.update(dict.fromkeys(op.outputs, op))
    return KeySchedule(given, frozenset(known), steps)


def _is_on_integers(op: Op) -> bool:
    if op.eqn.effects or not all(is_exact(v.aval) for v in op.eqn.outvars):
        return False
    return not any(floats or name == "random_bits" for name, floats in contents_of(op.eqn))
