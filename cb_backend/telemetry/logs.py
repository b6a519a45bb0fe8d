"""One JSON line per ended request on the logger `cb_backend.request`, level INFO. No text of prompts or answers unless
`CB_LOG_PROMPTS=1` asks for it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from .summary import RequestSummary

logger = logging.getLogger("cb_backend.request")


def follow_bentoml() -> None:
    """Lets what the engine says at INFO through, as far as BentoML's own lines are let through.

    BentoML opens only its own loggers at INFO and switches loggers off that exist before it configures them. A level
    that the operator gave `cb_backend` stays.
    """
    package = logging.getLogger("cb_backend")
    package.disabled = logger.disabled = False
    if package.level == logging.NOTSET:
        package.setLevel(logging.getLogger("bentoml").level)


def logs_prompts() -> bool:
    return os.environ.get("CB_LOG_PROMPTS", "").strip().lower() in ("1", "true")


def log_request(summary: RequestSummary, decode: Callable[[Sequence[int]], str] | None = None) -> None:
    """Writes the line; `decode` turns token ids into text, where the summary has them."""
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s", json.dumps(line(summary, decode), ensure_ascii=False))


def line(summary: RequestSummary, decode: Callable[[Sequence[int]], str] | None = None) -> dict[str, Any]:
    """What the line holds. Durations in seconds, to the microsecond; None where the moment never came."""
    latency = summary.latency
    fields: dict[str, Any] = {
        "event": "request_end",
        "id": summary.request_id,
        "trace_id": f"{summary.trace_id:032x}" if summary.trace_id else None,
        "span_id": f"{summary.span_id:016x}" if summary.span_id else None,
        "operation": summary.operation,
        "class": summary.request_class,
        "priority": summary.priority,
        "reason": summary.reason.value,
        "choices": summary.choices,
        "prompt_tokens": summary.prompt_tokens,
        "cached_tokens": summary.cached_tokens,
        "output_tokens": summary.output_tokens,
        "prepare_s": _round(latency.prepare),
        "queue_s": _round(latency.queue),
        "first_token_s": _round(latency.first_token),
        "prefill_s": _round(latency.prefill),
        "decode_s": _round(latency.decode),
        "e2e_s": _round(latency.e2e),
        "preemptions": summary.preemptions,
        "recomputed_tokens": summary.recomputed_tokens,
        "swapped_bytes": summary.swapped_bytes,
    }
    if summary.error is not None:
        fields["error"] = summary.error
    if summary.prompt_ids and decode is not None:
        fields["prompt"] = decode(summary.prompt_ids)
        fields["output"] = [decode(ids) for ids in summary.output_ids]
    return fields


def _round(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
