"""EFFECTS. Reports the progress of a load or save: as a bar on a terminal, or to a function."""

import contextlib
import sys
import threading
from collections.abc import Callable, Generator
from typing import TypeAlias

from rich import progress as bars
from rich.console import Console

Progress: TypeAlias = bool | Callable[[int, int], None] | None
"""True or None: bars where stderr is a terminal. False: silent. A function: called with (bytes done, bytes in all)."""


@contextlib.contextmanager
def reporting(progress: Progress, total: int, label: str) -> Generator[Callable[[int], None]]:
    """Yields a function to call, from any thread, with the number of bytes just done."""
    if callable(progress):
        lock, done = threading.Lock(), 0

        def advance(count: int) -> None:
            nonlocal done
            with lock:
                done += count
                progress(done, total)

        yield advance
    elif progress is not False and sys.stderr.isatty():
        columns = (
            bars.TextColumn("{task.description}"),
            bars.BarColumn(),
            bars.DownloadColumn(binary_units=True),
            bars.TransferSpeedColumn(),
            bars.TimeRemainingColumn(),
        )
        with bars.Progress(*columns, console=Console(stderr=True)) as display:
            task = display.add_task(label, total=total)
            yield lambda count: display.advance(task, count)
    else:
        yield lambda count: None
