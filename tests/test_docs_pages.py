"""The pages about errors and routes leave none out."""

import inspect
import re
from pathlib import Path

import pytest

from namedshard import _errors
from namedshard._route import Route

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


@pytest.mark.parametrize("page", [*sorted(DOCS.glob("*.md")), DOCS.parent / "README.md"], ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).is_file(), f"{page.name} links to {target}"
