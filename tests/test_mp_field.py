"""What people reported of several processes."""

import multiprocess


def test_two_processes() -> None:
    multiprocess.run("field", [4, 4], check_types=True)
