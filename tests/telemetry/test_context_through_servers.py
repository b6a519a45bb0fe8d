"""One trace through real servers: a caller's header, a front, its dependency or its runner, and the engine's spans.

All that is checked was exported by the processes themselves; they are stopped right after the last answer, so the last
spans arrive only if they are flushed.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.bento.servers import Server, serving, stop
from tests.telemetry.collector import SERVER_KIND, Collector, attributes, seconds, traceparent, tracing

pytestmark = pytest.mark.timeout(180)

SIZES = {"num_kv_blocks": 600, "block_size": 16}
CHILDREN = {"queued", "prefill", "decode"}
ABSURD = {
    "all zeros": "00-" + "0" * 32 + "-" + "0" * 16 + "-01",
    "unknown version": "ff-" + "a" * 32 + "-" + "b" * 16 + "-01",
    "no hexadecimal": "00-" + "z" * 32 + "-" + "b" * 16 + "-01",
    "long": "00-" + "a" * 5000,
    "bytes": "\x80\xff",
}


@contextmanager
def traced(target: str, folder: Path, model: Path, endpoint: str) -> Iterator[Server]:
    file = folder / "bentoml.yaml"
    file.write_text(tracing(endpoint), encoding="utf-8")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("BENTOML_CONFIG", str(file))
        with serving(target, folder, model, **SIZES) as server:
            yield server


def call(server: Server, path: str, headers: dict[str, str], **body: object) -> httpx.Response:
    answer = httpx.post(server.url + path, json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


def check_trace(collector: Collector, number: int, path: list[tuple[str, str]]) -> None:
    """The trace with this number hangs under the caller's span, holds `path` down to the engine, and no orphan."""
    spans = collector.by_trace()[f"{number:032x}"]
    (request,) = [span for span in spans if span.name == "text_completion tiny"]
    assert collector.path(request) == path
    assert [span.name for span in spans if span.parent_span_id.hex() == f"{number:016x}"] == [path[0][1]]
    known = {span.span_id.hex() for span in spans} | {f"{number:016x}"}
    assert [span.name for span in spans if span.parent_span_id.hex() not in known] == []
    assert {span.name for span in spans if span.parent_span_id == request.span_id} - {"tokenize"} == CHILDREN


@pytest.fixture(scope="module")
def front(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collector]:
    folder = tmp_path_factory.mktemp("front")
    with Collector() as collector:
        with traced("tests.bento.front_service:Front", folder, tiny_llama, collector.endpoint) as server:
            question = {"question": "Who is there?", "max_tokens": 24}
            call(server, "/ask", traceparent(3, sampled=False), **question)
            call(server, "/ask", traceparent(1), **question)
            call(server, "/tell", traceparent(2), **question)
        yield collector


@pytest.mark.parametrize(
    ("number", "entry", "method"), [(1, "POST /ask", "POST /generate"), (2, "POST /tell", "POST /stream")]
)
def test_a_trace_goes_through_a_front_to_the_engine_it_depends_on(front, number, entry, method):
    check_trace(front, number, [("front", entry), ("llm", method), ("llm", "text_completion tiny")])


@pytest.fixture(scope="module")
def legacy(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collector]:
    folder = tmp_path_factory.mktemp("legacy")
    with Collector() as collector:
        with traced("integration.legacy_service:svc", folder, tiny_llama, collector.endpoint) as server:
            body = {"prompt": "Who is there?", "max_tokens": 24, "ignore_eos": True}
            call(server, "/generate", traceparent(3, sampled=False), **body)
            call(server, "/generate", traceparent(1), **body)
            call(server, "/stream", traceparent(2), **body)
        yield collector


@pytest.mark.parametrize(("number", "entry", "method"), [(1, "/generate", "/"), (2, "/stream", "/stream")])
def test_a_trace_goes_through_a_legacy_service_to_its_runner(legacy, number, entry, method):
    service = [("llm-legacy", f"POST {entry}"), ("llm-legacy", "POST")]  # the second one is the client of its runner
    check_trace(legacy, number, [*service, ("llm", f"POST {method}"), ("llm", "text_completion tiny")])


@pytest.mark.parametrize("through", ["front", "legacy"])
def test_what_the_caller_does_not_sample_no_process_exports(through, request):
    traces = request.getfixturevalue(through).by_trace()
    assert [number for number in (1, 2, 3) if f"{number:032x}" in traces] == [1, 2]
    # A legacy service asks its runner whether it is ready, in traces of their own.
    assert {span.name for key, spans in traces.items() if int(key, 16) > 3 for span in spans} <= {"GET"}


@pytest.mark.parametrize("through", ["front", "legacy"])
def test_no_process_exports_a_span_per_streamed_chunk(through, request):
    collector = request.getfixturevalue(through)
    assert [span.name for span in collector.spans if "http send" in span.name or "http receive" in span.name] == []


@pytest.fixture(scope="module")
def direct(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Collector, str, str]]:
    """What the shipped service exported, its metrics after the calls, and its log."""
    folder = tmp_path_factory.mktemp("direct")
    with Collector() as collector:
        with traced("integration.service:LLM", folder, tiny_llama, collector.endpoint) as server:
            completion = {"model": "tiny", "prompt": "Who is there?", "max_tokens": 12, "ignore_eos": True}
            for header in ABSURD.values():
                call(server, "/v1/completions", {"traceparent": header.encode("latin-1")}, **completion)
            call(server, "/v1/completions", traceparent(1) | {"tracestate": "x" * 9000}, **completion)
            tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
            chat = {"model": "tiny", "messages": [{"role": "user", "content": "What time is it?"}], "max_tokens": 40}
            call(server, "/v1/chat/completions", traceparent(2), tools=[tool], tool_choice="required", **chat)
            schema = {"type": "json_object"}
            call(server, "/v1/chat/completions", traceparent(4), response_format=schema, **chat)
            for path, bad in (
                ("/v1/completions", {"model": "tiny", "prompt": "A", "top_p": 7}),
                ("/v1/completions", {"model": "other", "prompt": "A"}),
                ("/v1/chat/completions", {**chat, "response_format": {"type": "regex", "regex": "("}}),
                ("/generate", {"prompt": [10**9]}),
            ):
                assert 400 <= httpx.post(server.url + path, json=bad, headers=traceparent(5)).status_code < 500
            server.until(lambda: _refused(server) == 4, "four refusals in the metrics", seconds=5)
            metrics = httpx.get(f"{server.url}/metrics").text
            endless = {**completion, "max_tokens": 900, "n": 16, "stream": True}
            with httpx.stream(
                "POST", f"{server.url}/v1/completions", json=endless, headers=traceparent(6), timeout=30
            ) as answer:
                next(answer.iter_raw())
                stop(server.process)
        yield collector, metrics, server.log.read_text()


def _refused(server: Server) -> float:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("cb_requests_refused_total{"))


def test_a_request_that_runs_when_the_service_is_ended_has_its_whole_trace(direct):
    spans = direct[0].by_trace()[f"{6:032x}"]
    (request,) = [span for span in spans if span.name == "text_completion tiny"]
    reasons = attributes(request)["gen_ai.response.finish_reasons"]
    assert len(reasons) == 16 and set(reasons) <= {"abort", "length"}  # as far as the service lets them run
    own = [span for span in spans if span.parent_span_id == request.span_id]
    assert sum(span.name == "queued" for span in own) == 16
    assert sum(span.name == "decode" for span in own) >= 1  # how many run at once depends on the pool
    assert max(span.end_time_unix_nano for span in own) <= request.end_time_unix_nano


def test_absurd_traceparent_headers_are_ignored(direct):
    collector = direct[0]
    roots = [span for span in collector.named("POST /v1/completions") if not span.parent_span_id]
    assert len(roots) == len(ABSURD)
    assert len({span.trace_id for span in roots}) == len(ABSURD)
    for root in roots:
        (request,) = [span for span in collector.spans if span.parent_span_id == root.span_id]
        assert request.name == "text_completion tiny"


@pytest.mark.parametrize(
    ("number", "before"), [(1, ["tokenize"]), (2, ["compile tools", "compile grammar"]), (4, ["compile grammar"])]
)
def test_work_before_the_engine_is_in_the_trace_and_all_adds_up(direct, number, before):
    collector = direct[0]
    spans = collector.by_trace()[f"{number:032x}"]
    (request,) = [span for span in spans if span.name.endswith(" tiny")]
    children = sorted(
        (span for span in spans if span.parent_span_id == request.span_id), key=lambda span: span.start_time_unix_nano
    )
    assert [span.name for span in children if span.name not in CHILDREN] == before
    assert children[0].start_time_unix_nano - request.start_time_unix_nano < 1e6  # nanoseconds
    assert children[-1].end_time_unix_nano == request.end_time_unix_nano
    assert sum(map(seconds, children)) == pytest.approx(seconds(request), rel=0.02, abs=0.001)
    (server,) = [span for span in spans if span.kind == SERVER_KIND]
    assert server.start_time_unix_nano <= request.start_time_unix_nano
    assert request.end_time_unix_nano <= server.end_time_unix_nano


def test_a_malformed_request_is_a_refusal_and_has_no_span_of_the_engines(direct):
    collector, metrics, _log = direct
    assert [span.name for span in collector.by_trace()[f"{5:032x}"] if span.kind != SERVER_KIND] == []
    counted = {
        line.split('reason="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1])
        for line in metrics.splitlines()
        if line.startswith("cb_requests_refused_total{")
    }
    assert {reason: count for reason, count in counted.items() if count} == {"invalid_value": 3, "model_not_found": 1}


def test_the_log_line_of_a_request_agrees_with_its_span(direct):
    collector, _metrics, log = direct
    (request,) = [span for span in collector.by_trace()[f"{1:032x}"] if span.name == "text_completion tiny"]
    lines = [json.loads(line) for line in re.findall(r'\{"event": "request_end".*?\}', log)]
    (own,) = [line for line in lines if line["trace_id"] == f"{1:032x}"]
    assert own["span_id"] == request.span_id.hex()
    found = attributes(request)
    assert own["id"] == found["gen_ai.response.id"]
    assert own["output_tokens"] == found["gen_ai.usage.output_tokens"] == 12
    assert own["e2e_s"] == pytest.approx(seconds(request), rel=0.02, abs=0.001)
    parts = own["prepare_s"] + own["queue_s"] + own["prefill_s"] + own["decode_s"]
    assert own["e2e_s"] == pytest.approx(parts, abs=4e-6)


@pytest.mark.parametrize("fault", ["unreachable", "silent"])
def test_a_collector_out_of_order_neither_slows_nor_stops_the_service(tmp_path, tiny_llama, fault):
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4}
    with Collector(silent=True) as collector:
        endpoint = collector.endpoint if fault == "silent" else "http://127.0.0.1:9"
        with traced("integration.service:LLM", tmp_path, tiny_llama, endpoint) as server:
            until = time.monotonic() + 6  # an export is begun every five seconds
            slowest, answered = 0.0, 0
            while time.monotonic() < until:
                began = time.monotonic()
                call(server, "/v1/completions", {}, **body)
                slowest, answered = max(slowest, time.monotonic() - began), answered + 1
            ending = time.monotonic()
        assert time.monotonic() - ending < 9  # `serving` would insist after ten
        assert slowest < 5 and answered > 5  # an export is given up after ten seconds
        assert (collector.exports > 0) == (fault == "silent")
