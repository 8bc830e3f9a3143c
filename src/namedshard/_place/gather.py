"""`to_host` and `iter_to_host`: whole arrays as numpy, on every process or on one, in a bounded stream."""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jaxtyping import PyTree

from namedshard import _jaxcompat as compat
from namedshard._errors import TracedMoveError, count_of, deleted_arrays
from namedshard._place import transfer as collective
from namedshard._place.boxes import whole, whole_on
from namedshard._place.keys import raw, raw_type
from namedshard._place.local import summed
from namedshard._place.route import check_movable, placement_of
from namedshard._plan.leaves import Leaf, named_leaves
from namedshard._processes.agreement import LeafDescription, agree, describe_leaf
from namedshard._processes.coordination import guard_exchange
from namedshard._types import Device, Tracer

UNCOMMITTED = "uncommitted"

T = TypeVar("T")
_BINARY = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_UNITS = {**_BINARY, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_bytes(size: int | str) -> int:
    """Bytes from a number or a text like ``"1GiB"``, ``"500 MB"``; raises `ValueError` for others."""
    if isinstance(size, str):
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", size)
        if match is None or match[2].upper() not in _UNITS:
            raise ValueError(f'{size!r} is not a size: use a number of bytes, or text like "1GiB" or "500MB"')
        size = int(float(match[1]) * _UNITS[match[2].upper()])
    if size <= 0:
        raise ValueError(f"a size must be positive, not {size}")
    return size


def _check(what: str, leaves: Sequence[Leaf], process: int | None) -> None:
    count = jax.process_count()
    if process is not None and not 0 <= process < count:
        raise ValueError(f"{what}: there is no process {process}; this job has {count}")
    arrays = [leaf for leaf in leaves if isinstance(leaf.value, jax.Array)]
    if traced := [leaf.path for leaf in arrays if isinstance(leaf.value, Tracer)]:
        raise TracedMoveError(
            f"{what}: {count_of(len(traced), len(arrays))} traced, so there are no values to bring to the host",
            traced,
            fix="call it on the result, outside of compiled code",
        )


def _check_values(what: str, leaves: Sequence[Leaf]) -> None:
    arrays = [leaf for leaf in leaves if isinstance(leaf.value, jax.Array)]
    if gone := [leaf.path for leaf in arrays if leaf.value.is_deleted()]:
        raise deleted_arrays(what, gone, len(arrays))
    check_movable(what, ((x.path, x.value, placement_of(x.value, staging=False)) for x in arrays), len(arrays))


def _describe(leaf: Leaf, process: int | None) -> LeafDescription:
    x = leaf.value
    target = "every process" if process is None else f"process {process}"
    described = describe_leaf(leaf.path, x, target)
    uncommitted = not x.committed and x.is_fully_addressable
    return dataclasses.replace(described, source=UNCOMMITTED) if uncommitted else described


def _receivers(process: int | None, turn: int) -> tuple[Device, ...]:
    """For each keeping process the device that receives a leaf; its devices take turns."""
    by_process: dict[int, list[Device]] = {}
    for device in jax.devices():
        by_process.setdefault(device.process_index, []).append(device)
    keepers = sorted(by_process) if process is None else [process]
    return tuple(by_process[p][turn % len(by_process[p])] for p in keepers)


def _fill(
    arrays: Sequence[jax.Array], receivers: Sequence[tuple[Device, ...]], out: Sequence[Any], budget: int
) -> None:
    targets = [whole_on(devices, x.shape) for x, devices in zip(arrays, receivers, strict=True)]
    buffers = [{} if o is None else {whole(x.shape): o} for x, o in zip(arrays, out, strict=True)]
    collective.exchange(arrays, targets, buffers, budget)


@compat.explicit_transfers()
def _gather(leaves: Sequence[Leaf], process: int | None, budget: int, what: str) -> list[np.ndarray | None]:
    """The values of array leaves, on the keeping processes."""
    # Found within the exchange, it would break off for good.
    _check_values(what, leaves)
    keep = process is None or process == jax.process_index()
    with compat.no_context_mesh():
        # Before the others wait: there may be too little memory.
        types = [raw_type(leaf.value) for leaf in leaves]
        out = [np.empty(x.shape, x.dtype) if keep else None for x in types]
        own = set(range(len(leaves)))
        if jax.process_count() > 1:
            described = [_describe(leaf, process) for leaf in leaves]
            own = agree(what, described, f"budget={budget}", local_arrays=True)
            own |= {i for i, leaf in enumerate(described) if leaf.source == UNCOMMITTED}
        shared = [i for i in range(len(leaves)) if i not in own]
        with guard_exchange(bool(shared)):
            arrays = [raw(summed(leaf.value)) for leaf in leaves]
            mine = sorted(own) if keep else []
            devices = [(next(iter(arrays[i].sharding.addressable_devices)),) for i in mine]
            _fill([arrays[i] for i in mine], devices, [out[i] for i in mine], budget)
            receivers = [_receivers(process, i) for i in shared]
            _fill([arrays[i] for i in shared], receivers, [out[i] for i in shared], budget)
    return out


def to_host(tree: T, *, process: int | None = None, budget: int | str = "1GiB") -> T:
    """Bring every JAX array of a tree to the host as numpy, whole, on every process or on one.

    A collective: every process must make the same call. Pieces travel straight from the devices that hold them to the
    keeping process; nothing is gathered on a device.

    Args:
        tree: Any pytree; arrays of any shape, dtype and placement. Arrays of typed keys come as their ``uint32`` data
            (see ``jax.random.key_data``; ``jax.random.wrap_key_data`` undoes it). Other leaves stay as they are.
        process: The process that keeps the arrays; on the others the array leaves are ``None``. None keeps them on
            every process.
        budget: Bytes of memory that a process may use beyond the result: a number, or text like ``"1GiB"``. A few
            KiB for each pair of devices are used in any case.

    Returns:
        The tree with numpy arrays of each array's own global shape.

    Raises:
        ValueError: There is no such process, or the budget is no size.
        DeletedArrayError: An array was donated or deleted.
        TracedMoveError: An array is traced.
        OutOfStepError: The processes do not make the same call.
        ExchangeError: Another process died, or an earlier exchange broke off.

    Examples:
        >>> import jax.numpy as jnp, namedshard as ns
        >>> ns.to_host({"w": jnp.arange(3), "name": "x"})
        {'name': 'x', 'w': array([0, 1, 2], dtype=int32)}
    """
    size = parse_bytes(budget)
    leaves = named_leaves(tree)
    _check("to_host", leaves, process)
    gathered = iter(_gather([leaf for leaf in leaves if isinstance(leaf.value, jax.Array)], process, size, "to_host"))
    values = [next(gathered) if isinstance(leaf.value, jax.Array) else leaf.value for leaf in leaves]
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(tree), values)


def iter_to_host(
    tree: PyTree, *, process: int | None = 0, budget: int | str = "1GiB"
) -> Iterator[tuple[str, np.ndarray | None]]:
    """Bring the JAX and numpy arrays of a tree to the host one at a time, in the order of the tree's leaves.

    A collective: every process must run it to its end. The order of what happens depends on the tree's structure
    alone, so that processes cannot wait for each other in different orders.

    Args:
        tree: Any pytree; see `to_host`.
        process: The process that gets the arrays; None for every process.
        budget: Bytes of memory that a process may use beyond the array at hand.

    Yields:
        (leaf path, array); on processes that keep nothing, (leaf path, None).

    Raises:
        ValueError: As `to_host` does.
        NamedShardError: As `to_host` does.

    Examples:
        >>> import jax.numpy as jnp, namedshard as ns
        >>> for path, array in ns.iter_to_host({"a": jnp.arange(2), "b": jnp.ones(1)}):
        ...     print(path, array)
        ['a'] [0 1]
        ['b'] [1.]
    """
    size = parse_bytes(budget)
    leaves = [leaf for leaf in named_leaves(tree) if isinstance(leaf.value, jax.Array | np.ndarray)]
    _check("iter_to_host", leaves, process)
    _check_values("iter_to_host", leaves)
    return _stream(leaves, process, size)


def _stream(leaves: Sequence[Leaf], process: int | None, budget: int) -> Iterator[tuple[str, np.ndarray | None]]:
    keep = process is None or process == jax.process_index()
    for leaf in leaves:
        if isinstance(leaf.value, jax.Array):
            yield leaf.path, _gather([leaf], process, budget, "iter_to_host")[0]
        else:
            yield leaf.path, leaf.value if keep else None
