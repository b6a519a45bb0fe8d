"""`risk` means what it says: replays of real traces and synthetic mixes, cut down (docs/admission.md has the whole)."""

from __future__ import annotations

import math
from functools import cache

import pytest

from integration.benchmarks.replay import Outcome, make_policy, replay
from integration.benchmarks.workloads import WORKLOADS, requests

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


def test_the_measure_sees_what_admission_without_a_forecast_does():
    assert outcome("bimodal, classes", "prompt").overflow > 0.05
