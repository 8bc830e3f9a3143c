"""EFFECTS. How far a load or save has come: on a terminal, to a function, or to nobody."""

import contextlib
import sys
import threading
from collections.abc import Callable, Generator
from typing import TypeAlias

from rich import progress as bars
from rich.console import Console

Progress: TypeAlias = bool | Callable[[int, int], None] | None
"""True or None: bars where stderr is a terminal. False: silent. A function: told bytes done and in all."""


@contextlib.contextmanager
def reporting(progress: Progress, total: int, label: str) -> Generator[Callable[[int], None]]:
    """Yields a function to tell, from any thread, of bytes that are done."""
    if callable(progress):
        lock, done = threading.Lock(), 0

        def tell(count: int) -> None:
            nonlocal done
            with lock:
                done += count
                progress(done, total)

        yield tell
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
