"""The closing lines of a test run: what was skipped and why, and an error when nothing ran."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SKIPPED = """
import pytest
@pytest.mark.parametrize("n", range(2))
def test_a(n): pytest.skip("no Prometheus (install it)")
@pytest.mark.skip(reason="no GPU")
def test_b(): pass
"""
LINE = "skipped 3: 2 no Prometheus (install it); 1 no GPU"


def _run(folder: Path, source: str) -> tuple[int, list[str]]:
    (folder / "test_it.py").write_text(source, encoding="utf-8")
    (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "tests.skips", "-p", "no:cacheprovider", "test_it.py"]
    done = subprocess.run(
        command, cwd=folder, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False, timeout=120
    )
    return done.returncode, done.stdout.splitlines()


def test_skips_are_one_line_grouped_by_reason(tmp_path: Path) -> None:
    code, lines = _run(tmp_path, SKIPPED + "def test_c(): pass\n")
    assert code == pytest.ExitCode.OK
    assert lines[-2] == LINE
    assert "1 passed, 3 skipped" in lines[-1]


def test_a_run_of_skips_only_is_an_error(tmp_path: Path) -> None:
    code, lines = _run(tmp_path, SKIPPED)
    assert code == pytest.ExitCode.NO_TESTS_COLLECTED
    assert lines[-3:-1] == [LINE, "error: no test ran, all were skipped"]


def test_no_skip_no_line(tmp_path: Path) -> None:
    code, lines = _run(tmp_path, "def test_c(): pass\n")
    assert code == pytest.ExitCode.OK
    assert not any(line.startswith("skipped") for line in lines)
