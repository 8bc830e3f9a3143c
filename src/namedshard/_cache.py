"""A bounded, thread-safe cache."""

import collections
import contextlib
import threading
from collections.abc import Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class BoundedCache(Generic[V]):
    """Keeps at most `size` values and forgets the least recently used.

    A key that can't be hashed or compared (a tree may hold static fields such as numpy arrays) is never found and never
    kept.
    """

    def __init__(self, size: int):
        self._size = size
        self._entries: collections.OrderedDict[Hashable, V] = collections.OrderedDict()
        # Reentrant, since a garbage collection inside these methods may call `remove`.
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> V | None:
        """The value of a key, or None."""
        with contextlib.suppress(TypeError, ValueError, KeyError), self._lock:
            found = self._entries.get(key)
            if found is not None:
                self._entries.move_to_end(key)
            return found
        return None

    def put(self, key: Hashable, value: V) -> V:
        """Keeps a value and returns the one kept: of two threads that put the same key, the first one's."""
        with contextlib.suppress(TypeError, ValueError), self._lock:
            kept = self._entries.setdefault(key, value)
            self._entries.move_to_end(key)
            while len(self._entries) > self._size:
                self._entries.popitem(last=False)
            return kept
        return value

    def remove(self, key: Hashable) -> None:
        """Forgets a key, if it is there."""
        with contextlib.suppress(TypeError, ValueError), self._lock:
            self._entries.pop(key, None)

    def cache_clear(self) -> None:
        """Forgets everything. The name is the one that ``functools.lru_cache`` has, and that JAX calls."""
        with self._lock:
            self._entries.clear()
