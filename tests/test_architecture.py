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

# Each part of the package: a subpackage or a few single files, and the parts that it may import. Inside a part, files
# import each other without cycles.
TABLE: dict[str, tuple[set[str], set[str]]] = {
    "errors": ({"_errors"}, set()),
    "types": ({"_types"}, set()),
    "cache": ({"_cache"}, set()),
    "jax": ({"_jaxcompat"}, set()),
    "plan": ({"_plan"}, {"errors", "jax"}),
    "processes": ({"_processes"}, {"errors", "jax", "plan"}),
    "place": ({"_place"}, {"errors", "jax", "plan", "processes"}),
    "explain": ({"_explain"}, {"errors", "jax", "place", "plan"}),
    "jit": ({"_jit"}, {"errors", "jax", "place", "plan", "processes"}),
    "offload": ({"_offload"}, {"errors", "jax", "place", "plan"}),
    "safetensors": ({"_safetensors"}, {"errors", "jax", "place", "plan", "processes"}),
    "init": ({"_init"}, {"errors", "jax", "jit", "place", "plan", "processes"}),
    "testing": ({"testing"}, {"errors", "place", "plan", "safetensors"}),
    "topology": ({"_topology"}, {"errors"}),
    "command line": ({"__main__", "_cli"}, {"errors", "explain", "plan", "safetensors"}),
}

# Open to every part, so that the table needn't repeat it.
OPEN = {"types", "cache"}
MAY_MOVE = {"_place.local", "_place.compiled", "_place.traced"}
MOVERS = {
    "device_put",
    "device_put_replicated",
    "device_put_sharded",
    "make_array_from_callback",
    "make_array_from_process_local_data",
    "make_array_from_single_device_arrays",
    "put_shards",
    "reshard",
    "with_sharding_constraint",
}
# Imported where they are used, since not everybody installs them: module -> distribution and the extra that brings it.
OPTIONAL = {("_offload.offload", "optax"): "optax", ("_safetensors.source", "fsspec"): "remote"}
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
PARTS = {
    part: ({name for name in OWN for m in members if name == m or name.startswith(f"{m}.")}, allowed)
    for part, (members, allowed) in TABLE.items()
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


def part_of(module: str) -> str:
    return next(part for part, (members, _) in PARTS.items() if module in members)


def test_every_module_is_in_one_part() -> None:
    members = [m for names, _ in PARTS.values() for m in names]
    assert sorted(members) == sorted(OWN)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_imports_exactly_the_parts_of_the_table(part: str) -> None:
    members, allowed = PARTS[part]
    used = {part_of(target) for member in members for target in own_imports(member)} - {part} - OPEN
    assert used == allowed


def in_order(graph: dict[str, set[str]]) -> list[str]:
    """The nodes with each after all that it needs; fails where they form a cycle."""
    done: list[str] = []
    while len(done) < len(graph):
        ready = sorted(n for n in graph if n not in done and graph[n] <= set(done))
        assert ready, f"these import each other: {sorted(set(graph) - set(done))}"
        done += ready
    return done


def test_neither_modules_nor_parts_import_in_cycles() -> None:
    in_order({name: own_imports(name) & set(OWN) for name in OWN})
    in_order({part: allowed | (OPEN if part not in OPEN else set()) for part, (_, allowed) in PARTS.items()})


def test_a_cycle_would_be_found() -> None:
    with pytest.raises(AssertionError, match="these import each other"):
        in_order({"a": {"b"}, "b": {"c"}, "c": {"b"}})


def test_the_table_of_the_design_is_this_one() -> None:
    section = (ROOT / "docs" / "design.md").read_text().partition("\n## Layout\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([a-z ]+) \| (`[^|]+`) \| [^|]+ \| ([^|]+) \|$", section, re.MULTILINE)
    table = {
        part: (
            set(re.findall(r"`([^`]+)`", members)),
            set() if allowed == "none" else set(allowed.split(", ")),
        )
        for part, members, allowed in rows
    }
    assert table == TABLE


def test_the_package_itself_only_names_what_is_public() -> None:
    (docstring, *body) = MODULES["__init__"].body
    assert isinstance(docstring, ast.Expr)
    public: list[str] = []
    for node in body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                assert alias.asname is None and not alias.name.startswith("_")
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
    assert {"_plan.plan", "_place.route", "_place.boxes", "_explain.report"} <= set(pure)
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
    assert reached(OWN["_place.local"]) >= {"device_put", "put_shards"}
    assert reached(OWN["_place.traced"]) >= {"device_put", "with_sharding_constraint", "reshard"}


def test_only_one_module_uses_private_jax() -> None:
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
def test_files_are_plain(name: str) -> None:
    file = PACKAGE.joinpath(*name.split("."))
    text = (file / "__init__.py" if file.is_dir() else file.with_suffix(".py")).read_text()
    assert not {"utils", "util", "helpers", "common", "misc"} & set(re.split(r"[._]", name))
    assert "TYPE_CHECKING" not in reached(MODULES[name])
    raised = [ast.unparse(node.exc) for node in ast.walk(MODULES[name]) if isinstance(node, ast.Raise) and node.exc]
    assert not any(text.startswith("NotImplementedError") for text in raised)
    assert not re.search(r"\b(TODO|FIXME|XXX)\b", text)
    assert ast.get_docstring(MODULES[name])
