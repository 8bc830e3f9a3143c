"""Loading and saving in several real processes."""

from typing import Any

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
        "it failed on process 1: No space left on device; what was there before is untouched",
        "No space left on device; what was there before is untouched",
    ]
    different = job.returned("case_processes_that_save_different_trees_are_told")
    assert all(text.startswith("save_safetensors: the processes make different calls") for text in different)


def broke_off(process: int, why: str, size: str = "72 KiB", before: str = "what was there before is untouched") -> str:
    return (
        f"CheckpointError: PATH: the checkpoint ({size}) is not saved: process {process} broke off: {why}; {before}\n"
        f"  fix: see to the error of process {process}, and save again on every process"
    )


def differ(*calls: str) -> str:
    lines = "".join(f"  process {process}{call}\n" for process, call in enumerate(calls))
    return (
        "OutOfStepError: save_safetensors: the processes make different calls; the first difference is\n"
        f"{lines}  fix: call with the same tree, mapping and mesh, in the same order, on every process"
    )


def call(path: str = "PATH", size: Any = "5GB", metadata: Any = None, writer: str = "all", budget: Any = "1GiB") -> str:
    return f" calls save_safetensors({path!r}, max_shard_size={size!r}, {metadata=}, {writer=}, {budget=})"


def test_saves_that_go_wrong() -> None:
    job = multiprocess.run("saves", [2, 2])
    first, last = job.returned("case_a_callback_that_raises")
    assert first == [
        broke_off(1, "RuntimeError: no more bars"),
        broke_off(1, "BrokenPipeError: [Errno 32] Broken pipe"),
        broke_off(1, "KeyboardInterrupt"),
    ]
    assert last == ["RuntimeError: no more bars", "BrokenPipeError: [Errno 32] Broken pipe", "KeyboardInterrupt: "]
    first, last = job.returned("case_files_that_cannot_be_written_or_named")
    cannot = "CheckpointError: PATH: the checkpoint (72 KiB) cannot be written: "
    full = "No space left on device; what was there before is untouched\n  fix: free some space, or save elsewhere"
    assert first == [f"{cannot}it failed on process 1: {full}"] * 3
    assert last == [cannot + full] * 3
    interrupted = job.returned(
        "case_a_process_that_is_interrupted_in_a_file_of_its_own_goes_on_in_the_exchange_of_another"
    )
    assert interrupted == [broke_off(1, "KeyboardInterrupt", "24 KiB"), "KeyboardInterrupt: "]
    unfit = "tensor 'large': float32 values from 128.0 to 255.0 do not fit int8"
    assert job.returned("case_values_that_do_not_fit") == [
        broke_off(1, unfit, size="256 B"),
        f"NarrowingError: {unfit}\n  fix: pass a wider dtype=",
    ]
    first, last = job.returned("case_processes_that_leave_between_the_rounds")
    left = "KeyboardInterrupt: "
    assert first == [left] * 4 + [broke_off(1, "KeyboardInterrupt", "24 KiB")] * 4
    assert last == [broke_off(0, "KeyboardInterrupt", "24 KiB")] * 4 + [left] * 4
    unknown = "it is not known whether it has replaced what was there before"
    assert job.returned("case_a_process_that_leaves_when_all_is_done") == [
        left,
        broke_off(0, "KeyboardInterrupt", "24 KiB", unknown),
    ]
    agreed = job.returned("case_a_process_that_is_interrupted_when_all_have_agreed")
    assert agreed == [broke_off(1, "KeyboardInterrupt"), left]
    assert job.returned("case_a_folder_that_cannot_be_made") == ["FOLDER/plain cannot be written to: File exists"] * 2
    assert (
        job.returned("case_calls_that_differ")
        == [
            [
                differ(call("PATH/0"), call("PATH/1")),
                differ(call(metadata={"process": "0"}), call(metadata={"process": "1"})),
                differ(call(size=12289), call(size=12290)),
                differ(call(writer="all"), call(writer="main")),
                differ(call(budget=1048576), call(budget=1048577)),
                differ(": x0: float32[2, 64] from leaf ['x']", ": x1: float32[2, 64] from leaf ['x']"),
            ]
        ]
        * 2
    )
    elsewhere = (
        "model is not one directory that all processes share: process 0 does not see files of others; what was there"
        " before is untouched\n"
        "  process 1: model-00002-of-00006.safetensors\n"
        "  process 1: model-00004-of-00006.safetensors\n"
        "  process 1: model-00006-of-00006.safetensors\n"
        '  fix: save to a shared path, or pass writer="main" for process 0 to write all'
    )
    assert job.returned("case_a_path_that_is_not_shared") == [elsewhere, elsewhere]
    host = (
        "HostValueError: save_safetensors: host values of 2 leaves differ between processes\n"
        "  ['loose']: process 1 has another value than process 0\n"
        "  ['numpy']: process 1 has another value than process 0\n"
        "  fix: pass the same value on every process, or build the array with"
        " jax.make_array_from_process_local_data"
    )
    local = (
        "LocalArrayError: save_safetensors: 1 leaf is not one global array: each process passes its own, committed to"
        " its own devices\n  ['mine']\n"
        "  fix: pass numpy (the same value on every process), or build a global array with"
        " jax.make_array_from_process_local_data"
    )
    mixed = differ(
        ": ['one']: float32[4,64] from P() of {'x': 4} on devices [0, 1, 2048, 2049] in device",
        ": ['one']: float32[4,64] from a host value",
    )
    assert job.returned("case_values_that_are_not_the_same") == [[host, host, local, local, mixed, mixed]] * 2
    assert job.returned("case_a_writer_that_is_none") == ['writer must be "all" or "main", not \'mian\''] * 2
