"""Runs in turn, ratios pair by pair, one pinned core, a busy neighbour."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from integration.benchmarks import compare
from integration.benchmarks.meter import machine_cpu
from integration.benchmarks.neighbour import neighbour

ROOT = Path(__file__).parents[2]
RUNS = {
    "ours": [{"out_tok_s": 10.0, "foreign_cpu": 0.0}, {"out_tok_s": 30.0, "foreign_cpu": 0.2}],
    "peer": [{"out_tok_s": 5.0}, {"out_tok_s": 10.0}],
}


def script(folder: Path, name: str, code: str) -> str:
    path = folder / f"{name}.py"
    path.write_text(code, encoding="utf-8")
    return f"{sys.executable} {path}"


def test_the_ratio_is_the_median_of_pairs():
    own, peer = compare.table(RUNS, "out_tok_s").splitlines()[2:]
    assert own == "| ours | 20 | 10 | 30 | 1.00 | 0.20 |"
    assert peer == "| peer | 7.5 | 5 | 10 | 2.50 | nan |"


def test_a_figure_that_a_peer_has_none_of_has_no_ratio():
    runs = {"ours": [{"preemptions": 3}], "peer": [{"preemptions": 0}]}
    assert compare.table(runs, "preemptions").splitlines()[-1] == "| peer | 0 | 0 | 0 | nan | nan |"


def test_the_last_object_with_all_figures_is_read_whatever_stands_before_it(tmp_path):
    print_lines = "print('RESULT {\"a\": 1, \"b\": 2}'); print('{\"a\": 3}'); print('{broken')"
    found = compare.run(script(tmp_path, "p", print_lines).split(), ["a", "b"], 60)
    assert found == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    "code, message",
    [
        ("raise SystemExit('no weights')", "ended with 1 and no a:\nno weights"),
        ("import time; time.sleep(60)", "not done"),
    ],
)
def test_a_command_that_gives_no_figure_ends_the_comparison(tmp_path, code, message):
    with pytest.raises(RuntimeError, match=message):
        compare.run(script(tmp_path, "p", code).split(), ["a"], 1.0)


def test_runs_alternate_on_one_pinned_core_and_all_is_kept(tmp_path):
    report = f"""
import json, os
with open({str(tmp_path / "order")!r}, "a") as file: print(NAME, file=file)
cores = len(os.sched_getaffinity(0))
print(json.dumps({{"speed": SPEED, "cores": cores, "omp": os.environ["OMP_NUM_THREADS"]}}))
"""
    own = script(tmp_path, "own", f"NAME, SPEED = 'own', 4\n{report}")
    peer = script(tmp_path, "peer", f"NAME, SPEED = 'peer', 2\n{report}")
    kept = tmp_path / "kept.json"
    core = min(os.sched_getaffinity(0))
    command = ["--ours", own, "--peer", f"other={peer}", "--figure", "speed", "--repeat", "2", "--save", str(kept)]
    done = subprocess.run(
        [sys.executable, "-m", "integration.benchmarks.compare", *command, "--pin", str(core)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.splitlines()[-1] == "| other | 2 | 2 | 2 | 2.00 | nan |", done.stderr
    assert (tmp_path / "order").read_text().split() == ["own", "peer", "own", "peer"]
    assert json.loads(kept.read_text())["other"] == [{"speed": 2, "cores": 1, "omp": "1"}] * 2


GATED = """
import argparse, json, os
parser = argparse.ArgumentParser()
parser.add_argument("--repeat", type=int)
parser.add_argument("--gated", action="store_true")
args = parser.parse_args()
assert args.gated
for run in range(args.repeat):
    print("loaded some weights")
    print("ready", flush=True)
    input()
    with open(ORDER, "a") as file: print(NAME, run, file=file)
    print(json.dumps({"speed": SPEED * (run + 1), "pid": os.getpid()}), flush=True)
"""


def test_loaded_commands_take_turns_in_one_process_each(tmp_path):
    order, kept = tmp_path / "order", tmp_path / "kept.json"
    own = script(tmp_path, "own", f"ORDER, NAME, SPEED = {str(order)!r}, 'own', 4\n{GATED}")
    peer = script(tmp_path, "peer", f"ORDER, NAME, SPEED = {str(order)!r}, 'peer', 2\n{GATED}")
    options = ["--ours", own, "--peer", f"other={peer}", "--figure", "speed", "--repeat", "2", "--loaded"]
    compare.main([*options, "--save", str(kept), "--limit", "60"])
    assert order.read_text().split("\n")[:-1] == ["own 0", "peer 0", "own 1", "peer 1"]
    runs = json.loads(kept.read_text())
    assert {name: [run["speed"] for run in found] for name, found in runs.items()} == {"ours": [4, 8], "other": [2, 4]}
    assert [len({run["pid"] for run in found}) for found in runs.values()] == [1, 1]


@pytest.mark.parametrize(
    "code, message",
    [
        ("print('ready', flush=True); input(); raise SystemExit('out of memory')", "too early:\nout of memory"),
        ("raise SystemExit('no weights')", "too early:\nno weights"),
        ("import time; time.sleep(60)", "was not done after 1 s"),
    ],
)
def test_a_loaded_command_that_gives_no_figure_ends_the_comparison(tmp_path, code, message):
    command = script(tmp_path, "p", code)
    with pytest.raises(RuntimeError, match=message):
        compare.main(["--ours", command, "--peer", f"x={command}", "--loaded", "--limit", "1"])


def test_a_neighbour_computes_while_the_block_runs_and_is_gone_after_it():
    with neighbour(max(os.sched_getaffinity(0)), 30) as process:
        end = time.monotonic() + 10
        begin = machine_cpu()
        while machine_cpu() - begin < 0.3 and time.monotonic() < end:
            time.sleep(0.05)
        assert machine_cpu() - begin >= 0.3
        assert process.poll() is None
    assert process.poll() is not None


def test_a_neighbour_that_ended_early_spoils_the_run():
    with pytest.raises(RuntimeError, match="ended before the run did"), neighbour(0, 0.0) as process:
        process.wait(timeout=60)
