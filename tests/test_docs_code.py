"""The runner of the documentation's code, on small files with faults planted in them."""

import subprocess
import sys
import textwrap
from pathlib import Path

RUNNER = Path(__file__).parent.parent / "scripts" / "run_docs_code.py"


def run(folder: Path, markdown: str) -> tuple[int, str]:
    """Returns the exit status and all that is printed when the runner is given this one page."""
    page = folder / "page.md"
    page.write_text(textwrap.dedent(markdown))
    done = subprocess.run([sys.executable, str(RUNNER), str(page)], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_right_code_passes_in_one_namespace(tmp_path: Path) -> None:
    status, said = run(
        tmp_path,
        """
        ```python
        import os
        devices = os.environ["XLA_FLAGS"]
        print("not compared")
        ```

        Prose between the two.

        ```python
        print("first  ")
        print(devices)
        ```

        It prints:

        ```text title="output"
        first
        --xla_force_host_platform_device_count=8
        ```

        - In a list:

            ```python
            assert devices
            ```
        """,
    )
    assert status == 0, said
    assert "3 fences run, 1 outputs compared (0 wrong), 0 marked no-run" in said


def test_a_failing_fence_is_found_at_its_line(tmp_path: Path) -> None:
    status, said = run(
        tmp_path,
        """
        ```python
        def planted():
            raise ValueError("planted")
        ```

        ```python
        planted()
        ```
        """,
    )
    assert status == 1
    assert "page.md:4: ValueError, and the rest of the file was not run" in said
    assert "planted" in said
    assert "FAILED: page.md" in said


def test_a_syntax_error_is_found_at_its_line(tmp_path: Path) -> None:
    status, said = run(tmp_path, "```python\nx = 1\ny = = 2\n```\n")
    assert status == 1
    assert "page.md:3: SyntaxError" in said


def test_a_wrong_output_is_found(tmp_path: Path) -> None:
    status, said = run(
        tmp_path,
        """
        ```python
        print("one")
        print("two")
        ```

        ```text title="output"
        one
        three
        ```
        """,
    )
    assert status == 1
    assert "page.md:8: the code at line 3 prints something else" in said
    assert "-three\n+two" in said
    assert "FAILED: page.md" in said


def test_output_that_is_missing_or_too_much_is_wrong(tmp_path: Path) -> None:
    status, said = run(tmp_path, '```python\nprint("one")\n```\n```text title="output"\n```\n')
    assert status == 1
    assert "+one" in said
    status, said = run(tmp_path, '```python\nx = 1\n```\n```text title="output"\none\n```\n')
    assert status == 1
    assert "-one" in said


def test_a_fence_that_ends_the_interpreter_fails(tmp_path: Path) -> None:
    status, said = run(tmp_path, "```python\nraise SystemExit(0)\n```\n")
    assert status == 1
    assert "page.md:2: SystemExit" in said
    status, said = run(tmp_path, "```python\nimport os\nos._exit(7)\n```\n")
    assert status == 1
    assert "the interpreter ended with code 7" in said


def test_marked_and_quoted_fences_are_not_run(tmp_path: Path) -> None:
    status, said = run(
        tmp_path,
        """
        ```python no-run
        raise ValueError
        ```

        ```{.python .no-run}
        raise ValueError
        ```

        ```text title="output"
        of code that was not run
        ```

        ````markdown
        ```python
        raise ValueError
        ```
        ````

        ```bash
        exit 1
        ```
        """,
    )
    assert status == 0, said
    assert "0 fences run, 0 outputs compared (0 wrong), 2 marked no-run" in said


def test_broken_pages_are_refused(tmp_path: Path) -> None:
    status, said = run(tmp_path, "text\n```python\nx = 1\n")
    assert status == 1
    assert "page.md:2: the fence that opens here is never closed" in said
    status, said = run(tmp_path, '```bash\nls\n```\n```text title="output"\na\n```\n')
    assert status == 1
    assert "page.md:4: this output doesn't follow a Python fence" in said


def test_a_missing_page_is_refused(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(RUNNER), str(tmp_path / "none.md")], capture_output=True, text=True)
    assert done.returncode == 2
    assert "no such file" in done.stderr


def test_a_page_that_needs_a_missing_module_is_left_out_and_says_so(tmp_path: Path) -> None:
    page = """
        <!-- needs: {} -->

        ```python
        raise ValueError("planted")
        ```
        """
    status, said = run(tmp_path, page.format("module_that_is_not_there"))
    assert status == 0, said
    assert "NOT RUN: needs module_that_is_not_there, which is not installed" in said
    status, said = run(tmp_path, page.format("json"))
    assert status == 1
    assert "planted" in said
