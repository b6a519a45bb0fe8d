"""One span per request, with children for what happened to it, timed by the engine's own clock.

    chat smollm2                     under the server's span; ends with usage, finish reasons and latencies
      queued | prefill | decode | preempted | resumed

The phases of a choice follow each other without a gap, so their durations add up to the request's. An observer on the
engine thread: a child is made when its phase ends, a decode step of a traced request costs nothing. What is not
sampled (upstream or here) is forgotten at once. Knows no exporter and no provider but its tracer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer

from ...request import FinishReason, Request, TokenDelta
from ...scheduling.plan import StepPlan
from .. import semconv
from ..latency import Latency
from .context import Caller, caller_of

Event = tuple[str, float, dict[str, Any]]

QUEUED, PREFILL, DECODE, PREEMPTED, RESUMED = "queued", "prefill", "decode", "preempted", "resumed"


@dataclass(slots=True, eq=False)
class RequestSpan:
    """The span of one request; its choices share it."""

    span: Span
    context: Any
    caller: Caller
    epoch: int  # nanoseconds to add to the engine's clock
    open: list[ChoiceSpan] = field(default_factory=list)
    ended: list[tuple[Request, TokenDelta]] = field(default_factory=list)

    def nanoseconds(self, at: float) -> int:
        return self.epoch + int(at * 1e9)


@dataclass(slots=True, eq=False)
class ChoiceSpan:
    """One choice: the phase it is in."""

    root: RequestSpan
    request: Request
    phase: str | None
    since: float
    tokens: int
    swapped_blocks: int = 0  # of its earlier preemptions
    attributes: dict[str, Any] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)


class Tracing:
    """Observer of `EngineCore` that makes the spans.

    Args:
        tracer: of the provider whose exporters get the spans.
        model: id that clients use.
        bytes_per_block: size of a KV block, for the bytes of a preemption.
        decode: token ids to text; given only where prompts and answers are to be captured.
    """

    def __init__(
        self,
        tracer: Tracer,
        model: str,
        *,
        bytes_per_block: int = 0,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self._tracer = tracer
        self._model = model
        self._bytes_per_block = bytes_per_block
        self._decode = decode
        self._requests: dict[str, RequestSpan] = {}
        self._choices: dict[int, ChoiceSpan] = {}  # by seq_id
        self._filling: dict[int, ChoiceSpan] = {}  # in prefill or resumed: the only ones whose chunks matter

    # -- observer ---------------------------------------------------------------------------------------------------

    def on_added(self, request: Request) -> None:
        root = self._requests.get(request.request_id)
        if root is None:
            root = self._open(request)
            if root is None:
                return
            self._requests[request.request_id] = root
        choice = ChoiceSpan(
            root, request, QUEUED, request.timings.enqueued or request.timings.arrival, request.prompt_len
        )
        root.open.append(choice)
        self._choices[request.seq_id] = choice

    def on_step(self, plan: StepPlan, started: float, ended: float, error: str | None = None) -> None:
        if not self._choices:
            return
        for seq_id, mode in plan.preempted:
            if choice := self._choices.get(seq_id):
                swapped = choice.request.timings.swapped_blocks - choice.swapped_blocks
                choice.swapped_blocks += swapped
                self._enter(choice, PREEMPTED, started)
                choice.attributes = {
                    semconv.PREEMPTION_MODE: mode,
                    semconv.BLOCKS: swapped,
                    semconv.BYTES: swapped * self._bytes_per_block,
                    semconv.STEP: plan.step,
                }
        for seq_id in plan.admitted:
            if choice := self._choices.get(seq_id):
                self._enter(choice, PREFILL, started)
                choice.attributes = {semconv.CACHED_TOKENS: choice.request.num_cached, semconv.STEP: plan.step}
        for seq_id in plan.resumed:
            if choice := self._choices.get(seq_id):
                self._enter(choice, RESUMED, started)
                choice.attributes = {semconv.STEP: plan.step}
        if self._filling:
            self._book_chunks(plan, started, ended, failed=error is not None)

    def on_finished(self, request: Request, delta: TokenDelta) -> None:
        choice = self._choices.pop(request.seq_id, None)
        if choice is None:
            return
        self._end_phase(choice, request.timings.finished or time.monotonic())
        self._filling.pop(request.seq_id, None)
        root = choice.root
        root.open.remove(choice)
        root.ended.append((request, delta))
        if not root.open:
            del self._requests[request.request_id]
            self._close(root)

    # -- other threads ----------------------------------------------------------------------------------------------

    def span_context(self, request: Request) -> trace.SpanContext:
        """Ids of the request's span, or of the span it came under when it is not traced."""
        root = self._requests.get(request.request_id)
        if root is not None:
            return root.span.get_span_context()
        return trace.get_current_span(request.trace_context).get_span_context()

    def close(self) -> None:
        """Ends every span that is still open. Call it once the engine thread has ended."""
        for choice in list(self._choices.values()):
            request = choice.request
            self.on_finished(
                request, TokenDelta(request.request_id, request.index, (), finish_reason=FinishReason.ABORT)
            )

    # -- the request's span -----------------------------------------------------------------------------------------

    def _open(self, request: Request) -> RequestSpan | None:
        """Starts the span of a request, or decides that it has none."""
        context = request.trace_context
        parent = trace.get_current_span(context).get_span_context()
        if parent.is_valid and not parent.trace_flags.sampled:
            return None
        caller = caller_of(context)
        epoch = time.time_ns() - time.monotonic_ns()
        began = min([request.timings.arrival, *(start for _name, start, _end in caller.phases)])
        span = self._tracer.start_span(
            f"{caller.operation} {self._model}",
            context=context,
            kind=SpanKind.INTERNAL,
            attributes={
                semconv.OPERATION_NAME: caller.operation,
                semconv.PROVIDER_NAME: semconv.PROVIDER,
                semconv.REQUEST_MODEL: self._model,
            },
            start_time=epoch + int(began * 1e9),
        )
        # BentoML's sampler lets spans record that it does not sample; only the flag tells.
        if not (span.is_recording() and span.get_span_context().trace_flags.sampled):
            span.end()
            return None
        span.set_attributes(_request_attributes(request, caller))
        return RequestSpan(span, trace.set_span_in_context(span, context), caller, epoch)

    def _close(self, root: RequestSpan) -> None:
        requests = [request for request, _delta in root.ended]
        finished = max(request.timings.finished or time.monotonic() for request in requests)
        for name, began, ended in root.caller.phases:
            self._child(root, name, began, ended)
        root.span.set_attributes(self._response_attributes(root, requests, finished))
        for _request, delta in root.ended:
            if delta.finish_reason in (FinishReason.ERROR, FinishReason.TIMEOUT):
                message = delta.error or "the deadline passed"
                root.span.set_attribute(
                    semconv.ERROR_TYPE, "timeout" if delta.finish_reason is FinishReason.TIMEOUT else "engine_error"
                )
                root.span.set_status(Status(StatusCode.ERROR, message))
                break
        root.span.end(root.nanoseconds(finished))

    def _response_attributes(self, root: RequestSpan, requests: list[Request], finished: float) -> dict[str, Any]:
        ended = sorted(root.ended, key=lambda pair: pair[0].index)
        latency = Latency.of(requests, finished)
        found: dict[str, Any] = {
            semconv.RESPONSE_ID: requests[0].request_id,
            semconv.RESPONSE_MODEL: self._model,
            semconv.RESPONSE_FINISH_REASONS: [d.finish_reason.value for _r, d in ended if d.finish_reason],
            semconv.USAGE_INPUT_TOKENS: requests[0].prompt_len,
            semconv.USAGE_OUTPUT_TOKENS: sum(request.num_settled for request in requests),
            semconv.USAGE_CACHE_READ_INPUT_TOKENS: max(request.num_cached for request in requests),
            semconv.PREEMPTIONS: sum(request.timings.preemptions for request in requests),
            semconv.RECOMPUTED_TOKENS: sum(request.timings.recomputed_tokens for request in requests),
            semconv.SWAPPED_BYTES: sum(request.timings.swapped_blocks for request in requests) * self._bytes_per_block,
            semconv.LATENCY_E2E: latency.e2e,
            semconv.LATENCY_TIME_IN_QUEUE: latency.queue,
        }
        if latency.first_token is not None:
            found[semconv.LATENCY_TIME_TO_FIRST_TOKEN] = latency.first_token
            found[semconv.LATENCY_TIME_IN_MODEL_PREFILL] = latency.prefill
            found[semconv.LATENCY_TIME_IN_MODEL_DECODE] = latency.decode
            found[semconv.LATENCY_TIME_IN_MODEL_INFERENCE] = latency.inference
            if root.caller.stream:
                found[semconv.RESPONSE_TIME_TO_FIRST_CHUNK] = latency.first_token
        if self._decode is not None:
            found |= _content(root, [request for request, _delta in ended], self._decode)
        return found

    # -- its children -----------------------------------------------------------------------------------------------

    def _book_chunks(self, plan: StepPlan, started: float, ended: float, *, failed: bool) -> None:
        completed = []
        for item in plan.assignments:
            choice = self._filling.get(item.seq_id)
            if choice is None:
                continue
            chunk = {semconv.TOKENS: item.num_tokens, semconv.TOKENS_START: item.start, semconv.STEP: plan.step}
            choice.events.append(("chunk", started, chunk))
            if item.samples and not failed:
                completed.append(choice)
        for choice in completed:
            first = choice.request.timings.first_token
            self._enter(choice, DECODE, first if first is not None and first >= started else ended)

    def _enter(self, choice: ChoiceSpan, phase: str, at: float) -> None:
        # With overlap a step is planned before the one before it has settled.
        at = max(at, choice.since)
        self._end_phase(choice, at)
        choice.phase, choice.since, choice.tokens = phase, at, len(choice.request.token_ids)
        if phase in (PREFILL, RESUMED):
            self._filling[choice.request.seq_id] = choice
        else:
            self._filling.pop(choice.request.seq_id, None)

    def _end_phase(self, choice: ChoiceSpan, at: float) -> None:
        if choice.phase is None or (choice.phase == DECODE and at <= choice.since):  # its first token was its last
            choice.phase = None
            return
        attributes = choice.attributes
        attributes[semconv.CHOICE_INDEX] = choice.request.index
        if choice.phase == DECODE:
            # The token that began the phase was made by the prefill's last chunk.
            attributes[semconv.TOKENS] = len(choice.request.token_ids) - choice.tokens
        self._child(choice.root, choice.phase, choice.since, at, attributes, choice.events)
        choice.phase, choice.attributes, choice.events = None, {}, []

    def _child(
        self,
        root: RequestSpan,
        name: str,
        began: float,
        ended: float,
        attributes: dict[str, Any] | None = None,
        events: Sequence[Event] = (),
    ) -> None:
        span = self._tracer.start_span(
            name, context=root.context, attributes=attributes, start_time=root.nanoseconds(began)
        )
        for event, at, values in events:
            span.add_event(event, values, root.nanoseconds(at))
        span.end(root.nanoseconds(ended))


def _request_attributes(request: Request, caller: Caller) -> dict[str, Any]:
    params = request.params
    found: dict[str, Any] = {
        semconv.REQUEST_MAX_TOKENS: request.max_tokens,
        semconv.REQUEST_TEMPERATURE: params.temperature,
        semconv.REQUEST_TOP_P: params.top_p,
        semconv.REQUEST_FREQUENCY_PENALTY: params.frequency_penalty,
        semconv.REQUEST_PRESENCE_PENALTY: params.presence_penalty,
        semconv.OUTPUT_TYPE: "json" if _wants_json(params.response_format) else "text",
        semconv.REQUEST_PRIORITY: request.priority,
    }
    if caller.stream:
        found[semconv.REQUEST_STREAM] = True
    if params.top_k > 0:
        found[semconv.REQUEST_TOP_K] = params.top_k
    if params.seed is not None:
        found[semconv.REQUEST_SEED] = params.seed
    if params.n != 1:
        found[semconv.REQUEST_CHOICE_COUNT] = params.n
    if params.stop:
        found[semconv.REQUEST_STOP_SEQUENCES] = list(params.stop)
    if request.request_class:
        found[semconv.REQUEST_CLASS] = request.request_class
    return found


def _wants_json(response_format: Any) -> bool:
    return response_format is not None and response_format.get("type") in ("json_object", "json_schema")


def _content(root: RequestSpan, requests: list[Request], decode: Callable[[Sequence[int]], str]) -> dict[str, str]:
    """Prompt and answers in the conventions' message form, as JSON text."""
    first = requests[0]
    if root.caller.messages is not None:
        messages = [m for m in root.caller.messages if isinstance(m, Mapping)]
        asked = [_message(m.get("role", "user"), m.get("content")) for m in messages]
    else:
        asked = [_message("user", decode(first.token_ids[: first.prompt_len]))]
    answers = [
        {
            **_message("assistant", decode(request.token_ids[request.prompt_len :])),
            "finish_reason": request.finish_reason.value if request.finish_reason else "",
        }
        for request in requests
    ]
    return {
        semconv.INPUT_MESSAGES: json.dumps(asked, ensure_ascii=False, default=str),
        semconv.OUTPUT_MESSAGES: json.dumps(answers, ensure_ascii=False),
    }


def _message(role: str, content: Any) -> dict[str, Any]:
    parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    return {"role": role, "parts": [_part(part) for part in parts]}


def _part(part: Any) -> Any:
    """OpenAI spells a text part's text `text`, the conventions `content`."""
    if isinstance(part, dict) and part.get("type") == "text":
        return {"type": "text", "content": part.get("text", "")}
    return part
