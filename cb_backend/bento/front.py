"""Traces of a process that calls an engine in another one: a front that depends on it, or a legacy service.

As in the engine's own process, BentoML's tracing there exports no span per streamed chunk and loses none at the end.
Without this the spans that a request came through would be missing where its trace is read.
"""

from __future__ import annotations

from ..telemetry.tracing.asgi_spans import drop_chunk_spans
from ..telemetry.tracing.provider import FLUSH_SECONDS, flush
from .compat import tracer_provider


def watch_front() -> None:
    """When the process begins to serve. May be called again."""
    drop_chunk_spans(tracer_provider())


def leave_front() -> None:
    """When it has stopped to serve: exports what waits, for a bounded time."""
    flush(tracer_provider(), FLUSH_SECONDS)
