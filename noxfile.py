"""The test matrix, and the make targets as sessions.

make test covers one Python with the maintained distribution of haliax. The matrix adds the other Pythons, and the older
distribution: both are imported as haliax, so no environment can hold the two.
"""

import os
import subprocess
from pathlib import Path

import nox

ROOT = Path(__file__).parent
PYTHONS = ("3.11", "3.12", "3.13")
# The older distribution works with jax 0.10, the newest that Python 3.11 gets, and fails on jax 0.12.
HALIAX = {"3.11": ("marin", "pypi"), "3.12": ("marin",), "3.13": ("marin",)}
OLDER_HALIAX = "haliax==1.4.dev453"
# A matrix without its two ends would prove little, so there a missing interpreter fails; between them it is skipped.
REQUIRED = (PYTHONS[0], PYTHONS[-1])
JOBS = os.environ.get("JOBS") or str(min((os.cpu_count() or 1) + 1, 4))

nox.options.default_venv_backend = "venv"
nox.options.sessions = ["lint", "types", *(f"tests-{python}" for python in PYTHONS), "docs", "examples", "wheel"]


def interpreter(python: str) -> str | None:
    """Returns the path of this minor version, wherever the machine keeps it (a version manager's included)."""
    environment = os.environ | {"PYTHON_VERSION": python, "PYTHON": ""}
    script = ["sh", str(ROOT / "scripts" / "find_python.sh")]
    found = subprocess.run(script, env=environment, capture_output=True, text=True)
    return found.stdout.strip() or None


def install(session: nox.Session, haliax: str) -> None:
    """Installs the project with what its tests need, at the versions of constraints.txt."""
    constraints = ROOT / "constraints.txt"
    if haliax == "marin":
        session.install("-c", str(constraints), "-e", ".[dev]")
    else:
        without = Path(session.create_tmp()) / "constraints.txt"
        lines = constraints.read_text().splitlines(keepends=True)
        without.write_text("".join(line for line in lines if not line.startswith("marin-haliax==")))
        project = nox.project.load_toml(ROOT / "pyproject.toml")["project"]
        extras = project["optional-dependencies"]
        del extras["docs"], extras["tpu-compiler"]
        wanted = [*project["dependencies"], *(item for extra in extras.values() for item in extra)]
        needed = [item for item in wanted if not item.startswith(("marin-haliax", "namedshard["))]
        session.install("-c", str(without), OLDER_HALIAX, *needed)
        session.install("--no-deps", "-e", ".")
    session.install("--no-deps", "-r", "requirements-demo.txt")


def add_tests(python: str) -> None:
    """Adds one session for each distribution of haliax that this Python is tested with."""
    path = interpreter(python)

    @nox.session(name=f"tests-{python}", python=path or False)
    @nox.parametrize("haliax", HALIAX[python])
    def tests(session: nox.Session, haliax: str) -> None:
        """Run the tests on one Python with one distribution of haliax."""
        if path is None and python in REQUIRED:
            session.error(f"Python {python} was not found on this machine, and the matrix must cover it")
        if path is None:
            session.skip(f"PYTHON {python} WAS NOT FOUND ON THIS MACHINE: NOT TESTED")
        install(session, haliax)
        # How processes talk to each other is a matter of JAX, whichever distribution gives the names.
        fewer = ["--ignore-glob=tests/test_mp_*"] if haliax == "pypi" else []
        session.run("python", "-m", "pytest", "-n", JOBS, "--dist", "worksteal", *fewer, *session.posargs)


for version in PYTHONS:
    add_tests(version)


def make(session: nox.Session) -> None:
    """Run the make target of the same name."""
    session.run("make", session.name, external=True)


for target in ("lint", "types", "docs", "examples", "wheel"):
    nox.session(name=target, python=False)(make)
