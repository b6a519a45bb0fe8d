"""What is left of a request once it ended: the record that the log line and the request metrics are made of.

An observer on the engine thread that books each request once, when its last choice ends, and hands the record on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from opentelemetry import trace

from ..request import FinishReason, Request, TokenDelta
from .latency import Latency
from .tracing.context import caller_of

if TYPE_CHECKING:
    from ..scheduling.plan import StepPlan

# From the mildest to the one that matters most: what a request with several choices is said to have ended by.
_GRAVITY = (
    FinishReason.STOP,
    FinishReason.LENGTH,
    FinishReason.ABORT,
    FinishReason.TIMEOUT,
    FinishReason.ERROR,
)


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """One ended request, its choices together. `trace_id` and `span_id` are 0 where there was no trace.

    `prompt_ids` and `output_ids` (per choice) are filled only where prompts are to be logged.
    """

    request_id: str
    operation: str
    request_class: str
    priority: int
    trace_id: int
    span_id: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    choices: int
    reason: FinishReason
    error: str | None
    latency: Latency
    preemptions: int
    recomputed_tokens: int
    swapped_bytes: int
    late: bool
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[tuple[int, ...], ...] = ()


@dataclass(slots=True)
class _Open:
    requests: list[Request] = field(default_factory=list)
    error: str | None = None
    unfinished: int = 0


class Summaries:
    """Observer of `EngineCore`.

    Args:
        sink: gets each summary on the engine thread.
        span_context: ids of a request's span, asked for while the request is open.
        bytes_per_block: size of a KV block.
        with_tokens: keep prompt and output ids.
    """

    def __init__(
        self,
        sink: Callable[[RequestSummary], None],
        span_context: Callable[[Request], trace.SpanContext],
        *,
        bytes_per_block: int = 0,
        with_tokens: bool = False,
    ) -> None:
        self._sink = sink
        self._span_context = span_context
        self._bytes_per_block = bytes_per_block
        self._with_tokens = with_tokens
        self._open: dict[str, _Open] = {}

    def on_added(self, request: Request) -> None:
        entry = self._open.setdefault(request.request_id, _Open())
        entry.requests.append(request)
        entry.unfinished += 1

    def on_step(self, plan: StepPlan, started: float, ended: float, error: str | None = None) -> None:
        """Of a failed step the operator's line has the exception, which clients are not told."""
        if error is not None:
            failed = set(plan.seq_ids)
            for entry in self._open.values():
                if any(request.seq_id in failed for request in entry.requests):
                    entry.error = error

    def on_finished(self, request: Request, delta: TokenDelta) -> None:
        entry = self._open.get(request.request_id)
        if entry is None:
            return
        entry.error = entry.error or delta.error
        entry.unfinished -= 1
        if entry.unfinished == 0:
            del self._open[request.request_id]
            self._sink(self._summary(entry))

    def _summary(self, entry: _Open) -> RequestSummary:
        requests = entry.requests
        first = requests[0]
        ends = [request.timings.finished for request in requests]
        finished = max((end for end in ends if end is not None), default=0.0) if None not in ends else time.monotonic()
        ids = self._span_context(first)
        reason = max((r.finish_reason or FinishReason.ERROR for r in requests), key=_GRAVITY.index)
        return RequestSummary(
            first.request_id,
            caller_of(first.trace_context).operation,
            first.request_class,
            first.priority,
            ids.trace_id,
            ids.span_id,
            first.prompt_len,
            max(request.num_cached for request in requests),
            sum(request.num_settled for request in requests),
            len(requests),
            reason,
            entry.error,
            Latency.of(requests, finished),
            sum(request.timings.preemptions for request in requests),
            sum(request.timings.recomputed_tokens for request in requests),
            sum(request.timings.swapped_blocks for request in requests) * self._bytes_per_block,
            first.deadline is not None and finished >= first.deadline,
            tuple(first.token_ids[: first.prompt_len]) if self._with_tokens else (),
            tuple(tuple(r.token_ids[r.prompt_len :]) for r in requests) if self._with_tokens else (),
        )
