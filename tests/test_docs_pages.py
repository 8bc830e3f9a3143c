"""The pages about errors, routes, benchmarks and what is public leave none out."""

import inspect
import re
from pathlib import Path

import pytest

import namedshard as ns
import namedshard.testing
from namedshard import _errors
from namedshard._place.route import Route

DOCS = Path(__file__).parent.parent / "docs"
# The classes that others derive from have no text of their own.
BASES = {"NamedShardError", "PlanError", "PlaceError", "CheckpointError"}
ERRORS = [
    name
    for name, value in inspect.getmembers(_errors, inspect.isclass)
    if issubclass(value, _errors.NamedShardError) and name not in BASES
]


def test_every_error_has_a_section() -> None:
    page = (DOCS / "errors.md").read_text()
    sections = re.findall(r"^### (\w+)$", page, re.MULTILINE)
    assert sorted(sections) == sorted(ERRORS)
    assert all(f"ns.{base}" in page for base in BASES)


@pytest.mark.parametrize("route", Route, ids=lambda route: route.name)
def test_every_route_has_a_row(route: Route) -> None:
    page = (DOCS / "routes.md").read_text()
    assert len(re.findall(rf"^\| [^|]+ \| `{route.value}` \| [^|]+ \|$", page, re.MULTILINE)) == 1


def test_everything_public_is_on_the_api_page_once() -> None:
    groups = (DOCS / "api.md").read_text().split("\n## ")[1:]
    shown = [name for group in groups for name in re.findall(r"^::: namedshard\.(\S+)$", group, re.MULTILINE)]
    helpers = [
        f"testing.{name}"
        for name, value in inspect.getmembers(namedshard.testing, inspect.isfunction)
        if value.__module__ == "namedshard.testing" and not name.startswith("_")
    ]
    assert helpers
    assert sorted(shown) == sorted([*(name for name in ns.__all__ if name != "testing"), *helpers])


def test_every_page_is_in_the_navigation_once() -> None:
    navigation = (DOCS.parent / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\n\n")[0]
    assert sorted(re.findall(r": (\S+\.md)$", navigation, re.MULTILINE)) == sorted(p.name for p in DOCS.glob("*.md"))


def test_every_benchmark_has_a_section_with_its_figures() -> None:
    folder = DOCS.parent / "benchmarks"
    there = {p.stem for p in folder.glob("*.py") if not p.stem.startswith("_")}
    page = (DOCS / "benchmarks.md").read_text()
    blocks = re.findall(r"^## (\w+)\n(?:(?!^## ).)*?^<!-- begin \1 -->\n.+?^<!-- end \1 -->$", page, re.M | re.S)
    # The one for accelerators prints its own text, and is run by hand.
    assert sorted(blocks) == sorted(there - {"offload_gpu"})


@pytest.mark.parametrize("page", [*sorted(DOCS.glob("*.md")), DOCS.parent / "README.md"], ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).is_file(), f"{page.name} links to {target}"
