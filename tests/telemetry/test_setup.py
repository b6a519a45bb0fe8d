"""What is put on an engine, that it cannot harm it, and what it costs."""

from __future__ import annotations

import statistics
import threading
import time
from typing import Any

import numpy as np
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind

from cb_backend.bento.compat import tracer_provider
from cb_backend.request import FinishReason, Request
from cb_backend.sampling.batch import batch_of
from cb_backend.scheduling.plan import StepPlan
from cb_backend.telemetry import setup
from cb_backend.telemetry.tracing.asgi_spans import DropChunkSpans, drop_chunk_spans
from tests.pace import pure_python
from tests.telemetry.scripted_engine import ScriptedEngine


def provider_in_memory(**options):
    exporter = InMemorySpanExporter()
    provider = TracerProvider(**options)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider, exporter


def test_an_engine_in_a_program_traces_to_the_global_provider(monkeypatch):
    provider, exporter = provider_in_memory()
    monkeypatch.setattr(setup.trace, "get_tracer_provider", lambda: provider)
    engine = ScriptedEngine()
    telemetry = setup.offline(engine)
    engine.run(engine.request("r", 4, 2))
    telemetry.close()
    assert "text_completion tiny" in [span.name for span in exporter.get_finished_spans()]
    assert len(telemetry.recorder.snapshot()["steps"]) == 2


def test_an_engine_in_a_service_traces_to_the_services_provider_and_logs(caplog):
    provider, exporter = provider_in_memory()
    engine = ScriptedEngine()
    caplog.set_level("INFO", "cb_backend.request")
    telemetry = setup.service(engine, provider)
    engine.run(engine.request("r", 4, 2))
    telemetry.close()
    assert "text_completion tiny" in [span.name for span in exporter.get_finished_spans()]
    assert '"id": "r"' in "\n".join(r.message for r in caplog.records if r.name == "cb_backend.request")


def test_bentoml_never_sets_the_global_provider_so_its_own_is_asked_for():
    from bentoml._internal.configuration.containers import BentoMLContainer

    assert tracer_provider() is BentoMLContainer.tracer_provider.get()
    assert setup.trace.get_tracer_provider() is not tracer_provider()


def test_chunk_spans_are_dropped_and_all_others_kept():
    provider, exporter = provider_in_memory()
    assert drop_chunk_spans(provider) and drop_chunk_spans(provider)
    (processor,) = provider._active_span_processor._span_processors
    assert isinstance(processor, DropChunkSpans) and not isinstance(processor._inner, DropChunkSpans)
    tracer = provider.get_tracer("test")
    for name, attributes in (("POST /v1", {}), ("POST /v1 http send", {"asgi.event.type": "http.response.body"})):
        span = tracer.start_span(name)
        span.set_attributes(attributes)  # after the start, as the instrumentation does
        span.end()
    asgi = provider.get_tracer("opentelemetry.instrumentation.asgi")
    asgi.start_span("POST /v1 http receive").end()  # cancelled before a message came: nothing but its scope tells
    asgi.start_span("POST /v2", kind=SpanKind.SERVER).end()
    assert [span.name for span in exporter.get_finished_spans()] == ["POST /v1", "POST /v2"]
    assert provider.force_flush(100)


def test_a_provider_that_hides_its_processors_is_left_alone(caplog):
    assert not drop_chunk_spans(object())
    assert "hides its span processors" in caplog.text


class StuckExporter(SpanExporter):
    """A collector that never answers."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def export(self, spans):
        self.released.wait(30)
        return SpanExportResult.FAILURE


def test_a_collector_that_never_answers_delays_neither_requests_nor_the_end(monkeypatch):
    exporter = StuckExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=10))
    monkeypatch.setattr(setup.trace, "get_tracer_provider", lambda: provider)
    monkeypatch.setattr(setup, "FLUSH_SECONDS", 0.2)
    engine = ScriptedEngine()
    telemetry = setup.offline(engine)
    began = time.monotonic()
    requests = [engine.request(f"r{i}", 4, 2) for i in range(100)]
    assert set(engine.run(*requests).values()) == {FinishReason.LENGTH}
    telemetry.close()
    took = time.monotonic() - began
    exporter.released.set()
    assert took < 5


def test_an_observer_that_raises_is_switched_off_and_serving_goes_on(caplog):
    class Broken:
        calls = 0

        def on_added(self, request):
            Broken.calls += 1
            raise RuntimeError("a bug")

        on_step = on_finished = on_added

    engine = ScriptedEngine()
    engine.core.observers.append(Broken())
    assert engine.run(engine.request("r", 4, 3)) == {("r", 0): FinishReason.LENGTH}
    assert Broken.calls == 1
    assert "Broken failed and is switched off" in caplog.text


def decoding_step(engine: ScriptedEngine, sequences: int) -> StepPlan:
    requests = [engine.request(f"r{i}", 4, 1000)[0] for i in range(sequences)]
    for request in requests:
        for observer in engine.core.observers:
            observer.on_added(request)
    now = time.monotonic()
    first = uniform_plan(requests, 0, 4, admitted=tuple(request.seq_id for request in requests))
    for request in requests:
        request.timings.admitted = request.timings.first_token = now
    for observer in engine.core.observers:
        observer.on_step(first, now, now)
    return uniform_plan(requests, 4, 1)


def uniform_plan(requests: list[Request], start: int, num_tokens: int, **fields: Any) -> StepPlan:
    """Each request computes `num_tokens` tokens from `start` and samples."""
    rows = len(requests)
    starts, lengths = np.full(rows, start), np.full(rows, num_tokens)
    ids = np.zeros(rows * num_tokens, dtype=np.int64)
    plan = (np.arange(rows), starts, lengths, np.ones(rows, dtype=np.bool_), ids, batch_of(requests))
    return StepPlan(1 + start, tuple(request.seq_id for request in requests), *plan, **fields)


def microseconds_per_step(engine: ScriptedEngine, plan: StepPlan, repeat: int = 300) -> float:
    def once() -> float:
        began = time.perf_counter()
        for _ in range(repeat):
            for observer in engine.core.observers:
                observer.on_step(plan, 1.0, 2.0)
        return (time.perf_counter() - began) / repeat * 1e6

    return statistics.median(once() for _ in range(7))


@pytest.mark.parametrize(("sequences", "limit"), [(1, 25.0), (64, 100.0)])
def test_all_observers_cost_microseconds_per_step(sequences, limit):
    """The limits are some five times what a machine needs that does `pure_python` in 6 ms; a step of the smallest real
    model takes 5,000."""
    provider, _exporter = provider_in_memory()
    engine = ScriptedEngine()
    telemetry = setup.service(engine, provider)
    try:
        assert microseconds_per_step(engine, decoding_step(engine, sequences)) < limit * pure_python() / 6e-3
    finally:
        telemetry.close()


def test_what_is_not_sampled_costs_nothing_per_step():
    provider, _exporter = provider_in_memory(sampler=ALWAYS_OFF)
    engine = ScriptedEngine()
    tracing = setup.Tracing(provider.get_tracer("test"), "tiny")
    engine.core.observers.append(tracing)
    assert microseconds_per_step(engine, decoding_step(engine, 64)) < 5.0 * pure_python() / 6e-3
