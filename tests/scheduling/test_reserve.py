"""The reserve: verdicts on admissions by hand, how they move z, and what share of overflows that leads to."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest

from cb_backend.config import AdmissionConfig
from cb_backend.request import Request
from cb_backend.scheduling.admission import Admission
from cb_backend.scheduling.lengths import LengthCurves
from cb_backend.scheduling.reserve import AIM, LEAST, MORE, STEP, Member, Reserve

from .scripted import make_request, make_scheduler, step

RISK = 0.1
START = NormalDist().inv_cdf(1 - RISK)


def make_reserve(num_blocks: int = 10, block_size: int = 4) -> Reserve:
    return Reserve(RISK, num_blocks, block_size)


def sequence(prompt: int, max_tokens: int = 100) -> Request:
    (request,) = make_request("r", prompt, max_tokens)
    return request


def goes_on(*requests: Request, tokens: int) -> None:
    for request in requests:
        request.token_ids += [5] * tokens


def test_it_starts_where_a_right_forecast_stays():
    assert make_reserve().z == pytest.approx(START)


def test_two_that_together_took_more_than_the_pool_are_an_overflow():
    first, second = sequence(8), sequence(8)
    reserve = make_reserve(num_blocks=10)
    reserve.admitted([Member(first, 0), Member(second, 0)], 0)
    goes_on(first, tokens=13)
    goes_on(second, tokens=14)  # all but the newest token are stored: 20 and 21, in 5 and 6 blocks
    reserve.ended(first)
    assert (reserve.judged, reserve.overflowed) == (1, 1)
    assert reserve.z == pytest.approx(START + STEP * (1 - AIM * RISK))


def test_two_that_together_filled_the_pool_are_none():
    first, second = sequence(8, max_tokens=13), sequence(8, max_tokens=33)
    reserve = make_reserve(num_blocks=10)
    reserve.admitted([Member(first, 0), Member(second, 0)], 0)
    goes_on(first, tokens=13)
    goes_on(second, tokens=12)
    reserve.ended(first)  # 5 and 5 blocks; from here on the second needs 10 at most
    assert (reserve.judged, reserve.overflowed) == (1, 0)
    assert reserve.z == pytest.approx(START - STEP * AIM * RISK)


def test_there_is_no_verdict_while_an_overflow_may_still_come():
    first, second, third = sequence(8), sequence(8), sequence(8)
    reserve = make_reserve(num_blocks=10)
    reserve.admitted([Member(first, 0), Member(second, 0), Member(third, 0)], 0)
    goes_on(first, second, third, tokens=4)
    reserve.ended(first)
    assert reserve.judged == 0
    goes_on(second, third, tokens=20)  # 31 stored and 32 known tokens: 8 + 8 blocks
    reserve.ended(second)
    assert (reserve.judged, reserve.overflowed) == (1, 1)


def test_who_was_not_there_has_no_part_in_the_verdict():
    inside, outside = sequence(8), sequence(400)
    reserve = make_reserve(num_blocks=10)
    reserve.admitted([Member(inside, 0)], 0)
    reserve.ended(outside)
    assert reserve.judged == 0
    goes_on(inside, tokens=4)
    reserve.ended(inside)
    assert (reserve.judged, reserve.overflowed) == (1, 0)


def test_shared_blocks_are_counted_once():
    # 6 blocks of prompt in common, and 2 of each one's own: 10 of 10, and 16 if they were counted twice.
    first, second = sequence(24), sequence(24)
    reserve = make_reserve(num_blocks=10)
    reserve.admitted([Member(first, 6), Member(second, 6)], 6)
    goes_on(first, second, tokens=8)
    reserve.ended(first)
    reserve.ended(second)
    assert (reserve.judged, reserve.overflowed) == (1, 0)


def test_blocks_that_one_shared_are_still_there_when_it_has_ended():
    # 6 blocks in common; the two that are left may need 3 each of their own, and take them: 12 of 10.
    first, second, third = (sequence(24, max_tokens=13) for _ in range(3))
    reserve = make_reserve(num_blocks=10)
    reserve.admitted([Member(request, 6) for request in (first, second, third)], 6)
    goes_on(first, tokens=1)
    reserve.ended(first)
    assert reserve.judged == 0
    goes_on(second, third, tokens=13)
    reserve.ended(second)
    assert (reserve.judged, reserve.overflowed) == (1, 1)


def test_it_stays_within_its_bounds():
    reserve = make_reserve(num_blocks=10)
    for overflow, bound in ((True, START + MORE), (False, LEAST)):
        for _ in range(200):
            judge(reserve, overflow)
        assert reserve.z == pytest.approx(bound)


def judge(reserve: Reserve, overflow: bool) -> None:
    request = sequence(8)
    reserve.admitted([Member(request, 0)], 0)
    goes_on(request, tokens=60 if overflow else 4)
    reserve.ended(request)


def test_a_risk_above_one_half_may_stay_below_the_mean():
    reserve = Reserve(0.9, 10, 4)
    assert reserve.z < LEAST
    judge(reserve, overflow=False)
    assert reserve.z == pytest.approx(NormalDist().inv_cdf(0.1))


@pytest.mark.parametrize("scale", [0.3, 1.0, 1.5])
def test_over_time_the_share_of_overflows_is_the_risk_though_the_forecast_is_wrong(scale):
    # The true use deviates `scale` times as much as was forecast.
    rng = np.random.default_rng(1)
    reserve = make_reserve()
    n = 4000
    for _ in range(n):
        judge(reserve, overflow=bool(scale * rng.normal() > reserve.z))
    bound = (reserve.most - LEAST + STEP) / (STEP * n)  # how far z can have moved, in verdicts
    assert reserve.judged == n
    assert reserve.overflowed / n == pytest.approx(AIM * RISK, abs=bound)
    assert reserve.overflowed / n < RISK


def test_the_number_of_watched_requests_is_bounded():
    reserve = make_reserve(num_blocks=10)
    crowd = [sequence(8) for _ in range(600)]
    for _ in range(3):
        reserve.admitted([Member(request, 0) for request in crowd], 0)
    for request in crowd:
        reserve.ended(request)
    assert reserve.judged == 1


def test_a_larger_crowd_is_watched_alone():
    reserve = make_reserve(num_blocks=10)
    crowd = [sequence(8) for _ in range(2000)]
    reserve.admitted([Member(request, 0) for request in crowd], 0)
    reserve.ended(crowd[0])
    assert (reserve.judged, reserve.overflowed) == (1, 1)


def run_scheduler(num_blocks: int) -> Admission:
    admission = Admission(AdmissionConfig(risk=RISK), num_blocks, 4, LengthCurves())
    scheduler = make_scheduler(num_blocks, 4, admission=admission)
    admission.pool = scheduler.pool
    for i in range(40):
        for choice in make_request(f"r{i}", 5, 12 + i % 20, n=1 + i % 2):
            scheduler.add(choice)
    while scheduler.has_work:
        step(scheduler)
    return admission


def test_admissions_into_a_short_pool_are_judged_and_none_stays_open():
    reserve = run_scheduler(num_blocks=40).reserve
    assert reserve.judged > 10
    assert reserve.watched == 0


def test_admissions_that_no_reserve_would_have_refused_are_not_judged():
    reserve = run_scheduler(num_blocks=4000).reserve
    assert (reserve.judged, reserve.watched) == (0, 0)
    assert reserve.z == pytest.approx(START)
