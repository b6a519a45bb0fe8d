"""Nothing is declared and never written: after a scenario with everything in it, every metric has counted, every
attribute was on a span, every field of a request's account has a value, on a real engine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from functools import partial
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from cb_backend import Engine, RequestError, SamplingParams
from cb_backend.request import FinishReason, RequestOutput, RequestTimings
from cb_backend.telemetry import phase, reporter, request_context, semconv, setup
from cb_backend.telemetry.logs import line
from cb_backend.telemetry.metrics import collector as metrics
from cb_backend.telemetry.metrics.table import METRICS
from cb_backend.telemetry.summary import RequestSummary

PROMPT = list(range(5, 25))

# Label values that the documentation promises.
PROMISED = {
    ("cb_requests_finished_total", "reason"): {reason.value for reason in FinishReason},
    ("cb_engine_errors_total", "kind"): {"step", "request"},
    ("cb_tokens_total", "kind"): {"prompt", "cached", "computed", "generated", "recomputed"},
    ("cb_preemptions_total", "mode"): {"swap", "recompute"},
    ("cb_kv_blocks", "state"): {"used", "cached", "free"},
    ("cb_requests_refused_total", "reason"): {"queue_full", "context_length_exceeded", "invalid_value"},
    ("gen_ai_server_request_duration_seconds", "error_type"): {"", "abort", "timeout", "engine_error"},
    ("gen_ai_server_request_duration_seconds", "gen_ai_operation_name"): {"chat", "text_completion"},
}


class Seen:
    """What the scenario left behind."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.exporter = InMemorySpanExporter()
        self.summaries: list[RequestSummary] = []
        self.lines: list[dict[str, Any]] = []
        self.timings: list[RequestTimings] = []
        self.nonzero: dict[str, set[tuple[tuple[str, str], ...]]] = {}  # metric -> labels with a value above zero
        self.recording: dict[str, Any] = {}
        self.most: dict[str, float] = {}  # of Engine.stats()

    def look(self, engine: Engine, registry: CollectorRegistry | None = None) -> None:
        for family in (registry or self.registry).collect():
            for sample in family.samples:
                if sample.value > 0 and not sample.name.endswith(("_bucket", "_created", "_sum")):
                    name = sample.name.removesuffix("_count")
                    self.nonzero.setdefault(name, set()).add(tuple(sorted(sample.labels.items())))
        self.count(engine)

    def count(self, engine: Engine) -> None:
        for key, value in engine.stats().items():
            self.most[key] = max(value, self.most.get(key, 0.0))


async def read(stream: AsyncGenerator[RequestOutput, None], *, leave_after: int | None = None) -> RequestOutput:
    outputs = []
    async with aclosing(stream):
        async for output in stream:
            outputs.append(output)
            if len(outputs) == leave_after:
                break
    return outputs[-1]


async def scenario(engine: Engine, seen: Seen) -> None:
    def ask(prompt: Any = PROMPT, max_tokens: int = 8, *, seconds: float | None = None, **options: Any) -> Any:
        asked = {key: options.pop(key) for key in list(options) if key in SamplingParams.model_fields}
        params = SamplingParams(max_tokens=max_tokens, **{"ignore_eos": True, **asked})
        return engine.stream(prompt, params, timeout=seconds, **options)

    everything = request_context("chat", stream=True, messages=[{"role": "user", "content": "Hi"}])
    with phase(everything, "compile tools"):
        pass
    full = {"top_k": 5, "seed": 3, "stop": ("no such text",), "n": 2, "request_class": "chat", "priority": 1}
    await read(ask("Who is there?", response_format={"type": "json_object"}, trace_context=everything, **full))
    await read(ask())
    await read(ask())  # hits the prefix cache
    await read(ask(stop_token_ids=tuple(range(engine.vocab_size))))  # ends by itself
    await read(ask(max_tokens=60), leave_after=2)
    with pytest.raises(RequestError):
        await read(ask([engine.vocab_size]))
    with pytest.raises(RequestError):
        await read(ask(max_tokens=10_000))
    # They decode until the pool is full; then a better one comes, and takes the memory of worse ones.
    launch, gate = engine.core.executor.launch, threading.Event()

    def gated(plan: Any) -> Any:
        gate.wait(10)
        return launch(plan)

    engine.core.executor.launch = gated
    gate.set()
    pair = [asyncio.create_task(read(ask(list(range(30 + i, 60)), 70, priority=1))) for i in range(5)]
    while not (engine.stats()["swapped"] and engine.stats()["preemptions_recompute"]):
        await asyncio.sleep(0.001)
        assert not all(task.done() for task in pair), "no request was preempted in both ways"
    gate.clear()  # the device takes its time, so that the gauges show the moment
    while not {"cb_requests_swapped", "cb_requests_waiting", "cb_host_blocks_used"} <= seen.nonzero.keys():
        await asyncio.sleep(0.02)
        seen.look(engine)
    gate.set()
    better = asyncio.create_task(read(ask(list(range(80, 120)), 30, priority=0)))
    crowd = [asyncio.create_task(read(ask(max_tokens=2))) for _ in range(12)]
    refused = [e for e in await asyncio.gather(*crowd, return_exceptions=True) if isinstance(e, RequestError)]
    assert {error.code for error in refused} == {"queue_full"}
    for output in await asyncio.gather(*pair, better):
        seen.timings.append(output.timings)
    assert (await read(ask(max_tokens=60, seconds=0.02))).finish_reason == "timeout"

    def broken(plan: Any) -> Any:
        raise RuntimeError("the device is gone")

    engine.core.executor.launch = broken
    assert (await read(ask())).finish_reason == "error"
    engine.core.executor.launch = launch


def surprised_forecast(model: str, seen: Seen) -> None:
    """A blind start takes outputs that run to max_tokens for shorter ones: the pool overflows, and that is judged."""
    options = {"dtype": "float32", "device": "cpu", "num_threads": 1, "block_size": 16, "num_kv_blocks": 14}
    with Engine(model=model, admission={"risk": 0.2}, **options) as engine:
        prompts = [list(range(30 + i, 60)) for i in range(12)]
        registry = CollectorRegistry()
        measured = metrics.Metrics(model, engine.stats(), registry)
        engine.generate(prompts, SamplingParams(max_tokens=70, ignore_eos=True, stop=("no such text",)))
        measured.refresh(engine.stats())
        seen.look(engine, registry)


@pytest.fixture(scope="module")
def seen(tiny_llama: Any) -> Iterator[Seen]:
    seen = Seen()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(seen.exporter))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "true")
        patch.setenv("CB_LOG_PROMPTS", "1")
        own = metrics.Metrics
        patch.setattr(metrics, "Metrics", lambda model, stats: own(model, stats, seen.registry))
        patch.setattr(reporter, "log_request", lambda summary, decode: seen.summaries.append(summary))
        engine = Engine(
            model=str(tiny_llama),
            served_model_name="tiny",
            dtype="float32",
            device="cpu",
            num_threads=1,
            block_size=16,
            num_kv_blocks=14,
            swap_space="80KiB",  # six blocks: a second victim finds no room
            preemption="swap",
            max_queue_size=6,
            admission={"policy": "prompt", "refuse_late": False},
        )
        engine.observe = partial(setup.service, provider=provider)
        with engine:
            decode = engine.tokenizer.decode
            asyncio.run(scenario(engine, seen))
            until = time.monotonic() + 10
            while seen.registry.get_sample_value("cb_engine_errors_total", {"model": "tiny", "kind": "step"}) != 2:
                assert time.monotonic() < until, "the last step was not reported"
                time.sleep(0.02)
            seen.look(engine)
            seen.recording = engine.telemetry.recorder.snapshot()
        seen.lines = [line(summary, lambda ids: decode(list(ids))) for summary in seen.summaries]
    surprised_forecast(str(tiny_llama), seen)
    yield seen


def test_every_metric_has_counted(seen):
    assert [metric.name for metric in METRICS if metric.name not in seen.nonzero] == []


@pytest.mark.parametrize(("name", "label"), PROMISED, ids=lambda value: value)
def test_every_documented_label_value_has_counted(seen, name, label):
    assert {value for labels in seen.nonzero[name] for key, value in labels if key == label} == PROMISED[name, label]


def test_every_attribute_was_on_a_span_or_an_event(seen):
    declared = {
        value
        for key, value in vars(semconv).items()
        if key.isupper() and isinstance(value, str) and ("." in value) and key not in ("CHAT", "TEXT_COMPLETION")
    }
    spans = seen.exporter.get_finished_spans()
    used = {key for span in spans for key in span.attributes}
    used |= {key for span in spans for event in span.events for key in event.attributes}
    assert declared - used == set()
    assert {key for key in used if key.startswith(("cb.", "gen_ai."))} - declared == set()


def test_every_documented_child_was_made(seen):
    names = {span.name for span in seen.exporter.get_finished_spans()}
    assert names == {
        *("chat tiny", "text_completion tiny", "compile tools", "compile grammar", "tokenize"),
        *("queued", "prefill", "decode", "preempted", "resumed"),
    }


def _unwritten(objects: list[Any]) -> set[str]:
    """Fields that have their default, zero or nothing in all of them."""
    fields = dataclasses.fields(objects[0])
    return {field.name for field in fields if not any(getattr(one, field.name) for one in objects)}


def test_every_moment_and_count_of_a_request_is_written(seen):
    assert _unwritten(seen.timings) == set()
    assert _unwritten(seen.summaries) == set()


def test_every_field_of_the_log_line_has_a_value(seen):
    assert {key for key in seen.lines[0] if not any(fields.get(key) for fields in seen.lines)} == set()
    assert any("error" in fields for fields in seen.lines)
    json.dumps(seen.lines)


def test_every_number_of_the_engine_was_above_zero(seen):
    assert {key for key, value in seen.most.items() if not value} == set()


def test_every_field_of_the_recording_is_written(seen):
    for kind in ("rows", "steps"):
        entries = seen.recording[kind]
        assert {key for key in entries[0] if not any(entry[key] for entry in entries)} == set(), kind
    assert {why for step in seen.recording["steps"] for _row, _mode, why in step["preempted"]} == {"memory", "priority"}
