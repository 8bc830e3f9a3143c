"""Rewrites constraints.txt: the exact versions of the whole development environment, for every supported Python.

For each Python a clean virtual environment resolves the project with all its extras, with no constraints. Names and
versions only: where a file was fetched from differs between machines.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.11", "3.12", "3.13")
HEADER = """\
# The exact versions of the development environment, for Python 3.11 to 3.13. Rewritten by `make constraints`.
"""


def resolve(python_version: str) -> dict[str, str]:
    """Returns the version of every distribution that a fresh installation on this Python would get."""
    python = subprocess.run(
        ["sh", str(ROOT / "scripts" / "find_python.sh")],
        env=os.environ | {"PYTHON_VERSION": python_version, "PYTHON": ""},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        pip = [str(Path(folder, "bin", "python")), "-m", "pip"]
        # What ships with an older Python resolves many times slower.
        subprocess.run([*pip, "install", "-qq", "--upgrade", "pip"], check=True)
        report = Path(folder, "report.json")
        # As the first release of the minor version, since some projects refuse the early ones that distributions still
        # ship; and from wheels alone, so that no compiler is needed. pip wants a target for that, and leaves it alone.
        oldest = ["--python-version", f"{python_version}.0", "--only-binary", ":all:", "--target", folder]
        wanted = f"{ROOT}[dev,docs,tpu-compiler]"
        subprocess.run([*pip, "install", "-qq", "--dry-run", "--report", str(report), *oldest, wanted], check=True)
        installs = json.loads(report.read_text())["install"]
    found = {normalised(item["metadata"]["name"]): item["metadata"]["version"] for item in installs}
    del found["namedshard"]
    return found


def normalised(name: str) -> str:
    """Returns the name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def merged(found: dict[str, dict[str, str]]) -> list[str]:
    """Returns one line per name, or one per version with the Pythons that it holds for.

    Args:
        found: for each Python, oldest first, the version of every distribution.
    """
    lines: list[str] = []
    for name in sorted(set().union(*found.values())):
        versions = {python: found[python][name] for python in found if name in found[python]}
        distinct = list(dict.fromkeys(versions.values()))
        for version in distinct:
            holding = [python for python, held in versions.items() if held == version]
            # A constraint installs nothing, so one version needs no marker even if some Python does without it.
            lines.append(f"{name}=={version}{marker(holding, list(found)) if len(distinct) > 1 else ''}")
    return lines


def marker(holding: list[str], pythons: list[str]) -> str:
    """Returns the environment marker that is true for exactly the Pythons in `holding`."""
    if holding == pythons:
        return ""
    first, last = pythons.index(holding[0]), pythons.index(holding[-1])
    if last - first + 1 != len(holding):
        return " ; " + " or ".join(f'python_version == "{python}"' for python in holding)
    bounds: list[str] = []
    if first > 0:
        bounds.append(f'python_version >= "{pythons[first]}"')
    if last < len(pythons) - 1:
        bounds.append(f'python_version < "{pythons[last + 1]}"')
    return " ; " + " and ".join(bounds)


def main() -> None:
    """Resolves every Python, then replaces the file only if all of them succeeded."""
    found: dict[str, dict[str, str]] = {}
    for python in PYTHONS:
        print(f"resolving for Python {python}", file=sys.stderr, flush=True)
        found[python] = resolve(python)
    (ROOT / "constraints.txt").write_text(HEADER + "\n".join(merged(found)) + "\n")


if __name__ == "__main__":
    main()
