"""One JSON line per request, without a word of its text unless asked for."""

from __future__ import annotations

import json
import logging

import pytest
from opentelemetry.sdk.trace import TracerProvider

from cb_backend.telemetry.logs import follow_bentoml, line, log_request, logs_prompts
from cb_backend.telemetry.summary import RequestSummary, Summaries
from cb_backend.telemetry.tracing.spans import Tracing
from tests.telemetry.scripted_engine import ScriptedEngine


def summaries(engine: ScriptedEngine, with_tokens: bool = False) -> list[RequestSummary]:
    kept: list[RequestSummary] = []
    tracing = Tracing(TracerProvider().get_tracer("test"), "tiny")
    engine.core.observers += [Summaries(kept.append, tracing.span_context, with_tokens=with_tokens), tracing]
    return kept


def test_a_request_ends_in_one_line(caplog):
    engine = ScriptedEngine()
    kept = summaries(engine)
    engine.run(engine.request("r", 5, 3, request_class="chat", priority=1))
    with caplog.at_level(logging.INFO, "cb_backend.request"):
        log_request(kept[0])
    (record,) = caplog.records
    fields = json.loads(record.message)
    trace_id, span_id = fields.pop("trace_id"), fields.pop("span_id")
    assert (len(trace_id), len(span_id)) == (32, 16)
    seconds = {k: fields.pop(k) for k in list(fields) if k.endswith("_s")}
    assert set(seconds) == {"prepare_s", "queue_s", "first_token_s", "prefill_s", "decode_s", "e2e_s"}
    assert seconds["e2e_s"] == pytest.approx(seconds["queue_s"] + seconds["prefill_s"] + seconds["decode_s"], abs=3e-6)
    assert fields == {
        "event": "request_end",
        "id": "r",
        "operation": "text_completion",
        "class": "chat",
        "priority": 1,
        "reason": "length",
        "choices": 1,
        "prompt_tokens": 5,
        "cached_tokens": 0,
        "output_tokens": 3,
        "preemptions": 0,
        "recomputed_tokens": 0,
        "swapped_bytes": 0,
    }


def test_choices_end_in_one_line_with_the_gravest_reason():
    engine = ScriptedEngine()
    kept = summaries(engine)
    engine.before[3] = lambda: engine.abort("r")
    engine.run(engine.request("r", 4, 9, n=3))
    (summary,) = kept
    assert (summary.choices, summary.reason.value, summary.output_tokens) == (3, "abort", 1 + 3 + 3)


def test_an_error_is_in_the_line():
    engine = ScriptedEngine(failing={1, 2})
    kept = summaries(engine)
    engine.run(engine.request("r"))
    fields = line(kept[0])
    assert (fields["reason"], fields["error"]) == ("error", "RuntimeError: the device is gone")
    assert fields["first_token_s"] is None


def test_text_is_logged_only_when_asked_for(monkeypatch):
    def fields(with_tokens: bool):
        engine = ScriptedEngine()
        kept = summaries(engine, with_tokens)
        engine.run(engine.request("r", 4, 2))
        return line(kept[0], lambda ids: f"<{len(ids)}>")

    assert {"prompt", "output"}.isdisjoint(fields(False))
    asked = fields(True)
    assert (asked["prompt"], asked["output"]) == ("<4>", ["<2>"])
    monkeypatch.delenv("CB_LOG_PROMPTS", raising=False)
    assert not logs_prompts()
    monkeypatch.setenv("CB_LOG_PROMPTS", "1")
    assert logs_prompts()


def test_a_line_break_in_an_id_stays_inside_the_line(caplog):
    engine = ScriptedEngine()
    kept = summaries(engine)
    engine.run(engine.request("evil\n{}", 4, 1))
    with caplog.at_level(logging.INFO, "cb_backend.request"):
        log_request(kept[0])
    assert "\n" not in caplog.records[0].message


def test_in_a_service_info_lines_pass_where_bentomls_own_do(monkeypatch):
    package, request = logging.getLogger("cb_backend"), logging.getLogger("cb_backend.request")
    monkeypatch.setattr(package, "level", logging.NOTSET)
    monkeypatch.setattr(request, "disabled", True)  # what logging.config does to loggers that exist already
    monkeypatch.setattr(logging.getLogger("bentoml"), "level", logging.INFO)
    follow_bentoml()
    assert request.isEnabledFor(logging.INFO) and not request.isEnabledFor(logging.DEBUG)
    package.setLevel(logging.ERROR)
    follow_bentoml()
    assert package.level == logging.ERROR
    package.setLevel(logging.NOTSET)
