"""From a stream's bytes and times to latencies, percentiles and goodput."""

from __future__ import annotations

import json
import math

import pytest

from integration.benchmarks.latency import Answer, Latency, events, parse_slo, read, summary
from integration.benchmarks.meter import percentile


def event(text: str | None = None, **fields: object) -> bytes:
    choices = [] if text is None else [{"index": 0, "text": text}]
    return b"data: " + json.dumps({"choices": choices, **fields}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
USAGE = event(usage={"prompt_tokens": 7, "completion_tokens": 3})


def answer(*pieces: tuple[float, bytes], due: float = 10.0, **fields: object) -> Answer:
    return Answer(due=due, sent=due, pieces=list(pieces), ended=pieces[-1][0] if pieces else math.nan, **fields)


def test_an_answer_is_timed_from_when_it_was_due_and_by_its_events_with_text():
    stream = answer(
        (10.5, event("")), (11.0, event("a")), (11.25, event("b")), (12.0, event("c")), (12.0, USAGE + DONE)
    )
    latency = read(stream)
    assert latency == Latency(ttft=1.0, e2e=2.0, itl=(0.25, 0.75), in_tok=7, out_tok=3)
    assert latency.tpot == 0.5


def test_a_chats_first_event_with_a_role_is_no_token():
    role = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
    text = b'data: {"choices": [{"delta": {"content": "Hi"}}]}\n\n'
    assert read(answer((10.5, role), (11.0, text), (11.5, DONE))).ttft == 1.0


def test_an_event_counts_when_its_last_byte_came():
    assert events([(1.0, b"data: a\n\nda"), (2.0, b"ta: b\n"), (3.0, b"\ndata: c\n\ndata: d\n\n")]) == [
        (1.0, "a"),
        (2.0, "b"),
        (3.0, "c"),
        (3.0, "d"),
    ]


def test_without_usage_every_event_with_text_is_a_token():
    assert read(answer((11.0, event("a") + event("b")), (12.0, DONE))).out_tok == 2


@pytest.mark.parametrize(
    "failed, message",
    [
        (Answer(0, 0, error="HTTP 429: full"), "HTTP 429: full"),
        (answer((11.0, event("a"))), r"without \[DONE\]"),
        (answer((11.0, DONE)), "held no text"),
        (answer((11.0, event("a") + b'data: {"error": {"message": "boom"}}\n\n' + DONE)), "boom"),
    ],
)
def test_an_answer_that_failed_says_how(failed, message):
    with pytest.raises(ValueError, match=message):
        read(failed)


def test_percentiles_are_by_nearest_rank():
    values = [float(i) for i in range(1, 101)]
    assert [percentile(values, p) for p in (0, 50, 90, 99, 100)] == [1.0, 50.0, 90.0, 99.0, 100.0]
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert math.isnan(percentile([], 50))


def test_a_summary_counts_what_kept_the_limits_and_what_failed():
    fast = answer((10.5, event("a")), (11.0, event("b") + DONE))
    slow = answer((13.0, event("a")), (14.0, event("b") + DONE))
    figures = summary([fast, slow, Answer(10.0, 10.25, error="HTTP 500: no")], {"ttft": 1.0, "tpot": 0.5})
    assert (figures["requests"], figures["failed"], figures["first_failure"]) == (3, 1, "HTTP 500: no")
    assert (figures["wall_s"], figures["req_s"], figures["out_tok_s"]) == (4.0, 0.5, 1.0)
    assert (figures["slo_kept"], figures["goodput_req_s"]) == (0.3333, 0.25)
    assert (figures["ttft_p50_s"], figures["ttft_p99_s"], figures["ttft_mean_s"]) == (0.5, 3.0, 1.75)
    assert (figures["itl_p50_s"], figures["itl_p99_s"], figures["late_p99_s"]) == (0.5, 1.0, 0.25)


def test_limits_are_read_and_bad_ones_refused():
    assert parse_slo("ttft=2,tpot=0.1") == {"ttft": 2.0, "tpot": 0.1}
    for bad in ("ttfb=1", "ttft", "e2e=0", "tpot=nan", "ttft=soon"):
        with pytest.raises(ValueError, match="must be NAME=SECONDS with NAME one of ttft, tpot, e2e"):
            parse_slo(bad)
