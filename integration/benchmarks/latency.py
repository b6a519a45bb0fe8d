"""From the bytes that a streaming server sent, and when they came, to latencies: pure, after the run.

Terms: TTFT is the time to the first event that carries text; inter-token latency (ITL) the gap between two such events;
TPOT the time after the first token divided by the tokens after it; e2e the time to the last byte. An open loop counts
from the moment a request was due, not from when the client found time to send it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .meter import percentile

LIMITS = ("ttft", "tpot", "e2e")


@dataclass(slots=True)
class Answer:
    """What one request got. Times in seconds of the run's clock."""

    due: float
    sent: float
    pieces: list[tuple[float, bytes]] = field(default_factory=list)  # as they were read
    ended: float = math.nan
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Latency:
    """One request that succeeded. Seconds; `itl` has one entry less than there were events with text."""

    ttft: float
    e2e: float
    itl: tuple[float, ...]
    in_tok: int
    out_tok: int

    @property
    def tpot(self) -> float:
        return (self.e2e - self.ttft) / (self.out_tok - 1) if self.out_tok > 1 else 0.0

    def within(self, slo: Mapping[str, float]) -> bool:
        return all(getattr(self, name) <= limit for name, limit in slo.items())


def events(pieces: Sequence[tuple[float, bytes]]) -> list[tuple[float, str]]:
    """The `data:` payloads of a stream of server-sent events, each with the time at which its last byte came."""
    found, rest = [], b""
    for at, data in pieces:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                found.append((at, line[5:].strip().decode()))
    return found


def read(answer: Answer) -> Latency:
    """
    Raises:
        ValueError: the request failed; the message says how.
    """
    if answer.error is not None:
        raise ValueError(answer.error)
    times: list[float] = []
    usage: dict[str, Any] = {}
    finished = False
    for at, payload in events(answer.pieces):
        if payload == "[DONE]":
            finished = True
            continue
        event = json.loads(payload)
        if "error" in event:
            raise ValueError(f"the stream ended with an error: {event['error']}")
        usage = event.get("usage") or usage
        if any(choice.get("text") or choice.get("delta", {}).get("content") for choice in event.get("choices", [])):
            times.append(at)
    if not finished:
        raise ValueError("the stream ended without [DONE]")
    if not times:
        raise ValueError("the stream held no text")
    return Latency(
        ttft=times[0] - answer.due,
        e2e=answer.ended - answer.due,
        itl=tuple(b - a for a, b in zip(times, times[1:], strict=False)),
        in_tok=usage.get("prompt_tokens", 0),
        out_tok=usage.get("completion_tokens", len(times)),
    )


def summary(answers: Sequence[Answer], slo: Mapping[str, float]) -> dict[str, Any]:
    """Flat figures of a run, `compare` reads any of them: percentiles by nearest rank, rates over the whole run.

    `goodput_req_s` counts the requests that kept every limit of `slo` (seconds); without one, those that succeeded.
    """
    good, failures = outcomes(answers)
    ends = [answer.ended for answer in answers if not math.isnan(answer.ended)]
    wall = max(ends, default=0.0) - min((answer.due for answer in answers), default=0.0)
    kept = sum(latency.within(slo) for latency in good)
    out_tok = sum(latency.out_tok for latency in good)
    figures: dict[str, Any] = {
        "requests": len(answers),
        "failed": len(failures),
        "first_failure": failures[0] if failures else None,
        "wall_s": round(wall, 3),
        "req_s": _rate(len(good), wall),
        "in_tok": sum(latency.in_tok for latency in good),
        "out_tok": out_tok,
        "out_tok_s": _rate(out_tok, wall),
        "slo": dict(slo),
        "slo_kept": round(kept / len(answers), 4) if answers else 0.0,
        "goodput_req_s": _rate(kept, wall),
        "late_p99_s": round(percentile([answer.sent - answer.due for answer in answers], 99), 4),
    }
    for name, values in samples(good).items():
        for percent in (50, 90, 99):
            figures[f"{name}_p{percent}_s"] = round(percentile(values, percent), 4)
        figures[f"{name}_mean_s"] = round(sum(values) / len(values), 4) if values else math.nan
    return figures


def samples(latencies: Sequence[Latency]) -> dict[str, list[float]]:
    return {
        "ttft": [latency.ttft for latency in latencies],
        "itl": [gap for latency in latencies for gap in latency.itl],
        "tpot": [latency.tpot for latency in latencies if latency.out_tok > 1],
        "e2e": [latency.e2e for latency in latencies],
    }


def outcomes(answers: Sequence[Answer]) -> tuple[list[Latency], list[str]]:
    """Those that succeeded, and why the others did not."""
    good, failures = [], []
    for answer in answers:
        try:
            good.append(read(answer))
        except ValueError as error:
            failures.append(str(error))
    return good, failures


def _rate(count: int, wall: float) -> float:
    return round(count / wall, 3) if wall > 0 else 0.0


def parse_slo(text: str) -> dict[str, float]:
    """`ttft=2,tpot=0.1` in seconds.

    Raises:
        ValueError: an unknown name or no positive number; the message names both.
    """
    slo = {}
    for item in filter(None, text.split(",")):
        name, _, value = item.partition("=")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if name not in LIMITS or not limit > 0:
            raise ValueError(f"slo {item!r}: must be NAME=SECONDS with NAME one of {', '.join(LIMITS)} and SECONDS > 0")
        slo[name] = limit
    return slo
