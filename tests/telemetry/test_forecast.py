"""The forecast error: what came over what was expected, asked without changing the curves."""

from __future__ import annotations

import numpy as np
import pytest

from cb_backend.scheduling.lengths import LengthCurves
from cb_backend.telemetry.metrics.forecast import ForecastError, expected_lengths
from tests.telemetry.scripted_engine import ScriptedEngine


def learnt(length: int) -> LengthCurves:
    curves = LengthCurves()
    for _ in range(2000):
        curves.observe("", length, True)
    curves.include_running(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    return curves


def test_without_observations_the_blind_belief_is_expected():
    assert expected_lengths(LengthCurves(), "", [100]) == pytest.approx([LengthCurves().remaining("", 0, 100)])


def test_observed_lengths_are_expected_up_to_max_tokens():
    assert expected_lengths(learnt(40), "", [1000, 10, 1]) == [
        pytest.approx(40, rel=0.05),
        pytest.approx(10, rel=0.01),
        1.0,
    ]


def test_asking_leaves_the_curves_as_they_were():
    curves = learnt(40)
    curves.observe("", 500, True)  # the tables are out of date now, and must stay so
    before = curves._survival.copy(), curves._stale.copy()
    expected_lengths(curves, "", [1000])
    assert (before[0] == curves._survival).all() and (before[1] == curves._stale).all()


def test_each_request_that_comes_to_its_end_gives_one_ratio():
    engine = ScriptedEngine(overlap=True)
    ratios: list[tuple[str, float]] = []
    observer = ForecastError(learnt(8), lambda name, ratio: ratios.append((name, ratio)))
    engine.core.observers.append(observer)
    engine.before[1] = lambda: engine.abort("gone")  # ends while the step that admitted it is on the device
    engine.run(engine.request("gone", 4, 99), engine.request("r", 4, 4, request_class="chat"))
    assert ratios == [("chat", pytest.approx(1.0, rel=0.05))]
    assert observer._expected == {}
