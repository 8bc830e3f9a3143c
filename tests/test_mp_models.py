"""Models across real processes."""

import multiprocess


def test_two_processes() -> None:
    multiprocess.run("models", [4, 4])
