"""What makes a stream safe to `bentoml.depends` on, where BentoML 1.4 itself does not.

BentoML's proxy ends a stream quietly at 1.01 times the dependency's `traffic.timeout`, and again when it renews its
connections (every 100 requests or 300 seconds): `STREAMS` sets both out of reach. It never closes the response of a
stream that its caller leaves, so the dependency generates to the end what no client reads; and the process of the front
exports a span per streamed chunk and loses its last spans: `repair_proxies` repairs that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .compat import close_streams_that_are_left
from .front import leave_front, watch_front

# Service options that keep streams whole; seconds and requests.
STREAMS: Mapping[str, Mapping[str, Any]] = {
    "traffic": {"timeout": 3600},
    "runner_connection": {"max_requests": 10**9, "max_age": 1e9},
}


def repair_proxies() -> None:
    """From now on, for BentoML's proxies in this process. May be called again.

    A stream's connection is closed when its reader leaves, so the service behind it sees its client disconnect as it
    would without a front. A proxy that is made or closed brings the front's own spans in order (front.py).
    """
    close_streams_that_are_left(watch_front, leave_front)
