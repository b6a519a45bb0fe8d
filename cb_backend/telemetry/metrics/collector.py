"""Prometheus metrics of one engine, in BentoML's `/metrics`.

prometheus_client decides when it is first imported whether it writes the files that BentoML's multiprocess `/metrics`
reads, and BentoML sets `PROMETHEUS_MULTIPROC_DIR` only when it starts a worker: so nothing here imports it before
`Metrics` is made, which must happen in the worker. Gauges have one series per engine and no process label (the newest
value of a living process counts), because the Kubernetes gateway reads the first series that it finds.

Not an observer: telemetry/reporter.py calls it from its own thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ...request import FinishReason
from .. import semconv
from ..summary import RequestSummary
from .table import MAX_CLASSES, MAX_REFUSAL_REASONS, METRICS

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_SUCCESS = (FinishReason.STOP, FinishReason.LENGTH)
_ERROR_TYPE = {FinishReason.ABORT: "abort", FinishReason.TIMEOUT: "timeout", FinishReason.ERROR: "engine_error"}
_LONGEST_LABEL = 64

# Counters that repeat a count of `Engine.stats()`: (metric, label values after the model, key).
_COUNTED: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("cb_tokens_total", ("prompt",), "prefix_queried_tokens"),
    ("cb_tokens_total", ("cached",), "prefix_hit_tokens"),
    ("cb_tokens_total", ("computed",), "computed_tokens"),
    ("cb_tokens_total", ("generated",), "generated_tokens"),
    ("cb_tokens_total", ("recomputed",), "recomputed_tokens"),
    ("cb_preemptions_total", ("swap",), "preemptions_swap"),
    ("cb_preemptions_total", ("recompute",), "preemptions_recompute"),
    ("cb_swapped_bytes_total", (), "swapped_bytes"),
    ("cb_admissions_judged_total", (), "admissions_judged"),
    ("cb_admissions_overflowed_total", (), "admissions_overflowed"),
)

_process_families: dict[str, Any] = {}


class StepNumbers(NamedTuple):
    """What one step adds to the metrics. `admitted`: classes of the requests whose first choice it admitted."""

    seconds: float
    sequences: int
    tokens: int
    admitted: tuple[str, ...]
    error: str | None


class Metrics:
    """The metrics of one engine.

    Args:
        model: id that clients use.
        stats: of `Engine.stats()`, for the sizes that do not change.
        registry: for tests; default: the process's, whose metrics are made once however many engines it holds.
    """

    def __init__(self, model: str, stats: Mapping[str, float], registry: CollectorRegistry | None = None) -> None:
        self._model = label(model)
        if registry is not None:
            self._families = _make_families(registry)
        else:
            if not _process_families:
                _process_families.update(_make_families(None))
            self._families = _process_families
        self._classes = Bounded(MAX_CLASSES)
        self._refusals = Bounded(MAX_REFUSAL_REASONS)
        self._seen: dict[str, float] = {}
        self._counted = [(self._of(name, *labels), key) for name, labels, key in _COUNTED]
        self._steps = self._of("cb_steps_total")
        self._step_seconds = self._of("cb_step_seconds")
        self._step_sequences = self._of("cb_step_sequences")
        self._step_tokens = self._of("cb_step_tokens")
        self._disconnects = self._of("cb_client_disconnects_total")
        self._failed_steps = self._of("cb_engine_errors_total", "step")
        self._failed_requests = self._of("cb_engine_errors_total", "request")
        self._blocks = {state: self._of("cb_kv_blocks", state) for state in ("used", "cached", "free")}
        # There from the start, or Prometheus would not see the first one as an increase.
        self._of("cb_requests_refused_total", self._refusals("queue_full"))
        self._of("cb_deadline_misses_total", self._classes(""))
        size, blocks = str(int(stats["block_size"])), str(int(stats["kv_blocks"]))
        self._of("vllm:cache_config_info", size, blocks).set(1)
        self.refresh(stats)

    def step(self, step: StepNumbers) -> None:
        self._steps.inc()
        self._step_seconds.observe(step.seconds)
        self._step_sequences.observe(step.sequences)
        self._step_tokens.observe(step.tokens)
        for request_class in step.admitted:
            self._of("cb_requests_admitted_total", self._classes(request_class)).inc()
        if step.error is not None:
            self._failed_steps.inc()

    def finished(self, summary: RequestSummary) -> None:
        request_class = self._classes(summary.request_class)
        self._of("cb_requests_finished_total", request_class, summary.reason.value).inc()
        if summary.late:
            self._of("cb_deadline_misses_total", request_class).inc()
        if summary.reason is FinishReason.ERROR:
            self._failed_requests.inc()
        latency = summary.latency
        names = (summary.operation, semconv.PROVIDER, self._model)
        duration = self._families["gen_ai_server_request_duration_seconds"]
        duration.labels(*names, _ERROR_TYPE.get(summary.reason, "")).observe(latency.e2e)
        if latency.inference is not None or summary.reason in _SUCCESS:
            self._of("cb_request_queue_seconds", request_class).observe(latency.queue)
        if summary.reason in _SUCCESS and latency.first_token is not None and latency.decode is not None:
            first = self._families["gen_ai_server_time_to_first_token_seconds"]
            first.labels(*names).observe(latency.first_token)
            following = summary.output_tokens / summary.choices - 1
            if following > 0:
                each = self._families["gen_ai_server_time_per_output_token_seconds"]
                each.labels(*names).observe(latency.decode / following)

    def forecast(self, request_class: str, ratio: float) -> None:
        """A request ended with `ratio` times the tokens that were expected of it at admission."""
        self._of("cb_forecast_length_ratio", self._classes(request_class)).observe(ratio)

    def refused(self, code: str) -> None:
        self._of("cb_requests_refused_total", self._refusals(code)).inc()

    def disconnected(self) -> None:
        self._disconnects.inc()

    def refresh(self, stats: Mapping[str, float]) -> None:
        """Sets the gauges, and brings the counters that repeat a count of `stats` up to it."""
        for counter, key in self._counted:
            value = stats[key]
            counter.inc(max(0.0, value - self._seen.get(key, 0.0)))
            self._seen[key] = value
        for name, alias in (("running", "vllm:num_requests_running"), ("waiting", "vllm:num_requests_waiting")):
            self._set(f"cb_requests_{name}", stats[name])
            self._set(alias, stats[name])
        self._set("cb_requests_swapped", stats["swapped"])
        self._set("cb_host_blocks_used", stats["host_blocks_used"])
        for state, gauge in self._blocks.items():
            gauge.set(max(0.0, stats[f"kv_blocks_{state}"]))
        self._set("vllm:kv_cache_usage_perc", stats["kv_blocks_used"] / stats["kv_blocks"])
        queried = stats["prefix_queried_tokens"]
        self._set("cb_prefix_cache_hit_ratio", stats["prefix_hit_tokens"] / queried if queried else 0.0)

    def _of(self, name: str, *labels: str) -> Any:
        return self._families[name].labels(self._model, *labels)

    def _set(self, name: str, value: float) -> None:
        self._of(name).set(max(0.0, value))


class Bounded:
    """Bounds a label whose values clients choose: the first `limit` keep their name, the rest share `other`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: dict[str, str] = {}

    def __call__(self, value: str) -> str:
        known = self._known.get(value)
        if known is not None:
            return known
        if len(self._known) >= self._limit:
            return "other"
        self._known[value] = label(value) or "default"
        return self._known[value]


def label(value: str) -> str:
    """A label value that `/metrics` can hold: short, and without lone surrogates, which break the whole page."""
    return value[:_LONGEST_LABEL].encode("utf-8", "replace").decode("utf-8")


def _make_families(registry: CollectorRegistry | None) -> dict[str, Any]:
    import prometheus_client as prometheus

    options: dict[str, Any] = {} if registry is None else {"registry": registry}
    families: dict[str, Any] = {}
    for metric in METRICS:
        arguments = (metric.name, metric.help, metric.labels)
        if metric.kind == "counter":
            families[metric.name] = prometheus.Counter(*arguments, **options)
        elif metric.kind == "gauge":
            families[metric.name] = prometheus.Gauge(*arguments, multiprocess_mode="livemostrecent", **options)
        else:
            families[metric.name] = prometheus.Histogram(*arguments, buckets=metric.buckets, **options)
    return families
