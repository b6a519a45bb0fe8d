"""Takes the slow half of metrics and logs off the engine thread.

The engine thread appends to bounded queues; one daemon thread empties them once a second while anything happens, and a
last time when the engine has become idle, so that gauges return to zero. Not more often: on a CPU each time takes a
core from threads that compute in step with each other. If it cannot keep up, the oldest entries are dropped; the engine
never waits.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..request import Request, TokenDelta
from ..scheduling.plan import StepPlan
from .logs import log_request
from .metrics.collector import Metrics, StepNumbers
from .summary import RequestSummary

logger = logging.getLogger("cb_backend")

_PERIOD = 1.0  # seconds
_LONGEST = 65_536


class Reporter:
    """Observer of `EngineCore`, and sink of `Summaries`.

    Args:
        stats: `Engine.stats`.
        metrics: None: only log lines are written.
        decode: for the texts of a log line, where they are asked for.
    """

    def __init__(
        self,
        stats: Callable[[], Mapping[str, float]],
        metrics: Metrics | None,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self._stats = stats
        self._metrics = metrics
        self._decode = decode
        self._steps: deque[StepNumbers] = deque(maxlen=_LONGEST)
        self._waiting: dict[int, str] = {}  # class of each request that was not admitted yet, by seq_id
        self._ends: deque[RequestSummary] = deque(maxlen=_LONGEST)
        self._events: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque(maxlen=_LONGEST)
        self._woken = threading.Event()
        self._closing = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="cb-reporter", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout: float = 5.0) -> None:
        """Reports what is left and ends the thread."""
        self._closing.set()
        self._woken.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)

    # -- engine thread and event loop -------------------------------------------------------------------------------

    def on_added(self, request: Request) -> None:
        if self._metrics is not None and request.index == 0:  # its other choices follow it
            self._waiting[request.seq_id] = request.request_class
        self._wake()

    def on_step(self, plan: StepPlan, started: float, ended: float, error: str | None = None) -> None:
        if self._metrics is not None:
            admitted = tuple([self._waiting.pop(seq_id) for seq_id in plan.admitted if seq_id in self._waiting])
            self._steps.append(StepNumbers(ended - started, len(plan.seq_ids), plan.num_tokens, admitted, error))

    def on_finished(self, request: Request, delta: TokenDelta) -> None:
        self._waiting.pop(request.seq_id, None)
        self._wake()

    def summary(self, summary: RequestSummary) -> None:
        self._ends.append(summary)

    def refused(self, code: str) -> None:
        self._events.append((Metrics.refused, (code,)))
        self._wake()

    def disconnected(self) -> None:
        self._events.append((Metrics.disconnected, ()))
        self._wake()

    def forecast(self, request_class: str, ratio: float) -> None:
        self._events.append((Metrics.forecast, (request_class, ratio)))

    def _wake(self) -> None:
        if not self._woken.is_set():
            self._woken.set()

    # -- its own thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        busy = False
        while not self._closing.is_set():
            if not busy:
                self._woken.wait()
            self._closing.wait(_PERIOD)
            self._woken.clear()
            busy = self._try_report()
        self._try_report()

    def _try_report(self) -> bool:
        try:
            return self.report()
        except Exception:
            if not self._failed:  # once: it may well happen every second
                self._failed = True
                logger.exception("metrics or request logs cannot be written")
            return False

    def report(self) -> bool:
        """Writes what has gathered; True while the engine has unfinished requests."""
        stats = self._stats()
        metrics = self._metrics
        while self._steps:
            step = self._steps.popleft()
            if metrics is not None:
                metrics.step(step)
        while self._ends:
            summary = self._ends.popleft()
            if metrics is not None:
                metrics.finished(summary)
            log_request(summary, self._decode)
        while self._events:
            count, values = self._events.popleft()
            if metrics is not None:
                count(metrics, *values)
        if metrics is not None:
            metrics.refresh(stats)
        return bool(stats["running"] or stats["waiting"])
