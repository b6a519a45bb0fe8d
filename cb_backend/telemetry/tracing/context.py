"""What travels with a request from the event loop to the engine thread, inside its OpenTelemetry context.

The reader of HTTP knows the operation, the messages and how long it compiled a grammar; the engine thread makes the
spans. `request_context` is called where the request came in, while the server's span is current.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry.context import Context

from .. import semconv

_KEY = otel_context.create_key("cb_backend.request")
_CAPTURE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"


def captures_content() -> bool:
    """True where the operator asked for prompts and answers in traces (OpenTelemetry's own variable)."""
    return os.environ.get(_CAPTURE, "").strip().lower() in ("true", "1", "span_only", "span_and_event")


@dataclass(slots=True)
class Caller:
    """What the caller knows of a request. `phases`: work done before the engine saw it, `time.monotonic()` seconds."""

    operation: str = semconv.TEXT_COMPLETION
    stream: bool = False
    messages: Sequence[Mapping[str, Any]] | None = None
    phases: list[tuple[str, float, float]] = field(default_factory=list)


def request_context(
    operation: str = semconv.TEXT_COMPLETION,
    *,
    stream: bool = False,
    messages: Sequence[Mapping[str, Any]] | None = None,
    parent: Context | None = None,
) -> Context:
    """The context to hand to the engine as `trace_context`.

    Args:
        operation: `chat` or `text_completion`.
        stream: the client gets tokens as they come.
        messages: the chat as the client sent it; kept only where content capture is on.
        parent: default: the current context, with the server's span.
    """
    caller = Caller(operation, stream, messages if captures_content() else None)
    return otel_context.set_value(_KEY, caller, parent)


def caller_of(context: Context | None) -> Caller:
    """What `request_context` put in, or what holds for a request that came without it."""
    caller = None if context is None else otel_context.get_value(_KEY, context)
    return caller if isinstance(caller, Caller) else Caller()


def own_caller(context: Context | None) -> Context:
    """`context` for one request alone, since the prompts of one call share theirs: it takes the phases so far along,
    and what is added to it is its own. Where `context` did not come from `request_context`, the defaults hold.
    """
    known = caller_of(context)
    return otel_context.set_value(_KEY, replace(known, phases=list(known.phases)), context)


@contextmanager
def phase(context: Context | None, name: str) -> Iterator[None]:
    """Times work before the engine (`tokenize`, `compile grammar`): it becomes a child of the request's span."""
    began = time.monotonic()
    try:
        yield
    finally:
        caller_of(context).phases.append((name, began, time.monotonic()))
