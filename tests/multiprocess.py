"""Jobs of several real processes on this machine, joined by ``jax.distributed`` with gloo collectives over loopback.

A job runs the ``case_...`` functions of a module of ``tests/mp``, one after the other, in every process. All are forked
from a process that has imported JAX, since that takes a second each time.
"""

import ast
import dataclasses
import functools
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

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
        settings = {
            "module": module,
            "devices": list(devices),
            "port": held.getsockname()[1],
            "dying": list(dying),
            "only": only,
            "check_types": check_types,
            "folder": folder,
        }
        started = time.monotonic()
        starter = _starter()
        assert starter.stdin and starter.stdout
        starter.stdin.write(json.dumps(settings).encode() + b"\n")
        starter.stdin.flush()
        exits, late = json.loads(starter.stdout.readline())
        job = Job(
            exits,
            [Path(f"{folder}/{i}.output").read_text(errors="replace") for i in range(len(devices))],
            [_results(Path(f"{folder}/{i}.results")) for i in range(len(devices))],
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


@functools.cache
def _starter() -> subprocess.Popen[bytes]:
    """A process that starts those of one job after the other; it ends with this one."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
        "PYTHONUNBUFFERED": "1",
    }
    command = [sys.executable, str(HERE / "multiprocess.py")]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


def _results(file: Path) -> dict[str, tuple[Any, str]]:
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {case: (value, error) for case, value, error in lines}


def _cases(module: str) -> list[str]:
    """In the order in which they are written; the module itself is for the processes of a job only."""
    body = ast.parse((HERE / "mp" / f"{module}.py").read_text()).body
    return [x.name for x in body if isinstance(x, ast.FunctionDef) and x.name.startswith("case_")]


# --- in the starter ---------------------------------------------------------------------------------------------------


def main() -> None:
    """Import what takes long, but neither the package nor a backend, then fork the processes of each job."""
    for name in ("jax", "beartype", "haliax", "jaxtyping", "optax", "rich.progress", "safetensors.numpy"):
        importlib.import_module(name)
    # JAX warns of forks, which are harmless as long as there is one thread.
    warnings.simplefilter("ignore", RuntimeWarning)
    while line := sys.stdin.buffer.readline():
        assert threading.active_count() == 1
        print(json.dumps(_run_job(json.loads(line))), flush=True)


def _run_job(settings: dict[str, Any]) -> tuple[list[int], list[int]]:
    """The exit statuses of a job's processes, and which had to be ended since they were late."""
    ends, others_ended = os.pipe()
    running: dict[int, int] = {}
    exits: dict[int, int] = {}
    for i in range(len(settings["devices"])):
        pid = os.fork()
        if not pid:
            os.close(others_ended)
            _be_process(settings, i, ends)
        running[pid] = i
    os.close(ends)
    end, parent = time.monotonic() + LIMIT, os.getppid()
    while running and time.monotonic() < end and os.getppid() == parent:
        for pid, i in list(running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                exits[i] = os.waitstatus_to_exitcode(status)
                del running[pid]
        if set(running.values()) <= {0} and others_ended >= 0:
            os.close(others_ended)
            others_ended = -1
        # Shortly after one ended that should not have, the others are ended.
        if any(status and i not in settings["dying"] for i, status in exits.items()):
            end = min(end, time.monotonic() + 10)
        time.sleep(0.02)
    late = list(running.values())
    for pid, i in running.items():
        os.kill(pid, signal.SIGKILL)
        exits[i] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if others_ended >= 0:
        os.close(others_ended)
    return [exits[i] for i in range(len(exits))], late


def _be_process(settings: dict[str, Any], process: int, ends: int) -> NoReturn:
    output = os.open(f"{settings['folder']}/{process}.output", os.O_CREAT | os.O_WRONLY)
    for old, new in ((ends, 0), (output, 1), (output, 2)):
        os.dup2(old, new)
    status = 1
    try:
        run_cases(settings, process)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # Also after an error: only `main` goes on from here.
        os._exit(status)


# --- in the processes -------------------------------------------------------------------------------------------------


def die() -> None:
    """End this process as a machine that loses its power does."""
    os.kill(os.getpid(), signal.SIGKILL)


def run_cases(settings: dict[str, Any], process: int) -> None:
    """One process of a job."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={settings['devices'][process]}"
    os.environ["JOB_FOLDER"] = settings["folder"]
    import jax
    import jaxtyping

    if settings["check_types"]:
        jaxtyping.install_import_hook("namedshard", "beartype.beartype")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"127.0.0.1:{settings['port']}",
        num_processes=len(settings["devices"]),
        process_id=process,
        initialization_timeout=120,
        heartbeat_timeout_seconds=60,
    )
    module = importlib.import_module(f"mp.{settings['module']}")
    from namedshard._jaxcompat import coordination_client

    warnings.simplefilter("error")
    for gone in ("core.is_constant_dim", "interpreters.pxla.thread_resources", "experimental.shard_map"):
        # Haliax uses it.
        warnings.filterwarnings("ignore", rf"jax\.{gone} is deprecated", DeprecationWarning)
    with open(f"{settings['folder']}/{process}.results", "w") as results:
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
    if process == 0:
        # JAX's service runs here, and would end the others with it.
        os.read(0, 1)


if __name__ == "__main__":
    main()
