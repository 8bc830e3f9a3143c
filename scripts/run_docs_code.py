"""Executes the Python code in the README and the documentation, so that nothing published is wrong.

    python run_docs_code.py [FILE.md ...]

Without arguments: README.md and docs/*.md. The fences of one file run in order in one namespace, in a process of
its own with eight virtual CPU devices and an empty working folder.

* A page with the comment `<!-- needs: libtpu -->` is left out where that module is not installed.
* A fence marked `no-run` (```` ```python no-run ````, or ```` ```{.python .no-run} ````) is left out.
* A fence followed by one that opens with ```` ```text title="output" ```` must print exactly that text; trailing
  whitespace doesn't count. What goes to stderr, warnings included, is not part of it.
"""

import argparse
import contextlib
import difflib
import importlib.util
import io
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import traceback
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Fixed, because what libraries print depends on them: the devices, and rich's colours and line width.
ENVIRONMENT = {
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    "JAX_PLATFORMS": "cpu",
    "NO_COLOR": "1",
    "COLUMNS": "100",
}

OPENING = re.compile(r"^(?P<indent>\s*)(?P<fence>`{3,}|~{3,})(?P<info>[^`]*)$")
NEEDS = re.compile(r"^<!-- needs: (\w+) -->$", re.MULTILINE)
INFO_WORD = re.compile(r'[^\s="]+="[^"]*"|\S+')


class BadMarkdown(Exception):
    """What is wrong with a file's fences, starting with its line number."""


@dataclass(frozen=True)
class Fence:
    """One fenced block: the line number of its first line of text, the words after the fence, and its text."""

    line: int
    words: tuple[str, ...]
    text: str

    @property
    def is_python(self) -> bool:
        """Whether the language is Python."""
        return self.words[:1] in [("python",), ("py",)]

    @property
    def is_output(self) -> bool:
        """Whether this is the expected output of the fence before it."""
        return self.words[:1] == ("text",) and 'title="output"' in self.words


@dataclass(frozen=True)
class Step:
    """One fence to execute, and the fence with what it must print, if there is one."""

    code: Fence
    output: Fence | None


def fences(markdown: str) -> Iterator[Fence]:
    """Yields the fenced blocks. A fence inside a longer fence is text, as in Markdown itself."""
    lines = iter(enumerate(markdown.splitlines(), start=1))
    for number, line in lines:
        opening = OPENING.match(line)
        if opening is None:
            continue
        fence = opening["fence"]
        closing = re.compile(rf"^\s*{re.escape(fence[0])}{{{len(fence)},}}\s*$")
        block: list[str] = []
        for _, inner in lines:
            if closing.match(inner):
                break
            block.append(inner)
        else:
            raise BadMarkdown(f"{number}: the fence that opens here is never closed")
        info = opening["info"].strip().removeprefix("{").removesuffix("}")
        words = tuple(word.removeprefix(".") for word in INFO_WORD.findall(info))
        yield Fence(number + 1, words, textwrap.dedent("\n".join(block)))


def steps(markdown: str) -> tuple[list[Step], int]:
    """Returns what to execute, and how many fences are marked as not to be."""
    found: list[Step] = []
    left_out = 0
    previous: Fence | None = None
    for fence in fences(markdown):
        if fence.is_output:
            if previous is None or not previous.is_python:
                raise BadMarkdown(f"{fence.line - 1}: this output doesn't follow a Python fence")
            if "no-run" not in previous.words:
                found[-1] = Step(previous, fence)
        elif fence.is_python and "no-run" in fence.words:
            left_out += 1
        elif fence.is_python:
            found.append(Step(fence, None))
        previous = fence
    return found, left_out


def stripped(text: str) -> list[str]:
    """Returns the lines of a text without trailing whitespace and trailing empty lines."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def failing_line(error: BaseException, path: Path, otherwise: int) -> int:
    """Returns the line of the Markdown file that an exception comes from."""
    if isinstance(error, SyntaxError) and error.filename == str(path) and error.lineno is not None:
        return error.lineno
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return lines[-1] or otherwise if lines else otherwise


def execute(path: Path, shown: str) -> bool:
    """Executes one file's fences in this process and prints what came of it; returns whether all was well."""
    try:
        to_run, left_out = steps(path.read_text())
    except BadMarkdown as problem:
        print(f"{shown}:{problem}")
        return False
    # As the main module, so that what looks names up there (dataclasses, type hints, pickle) finds those of the fences.
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    wrong = compared = 0
    for step in to_run:
        printed = io.StringIO()
        try:
            # Shifted down to its place in the file: tracebacks then name the file's own lines.
            source = "\n" * (step.code.line - 1) + step.code.text
            code = compile(source, str(path), "exec", dont_inherit=True)
            with contextlib.redirect_stdout(printed):
                exec(code, module.__dict__)
        except BaseException as error:
            line = failing_line(error, path, step.code.line)
            print(f"{shown}:{line}: {type(error).__name__}, and the rest of the file was not run", flush=True)
            print(printed.getvalue(), end="")
            traceback.print_exception(error, file=sys.stdout)
            return False
        if step.output is None:
            continue
        compared += 1
        expected, actual = stripped(step.output.text), stripped(printed.getvalue())
        if expected != actual:
            wrong += 1
            print(f"{shown}:{step.output.line}: the code at line {step.code.line} prints something else")
            print("\n".join(difflib.unified_diff(expected, actual, "published", "printed", lineterm="")))
    print(f"{shown}: {len(to_run)} fences run, {compared} outputs compared ({wrong} wrong), {left_out} marked no-run")
    return wrong == 0


def execute_apart(path: Path) -> bool:
    """Executes one file's fences in a process of its own; returns whether all was well."""
    shown = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
    for module in NEEDS.findall(path.read_text()):
        if importlib.util.find_spec(module) is None:
            print(f"{shown}: NOT RUN: needs {module}, which is not installed", flush=True)
            return True
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-P", __file__, "--here", shown, str(path)]
        code = subprocess.run(command, cwd=folder, env=os.environ | ENVIRONMENT, stdin=subprocess.DEVNULL).returncode
    if code not in (0, 1):
        print(f"{shown}: the interpreter ended with code {code}", flush=True)
    return code == 0


def main() -> int:
    """Returns the exit status: 0 if all code ran and printed what is published."""
    parser = argparse.ArgumentParser(description="Execute the Python code in Markdown files.")
    parser.add_argument("--here", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.md", help="default: README.md and docs/*.md")
    arguments = parser.parse_args()
    if arguments.here is not None:
        return 0 if execute(arguments.files[0], arguments.here) else 1
    files: list[Path] = arguments.files or [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        parser.error(f"no such file: {', '.join(missing)}")
    failed = [file.name for file in files if not execute_apart(file.resolve())]
    print(f"FAILED: {', '.join(failed)}" if failed else f"all code in {len(files)} files is right")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
