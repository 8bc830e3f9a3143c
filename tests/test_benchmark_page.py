"""The script that puts benchmark results into the documentation, on planted results."""

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PAGE = """# Benchmarks

<!-- begin plan -->
what was there before
<!-- end plan -->

Text between the two.

<!-- begin offload -->
<!-- end offload -->
"""
TIMES = {"first": 0.5, "ns.plan": 0.001, "ns.plan(...).shardings": 0.002, "ns.explain": 0.04, "tree_flatten": 0.0001}
MACHINE = {"cpu": "A processor", "cores": 4, "python": "3.13.0", "jax": "0.12.0", "devices": "8 cpu"}
NOT_RUN = "\nNot run yet on this machine kind.\n\n"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], tuple[int, str]]:
    """Runs the script on a page and these results; returns its status and the page."""
    spec = importlib.util.spec_from_file_location("benchmark_page", ROOT / "scripts" / "benchmark_page.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "page.md").write_text(PAGE)

    def run(results: dict[str, Any]) -> tuple[int, str]:
        for name, found in results.items():
            (tmp_path / f"{name}.json").write_text(json.dumps({"machine": MACHINE, "results": found}))
        monkeypatch.setattr(sys, "argv", ["x", "--results", str(tmp_path), "--page", str(tmp_path / "page.md")])
        return script.main(), (tmp_path / "page.md").read_text()

    return run


def test_what_was_not_run_says_so(write: Callable[..., tuple[int, str]]) -> None:
    status, page = write({})
    assert status == 0
    assert page == PAGE.replace("what was there before\n", NOT_RUN).replace(
        "<!-- begin offload -->\n", f"<!-- begin offload -->\n{NOT_RUN}"
    )


def test_results_are_shown_with_their_machine_and_again_the_same(write: Callable[..., tuple[int, str]]) -> None:
    status, page = write({"plan": {"leaves": 1200, "devices": 16384, **TIMES}})
    assert status == 0
    block = page.partition("<!-- begin plan -->")[2].partition("<!-- end plan -->")[0]
    assert block.startswith(
        "\n\nOn A processor with 4 cores; Python 3.13.0, jax 0.12.0, 8 cpu devices:\n\n"
        "```text\n1,200 leaves on 16,384 devices\n"
    )
    assert block.endswith("\n```\n\n")
    assert "ns.plan, first call" in block and "500 ms" in block and "1 ms" in block
    assert page.count(NOT_RUN) == 1
    assert write({}) == (0, page)


def test_results_of_an_older_benchmark_are_refused_and_the_page_stays(
    write: Callable[..., tuple[int, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert write({"plan": {"leaves": 1200}}) == (1, PAGE)
    said = capsys.readouterr().err
    assert said.endswith("plan.json does not fit the benchmark (KeyError('first')): run python -m benchmarks plan\n")
