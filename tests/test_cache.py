"""The bounded cache: what it keeps, forgets and refuses."""

import numpy as np

from namedshard._cache import BoundedCache


def test_the_least_recently_used_is_forgotten() -> None:
    cache = BoundedCache[str](2)
    cache.put("a", "A")
    cache.put("b", "B")
    assert cache.get("a") == "A"
    cache.put("c", "C")
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == ("A", None, "C")
    assert len(cache) == 2


def test_the_first_value_of_a_key_stays() -> None:
    cache = BoundedCache[str](2)
    assert cache.put("a", "first") == "first"
    assert cache.put("a", "second") == "first"


def test_what_cannot_be_a_key_is_never_kept() -> None:
    cache = BoundedCache[str](2)
    assert cache.put(([1],), "list") == "list"
    assert cache.get(([1],)) is None
    assert len(cache) == 0

    class Ambiguous:
        def __hash__(self) -> int:
            return 1

        def __eq__(self, other: object) -> bool:
            return bool(np.ones(2) == np.ones(2))

    cache.put(Ambiguous(), "one")
    assert cache.get(Ambiguous()) is None
    assert cache.put(Ambiguous(), "another") == "another"


def test_removed_and_cleared_keys_are_gone() -> None:
    cache = BoundedCache[str](3)
    for key in "abc":
        cache.put(key, key)
    cache.remove("a")
    cache.remove("a")
    assert (cache.get("a"), cache.get("b")) == (None, "b")
    cache.cache_clear()
    assert len(cache) == 0
