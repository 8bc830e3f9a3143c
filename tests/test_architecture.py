"""Who may import whom, who may move arrays, and what no file may hold: the table of docs/design.md, held true."""

import ast
import importlib.util
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = Path(next(iter(importlib.util.find_spec("namedshard").submodule_search_locations or [])))

# Each room: its modules (a package stands for all in it), and the rooms that they may import. Within a room modules
# import each other, without cycles.
TABLE: dict[str, tuple[set[str], set[str]]] = {
    "errors": ({"_errors"}, set()),
    "types": ({"_types"}, set()),
    "jax": ({"_jaxcompat"}, set()),
    "mapping": ({"_mapping"}, {"errors"}),
    "mesh": ({"_mesh"}, {"errors", "jax"}),
    "leaves": ({"_leaves"}, {"mapping"}),
    "plan": ({"_plan"}, {"errors", "leaves", "mapping", "mesh"}),
    "specs": ({"_specs"}, {"errors", "leaves", "mapping", "mesh", "plan"}),
    "best effort": ({"_best_effort"}, {"mesh"}),
    "route": ({"_route"}, {"jax"}),
    "breaks": ({"_breaks"}, {"errors", "jax", "mesh"}),
    "boxes": ({"_boxes"}, set()),
    "moves": ({"_moves"}, {"boxes", "errors", "jax", "mesh", "route"}),
    "processes": ({"_collective", "_exchange", "_sync"}, {"boxes", "breaks", "errors", "jax", "moves", "route"}),
    "place": (
        {"_place"},
        {"errors", "jax", "leaves", "mapping", "mesh", "moves", "plan", "processes", "route"},
    ),
    "gather": ({"_gather"}, {"breaks", "errors", "jax", "leaves", "processes"}),
    "report": ({"_report", "_table"}, {"errors", "mapping", "mesh", "plan"}),
    "explain": (
        {"_explain"},
        {"errors", "jax", "leaves", "mapping", "mesh", "place", "plan", "report", "route"},
    ),
    "compile": (
        {
            "_calls",
            "_donation",
            "_fsdp",
            "_jaxprs",
            "_jit",
            "_mismatch",
            "_programs",
            "_stages",
            "_statics",
            "_unflatten",
            "_validate",
        },
        {"breaks", "errors", "jax", "leaves", "mapping", "mesh", "place", "plan", "route"},
    ),
    "init": (
        {
            "_init",
            "_init_bits",
            "_init_jaxpr",
            "_init_programs",
            "_init_run",
            "_init_split",
            "_init_tape",
            "_init_trace",
            "_init_traits",
        },
        {"breaks", "compile", "errors", "jax", "leaves", "mapping", "mesh", "moves", "place", "plan"},
    ),
    "offload": ({"_offload", "_offload_budget"}, {"errors", "gather", "jax", "leaves", "mesh", "moves"}),
    "checkpoints": (
        {"_safetensors"},
        {
            "best effort",
            "boxes",
            "breaks",
            "errors",
            "gather",
            "jax",
            "leaves",
            "mapping",
            "mesh",
            "moves",
            "place",
            "plan",
            "processes",
        },
    ),
    "testing": ({"testing"}, {"checkpoints", "errors", "gather", "leaves", "mapping", "mesh", "plan"}),
    "command line": (
        {"__main__", "_cli"},
        {"checkpoints", "errors", "explain", "leaves", "mapping", "report"},
    ),
}

# Open to every room, so that the table need not say it each time.
OPEN = {"types"}
MAY_MOVE = {"_moves", "_place", "_collective"}
MOVERS = {
    "device_put",
    "device_put_replicated",
    "device_put_sharded",
    "make_array_from_callback",
    "make_array_from_process_local_data",
    "make_array_from_single_device_arrays",
    "reshard",
    "with_sharding_constraint",
}
# Imported where they are used, since not everybody installs them: module -> distribution and the extra that brings it.
OPTIONAL = {("_offload", "optax"): "optax", ("_safetensors._remote", "fsspec"): "remote"}
IMPORT_NAMES = {"marin-haliax": "haliax"}
# JAX cannot be without it: numpy's side of the narrow dtypes.
BROUGHT_BY_JAX = {"ml_dtypes"}
PRIVATE_JAX = ("jax._src", "jax.interpreters", "jaxlib")


def modules() -> dict[str, ast.Module]:
    found: dict[str, ast.Module] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        found[name] = ast.parse(file.read_text())
    return found


MODULES = modules()
OWN = {name: tree for name, tree in MODULES.items() if name != "__init__"}
ROOMS = {
    room: ({name for name in OWN for m in members if name == m or name.startswith(f"{m}.")}, allowed)
    for room, (members, allowed) in TABLE.items()
}


def imports(tree: ast.AST) -> Iterator[str]:
    """Everything imported, as full dotted names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "relative imports hide where a name lives"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(name: str) -> set[str]:
    """The package's own modules that a module imports."""
    found: set[str] = set()
    for full in imports(MODULES[name]):
        if full == "namedshard" or full.startswith("namedshard."):
            parts = full.split(".")[1:]
            # The longest beginning that is a module; what follows is a name in it.
            known = [".".join(parts[:n]) for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in MODULES]
            assert known, f"{name} imports {full}, which is no module of the package"
            found.add(known[0])
    return found - {name}


def room_of(module: str) -> str:
    return next(room for room, (members, _) in ROOMS.items() if module in members)


def test_every_module_has_one_room() -> None:
    members = [m for names, _ in ROOMS.values() for m in names]
    assert sorted(members) == sorted(OWN)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_exactly_the_rooms_of_the_table(room: str) -> None:
    members, allowed = ROOMS[room]
    used = {room_of(target) for member in members for target in own_imports(member)} - {room} - OPEN
    assert used == allowed


def in_order(graph: dict[str, set[str]]) -> list[str]:
    """The nodes with each after all that it needs; fails where they form a cycle."""
    done: list[str] = []
    while len(done) < len(graph):
        ready = sorted(n for n in graph if n not in done and graph[n] <= set(done))
        assert ready, f"these import each other: {sorted(set(graph) - set(done))}"
        done += ready
    return done


def test_neither_modules_nor_rooms_import_in_circles() -> None:
    in_order({name: own_imports(name) & set(OWN) for name in OWN})
    in_order({room: allowed | (OPEN - {room}) for room, (_, allowed) in ROOMS.items()})


def test_a_circle_would_be_found() -> None:
    with pytest.raises(AssertionError, match="these import each other"):
        in_order({"a": {"b"}, "b": {"c"}, "c": {"b"}})


def test_the_table_of_the_design_is_this_one() -> None:
    section = (ROOT / "docs" / "design.md").read_text().partition("\n## Rooms\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([a-z ]+) \| (`[^|]+`) \| [^|]+ \| ([^|]+) \|$", section, re.MULTILINE)
    table = {
        room: (
            set(re.findall(r"`([^`]+)`", members)),
            set() if allowed == "none" else set(allowed.split(", ")),
        )
        for room, members, allowed in rows
    }
    assert table == TABLE


def test_the_package_itself_only_names_what_is_public() -> None:
    (docstring, *body) = MODULES["__init__"].body
    assert isinstance(docstring, ast.Expr)
    public: list[str] = []
    for node in body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                assert alias.asname == alias.name and not alias.name.startswith("_")
                public.append(alias.name)
        else:
            assert isinstance(node, ast.Assign) and [t.id for t in node.targets if isinstance(t, ast.Name)] == [
                "__all__"
            ]
            assert sorted(ast.literal_eval(node.value)) == sorted(public)
    assert len(set(public)) == len(public)


def test_what_is_pure_needs_nothing_with_effects() -> None:
    says = {name: ast.get_docstring(tree) or "" for name, tree in OWN.items()}
    pure = [name for name in OWN if says[name].startswith("PURE.")]
    assert {"_plan", "_route", "_boxes", "_report"} <= set(pure)
    for name in pure:
        assert not [target for target in own_imports(name) if says[target].startswith("EFFECTS.")], name


def reached(tree: ast.AST) -> set[str]:
    """Attributes looked up, and names imported one by one."""
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return attributes | {full.rpartition(".")[2] for full in imports(tree)}


@pytest.mark.parametrize("name", sorted(set(OWN) - MAY_MOVE))
def test_only_the_movers_move(name: str) -> None:
    assert MOVERS & reached(OWN[name]) == set()


def test_the_movers_do_move() -> None:
    assert reached(OWN["_moves"]) >= {"device_put", "with_sharding_constraint", "reshard"}


def test_only_one_module_reaches_into_jax() -> None:
    reaching = {n for n, t in MODULES.items() if any(i.startswith(PRIVATE_JAX) for i in imports(t))}
    private = {n for n, t in OWN.items() if reached(t) & {"_src", "_device_assignment", "_arrays"}}
    assert reaching == {"_jaxcompat"} and private == {"_jaxcompat"}


def test_imports_stand_at_the_top_save_for_optional_extras() -> None:
    inside: set[tuple[str, str]] = set()
    for name, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.If | ast.Try | ast.With):
                body = ast.Module([node], [])
                inside |= {(name, full.split(".")[0]) for full in imports(body)}
    assert inside == set(OPTIONAL)


@pytest.mark.parametrize(("module", "extra"), [(m, extra) for (m, _), extra in OPTIONAL.items()])
def test_a_missing_extra_is_named_with_its_remedy(module: str, extra: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extra in project["optional-dependencies"]
    text = " ".join(n.value for n in ast.walk(OWN[module]) if isinstance(n, ast.Constant) and isinstance(n.value, str))
    assert f"namedshard[{extra}]" in text


def test_only_declared_distributions_are_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[<>=!~\[ ]", d)[0] for d in project["dependencies"]}
    allowed = {IMPORT_NAMES.get(d, d) for d in declared} | BROUGHT_BY_JAX | {"namedshard"}
    optional = {package for _, package in OPTIONAL}
    used = {full.split(".")[0] for tree in MODULES.values() for full in imports(tree)} - set(sys.stdlib_module_names)
    assert used - optional <= allowed


@pytest.mark.parametrize("name", sorted(MODULES))
def test_files_stay_small_and_plain(name: str) -> None:
    file = PACKAGE.joinpath(*name.split("."))
    text = (file / "__init__.py" if file.is_dir() else file.with_suffix(".py")).read_text()
    assert len(text.splitlines()) < 500
    assert not {"utils", "util", "helpers", "common", "misc"} & set(re.split(r"[._]", name))
    assert "TYPE_CHECKING" not in reached(MODULES[name])
    raised = [ast.unparse(node.exc) for node in ast.walk(MODULES[name]) if isinstance(node, ast.Raise) and node.exc]
    assert not any(text.startswith("NotImplementedError") for text in raised)
    assert not re.search(r"\b(TODO|FIXME|XXX)\b", text)
    assert ast.get_docstring(MODULES[name])
