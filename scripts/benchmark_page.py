"""Puts the figures of `python -m benchmarks` into the documentation, and a plot beside them.

    python scripts/benchmark_page.py [--results FOLDER] [--page FILE ...]

Between `<!-- begin NAME -->` and `<!-- end NAME -->` stand the machine and the table of that benchmark's last full run;
`NAME.TABLE` is one table of several.
"""

import argparse
import functools
import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- begin ([\w.]+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)
NOT_RUN = "Not run yet on this machine kind.\n"
PLOT = "init.svg"


class Outdated(Exception):
    """Which results do not fit their benchmark any more."""


def machine(kind: dict[str, Any]) -> str:
    """Returns the machine that results come from, as one sentence."""
    return (
        f"On {kind['cpu']} with {kind['cores']} cores; Python {kind['python']}, jax {kind['jax']}, {kind['devices']}"
        " devices:\n"
    )


def plot(results: dict[str, Any], path: Path) -> None:
    """Draws the time of the first call of an initialiser over the number of blocks."""
    import matplotlib

    matplotlib.use("svg")
    # The same figures give the same file.
    matplotlib.rcParams["svg.hashsalt"] = "namedshard"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for method, by_blocks in results["unstacked"].items():
        blocks = [int(n) for n in by_blocks]
        axes.plot(blocks, [r["first"] for r in by_blocks.values()], marker="o", label=method)
    axes.set_xlabel("blocks")
    axes.set_ylabel("first call, seconds")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def block(name: str, folder: Path, page: Path) -> str:
    """Returns what stands between the marks of one benchmark."""
    name, _, which = name.partition(".")
    file = folder / f"{name}.json"
    if not file.is_file():
        return NOT_RUN
    found = json.loads(file.read_text())
    try:
        text = getattr(importlib.import_module(f"benchmarks.{name}"), which or "table")(found["results"])
    except (AttributeError, LookupError, TypeError) as error:
        raise Outdated(f"{file} does not fit the benchmark ({error!r}): run python -m benchmarks {name}") from error
    lines = "\n".join(line.rstrip() for line in text.splitlines())
    whole = f"{machine(found['machine'])}\n```text\n{lines}\n```\n"
    if name == "init":
        plot(found["results"], page.parent / PLOT)
        whole += f"\n![Time of the first call over the number of blocks]({PLOT})\n"
    return whole


def shown(folder: Path, page: Path, mark: re.Match[str]) -> str:
    """Returns a block of a page as it should be."""
    return f"{mark[1]}\n{block(mark[2], folder, page)}\n{mark[3]}"


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description="Put benchmark results into the documentation.")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", metavar="FOLDER")
    pages = [ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "routes.md"]
    parser.add_argument("--page", type=Path, nargs="+", default=pages, metavar="FILE")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    said: list[str] = []
    for page in arguments.page:
        try:
            text = BLOCK.sub(functools.partial(shown, arguments.results, page), page.read_text())
        except Outdated as problem:
            print(problem, file=sys.stderr)
            return 1
        page.write_text(text)
        said += [f"{m[2]}: {'not run' if NOT_RUN in m[0] else 'shown'}" for m in BLOCK.finditer(text)]
    print(", ".join(said))
    return 0


if __name__ == "__main__":
    sys.exit(main())
