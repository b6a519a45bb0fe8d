"""What an engine takes of a machine when it starts: bounds that a user can plan with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_demo_model_starts_within_its_memory_and_time(demo_model_path, tmp_path):
    """At most 600 MB over a bare import of torch and transformers, the weights and the KV pool.

    Importing those two takes most of the 6 s to ready, and of whatever they take on a slow machine; loading and fusing
    the model must take less than they do.
    """
    workload = tmp_path / "w.json"
    requests = [{"prompt_token_ids": list(range(100 + i, 200 + i)), "max_tokens": 4} for i in range(8)]
    workload.write_text(json.dumps({"requests": requests}))
    command = ["--model", str(demo_model_path), "--workload", str(workload), "--set", "kv_cache_memory=64MiB"]
    done = subprocess.run(
        [sys.executable, "-m", "integration.benchmarks.startup", *command, "--set", "num_threads=1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    figures = json.loads(done.stdout)
    assert figures["weights_mb"] == 257
    assert 63 <= figures["kv_pool_mb"] <= 64
    assert figures["over_mb"] <= 600
    assert figures["ready_s"] - figures["import_s"] < figures["import_s"]
