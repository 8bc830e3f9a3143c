"""PURE. Arrays of typed random keys as the integers under them, which every route can move."""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from namedshard import _jaxcompat as compat


def raw(x: Any) -> Any:
    """The array itself, or the integers under an array of typed keys."""
    return jax.random.key_data(x) if compat.is_key_array(x) else x


def raw_type(x: Any) -> Any:
    """Shape and dtype of the integers under an array of keys, else of the array; nothing runs."""
    return jax.ShapeDtypeStruct(compat.key_data_shape(x), np.uint32) if compat.is_key_array(x) else x


def raw_sharding(x: Any, want: NamedSharding) -> NamedSharding:
    """The sharding of the integers, where the array is to have the one wanted."""
    extra = raw_type(x).ndim - x.ndim
    spec = PartitionSpec(*want.spec, *[None] * (x.ndim - len(want.spec) + extra))
    return NamedSharding(want.mesh, spec, memory_kind=want.memory_kind) if extra else want


def like(x: Any, built: jax.Array) -> jax.Array:
    """Raw data in the form (keys, weak type) that the source has."""
    if compat.is_key_array(x):
        return jax.random.wrap_key_data(built, impl=jax.random.key_impl(x))
    return compat.as_weak(built) if isinstance(x, jax.Array) and x.weak_type else built
