"""Jobs of several real processes on this machine, joined by ``jax.distributed`` with gloo collectives over loopback.

A job runs the ``case_...`` functions of a module of ``tests/mp``, one after the other, in every process. Starting takes
seconds, so that one job has many cases.
"""

import ast
import dataclasses
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
LIMIT = float(os.environ.get("LIM", "300"))
"""Seconds after which a job is a failure."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What became of a job.

    ``exits`` has each process's exit status, ``outputs`` what it printed, ``outcomes`` for each process and each case
    that it came to the end of: what the case returned and the traceback it failed with.
    """

    exits: list[int]
    outputs: list[str]
    outcomes: list[dict[str, tuple[Any, str]]]
    seconds: float

    def returned(self, case: str) -> list[Any]:
        """What a case returned on each process that came to its end."""
        return [cases[case][0] for cases in self.outcomes if case in cases]


def run(
    module: str, devices: Sequence[int], *, dying: Sequence[int] = (), only: str = "", check_types: bool = False
) -> Job:
    """Run the cases of a module in processes with these many devices each, and fail if any of them does.

    Args:
        module: A module of ``tests/mp``.
        devices: How many virtual CPU devices each process has.
        dying: Processes that end by a signal; all others must come to the end of every case, and exit with 0.
        only: Run only cases with this in their name.
        check_types: Check the package's annotations as all other tests do, which takes seconds at the start.
    """
    with tempfile.TemporaryDirectory() as folder, socket.socket() as held:
        # Bound, not listening: no other program is given the port, and JAX's service shares it.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
            "PYTHONUNBUFFERED": "1",
            "XLA_FLAGS": "",
        }
        started = time.monotonic()
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for i, count in enumerate(devices):
                settings = {
                    "module": module,
                    "process": i,
                    "devices": list(devices),
                    "port": port,
                    "only": only,
                    "check_types": check_types,
                    "results": f"{folder}/{i}.results",
                }
                with open(f"{folder}/{i}.output", "wb") as output:
                    processes.append(
                        subprocess.Popen(
                            [sys.executable, str(HERE / "multiprocess.py"), json.dumps(settings)],
                            stdin=subprocess.PIPE,
                            stdout=output,
                            stderr=subprocess.STDOUT,
                            env=environment | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={count}"},
                        )
                    )
            _wait(processes, dying, started + LIMIT)
        finally:
            late = [i for i, p in enumerate(processes) if p.poll() is None]
            for i in late:
                processes[i].kill()
            for p in processes:
                p.communicate()
        job = Job(
            [p.returncode for p in processes],
            [Path(f"{folder}/{i}.output").read_text(errors="replace") for i in range(len(processes))],
            [_results(Path(f"{folder}/{i}.results")) for i in range(len(processes))],
            time.monotonic() - started,
        )
    wrong = [f"process {i} was ended after {job.seconds:.0f} s" for i in late]
    cases = [case for case in _cases(module) if only in case]
    assert cases
    for i, (status, outcomes) in enumerate(zip(job.exits, job.outcomes, strict=True)):
        wrong += [f"process {i}, {case}:\n{error}" for case, (_, error) in outcomes.items() if error]
        if i in dying:
            if status >= 0:
                wrong.append(f"process {i} ended with {status}, not by a signal; it printed:\n{job.outputs[i][-4000:]}")
            continue
        if left_out := [case for case in cases if case not in outcomes]:
            wrong.append(f"process {i} did not come to the end of {', '.join(left_out)}")
        if status:
            wrong.append(f"process {i} ended with {status}")
        if status or left_out:
            wrong.append(f"process {i} printed:\n{job.outputs[i][-4000:]}")
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)
    return job


def _wait(processes: Sequence[subprocess.Popen[bytes]], dying: Sequence[int], end: float) -> None:
    """Until all have ended, or shortly after one ended that should not have, or until the end."""
    first, *others = processes
    while time.monotonic() < end:
        if all(p.poll() is not None for p in others) and first.stdin and not first.stdin.closed:
            first.stdin.close()
        if all(p.poll() is not None for p in processes):
            return
        if any(p.poll() and i not in dying for i, p in enumerate(processes)):
            end = min(end, time.monotonic() + 10)
        time.sleep(0.05)


def _results(file: Path) -> dict[str, tuple[Any, str]]:
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {case: (value, error) for case, value, error in lines}


def _cases(module: str) -> list[str]:
    """In the order in which they are written; the module itself is for the processes of a job only."""
    body = ast.parse((HERE / "mp" / f"{module}.py").read_text()).body
    return [x.name for x in body if isinstance(x, ast.FunctionDef) and x.name.startswith("case_")]


# --- in the processes -------------------------------------------------------------------------------------------------


def die() -> None:
    """End this process as a machine that loses its power does."""
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """One process of a job."""
    settings = json.loads(sys.argv[1])
    import jax
    import jaxtyping

    if settings["check_types"]:
        jaxtyping.install_import_hook("namedshard", "beartype.beartype")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"127.0.0.1:{settings['port']}",
        num_processes=len(settings["devices"]),
        process_id=settings["process"],
        initialization_timeout=120,
        heartbeat_timeout_seconds=60,
    )
    module = importlib.import_module(f"mp.{settings['module']}")
    from namedshard._jaxcompat import coordination_client

    warnings.simplefilter("error")
    for gone in ("core.is_constant_dim", "interpreters.pxla.thread_resources", "experimental.shard_map"):
        # Haliax uses it.
        warnings.filterwarnings("ignore", rf"jax\.{gone} is deprecated", DeprecationWarning)
    with open(settings["results"], "w") as results:
        for case in _cases(settings["module"]):
            if settings["only"] not in case:
                continue
            value, error = None, ""
            started = time.monotonic()
            try:
                value = getattr(module, case)()
            except BaseException:
                error = traceback.format_exc()
            print(json.dumps([case, value, error]), file=results, flush=True)
            print(f"{case}: {time.monotonic() - started:.1f} s", flush=True)
            if not getattr(module, "ALONE", False):
                coordination_client().wait_at_barrier(f"after {case}", 100_000)
    if not getattr(module, "ALONE", False):
        jax.distributed.shutdown()
    if settings["process"] == 0:
        # JAX's service runs here, and would end the others with it.
        sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
