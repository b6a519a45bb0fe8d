"""One span per request, children for what happened to it; every span ends; what is not sampled costs nothing."""

from __future__ import annotations

import time

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from cb_backend.params import SamplingParams
from cb_backend.request import FinishReason
from cb_backend.telemetry import phase, request_context
from cb_backend.telemetry.tracing.spans import Tracing
from tests.telemetry.scripted_engine import BYTES_PER_BLOCK, ScriptedEngine


class Traced:
    """A scripted engine whose spans are kept in memory."""

    def __init__(self, sampler=None, decode=None, overlap=False, **options) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(**({"sampler": sampler} if sampler else {}))
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("test")
        self.engine = ScriptedEngine(options, overlap=overlap)
        self.tracing = Tracing(self.tracer, "tiny", bytes_per_block=BYTES_PER_BLOCK, decode=decode)
        self.engine.core.observers.append(self.tracing)

    def spans(self, name=None):
        return [s for s in self.exporter.get_finished_spans() if name is None or s.name == name]

    def root(self):
        (span,) = [s for s in self.spans() if s.name.endswith(" tiny")]
        return span

    def children(self):
        root = self.root()
        found = [s for s in self.spans() if s.parent is not None and s.parent.span_id == root.context.span_id]
        return sorted(found, key=lambda s: (s.start_time, s.end_time))


def test_a_request_is_one_internal_span_with_the_conventions_attributes():
    traced = Traced()
    params = SamplingParams(max_tokens=3, temperature=0.5, top_k=7, seed=11, stop=("END",))
    traced.engine.run(
        traced.engine.request("r", 5, 3, params=params, context=request_context("chat", stream=True), priority=2)
    )
    root = traced.root()
    assert (root.name, root.kind, root.status.status_code) == ("chat tiny", SpanKind.INTERNAL, StatusCode.UNSET)
    latencies = {k for k in root.attributes if k.startswith("gen_ai.latency.")}
    assert latencies == {
        "gen_ai.latency." + name
        for name in (
            "time_to_first_token",
            "e2e",
            "time_in_queue",
            "time_in_model_prefill",
            "time_in_model_decode",
            "time_in_model_inference",
        )
    }
    first_chunk = root.attributes["gen_ai.response.time_to_first_chunk"]
    assert first_chunk == root.attributes["gen_ai.latency.time_to_first_token"]
    rest = {k: v for k, v in root.attributes.items() if k not in latencies and not k.endswith("first_chunk")}
    assert rest == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "cb_backend",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.id": "r",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 7,
        "gen_ai.request.seed": 11,
        "gen_ai.request.stop_sequences": ("END",),
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.stream": True,
        "gen_ai.output.type": "text",
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "cb.request.priority": 2,
        "cb.preemptions": 0,
        "cb.recomputed_tokens": 0,
        "cb.swapped_bytes": 0,
    }


def test_a_request_without_a_caller_is_a_text_completion():
    traced = Traced()
    traced.engine.run(traced.engine.request("r"))
    assert traced.root().name == "text_completion tiny"


def test_the_span_hangs_under_the_span_that_was_current_when_the_request_came():
    traced = Traced()
    with traced.tracer.start_as_current_span("POST /v1/completions") as server:
        context = request_context()
    traced.engine.run(traced.engine.request("r", context=context))
    assert traced.spans("text_completion tiny")[0].parent.span_id == server.get_span_context().span_id


def test_phases_follow_each_other_without_a_gap_and_fill_the_request():
    traced = Traced(budget=8)
    traced.engine.run(traced.engine.request("r", 20, 5))
    root, children = traced.root(), traced.children()
    assert [s.name for s in children] == ["queued", "prefill", "decode"]
    assert children[0].start_time == root.start_time
    assert children[-1].end_time == root.end_time
    assert [s.start_time for s in children[1:]] == [s.end_time for s in children[:-1]]


def test_each_prefill_chunk_is_an_event_with_its_tokens_and_step():
    traced = Traced(budget=8)
    traced.engine.run(traced.engine.request("r", 20, 2))
    (prefill,) = traced.spans("prefill")
    chunks = [(e.name, e.attributes["cb.tokens"], e.attributes["cb.tokens.start"]) for e in prefill.events]
    assert chunks == [("chunk", 8, 0), ("chunk", 8, 8), ("chunk", 4, 16)]
    assert [e.attributes["cb.step"] for e in prefill.events] == [1, 2, 3]
    assert all(prefill.start_time <= e.timestamp <= prefill.end_time for e in prefill.events)


def test_the_decode_span_counts_the_tokens_after_the_first():
    traced = Traced()
    traced.engine.run(traced.engine.request("r", 4, 6))
    assert traced.spans("decode")[0].attributes["cb.tokens"] == 5


@pytest.mark.parametrize("end", ["abort", "length"])
def test_with_steps_that_overlap_phases_still_follow_each_other(end):
    traced = Traced(overlap=True, num_blocks=6, block_size=4, host_blocks=64, mode="swap")
    engine = traced.engine
    if end == "abort":
        engine.before[9] = lambda: (engine.abort("old"), engine.abort("young"))
    engine.run(engine.request("old", 8, 12), engine.request("young", 8, 12))
    roots = [s for s in traced.spans() if s.name.endswith(" tiny")]
    assert [s.attributes["gen_ai.response.finish_reasons"] for s in roots] == [(end,), (end,)]
    for root in roots:
        own = sorted((s for s in traced.spans() if s.parent == root.context), key=lambda s: (s.start_time, s.end_time))
        assert all(s.end_time >= s.start_time for s in own)
        assert [s.start_time for s in own[1:]] == [s.end_time for s in own[:-1]]
        assert (own[0].start_time, own[-1].end_time) == (root.start_time, root.end_time)


def test_a_request_of_one_token_has_no_decode():
    traced = Traced()
    traced.engine.run(traced.engine.request("r", 4, 1))
    assert [s.name for s in traced.children()] == ["queued", "prefill"]


@pytest.mark.parametrize(("mode", "host_blocks"), [("swap", 64), ("recompute", 0)])
def test_a_preempted_request_shows_when_it_lost_its_memory_and_when_it_came_back(mode, host_blocks):
    traced = Traced(num_blocks=6, block_size=4, host_blocks=host_blocks, mode=mode, budget=16)
    engine = traced.engine
    ends = engine.run(engine.request("old", 8, 12), engine.request("young", 8, 12))
    assert set(ends.values()) == {FinishReason.LENGTH}
    (lost,) = traced.spans("preempted")
    (back,) = traced.spans("resumed")
    blocks = lost.attributes["cb.kv.blocks"]
    assert lost.attributes["cb.preemption.mode"] == mode
    assert blocks > 0 if mode == "swap" else blocks == 0
    assert lost.attributes["cb.kv.bytes"] == blocks * BYTES_PER_BLOCK
    if mode == "swap":
        assert blocks == engine.scheduler.counters["swapped_blocks"]
    assert back.start_time == lost.end_time
    young = next(s for s in traced.spans() if s.attributes.get("gen_ai.response.id") == "young")
    own = sorted((s for s in traced.spans() if s.parent == young.context), key=lambda s: s.start_time)
    assert [s.name for s in own] == ["queued", "prefill", "decode", "preempted", "resumed", "decode"]
    assert sum(s.end_time - s.start_time for s in own) == young.end_time - young.start_time
    assert young.attributes["cb.preemptions"] == 1
    assert young.attributes["cb.swapped_bytes"] == lost.attributes["cb.kv.bytes"]
    # The prefill made one token, the resumed phase another one.
    assert sum(s.attributes["cb.tokens"] for s in own if s.name == "decode") == 12 - 2


def test_choices_share_one_span_and_decode_side_by_side():
    traced = Traced()
    traced.engine.run(traced.engine.request("r", 4, 3, n=3))
    root = traced.root()
    assert root.attributes["gen_ai.request.choice.count"] == 3
    assert root.attributes["gen_ai.response.finish_reasons"] == ("length",) * 3
    assert root.attributes["gen_ai.usage.output_tokens"] == 9
    assert sorted(s.attributes["cb.choice.index"] for s in traced.spans("decode")) == [0, 1, 2]
    assert [len(traced.spans(name)) for name in ("queued", "prefill")] == [3, 3]
    first, *others = sorted(traced.spans("queued"), key=lambda s: s.attributes["cb.choice.index"])
    assert all(other.end_time > first.end_time for other in others), "they wait for the first one's prompt"


def test_an_aborted_request_ends_its_spans_and_is_no_error():
    traced = Traced()
    engine = traced.engine
    engine.before[3] = lambda: engine.abort("r")
    engine.run(engine.request("r", 4, 50))
    root = traced.root()
    assert root.attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert root.status.status_code is StatusCode.UNSET
    assert traced.children()[-1].end_time <= root.end_time
    assert [s.name for s in traced.children()] == ["queued", "prefill", "decode"]


def test_a_request_that_never_ran_was_queued_all_its_life():
    traced = Traced()
    engine = traced.engine
    request = engine.request("r", 4, 4, deadline=time.monotonic() - 1)
    assert engine.run(request) == {("r", 0): FinishReason.TIMEOUT}
    root = traced.root()
    assert [s.name for s in traced.children()] == ["queued"]
    assert (root.status.status_code, root.attributes["error.type"]) == (StatusCode.ERROR, "timeout")
    assert root.attributes["gen_ai.latency.time_in_queue"] == root.attributes["gen_ai.latency.e2e"]
    assert "gen_ai.latency.time_to_first_token" not in root.attributes


def test_a_failed_step_is_an_error_with_its_message():
    traced = Traced()
    traced.engine.failing = {2, 3}
    assert traced.engine.run(traced.engine.request("r", 4, 4)) == {("r", 0): FinishReason.ERROR}
    root = traced.root()
    assert root.status.status_code is StatusCode.ERROR
    assert root.status.description == "the engine failed while serving this request (id r)"
    assert root.attributes["error.type"] == "engine_error"


def test_spans_that_are_open_at_the_end_are_ended():
    traced = Traced()
    for choice in traced.engine.request("r", 4, 4, n=2):
        traced.tracing.on_added(choice)
    traced.tracing.close()
    assert [s.name for s in traced.spans()] == ["queued", "queued", "text_completion tiny"]


def test_work_before_the_engine_is_a_child():
    traced = Traced()
    context = request_context("chat")
    with phase(context, "compile grammar"):
        pass
    traced.engine.run(traced.engine.request("r", context=context))
    (span,) = traced.spans("compile grammar")
    assert span.parent.span_id == traced.root().context.span_id


def test_sampling_refused_upstream_is_honoured():
    traced = Traced()
    header = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"}
    context = request_context(parent=TraceContextTextMapPropagator().extract(header))
    (request,) = traced.engine.request("r", context=context)
    assert f"{traced.tracing.span_context(request).trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    traced.engine.run([request])
    assert traced.spans() == []


def test_what_a_sampler_drops_has_no_children():
    traced = Traced(sampler=ALWAYS_OFF)
    traced.engine.run(traced.engine.request("r"))
    assert traced.spans() == []


def test_bentomls_sampler_records_without_sampling_and_is_understood():
    from bentoml._internal.utils.telemetry import ParentBasedTraceIdRatio

    traced = Traced(sampler=ParentBasedTraceIdRatio(0.0))
    (request,) = traced.engine.request("r")
    traced.tracing.on_added(request)
    assert traced.tracing._choices == {}


@pytest.mark.parametrize(
    "header",
    ["", "garbage", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "ff-" + "a" * 32 + "-" + "b" * 16 + "-01", "x" * 10_000],
)
def test_absurd_traceparent_headers_start_a_new_trace(header):
    traced = Traced()
    context = request_context(parent=TraceContextTextMapPropagator().extract({"traceparent": header}))
    traced.engine.run(traced.engine.request("r", context=context))
    assert traced.root().parent is None


def test_content_is_captured_only_when_asked_for(monkeypatch):
    messages = [{"role": "user", "content": "secret"}]

    def attributes(decode):
        traced = Traced(decode=decode)
        traced.engine.run(traced.engine.request("r", 4, 2, context=request_context("chat", messages=messages)))
        return traced.root().attributes

    monkeypatch.delenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", raising=False)
    assert "secret" not in str(dict(attributes(None)))
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "true")
    found = attributes(lambda ids: f"<{len(ids)} tokens>")
    asked, answered = found["gen_ai.input.messages"], found["gen_ai.output.messages"]
    assert asked == '[{"role": "user", "parts": [{"type": "text", "content": "secret"}]}]'
    assert answered == (
        '[{"role": "assistant", "parts": [{"type": "text", "content": "<2 tokens>"}], "finish_reason": "length"}]'
    )


def test_without_a_provider_there_are_no_spans_to_keep():
    tracing = Tracing(trace.NoOpTracerProvider().get_tracer("none"), "tiny")
    (request,) = ScriptedEngine().request("r")
    tracing.on_added(request)
    assert tracing._choices == {}
