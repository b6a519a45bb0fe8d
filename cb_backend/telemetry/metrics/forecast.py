"""How good the forecast of output lengths is: tokens that came over tokens expected at admission.

An observer on the engine thread, because the length curves belong to it. Asks the curves without changing them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ...request import FinishReason, Request, TokenDelta
from ...scheduling.lengths import SCALE, LengthCurves
from ...scheduling.plan import StepPlan

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
        self._waiting: dict[int, Request] = {}  # by seq_id, until admitted
        self._expected: dict[int, float] = {}  # by seq_id

    def on_added(self, request: Request) -> None:
        if request.max_tokens > 0:
            self._waiting[request.seq_id] = request

    def on_step(self, plan: StepPlan, started: float, ended: float, error: str | None = None) -> None:
        by_class: dict[str, list[Request]] = {}
        for seq_id in plan.admitted:
            request = self._waiting.pop(seq_id, None)
            if request is not None:
                by_class.setdefault(request.request_class, []).append(request)
        for request_class, requests in by_class.items():
            expected = expected_lengths(self._curves, request_class, [request.max_tokens for request in requests])
            self._expected.update(zip([request.seq_id for request in requests], expected, strict=True))

    def on_finished(self, request: Request, delta: TokenDelta) -> None:
        self._waiting.pop(request.seq_id, None)
        expected = self._expected.pop(request.seq_id, None)
        if expected and delta.finish_reason in _COUNTS:
            self._sink(request.request_class, request.num_settled / expected)


def expected_lengths(curves: LengthCurves, request_class: str, limits: Sequence[int]) -> list[float]:
    """Mean of min(output length, limit) for each limit, by the curves as they are: the sum of P(length > t) over t."""
    wanted = np.asarray(limits, dtype=np.int64)
    rows = np.full(len(wanted), curves.row(request_class), dtype=np.int64)
    alive = curves.survival(rows, np.zeros_like(wanted), wanted, SCALE)[0].astype(np.float64)
    width = np.clip(np.minimum(np.append(SCALE[1:], SCALE[-1] + 1), wanted[:, None]) - SCALE, 0, None)
    means: list[float] = np.maximum(1.0, (alive * width).sum(axis=1)).tolist()
    return means
