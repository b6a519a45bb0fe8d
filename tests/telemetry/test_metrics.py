"""Metrics against scripted engines: right counts, bounded labels, gauges that return to zero."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from cb_backend.request import FinishReason
from cb_backend.telemetry.metrics.collector import Bounded, Metrics
from cb_backend.telemetry.metrics.table import METRICS, markdown
from cb_backend.telemetry.reporter import Reporter
from cb_backend.telemetry.summary import Summaries
from cb_backend.telemetry.tracing.spans import Tracing
from tests.telemetry.scripted_engine import BYTES_PER_BLOCK, ScriptedEngine

ROOT = Path(__file__).parents[2]
GAUGES = [m.name for m in METRICS if m.kind == "gauge" and not m.name.endswith("_info")]


class Measured:
    def __init__(self, **options) -> None:
        from opentelemetry.trace import NoOpTracerProvider

        self.engine = ScriptedEngine(options)
        self.registry = CollectorRegistry()
        self.metrics = Metrics("tiny", self.engine.core.stats(), self.registry)
        self.reporter = Reporter(self.engine.core.stats, self.metrics)
        tracing = Tracing(NoOpTracerProvider().get_tracer("none"), "tiny")
        self.engine.core.observers += [Summaries(self.reporter.summary, tracing.span_context), self.reporter]

    def run(self, *requests):
        ends = self.engine.run(*requests)
        self.reporter.report()
        return ends

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, {"model": "tiny", **labels})

    def total(self, name: str) -> float:
        """Sum over all label values."""
        return sum(
            s.value
            for family in text_string_to_metric_families(generate_latest(self.registry).decode())
            for s in family.samples
            if s.name == name
        )


def test_requests_are_counted_by_class_and_reason():
    measured = Measured()
    engine = measured.engine
    engine.before[3] = lambda: engine.abort("gone")
    measured.run(
        engine.request("a", 4, 2, request_class="chat"), engine.request("b", 4, 3), engine.request("gone", 4, 50)
    )
    finished = "cb_requests_finished_total"
    assert measured.value(finished, request_class="chat", reason="length") == 1
    assert measured.value(finished, request_class="default", reason="length") == 1
    assert measured.value(finished, request_class="default", reason="abort") == 1
    assert measured.total("cb_requests_admitted_total") == 3


def test_tokens_are_counted_by_kind():
    measured = Measured(block_size=4)
    engine = measured.engine
    prompt = list(range(10, 19))
    engine.before[3] = lambda: engine.send(engine.request("again", prompt, 2))
    measured.run(engine.request("first", prompt, 6), engine.request("again-2", 4, 1))
    kinds = {kind: measured.value("cb_tokens_total", kind=kind) for kind in ("prompt", "cached", "generated")}
    assert kinds == {"prompt": 9 + 4 + 9, "cached": 8, "generated": 6 + 1 + 2}
    assert measured.value("cb_prefix_cache_hit_ratio") == 8 / 22


def test_steps_tell_their_batch_and_tokens():
    measured = Measured(budget=16)
    measured.run(measured.engine.request("a", 4, 2), measured.engine.request("b", 5, 2))
    assert measured.value("cb_step_sequences_sum") == 2 + 2
    assert measured.value("cb_step_tokens_sum") == 4 + 5 + 2
    assert measured.value("cb_steps_total") == measured.value("cb_step_seconds_count") == 2


def test_preemptions_are_counted_by_mode_with_their_bytes():
    measured = Measured(num_blocks=6, block_size=4, host_blocks=64, mode="swap")
    engine = measured.engine
    measured.run(engine.request("old", 8, 12), engine.request("young", 8, 12))
    swaps = measured.value("cb_preemptions_total", mode="swap")
    assert swaps == engine.scheduler.counters["preemptions_swap"] > 0
    assert measured.value("cb_swapped_bytes_total") == engine.scheduler.counters["swapped_blocks"] * BYTES_PER_BLOCK
    assert measured.value("cb_preemptions_total", mode="recompute") == 0


def test_a_failed_step_and_its_requests_are_errors():
    measured = Measured()
    measured.engine.failing = {2, 3, 4, 5}  # once more, and each request alone
    measured.run(measured.engine.request("a"), measured.engine.request("b"))
    assert measured.value("cb_engine_errors_total", kind="step") == 4
    assert measured.value("cb_engine_errors_total", kind="request") == 2


def test_durations_carry_the_conventions_labels():
    measured = Measured()
    engine = measured.engine
    measured.run(engine.request("r", 4, 3), engine.request("late", 4, 3, deadline=time.monotonic() - 1))
    names = {
        "gen_ai_operation_name": "text_completion",
        "gen_ai_provider_name": "cb_backend",
        "gen_ai_request_model": "tiny",
    }

    def count(name: str, **labels: str) -> float | None:
        return measured.registry.get_sample_value(f"gen_ai_server_{name}_seconds_count", {**names, **labels})

    assert count("request_duration", error_type="") == 1
    assert count("request_duration", error_type="timeout") == 1
    assert count("time_to_first_token") == 1
    assert count("time_per_output_token") == 1
    assert measured.value("cb_deadline_misses_total", request_class="default") == 1


def test_refusals_and_disconnects_are_counted():
    measured = Measured()
    measured.reporter.refused("queue_full")
    measured.reporter.disconnected()
    measured.reporter.report()
    assert measured.value("cb_requests_refused_total", reason="queue_full") == 1
    assert measured.value("cb_client_disconnects_total") == 1


def test_the_share_of_admissions_that_overflowed_can_be_read():
    measured = Measured()
    for judged, overflowed in ((5, 0), (8, 2)):
        found = {"admissions_judged": judged, "admissions_overflowed": overflowed}
        measured.metrics.refresh({**measured.engine.core.stats(), **found})
    assert measured.value("cb_admissions_judged_total") == 8
    assert measured.value("cb_admissions_overflowed_total") == 2


def test_gauges_show_the_load_and_return_to_zero_when_idle():
    measured = Measured(num_blocks=6, block_size=4, host_blocks=64, mode="swap", prefix_caching=False)
    engine, seen = measured.engine, []

    def look() -> None:
        measured.metrics.refresh(engine.core.stats())
        seen.append({name: measured.total(name) for name in GAUGES})

    engine.before |= dict.fromkeys(range(2, 20), look)
    measured.run(engine.request("old", 8, 12), engine.request("young", 8, 12))
    for name in ("cb_requests_running", "cb_requests_swapped", "vllm:num_requests_waiting", "cb_host_blocks_used"):
        assert max(s[name] for s in seen) >= 1, name
    assert all(value >= 0 for s in seen for value in s.values())
    assert measured.value("cb_kv_blocks", state="free") == 6
    assert {name: measured.total(name) for name in GAUGES if name != "cb_kv_blocks"} == dict.fromkeys(
        set(GAUGES) - {"cb_kv_blocks"}, 0
    )


def test_the_reporters_thread_brings_gauges_back_without_another_step():
    measured = Measured()
    measured.reporter.start()
    try:
        ends = measured.engine.run(measured.engine.request("r", 4, 30))
        assert ends == {("r", 0): FinishReason.LENGTH}
        until = time.monotonic() + 5
        while measured.value("cb_requests_finished_total", request_class="default", reason="length") != 1:
            assert time.monotonic() < until, "the request was not reported within 5 s"
            time.sleep(0.01)
        assert measured.value("cb_requests_running") == 0
    finally:
        measured.reporter.close()


def test_a_reporter_that_fails_says_so_once(caplog):
    def stats():
        raise RuntimeError("no stats")

    reporter = Reporter(stats, None)
    reporter.start()
    reporter.disconnected()
    reporter.close()
    assert [r.message for r in caplog.records] == ["metrics or request logs cannot be written"]


def test_the_gateways_aliases_have_exactly_one_series():
    measured = Measured(num_blocks=64, block_size=4)
    measured.run(measured.engine.request("r"))
    text = generate_latest(measured.registry).decode()
    series = [line for line in text.splitlines() if line.startswith("vllm:")]
    assert [line.split("{")[0] for line in series] == [
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:cache_config_info",
    ]
    assert 'vllm:cache_config_info{block_size="4",model_name="tiny",num_gpu_blocks="64"} 1.0' in series


def test_classes_are_bounded_and_escaped():
    bounded = Bounded(3)
    assert [bounded(v) for v in ("", "a", "b" * 200, "too many", "a")] == ["default", "a", "b" * 64, "other", "a"]
    measured = Measured()
    measured.run(measured.engine.request("r", request_class='x"}\n\ud800'))
    (family,) = [
        f
        for f in text_string_to_metric_families(generate_latest(measured.registry).decode())
        if f.name == "cb_requests_admitted"
    ]
    assert family.samples[0].labels["request_class"] == 'x"}\n?'


def test_a_count_that_went_back_never_lowers_a_counter():
    measured = Measured()
    stats = dict(measured.engine.core.stats())
    for tokens in (5, 3, 4):
        measured.metrics.refresh({**stats, "generated_tokens": tokens, "kv_blocks_free": -1})
    assert measured.value("cb_tokens_total", kind="generated") == 6
    assert measured.value("cb_kv_blocks", state="free") == 0


def test_in_multiprocess_mode_a_gauge_is_one_series_of_the_newest_process(tmp_path):
    """BentoML's `/metrics` merges the files of all processes, also of one that was killed and replaced."""
    program = """
import sys
from tests.telemetry.scripted_engine import ScriptedEngine
from cb_backend.telemetry.metrics.collector import Metrics
stats = ScriptedEngine().core.stats()
metrics = Metrics("tiny", stats)
metrics.refresh({**stats, "running": int(sys.argv[1]), "generated_tokens": 10})
"""
    environment = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    for running in ("7", "2"):
        subprocess.run([sys.executable, "-c", program, running], env=environment, check=True, cwd=ROOT, timeout=60)
    from prometheus_client.multiprocess import MultiProcessCollector

    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(tmp_path))
    text = generate_latest(registry).decode()
    assert [line for line in text.splitlines() if line.startswith(("cb_requests_running", "vllm:num_requests_ru"))] == [
        'cb_requests_running{model="tiny"} 2.0',
        'vllm:num_requests_running{model_name="tiny"} 2.0',
    ]
    assert 'cb_tokens_total{kind="generated",model="tiny"} 20.0' in text


def test_importing_the_package_leaves_prometheus_client_alone():
    """BentoML sets the multiprocess directory after the service module is imported."""
    program = """
import sys
import cb_backend.telemetry.setup, cb_backend.telemetry.metrics.collector, cb_backend.telemetry.timeline.page
print(sorted({name.split(".")[0] for name in sys.modules} & {"prometheus_client", "bentoml", "torch", "starlette"}))
"""
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT, timeout=60
    )
    assert found.stdout == "[]\n"


@pytest.mark.parametrize("metric", METRICS, ids=lambda m: m.name)
def test_names_follow_prometheus_rules(metric):
    assert (metric.kind == "counter") == metric.name.endswith("_total")
    assert (
        metric.kind != "histogram"
        or metric.unit in ("sequences", "tokens", "ratio")
        or metric.name.endswith("_seconds")
    )
    assert metric.help.endswith(".")


def test_the_documented_table_is_the_code():
    guide = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert markdown() in guide
