"""Runs tests/kernels/interpreted in a process of its own, where Triton interprets its kernels on the CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"
MINIMUM_CASES = 330


@pytest.mark.timeout(650)
def test_kernels_equal_their_references_under_the_interpreter() -> None:
    source = str(FOLDER.parents[2] / "kernels")
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", str(FOLDER)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) >= MINIMUM_CASES, done.stdout[-500:]
    assert "skipped" not in done.stdout
