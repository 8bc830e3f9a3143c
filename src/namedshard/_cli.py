"""The command line: what a plan would do with a checkpoint, from its header alone, on no device at all."""

import argparse
import io
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh
from rich.console import Console

from namedshard._errors import NamedShardError
from namedshard._explain.explain import explain_leaves
from namedshard._explain.report import Lint
from namedshard._plan.leaves import Leaf, with_names
from namedshard._plan.mapping import AxisMapping, MeshAxes, Rule, first, spec_entry
from namedshard._safetensors.index import read_header

_EPILOG = """\
AXIS is a mesh axis (model), a product of several (data+model), none, or ordered candidates of which the first that
fits wins (model|data|none; quote the bars). PATTERN is parts of a tensor's name joined by dots, from any part to the
end: * is anything within a part, ** any number of parts, and re: starts a regular expression for the whole name. The
first pattern that matches a tensor names its dimensions: 'out in', '_ embed', '... embed',
'(heads=12 head_size) embed'. Tensors that no pattern matches are split as load_safetensors splits them, along whatever
dimension divides.

example:
  python -m namedshard explain model.safetensors --mesh data=2,model=4 \\
      --axes 'word_embeddings.weight=vocab embed' --map 'vocab=model|data|none'

The exit status is 0 if every tensor can be placed, 1 if one cannot, and 2 for a checkpoint that cannot be read.
"""


class UsageError(Exception):
    """An argument that cannot be understood."""


def _pair(text: str, what: str) -> tuple[str, str]:
    left, equals, right = text.rpartition("=")
    if not equals or not left:
        raise UsageError(f"{text!r} is not {what}")
    return left, right


def parse_mesh(text: str) -> AbstractMesh:
    """``"data=2,model=4"``."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, size = _pair(part.strip(), "a mesh axis and its size: write --mesh data=2,model=4")
        if not size.isdecimal() or not int(size):
            raise UsageError(f"mesh axis {name} has size {size!r}: use a positive number")
        if name in sizes:
            raise UsageError(f"mesh axis {name} is given twice")
        sizes[name] = int(size)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))


def _candidate(text: str, whole: str) -> MeshAxes:
    if text == "none":
        return None
    names = tuple(text.split("+"))
    if not all(names):
        raise UsageError(
            f"{whole!r} is not a rule: write NAME=model, NAME=data+model, NAME=none or 'NAME=model|data|none'"
        )
    return spec_entry(names)


def parse_rule(text: str) -> tuple[str, Rule]:
    """``"vocab=model|data|none"``."""
    name, value = _pair(text, "an axis and its rule: write --map vocab=model")
    candidates = tuple(_candidate(part, text) for part in value.split("|"))
    return name, candidates[0] if len(candidates) == 1 else first(*candidates)


def parse_axes(text: str) -> tuple[str, str]:
    """``"encoder.*.weight=out in"``."""
    pattern, equals, names = text.partition("=")
    if not equals or not pattern:
        raise UsageError(f"{text!r} is not a pattern and axis names: write --axes 'encoder.*.weight=out in'")
    return pattern, names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m namedshard", description="Axis names to device placements for JAX."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    explain = commands.add_parser(
        "explain",
        help="show what a plan would do with a checkpoint",
        description="Show what a plan would do with a checkpoint's tensors. Reads headers only; needs no accelerator.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    explain.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="a safetensors file, or a folder with one or with an index"
    )
    explain.add_argument("--mesh", required=True, metavar="AXIS=SIZE,...", help="the mesh's axes, as in data=2,model=4")
    repeated: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}
    explain.add_argument("--map", **repeated, metavar="NAME=AXIS", help="a rule of the mapping")
    explain.add_argument("--axes", **repeated, metavar="PATTERN=NAMES", help="names tensors' dimensions")
    explain.add_argument(
        "--indivisible", choices=("error", "replicate"), default="error", help="what to do with axes that do not divide"
    )
    explain.add_argument(
        "--all", action="store_true", help="show every tensor, also those that differ in an index only"
    )
    explain.add_argument("--json", action="store_true", help="print JSON, with every tensor")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    mesh = parse_mesh(arguments.mesh)
    rules: dict[str, Rule] = {}
    for name, rule in map(parse_rule, arguments.map):
        if name in rules:
            raise UsageError(f"axis {name} is mapped twice")
        rules[name] = rule
    axes: dict[str, str] = {}
    for pattern, names in map(parse_axes, arguments.axes):
        # Of a pattern given twice the first counts.
        axes.setdefault(pattern, names)
    mapping = AxisMapping(rules, indivisible=arguments.indivisible, axes=axes)
    tensors = read_header(arguments.checkpoint)
    structs = [Leaf(name, jax.ShapeDtypeStruct(info.shape, info.dtype), None) for name, info in tensors.items()]
    leaves = with_names(structs, mapping.axes_items)
    bare = sum(leaf.names is None for leaf in leaves)
    lints = [Lint("unnamed", f"{bare} of {len(leaves)} tensors match no --axes pattern")] if bare else []
    treedef = jax.tree_util.tree_structure([0] * len(leaves))
    explanation = explain_leaves(leaves, treedef, mapping, mesh, in_file=True, lints=lints)
    if arguments.json:
        print(explanation.to_json())
    else:
        # Color only where there is a terminal, or where FORCE_COLOR asks for it.
        console = Console(highlight=False)
        for line in explanation.lines(shutil.get_terminal_size((120, 24)).columns, all=arguments.all):
            console.print(line, soft_wrap=True)
    return 0 if explanation.ok else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, with the process's own arguments by default; returns the exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Terminals that lack an arrow or a line get a question mark, not a traceback.
        sys.stdout.reconfigure(errors="replace")
    arguments = _parser().parse_args(argv)
    try:
        return _run(arguments)
    except (UsageError, NamedShardError, OSError) as error:
        print(f"python -m namedshard {arguments.command}: error: {error}", file=sys.stderr)
        return 2
