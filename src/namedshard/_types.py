"""The types that annotations share, in one place."""

from typing import Any, Protocol, TypeAlias, runtime_checkable

from jax.core import Tracer as Tracer
from jaxtyping import PyTree as PyTree

Bounds: TypeAlias = tuple[tuple[int, int], ...]
"""A box of an array: start and stop of each dimension."""


@runtime_checkable
class Device(Protocol):
    """What is used of a ``jax.Device``, which is a name of the compiled extension and no type to a static checker."""

    id: int
    """Unique among all processes."""
    process_index: int
    """The process that owns it."""
    platform: str
    """``"cpu"``, ``"gpu"``, ``"tpu"``."""

    def addressable_memories(self) -> list[Any]:
        """Its memories, each with its ``kind``."""
        ...

    def default_memory(self) -> Any:
        """The memory that arrays go to unless told otherwise."""
        ...


@runtime_checkable
class PyTreeDef(Protocol):
    """What is used of a ``jax.tree_util.PyTreeDef``, for the same reason."""

    num_leaves: int
    """Number of leaves."""

    def unflatten(self, leaves: Any, /) -> Any:
        """The tree of this structure with these leaves."""
        ...

    def flatten_up_to(self, tree: Any, /) -> list[Any]:
        """The subtrees of a tree at this structure's leaves."""
        ...

    def walk(self, at_node: Any, at_leaf: Any, leaves: Any, /) -> Any:
        """Calls ``at_node`` with the children and the metadata of each node."""
        ...
