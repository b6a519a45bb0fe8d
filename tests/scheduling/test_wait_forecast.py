"""What Retry-After and the refusal of unreachable deadlines are computed from."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from cb_backend.scheduling.lengths import LengthCurves
from cb_backend.scheduling.wait_forecast import WaitForecaster
from tests.scheduling.scripted import make_request, make_scheduler, step

BUDGET = 32


def curves_of(lengths: Iterable[int], request_class: str = "") -> LengthCurves:
    curves = LengthCurves(half_life=10**9)
    for length in lengths:
        curves.observe(request_class, length, True)
    return curves


def forecast_of(
    lengths: Iterable[int] = (), *, running: int = 0, step: float = 0.5, pool: int = 1000, budget: int = BUDGET
):
    return WaitForecaster(curves_of(lengths), pool, budget).forecast(running, step)


def test_start_is_estimated_by_littles_law():
    forecast = forecast_of([100] * 10_000, running=10, step=0.02, pool=1_000_000)
    # One of ten ends per a tenth of the mean length; what was believed without observations has the weight 0.5.
    mean = (100 * 10_000 + 0.5 * LengthCurves().remaining("", 0, 1_000_000)) / 10_000.5
    assert forecast.seconds_until_start(4) == pytest.approx(5 * mean / 10 * 0.02, rel=1e-3)


def test_start_is_a_step_per_request_when_nothing_is_known():
    assert forecast_of(step=0.1).seconds_until_start(3) == pytest.approx(0.4)


def test_the_soonest_finish_is_prefill_and_the_shortest_output():
    forecast = forecast_of([50] * 200)
    # 100 prompt tokens in chunks of 32: 4 steps, the last of which gives the first of 50 tokens.
    assert forecast.seconds_until_finish(100, 400, "", 0) == pytest.approx((4 + 49) * 0.5)
    assert forecast.seconds_until_finish(100, 20, "", 0) == pytest.approx((4 + 19) * 0.5)
    assert forecast.seconds_until_finish(100, 400, "", 29) == pytest.approx((5 + 49) * 0.5)


def test_an_engine_that_knows_nothing_refuses_only_what_cannot_be_prefilled():
    assert forecast_of().seconds_until_finish(100, 400, "", 0) == pytest.approx(2.0)


def test_the_soonest_finish_is_never_later_than_an_idle_engine():
    for prompt, output in ((1, 10), (5, 30), (40, 10)):
        bound = forecast_of(range(10, 210), step=1.0, budget=16).seconds_until_finish(prompt, 100, "", 0)
        scheduler = make_scheduler(64, 4, budget=16)
        scheduler.add(*make_request(f"{prompt}", prompt, output))
        steps = 0
        while scheduler.has_work:
            step(scheduler)
            steps += 1
        assert bound <= steps


def test_a_class_without_observations_is_not_taken_for_the_others():
    forecast = forecast_of([50] * 200, step=1.0)
    assert forecast.seconds_until_finish(1, 400, "unknown", 0) == pytest.approx(1.0)


def test_a_forecast_does_not_change_with_later_observations():
    curves = curves_of([50] * 200, "chat")
    forecaster = WaitForecaster(curves, 1000, BUDGET)
    before = forecaster.forecast(10, 1.0)
    for _ in range(200):
        curves.observe("chat", 3, True)
    assert before.seconds_until_finish(1, 400, "chat", 0) == pytest.approx(50.0)
    after = forecaster.forecast(10, 1.0)
    assert after.seconds_until_finish(1, 400, "chat", 0) == pytest.approx(3.0)
    assert after.steps_per_end < before.steps_per_end


def test_a_forgotten_class_is_forgotten():
    curves = LengthCurves(max_classes=2)
    for name in ("a", "b"):
        for _ in range(200):
            curves.observe(name, 50, True)
    assert curves.shortest_by_class() == {"": 50, "a": 50, "b": 50}
    curves.observe("c", 50, True)
    assert curves.shortest_by_class() == {"": 50, "b": 50}
