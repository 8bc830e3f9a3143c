"""EFFECTS. Checks that all processes save the same, and finds the arrays that only all of them together can read."""

from collections.abc import Sequence
from typing import Any

import jax

from namedshard._processes.agreement import LeafDescription, agree, describe_leaf
from namedshard._safetensors.outgoing import Outgoing


def _on_host(value: Any) -> bool:
    """True for what `shard` too takes for a value that every process has: numpy, and arrays nobody has placed."""
    return not isinstance(value, jax.Array) or (not value.committed and value.is_fully_addressable)


def shared_values(tensors: Sequence[Outgoing], note: str, count: int) -> frozenset[int]:
    """Ids of the values that are one array of all processes, of which each has only some. A collective.

    Raises:
        OutOfStepError: The processes do not save the same tensors from the same leaves in the same way.
        HostValueError: They have different values of a leaf that each of them has whole.
        LocalArrayError: A leaf is an array of each process's own.
    """
    if count == 1:
        return frozenset()
    values: dict[str, Any] = {}
    for tensor in tensors:
        values |= zip(tensor.paths, (value for value, _ in tensor.parts), strict=True)
    described = [describe_leaf(path, value, host=_on_host(value)) for path, value in values.items()]
    described += [LeafDescription(t.name, f"{t.dtype}{list(t.shape)}", f"leaf {', '.join(t.paths)}") for t in tensors]
    agree("save_safetensors", described, note)
    everywhere = set(range(count))
    return frozenset(
        id(value) for value in values.values() if not _on_host(value) and not _replicated(value, everywhere)
    )


def _replicated(value: jax.Array, processes: set[int]) -> bool:
    """True if each of these processes has all of an array."""
    return value.is_fully_replicated and {d.process_index for d in value.sharding.device_set} == processes
