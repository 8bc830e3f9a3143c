"""Processes that do not make the same call."""

import multiprocess


def test_two_processes() -> None:
    multiprocess.run("steps", [4, 4])


def test_four_processes() -> None:
    multiprocess.run("steps", [2, 2, 2, 2])
