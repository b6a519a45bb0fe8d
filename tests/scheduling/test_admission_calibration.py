"""`risk` means what it says: replays of real traces and synthetic mixes, cut down (docs/admission.md has the whole)."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path

import pytest

from integration.benchmarks.replay import Outcome, make_policy, replay
from integration.benchmarks.workloads import WORKLOADS, Arrival, requests

W256S = Path(__file__).parents[1] / "data" / "w256s.json"
NUM_BLOCKS, BLOCK_SIZE, REQUESTS = 150, 16, 500
SHIFTING = {"drift": 3000, "jumps": 3000}  # once down and up; over one jump


@cache
def outcome(workload: str, policy: str, risk: float = 0.01) -> Outcome:
    admission = make_policy(policy, NUM_BLOCKS, BLOCK_SIZE, risk)
    arrivals = requests(workload, SHIFTING.get(workload, REQUESTS))
    return replay(arrivals, admission, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("risk", [0.01, 0.05, 0.2])
def test_the_share_of_overflows_is_within_the_risk(workload, risk):
    result = outcome(workload, "forecast", risk)
    expected = 1.96 * math.sqrt(risk * (1 - risk) / result.admissions)
    assert result.admissions >= REQUESTS  # who was preempted is admitted again
    assert result.overflow <= risk + max(expected, result.sampling_error)
    assert result.preempted <= result.overflow + expected


@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_forecast_serves_more_than_the_worst_case(workload):
    forecast, worst = outcome(workload, "forecast", 0.01), outcome(workload, "worst_case")
    assert worst.preemptions == 0
    assert forecast.requests_per_1000_steps > worst.requests_per_1000_steps


@cache
def starved(policy: str, num_blocks: int) -> Outcome:
    """tests/data/w256s.json: outputs of 16 to 128 tokens where 256 are allowed, from a blind start."""
    requests = json.loads(W256S.read_text(encoding="utf-8"))["requests"]
    arrivals = [Arrival(len(r["prompt_token_ids"]), r["output_tokens"], r["max_tokens"]) for r in requests]
    return replay(arrivals, make_policy(policy, num_blocks, 32), num_blocks=num_blocks, block_size=32, budget=512)


@pytest.mark.parametrize("num_blocks", [120, 180, 300])
def test_a_blind_start_in_a_starved_pool_wastes_few_steps(num_blocks):
    forecast, prompt, worst = (starved(p, num_blocks) for p in ("forecast", "prompt", "worst_case"))
    assert forecast.steps * 1.7 < worst.steps
    assert forecast.steps < prompt.steps * 1.1  # whose recomputing takes no step here
    assert forecast.preemptions * 5 < prompt.preemptions
    assert forecast.recomputed * 5 < prompt.recomputed and forecast.recomputed < 0.02


def test_the_measure_sees_what_admission_without_a_forecast_does():
    assert outcome("bimodal, classes", "prompt").overflow > 0.05
