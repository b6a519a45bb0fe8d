"""Every metric: name, type, unit, labels and meaning. docs/operations.md holds this table as `markdown()` prints it.

Label sets are bounded: `model` is the one that is served, `request_class` at most `MAX_CLASSES` values of a process
(the rest is `other`), everything else an enumeration of ours. Imports nothing of prometheus_client.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .. import semconv

MAX_CLASSES = 32
MAX_REFUSAL_REASONS = 32

_GEN_AI = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")
_WAIT_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_SIZE_BUCKETS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)
_TOKEN_BUCKETS = (*_SIZE_BUCKETS, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
_RATIO_BUCKETS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.1, 1.5, 2.0, 4.0, 10.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """`name` is the one that is scraped, with its `_total` or unit suffix."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()


METRICS: tuple[Metric, ...] = (
    Metric(
        "gen_ai_server_request_duration_seconds",
        "histogram",
        "seconds",
        (*_GEN_AI, "error_type"),
        "Arrival to end of a request; error_type is empty where it succeeded.",
        semconv.DURATION_BUCKETS,
    ),
    Metric(
        "gen_ai_server_time_to_first_token_seconds",
        "histogram",
        "seconds",
        _GEN_AI,
        "Arrival to first token, of requests that succeeded.",
        semconv.TIME_TO_FIRST_TOKEN_BUCKETS,
    ),
    Metric(
        "gen_ai_server_time_per_output_token_seconds",
        "histogram",
        "seconds",
        _GEN_AI,
        "Time per output token after the first, of requests that succeeded.",
        semconv.TIME_PER_OUTPUT_TOKEN_BUCKETS,
    ),
    Metric(
        "cb_request_queue_seconds",
        "histogram",
        "seconds",
        ("model", "request_class"),
        "From being tokenized and compiled to first admission.",
        _WAIT_BUCKETS,
    ),
    Metric("cb_requests_admitted_total", "counter", "requests", ("model", "request_class"), "Requests let in."),
    Metric(
        "cb_requests_finished_total",
        "counter",
        "requests",
        ("model", "request_class", "reason"),
        "Ended requests by the engine's finish reason (stop, length, abort, timeout, error); a tool call is a stop.",
    ),
    Metric(
        "cb_requests_refused_total",
        "counter",
        "requests",
        ("model", "reason"),
        "Requests refused before admission, malformed ones included, by the error's code.",
    ),
    Metric(
        "cb_deadline_misses_total",
        "counter",
        "requests",
        ("model", "request_class"),
        "Requests that ended at or after their deadline.",
    ),
    Metric(
        "cb_client_disconnects_total", "counter", "requests", ("model",), "Requests whose reader left before the end."
    ),
    Metric(
        "cb_engine_errors_total",
        "counter",
        "errors",
        ("model", "kind"),
        "Failed steps; failed requests.",
    ),
    Metric(
        "cb_tokens_total",
        "counter",
        "tokens",
        ("model", "kind"),
        "prompt: of admitted requests; cached: of those, found in the prefix cache; computed: by forward passes; "
        "generated: sampled; recomputed: computed again after a preemption.",
    ),
    Metric(
        "cb_preemptions_total", "counter", "preemptions", ("model", "mode"), "Preemptions by mode (swap, recompute)."
    ),
    Metric("cb_swapped_bytes_total", "counter", "bytes", ("model",), "KV bytes copied to host memory by preemptions."),
    Metric("cb_steps_total", "counter", "steps", ("model",), "Steps that ran, failed ones included."),
    Metric(
        "cb_step_seconds",
        "histogram",
        "seconds",
        ("model",),
        "A step, planning to settling.",
        _STEP_BUCKETS,
    ),
    Metric("cb_step_sequences", "histogram", "sequences", ("model",), "Sequences in one step's batch.", _SIZE_BUCKETS),
    Metric("cb_step_tokens", "histogram", "tokens", ("model",), "Tokens computed by one step.", _TOKEN_BUCKETS),
    Metric(
        "cb_forecast_length_ratio",
        "histogram",
        "ratio",
        ("model", "request_class"),
        "Forecast error: generated tokens over those expected at admission (aborts, timeouts and errors left out).",
        _RATIO_BUCKETS,
    ),
    Metric(
        "cb_admissions_judged_total",
        "counter",
        "admissions",
        ("model",),
        "Admissions of which it is known whether they would have overflowed the KV pool.",
    ),
    Metric(
        "cb_admissions_overflowed_total",
        "counter",
        "admissions",
        ("model",),
        "Those that would have; their share is what `admission.risk` bounds.",
    ),
    Metric("cb_requests_running", "gauge", "requests", ("model",), "Sequences that hold KV blocks."),
    Metric(
        "cb_requests_waiting",
        "gauge",
        "requests",
        ("model",),
        "Queue depth, preempted ones included.",
    ),
    Metric("cb_requests_swapped", "gauge", "requests", ("model",), "Waiting sequences whose KV is in host memory."),
    Metric("cb_kv_blocks", "gauge", "blocks", ("model", "state"), "KV blocks by state (used, cached, free)."),
    Metric("cb_host_blocks_used", "gauge", "blocks", ("model",), "Blocks of the host pool that hold swapped KV."),
    Metric(
        "cb_prefix_cache_hit_ratio",
        "gauge",
        "ratio",
        ("model",),
        "Share of prompt tokens since the start that came from the prefix cache.",
    ),
    Metric("vllm:num_requests_running", "gauge", "requests", ("model_name",), "Alias of cb_requests_running."),
    Metric("vllm:num_requests_waiting", "gauge", "requests", ("model_name",), "Alias of cb_requests_waiting."),
    Metric("vllm:kv_cache_usage_perc", "gauge", "ratio", ("model_name",), "Used share of the KV blocks, 0 to 1."),
    Metric(
        "vllm:cache_config_info",
        "gauge",
        "1",
        ("model_name", "block_size", "num_gpu_blocks"),
        "Always 1; the labels say how large the KV pool is.",
    ),
)

BY_NAME = {metric.name: metric for metric in METRICS}


def markdown() -> str:
    """The table of docs/operations.md."""
    rows = [
        f"| `{m.name}` | {m.kind} | {m.unit} | {', '.join(f'`{label}`' for label in m.labels)} | {m.help} |"
        for m in METRICS
    ]
    return "\n".join(["| name | type | unit | labels | meaning |", "|---|---|---|---|---|", *rows]) + "\n"
