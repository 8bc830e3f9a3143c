"""Tries an installed wheel: run it with the environment's Python from a folder that has no namedshard in it.

    python wheel_smoke.py SOURCE_TREE

Only the core dependencies may be needed, so it imports nothing that an extra would bring.
"""

import importlib.metadata
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import haliax
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import namedshard as ns


def main() -> None:
    """Raises AssertionError with what is wrong."""
    source_tree = Path(sys.argv[1]).resolve()
    installed = Path(ns.__file__).resolve()
    assert not installed.is_relative_to(source_tree), f"{installed} is the source tree, not the wheel"

    unresolved = [name for name in ns.__all__ if not hasattr(ns, name)]
    assert ns.__all__ and not unresolved, f"names of __all__ that do not resolve: {unresolved}"
    assert files("namedshard").joinpath("py.typed").is_file(), "py.typed is missing, so type checkers ignore the types"
    licences = [file for file in importlib.metadata.files("namedshard") or [] if file.name == "LICENSE"]
    assert licences, "the licence is not in the wheel"

    batch = haliax.Axis("batch", 4)
    source = np.arange(4, dtype=np.float32)
    mesh = Mesh(np.array(jax.devices("cpu")[:1]), ("data",))
    placed = ns.shard(haliax.NamedArray(jax.numpy.asarray(source), (batch,)), {"batch": "data"}, mesh)
    assert placed.axes == (batch,)
    np.testing.assert_array_equal(np.asarray(placed.array), source)
    wanted = NamedSharding(mesh, PartitionSpec("data"))
    assert placed.array.sharding.is_equivalent_to(wanted, 1), f"placed as {placed.array.sharding}"

    usage = subprocess.run([sys.executable, "-m", "namedshard", "--help"], capture_output=True, text=True)
    assert usage.returncode == 0, f"python -m namedshard --help failed:\n{usage.stdout}{usage.stderr}"
    assert "usage" in usage.stdout.lower(), f"python -m namedshard --help printed no usage:\n{usage.stdout}"

    version = importlib.metadata.version("namedshard")
    print(f"namedshard {version} works from its wheel: Python {sys.version.split()[0]}, jax {jax.__version__}")


if __name__ == "__main__":
    main()
