"""``python -m benchmarks [NAME ...] [--quick]``: prints tables, and writes ``benchmarks/results/NAME.json``."""

import argparse
import importlib
import json
import os
import pkgutil
import sys
from pathlib import Path

# Before JAX is imported: eight devices, whatever the machine.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

HERE = Path(__file__).parent
ORDER = ("shard", "dispatch", "plan", "moves", "load", "save", "init", "offload")


def names() -> list[str]:
    """The benchmarks there are, in reading order."""
    found = {m.name for m in pkgutil.iter_modules([str(HERE)]) if not m.name.startswith("_")}
    return [n for n in ORDER if n in found] + sorted(found - set(ORDER))


def main() -> int:
    """Run the benchmarks asked for, or all of them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Run benchmarks side by side.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(names())}")
    parser.add_argument("--quick", action="store_true", help="few rounds and no JSON: does it run, not how fast")
    given = parser.parse_args()
    unknown = [n for n in given.names if n not in names()]
    if unknown:
        parser.error(f"no such benchmark: {', '.join(unknown)} (there are {', '.join(names())})")
    harness = importlib.import_module("benchmarks._harness")
    print(", ".join(f"{k}: {v}" for k, v in harness.machine().items()), flush=True)
    for name in given.names or names():
        module = importlib.import_module(f"benchmarks.{name}")
        results = module.run(given.quick)
        print("\n" + module.table(results), flush=True)
        if not given.quick:
            folder = HERE / "results"
            folder.mkdir(exist_ok=True)
            everything = {"machine": harness.machine(), "results": results}
            (folder / f"{name}.json").write_text(json.dumps(everything, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
