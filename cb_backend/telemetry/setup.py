"""Puts the observers on an engine: tracing and recorder always, metrics and log lines in a service.

Configured only by what is there anyway: BentoML's `tracing=` in a service, OpenTelemetry's global provider elsewhere.
Nothing in here may harm serving: an observer that raises is reported once and taken off; the last flush is bounded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from opentelemetry import trace

from .. import _version
from ..request import Request, StepPlan, TokenDelta
from .asgi_spans import drop_chunk_spans
from .context import captures_content
from .forecast import ForecastError
from .logs import follow_bentoml, logs_prompts
from .logs import logger as request_logger
from .observer import Observer
from .provider import FLUSH_SECONDS, flush
from .recorder import Recorder
from .reporter import Reporter
from .summary import Summaries
from .tracing import Tracing

if TYPE_CHECKING:
    from ..engine.build import Parts
    from .metrics import Metrics

logger = logging.getLogger("cb_backend")


class Telemetry:
    """What watches one engine. `recorder` is what the timeline page shows."""

    def __init__(self, provider: Any, tracing: Tracing, recorder: Recorder, reporter: Reporter | None) -> None:
        self.recorder = recorder
        self._provider = provider
        self._tracing = tracing
        self._reporter = reporter

    def refused(self, code: str) -> None:
        """Counts a request that was refused before it reached the engine thread; `code`: `RequestError.code`."""
        if self._reporter is not None:
            self._reporter.refused(code)

    def disconnected(self) -> None:
        """Counts a reader that left before its request ended."""
        if self._reporter is not None:
            self._reporter.disconnected()

    def close(self) -> None:
        """Ends every open span, writes the last metrics and lines, and flushes the exporters for at most
        `FLUSH_SECONDS`. Call it after the engine thread has ended."""
        self._tracing.close()
        if self._reporter is not None:
            self._reporter.close()
        flush(self._provider, FLUSH_SECONDS)


def offline(parts: Parts) -> Telemetry:
    """For an `Engine` in a program: the global tracer provider, log lines if their logger is enabled, no metrics."""
    return _observe(parts, trace.get_tracer_provider(), None, log=request_logger.isEnabledFor(logging.INFO))


def service(parts: Parts, provider: Any) -> Telemetry:
    """For an engine in a service: the service's tracer `provider` without its chunk spans, metrics, log lines."""
    from .metrics import Metrics

    follow_bentoml()
    drop_chunk_spans(provider)
    return _observe(parts, provider, Metrics(parts.model_name, parts.stats()), log=True)


def _observe(parts: Parts, provider: Any, metrics: Metrics | None, *, log: bool) -> Telemetry:
    core, decode = parts.core, _decoder(parts.tokenizer)
    tracing = Tracing(
        trace.get_tracer("cb_backend", _version.__version__, tracer_provider=provider),
        parts.model_name,
        bytes_per_block=parts.storage.bytes_per_block,
        decode=decode if captures_content() else None,
    )
    recorder = Recorder(core.choices, parts.model_name)
    observers: list[Observer] = [tracing, recorder]
    reporter = None
    if log or metrics is not None:
        reporter = Reporter(parts.stats, metrics, decode)
        reporter.start()
        summaries = Summaries(
            reporter.summary,
            tracing.span_context,
            bytes_per_block=parts.storage.bytes_per_block,
            with_tokens=logs_prompts() and decode is not None,
        )
        # Before tracing, which forgets a request's span when the request ends.
        observers = [summaries, tracing, recorder, reporter]
        if metrics is not None:
            observers.append(ForecastError(parts.curves, reporter.forecast))
    core.observers.extend(Guarded(observer) for observer in observers)
    return Telemetry(provider, tracing, recorder, reporter)


def _decoder(tokenizer: Any) -> Callable[[Sequence[int]], str] | None:
    if tokenizer is None:
        return None
    return lambda token_ids: tokenizer.decode(list(token_ids))


class Guarded:
    """An observer that can fail without the engine: its first exception is logged, and then it is left alone."""

    def __init__(self, observer: Observer) -> None:
        self._observer: Observer | None = observer

    def on_added(self, request: Request) -> None:
        if self._observer is not None:
            try:
                self._observer.on_added(request)
            except Exception:
                self._give_up()

    def on_step(self, plan: StepPlan, started: float, ended: float, error: str | None = None) -> None:
        if self._observer is not None:
            try:
                self._observer.on_step(plan, started, ended, error)
            except Exception:
                self._give_up()

    def on_finished(self, request: Request, delta: TokenDelta) -> None:
        if self._observer is not None:
            try:
                self._observer.on_finished(request, delta)
            except Exception:
                self._give_up()

    def _give_up(self) -> None:
        logger.exception("%s failed and is switched off; serving goes on", type(self._observer).__name__)
        self._observer = None
