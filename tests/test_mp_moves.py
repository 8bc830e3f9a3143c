"""Moves between real processes."""

import multiprocess
import pytest


@pytest.mark.parametrize("devices", [[4, 4], [2, 2, 2, 2], [5, 3], [2, 4]], ids=str)
def test_moves(devices: list[int]) -> None:
    job = multiprocess.run("moves", devices)
    for case in ("case_every_placement_to_every_other", "case_the_compilers_way"):
        assert job.returned(case) == [16 * 16] * len(devices)
