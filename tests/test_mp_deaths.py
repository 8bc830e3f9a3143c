"""A process that is killed in the middle of a job."""

import multiprocess
import pytest


@pytest.mark.parametrize(
    "case", ["during_a_move", "during_a_compiled_move", "during_a_gather", "during_a_save", "before_a_call"]
)
def test_one_process(case: str) -> None:
    job = multiprocess.run("deaths", [2, 2, 2], dying=[2], only=case)
    assert job.exits == [0, 0, -9]
    assert job.seconds < 200


@pytest.mark.parametrize(
    "case",
    [
        "before_anything_is_sent",
        "between_two_files_of_a_save",
        "in_a_compiled_move",
        "in_a_move",
        "in_the_exchange_of_others_while_saving",
        "when_all_have_agreed",
        "while_saving",
    ],
)
def test_a_process_that_fails_and_lives(case: str) -> None:
    multiprocess.run("deaths", [2, 2, 2], only=f"case_a_failure_{case}")


def test_the_first_process() -> None:
    job = multiprocess.run("death_of_the_first", [2, 2], dying=[0, 1])
    assert job.exits == [-9, -6]
    assert "Terminating process because the JAX distributed service detected fatal errors" in job.outputs[1]
    assert job.seconds < 200
