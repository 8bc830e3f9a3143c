"""Arrays to the host, between real processes and in one."""

import multiprocess


def test_two_processes() -> None:
    multiprocess.run("gather", [4, 4])


def test_three_processes_of_different_sizes() -> None:
    multiprocess.run("gather", [1, 4, 3])
