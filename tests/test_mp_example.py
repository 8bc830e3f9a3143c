"""The example of two hosts, and what the documentation says of it."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "two_hosts.py"
PAGE = (ROOT / "docs" / "across-hosts.md").read_text()


def fences(title: str) -> list[str]:
    return re.findall(rf'^```[^\n]* title="{re.escape(title)}"\n(.*?)^```$', PAGE, re.M | re.S)


def run(script: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")} | settings
    return subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300)


def test_it_prints_what_the_page_says() -> None:
    done = run(EXAMPLE)
    assert done.returncode == 0, done.stderr
    assert [done.stdout] == fences("examples/two_hosts.py prints")


def test_the_page_quotes_it_word_for_word() -> None:
    quoted = fences("examples/two_hosts.py")
    assert len(quoted) == 4
    code = EXAMPLE.read_text()
    assert all(text in code for text in quoted)


def test_a_failing_process_fails_it(tmp_path: Path) -> None:
    broken = tmp_path / "two_hosts.py"
    code = EXAMPLE.read_text()
    assert code.count("    me = jax.process_index()\n") == 1
    broken.write_text(code.replace("    me = jax.process_index()\n", "    me = 1 / jax.process_index()\n"))
    done = run(broken, NAMEDSHARD_COLLECTIVE_TIMEOUT="3")
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert "did not make this call within 3 s" in done.stderr
