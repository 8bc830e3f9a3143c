"""The demo's checkpoint across real processes."""

import multiprocess


def test_two_processes() -> None:
    multiprocess.run("sentences", [4, 4])
