"""The GPU benchmark's command runs through all its stages, here under the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*arguments: str, interpret: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    return subprocess.run(
        [sys.executable, "-m", "integration.benchmarks.kernels", *arguments],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": interpret, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_dry_run_visits_every_stage_correctness_first(tmp_path: Path) -> None:
    rows_file = tmp_path / "rows.jsonl"
    done = run("--dry", "--out", str(rows_file), interpret="1")
    assert done.returncode == 0, done.stderr[-2000:]
    assert rows_file.read_text() == done.stdout
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    stages = list(dict.fromkeys(row["stage"] for row in rows))
    assert stages == ["correctness", "ceilings", "decode", "prefill", "write_kv", "done"]
    assert all(row["right"] for row in rows if row["stage"] == "correctness")
    assert not any("error" in row for row in rows if row["stage"] != "correctness")


def test_without_a_gpu_it_says_what_to_do() -> None:
    done = run("--dry", interpret="0")
    assert done.returncode == 2
    assert "--dry needs TRITON_INTERPRET=1 in the environment" in done.stderr
