"""Moves between real processes."""

import multiprocess
import pytest


def test_two_processes() -> None:
    job = multiprocess.run("moves", [4, 4])
    assert job.returned("case_placements_each_to_each") == [16 * 16] * 2
    assert job.returned("case_placements_from_device_to_device") == [86] * 2


@pytest.mark.parametrize(("devices", "moves"), [([2, 2, 2, 2], 86), ([5, 3], 85), ([2, 4], 85)], ids=str)
def test_placements(devices: list[int], moves: int) -> None:
    job = multiprocess.run("moves", devices, only="placements")
    assert job.returned("case_placements_each_to_each") == [moves] * len(devices)
    assert job.returned("case_placements_from_device_to_device") == [29] * len(devices)
