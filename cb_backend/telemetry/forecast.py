"""How good the forecast of output lengths is: tokens that came over tokens expected at admission.

An observer on the engine thread, because the length curves belong to it. Asks the curves without changing them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..request import FinishReason, Request, StepPlan, TokenDelta
from ..scheduling.lengths import SCALE, LengthCurves

_COUNTS = (FinishReason.STOP, FinishReason.TOOL_CALLS, FinishReason.LENGTH)


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
        for request in plan.admitted:
            if request in self._expected and request.max_tokens > 0:
                self._expected[request] = expected_length(self._curves, request.request_class, request.max_tokens)

    def on_finished(self, request: Request, delta: TokenDelta) -> None:
        expected = self._expected.pop(request, None)
        if expected and delta.finish_reason in _COUNTS:
            self._sink(request.request_class, request.num_settled / expected)


def expected_length(curves: LengthCurves, request_class: str, max_tokens: int) -> float:
    """Mean of min(output length, max_tokens) by the curves as they are: the sum of P(length > t) over t."""
    horizons: Any = SCALE[: np.searchsorted(SCALE, max_tokens)]
    row = np.array([curves.row(request_class)], dtype=np.int64)
    alive, _basis = curves.survival(row, np.zeros(1, dtype=np.int64), horizons)
    widths = np.diff(np.append(horizons, max_tokens))
    return max(1.0, float(alive[0] @ widths))
