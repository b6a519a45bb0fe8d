"""Keeps BentoML's tracing from exporting one span per streamed chunk.

OpenTelemetry's ASGI instrumentation makes a span for every `http.response.body` message, so an answer of 500 tokens
is 500 spans; BentoML 1.4.40 has no option for it. The spans are dropped on their way to the exporters. They carry
`asgi.event.type`, but for a `receive` that is cancelled, which only its scope and kind tell from the server's span.
"""

from __future__ import annotations

import logging
from typing import Any

from opentelemetry.trace import SpanKind

logger = logging.getLogger("cb_backend")

_MARK = "asgi.event.type"
_SCOPE = "opentelemetry.instrumentation.asgi"


class DropChunkSpans:
    """A span processor that passes on to another one all spans but those of single ASGI messages."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        self._inner.on_start(span, parent_context)

    def on_end(self, span: Any) -> None:
        if not _is_of_a_message(span):
            self._inner.on_end(span)

    def __getattr__(self, name: str) -> Any:  # shutdown, force_flush and what later versions of the SDK call
        return getattr(self._inner, name)


def _is_of_a_message(span: Any) -> bool:
    if _MARK in (span.attributes or {}):
        return True
    scope = span.instrumentation_scope
    return span.kind is SpanKind.INTERNAL and scope is not None and scope.name == _SCOPE


def drop_chunk_spans(provider: Any) -> bool:
    """Wraps the processors of `provider` once; False where the SDK does not show them (then chunk spans stay)."""
    active: Any = getattr(provider, "_active_span_processor", None)
    processors = getattr(active, "_span_processors", None)
    if not isinstance(processors, tuple):
        logger.warning("tracing exports a span per streamed chunk: this OpenTelemetry SDK hides its span processors")
        return False
    active._span_processors = tuple(p if isinstance(p, DropChunkSpans) else DropChunkSpans(p) for p in processors)
    return True
