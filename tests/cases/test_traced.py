"""Reports of traces in which one request's work appeared under another's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from cb_backend.telemetry import request_context
from tests.telemetry.test_tracing import Traced


def parent_of(trace_id: int) -> str:
    return f"00-{trace_id:032x}-{trace_id:016x}-01"


def test_case_170_requests_of_one_batch_stay_in_their_own_traces() -> None:
    traced = Traced()
    extract = TraceContextTextMapPropagator().extract
    requests = [
        traced.engine.request(
            f"r{i}", 4, 5, context=request_context(parent=extract({"traceparent": parent_of(i)})), order=i
        )
        for i in (1, 2, 3)
    ]
    traced.engine.run(*requests)
    roots = traced.spans("text_completion tiny")
    assert {span.attributes["gen_ai.response.id"]: span.parent.trace_id for span in roots} == {
        "r1": 1,
        "r2": 2,
        "r3": 3,
    }
    by_trace = {i: sorted(span.name for span in traced.spans() if span.context.trace_id == i) for i in (1, 2, 3)}
    assert set(map(tuple, by_trace.values())) == {("decode", "prefill", "queued", "text_completion tiny")}
    assert len(traced.spans()) == 12


def test_case_173_the_environment_is_nobodys_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACEPARENT", parent_of(7))
    traced = Traced()
    traced.engine.run(traced.engine.request("r", context=request_context()))
    assert traced.root().parent is None


def test_case_176_work_handed_to_other_threads_keeps_its_parent() -> None:
    traced = Traced()
    with ThreadPoolExecutor(3) as pool, traced.tracer.start_as_current_span("server") as server:
        context = request_context()
        choices = pool.submit(traced.engine.request, "r", context=context).result()
    traced.engine.run(choices)
    root = traced.root()
    assert root.parent.span_id == server.get_span_context().span_id
    assert {span.context.trace_id for span in traced.spans()} == {server.get_span_context().trace_id}
