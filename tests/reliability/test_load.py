"""A slice of the load (load.py): under trouble every answer is right, every fault has its status, and nothing is held.

How long probes wait and how memory grows is measured by the whole run (`make load`), which takes minutes.
"""

from __future__ import annotations

import pytest

from .load import measure, slope


@pytest.mark.timeout(280)
def test_a_load_with_trouble_is_answered_exactly_and_leaves_nothing() -> None:
    result = measure(requests=600, clients=60, count=60)
    assert result["wrong"] == []
    assert result["held"] == {}
    assert result["requests"] == 600
    assert result["preemptions"] > 0
    kinds = ("good", "left", "bad 400")
    assert all(result["counts"].get(kind) for kind in kinds), result["counts"]


def test_the_slope_is_that_of_the_second_half() -> None:
    warm = [(n, 500.0 + n) for n in range(0, 1000, 10)]
    steady = [(n, 1500.0 + 0.002 * (n - 1000)) for n in range(1000, 2000, 10)]
    assert slope(warm + steady) == pytest.approx(2.0)
