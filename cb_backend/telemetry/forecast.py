"""How good the forecast of output lengths is: tokens that came over tokens expected at admission.

An observer on the engine thread, because the length curves belong to it. Asks the curves without changing them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..request import FinishReason, Request, StepPlan, TokenDelta
from ..scheduling.lengths import SCALE, LengthCurves

_COUNTS = (FinishReason.STOP, FinishReason.LENGTH)


class ForecastError:
    """Observer of `EngineCore`.

    Args:
        curves: what admission forecasts with.
        sink: gets (request class, generated / expected) of each request that came to its end.
    """

    def __init__(self, curves: LengthCurves, sink: Callable[[str, float], None]) -> None:
        self._curves = curves
        self._sink = sink
        self._expected: dict[Request, float] = {}  # 0: not admitted yet

    def on_added(self, request: Request) -> None:
        self._expected[request] = 0.0

    def on_step(self, plan: StepPlan, started: float, ended: float, error: str | None = None) -> None:
        by_class: dict[str, list[Request]] = {}
        for request in plan.admitted:
            if request in self._expected and request.max_tokens > 0:
                by_class.setdefault(request.request_class, []).append(request)
        for request_class, requests in by_class.items():
            expected = expected_lengths(self._curves, request_class, [request.max_tokens for request in requests])
            self._expected.update(zip(requests, expected, strict=True))

    def on_finished(self, request: Request, delta: TokenDelta) -> None:
        expected = self._expected.pop(request, None)
        if expected and delta.finish_reason in _COUNTS:
            self._sink(request.request_class, request.num_settled / expected)


def expected_lengths(curves: LengthCurves, request_class: str, limits: Sequence[int]) -> list[float]:
    """Mean of min(output length, limit) for each limit, by the curves as they are: the sum of P(length > t) over t."""
    row = np.array([curves.row(request_class)], dtype=np.int64)
    alive = curves.survival(row, np.zeros(1, dtype=np.int64), SCALE)[0][0].astype(np.float64)
    area = np.append(0.0, np.cumsum(alive[:-1] * np.diff(SCALE)))  # up to each point of the scale
    wanted = np.asarray(limits, dtype=np.int64)
    last: Any = np.maximum(np.searchsorted(SCALE, wanted) - 1, 0)  # point below each limit
    means: list[float] = np.maximum(1.0, area[last] + alive[last] * (wanted - SCALE[last])).tolist()
    return means
