"""The command line: what a plan would do with a checkpoint, from its header alone, on no device at all."""

import argparse
import fnmatch
import io
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import AbstractMesh
from rich.console import Console

from namedshard._errors import NamedShardError, did_you_mean, message
from namedshard._explain.explain import explain_leaves
from namedshard._explain.report import Lint
from namedshard._plan.leaves import Leaf
from namedshard._plan.mapping import AxisMapping, MeshAxes, Rule, first, spec_entry
from namedshard._safetensors.header import TensorInfo
from namedshard._safetensors.index import read_header

_EPILOG = """\
AXIS is a mesh axis (model), a product of several (data+model), none, or ordered candidates of which the first that
fits wins (model|data|none; quote the bars). PATTERN is a glob over the whole tensor name (encoder.*.bias) or, after
re:, a regular expression (re:.*\\.(query|key)\\.bias); the first pattern that matches a tensor names its dimensions.
Tensors that no pattern matches are shown as left replicated.

example:
  python -m namedshard explain model.safetensors --mesh data=2,model=4 \\
      --axes '*.word_embeddings.weight=vocab,embed' --map 'vocab=model|data|none'

The exit status is 0 if every tensor can be placed, 1 if one cannot, and 2 for a checkpoint that cannot be read.
"""

AxesPattern: TypeAlias = tuple[str, re.Pattern[str], tuple[str, ...]]
"""One ``--axes``: the pattern as written, compiled, and the names of the dimensions."""


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


def parse_axes(text: str) -> AxesPattern:
    """``"encoder.*.weight=out,in"``."""
    pattern, listed = _pair(text, "a pattern and axis names: write --axes 'encoder.*.weight=out,in'")
    names = tuple(name.strip() for name in listed.split(",")) if listed.strip() else ()
    if not all(names) or len(set(names)) != len(names):
        raise UsageError(f"{text!r}: axis names must not be empty or repeat")
    try:
        compiled = re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else fnmatch.translate(pattern))
    except re.error as error:
        raise UsageError(f"{pattern!r} is not a regular expression: {error}") from None
    return pattern, compiled, names


def named_tensors(tensors: Mapping[str, TensorInfo], patterns: Sequence[AxesPattern]) -> tuple[list[Leaf], list[Lint]]:
    """A leaf for each tensor, with the names of the first pattern that matches it, and lints about the patterns."""
    leaves: list[Leaf] = []
    wrong: list[str] = []
    matched: set[str] = set()
    for name, info in tensors.items():
        hits = [(text, names) for text, compiled, names in patterns if compiled.fullmatch(name)]
        matched.update(text for text, _ in hits)
        names = hits[0][1] if hits else None
        if names is not None and len(names) != len(info.shape):
            wrong.append(f"{name}: its shape is {info.shape}, but {hits[0][0]!r} names ({', '.join(names)})")
        leaves.append(Leaf(name, jax.ShapeDtypeStruct(info.shape, info.dtype), names))
    if wrong:
        headline = f"{len(wrong)} of {len(tensors)} tensors have another number of dimensions than --axes names"
        fix = "name every dimension, and give the narrower pattern first: the first that matches a tensor counts"
        raise UsageError(message(headline, wrong, fix))
    lints = [
        Lint("unmatched pattern", f"--axes pattern {text!r} matches no tensor{did_you_mean(text, list(tensors))}")
        for text, _, _ in patterns
        if text not in matched
    ]
    if bare := sum(leaf.names is None for leaf in leaves):
        lints.append(Lint("unnamed", f"{bare} of {len(leaves)} tensors match no --axes pattern"))
    return leaves, lints


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
    explain.add_argument("--axes", **repeated, metavar="PATTERN=NAME,...", help="names tensors' dimensions")
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
    mapping = AxisMapping(rules, indivisible=arguments.indivisible)
    patterns = [parse_axes(text) for text in arguments.axes]
    leaves, lints = named_tensors(read_header(arguments.checkpoint), patterns)
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
