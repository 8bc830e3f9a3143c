"""Timing side by side: all candidates take turns in one process, so that a busy machine slows each of them alike."""

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

Thunk = Callable[[], Any]


def interleaved(
    candidates: Mapping[str, Thunk], *, rounds: int, turn: float = 0.02, warmup: int = 2
) -> dict[str, float]:
    """Median seconds per call of each candidate.

    Args:
        candidates: What to call, by name. A candidate must wait for its own results.
        rounds: How often each candidate has its turn; the order changes from round to round.
        turn: About how long a turn lasts, in seconds: as many calls as fit, one at least.
        warmup: Calls of each candidate before the clock runs.
    """
    names = list(candidates)
    calls: dict[str, int] = {}
    for name in names:
        for _ in range(warmup):
            candidates[name]()
        start = time.perf_counter()
        if turn:
            candidates[name]()
        calls[name] = max(1, int(turn / (time.perf_counter() - start)))
    taken: dict[str, list[float]] = {name: [] for name in names}
    for n in range(rounds):
        for name in names[n % len(names) :] + names[: n % len(names)]:
            call = candidates[name]
            start = time.perf_counter()
            for _ in range(calls[name]):
                call()
            taken[name].append((time.perf_counter() - start) / calls[name])
    return {name: statistics.median(times) for name, times in taken.items()}


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        named = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = named[0].partition(":")[2].strip() if named else model
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "devices": f"{jax.device_count()} {jax.devices()[0].platform}",
    }


def duration(seconds: float) -> str:
    """A time in its own unit, three digits: ``"1.23 ms"``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def text_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as plain text; the first column is left-aligned, the others are right-aligned."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console(width=160)
    with console.capture() as capture:
        console.print(table)
    return capture.get().rstrip()


def versus(title: str, times: Mapping[str, float], reference: str, aims: Mapping[str, float] | None = None) -> str:
    """Each candidate's time, its ratio to a reference, and the ratio aimed at."""
    rows = [
        [name, duration(t), f"{t / times[reference]:.2f}", f"{aims[name]:.2f}" if aims and name in aims else ""]
        for name, t in times.items()
    ]
    return text_table(title, ["", "time", f"ratio to {reference}", "aim"], rows)
