"""Loading and saving in several real processes."""

import multiprocess
import pytest


@pytest.mark.parametrize("devices", [[4, 4], [2, 4]], ids=str)
def test_checkpoints(devices: list[int]) -> None:
    job = multiprocess.run("checkpoints", devices)
    total = sum(devices)
    halves = job.returned("case_half_the_bytes_each_when_split_by_columns")
    assert halves == [n / total for n in devices]
    told = job.returned("case_a_failure_on_one_process_is_told_to_all_and_leaves_what_was_there")
    assert [text.split("cannot be written: ")[1] for text in told] == [
        "it failed on process 1; what was there before is untouched",
        "No space left on device; what was there before is untouched",
    ]
    different = job.returned("case_processes_that_save_different_trees_are_told")
    assert all(text.startswith("save_safetensors: the processes make different calls") for text in different)
