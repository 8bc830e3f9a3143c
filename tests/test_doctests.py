"""Every example in the library's docstrings runs and prints what it says."""

import doctest
import importlib
import pkgutil

import pytest

import namedshard

MODULES = [
    name for _, name, _ in pkgutil.walk_packages(namedshard.__path__, "namedshard.") if not name.endswith("__main__")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0, capsys.readouterr().out


def test_a_wrong_example_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    planted = type(namedshard)("planted", ">>> 1 + 1\n3\n")
    assert doctest.testmod(planted).failed == 1
    assert "Expected:\n    3\nGot:\n    2" in capsys.readouterr().out


def test_every_public_function_has_an_example() -> None:
    functions = [n for n in namedshard.__all__ if n[0].islower()]
    assert len(functions) > 20
    assert [n for n in functions if ">>>" not in (getattr(namedshard, n).__doc__ or "")] == []
