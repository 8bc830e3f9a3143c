"""Models made by several real processes."""

import multiprocess


def test_two_processes() -> None:
    multiprocess.run("init", [4, 4])
