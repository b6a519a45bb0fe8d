"""Puts the observers on an engine: tracing and recorder always, metrics and log lines in a service.

Configured only by what is there anyway: BentoML's `tracing=` in a service, OpenTelemetry's global provider elsewhere.
Nothing in here may harm serving: the engine takes off an observer that raises, and the last flush is bounded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from opentelemetry import trace

from .. import _version
from ..scheduling.lengths import LengthCurves
from .logs import follow_bentoml, logs_prompts
from .logs import logger as request_logger
from .metrics.forecast import ForecastError
from .observer import Observer
from .reporter import Reporter
from .summary import Summaries
from .timeline.recorder import Occupancy, Recorder
from .tracing.asgi_spans import drop_chunk_spans
from .tracing.context import captures_content
from .tracing.provider import FLUSH_SECONDS, flush
from .tracing.spans import Tracing

if TYPE_CHECKING:
    from .metrics.collector import Metrics


class ObservedCore(Protocol):
    """The engine thread, as far as it is watched."""

    observers: list[Observer]

    @property
    def snapshot(self) -> Occupancy: ...

    def stats(self) -> dict[str, float]: ...


class ObservedEngine(Protocol):
    """An engine that is built and not started (engine/build.py)."""

    @property
    def core(self) -> ObservedCore: ...

    @property
    def model_name(self) -> str: ...

    @property
    def tokenizer(self) -> Any: ...

    @property
    def curves(self) -> LengthCurves: ...


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


def offline(engine: ObservedEngine) -> Telemetry:
    """For an `Engine` in a program: the global tracer provider, log lines if their logger is enabled, no metrics."""
    return _observe(engine, trace.get_tracer_provider(), None, log=request_logger.isEnabledFor(logging.INFO))


def service(engine: ObservedEngine, provider: Any) -> Telemetry:
    """For an engine in a service: the service's tracer `provider` without its chunk spans, metrics, log lines."""
    from .metrics.collector import Metrics

    follow_bentoml()
    drop_chunk_spans(provider)
    return _observe(engine, provider, Metrics(engine.model_name, engine.core.stats()), log=True)


def _observe(engine: ObservedEngine, provider: Any, metrics: Metrics | None, *, log: bool) -> Telemetry:
    core, decode = engine.core, _decoder(engine.tokenizer)
    bytes_per_block = core.snapshot.bytes_per_block
    tracing = Tracing(
        trace.get_tracer("cb_backend", _version.__version__, tracer_provider=provider),
        engine.model_name,
        bytes_per_block=bytes_per_block,
        decode=decode if captures_content() else None,
    )
    recorder = Recorder(lambda: core.snapshot, engine.model_name)
    observers: list[Observer] = [tracing, recorder]
    reporter = None
    if log or metrics is not None:
        reporter = Reporter(core.stats, metrics, decode)
        reporter.start()
        summaries = Summaries(
            reporter.summary,
            tracing.span_context,
            bytes_per_block=bytes_per_block,
            with_tokens=logs_prompts() and decode is not None,
        )
        # Before tracing, which forgets a request's span when the request ends.
        observers = [summaries, tracing, recorder, reporter]
        if metrics is not None:
            observers.append(ForecastError(engine.curves, reporter.forecast))
    core.observers.extend(observers)
    return Telemetry(provider, tracing, recorder, reporter)


def _decoder(tokenizer: Any) -> Callable[[Sequence[int]], str] | None:
    if tokenizer is None:
        return None
    return lambda token_ids: tokenizer.decode(list(token_ids))
