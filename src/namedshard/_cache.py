"""A bounded, thread-safe cache."""

import collections
import contextlib
import threading
from collections.abc import Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class _Kept(Generic[V]):
    __slots__ = ("used", "value")

    def __init__(self, value: V):
        self.value, self.used = value, False


class BoundedCache(Generic[V]):
    """Keeps at most `size` values and forgets one that was not used lately, the oldest first.

    A key that can't be hashed or compared (a tree may hold static fields such as numpy arrays) is never found and never
    kept.
    """

    def __init__(self, size: int):
        self._size = size
        self._entries: collections.OrderedDict[Hashable, _Kept[V]] = collections.OrderedDict()
        # Reentrant, since a garbage collection inside these methods may call `remove`.
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> V | None:
        """The value of a key, or None."""
        # Hashing a key can take most of the time, so it is done once: no lock, and no change of order.
        try:
            entry = self._entries.get(key)
        except (TypeError, ValueError):
            return None
        if entry is None:
            return None
        entry.used = True
        return entry.value

    def put(self, key: Hashable, value: V) -> V:
        """Keeps a value and returns the one kept: of two threads that put the same key, the first one's."""
        with contextlib.suppress(TypeError, ValueError), self._lock:
            if (entry := self._entries.get(key)) is not None:
                return entry.value
            while len(self._entries) >= self._size:
                oldest, entry = self._entries.popitem(last=False)
                if entry.used:
                    entry.used = False
                    self._entries[oldest] = entry
            self._entries[key] = _Kept(value)
        return value

    def remove(self, key: Hashable) -> None:
        """Forgets a key, if it is there."""
        with contextlib.suppress(TypeError, ValueError), self._lock:
            self._entries.pop(key, None)

    def cache_clear(self) -> None:
        """Forgets everything. The name is the one that ``functools.lru_cache`` has, and that JAX calls."""
        with self._lock:
            self._entries.clear()
