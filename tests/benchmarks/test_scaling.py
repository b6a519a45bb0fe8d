"""Steps over the batch's size: the fit, what is super-linear, and a run on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from integration.benchmarks import scaling
from integration.benchmarks.scaling import Point, fit, report, steps_until_all_run, superlinear

ROOT = Path(__file__).parents[2]


def grid(step_ms) -> list[Point]:
    return [Point(n, c, step_ms(n, c)) for n in (1, 2, 4, 8) for c in (100, 1000)]


def test_the_fit_finds_the_constants_of_a_linear_cost():
    found = fit(grid(lambda n, c: 5 + 0.5 * n + 0.25 * n * c / 1000))
    assert (found.per_step, found.per_sequence, found.per_kilotoken) == pytest.approx((5, 0.5, 0.25))
    assert found.worst == pytest.approx(1.0)


def test_a_doubling_that_more_than_doubles_a_step_is_named():
    points = grid(lambda n, c: n * n if c == 100 else n)
    assert [(a.sequences, b.sequences, a.context) for a, b in superlinear(points)] == [
        (1, 2, 100),
        (2, 4, 100),
        (4, 8, 100),
    ]
    assert "super-linear: 4 to 8 sequences at context 100: 16.0 to 64.0 ms" in report(points)


def test_a_linear_cost_is_called_that():
    assert report(grid(lambda n, c: 1 + n)).endswith("no doubling of the sequences takes more than 2.2 times the time")


@pytest.mark.parametrize(
    ("sequences", "tokens_each", "budget", "steps"),
    [
        (1, 33, 512, 1),
        (15, 33, 512, 1),
        (16, 33, 512, 2),
        (4, 8, 16, 3),  # 2, then one in what two decodes leave, then one
        (3, 33, 16, 3),  # a prompt that is longer than the budget
    ],
)
def test_prompts_get_what_decodes_leave(sequences, tokens_each, budget, steps):
    assert steps_until_all_run(sequences, tokens_each, budget) == steps


def test_as_many_sequences_as_an_engine_runs_come_together(tiny_llama, capsys):
    options = ["--model", str(tiny_llama), "--sequences", "256", "--contexts", "32", "--steps", "3", "--threads", "1"]
    scaling.main(options)
    assert "| 256 | " in capsys.readouterr().out


def test_the_command_measures_every_point_of_an_engine_and_draws_them(tiny_llama, tmp_path):
    saved, plot = tmp_path / "points.json", tmp_path / "plot.svg"
    command = [
        "--model",
        str(tiny_llama),
        "--sequences",
        "1,3",
        "--contexts",
        "32,96",
        "--steps",
        "3",
        "--threads",
        "1",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "integration.benchmarks.scaling", *command, "--save", str(saved), "--plot", str(plot)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    points = json.loads(saved.read_text())
    assert [(p["sequences"], p["context"]) for p in points] == [(1, 32), (3, 32), (1, 96), (3, 96)]
    assert all(0 < p["step_ms"] < 60_000 for p in points)
    assert "| 3 | " in done.stdout
    assert plot.read_text().count("<polyline") == 2
