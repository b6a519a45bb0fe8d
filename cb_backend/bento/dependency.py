"""What makes a stream safe to `bentoml.depends` on, where BentoML 1.4 itself does not.

BentoML's proxy ends a stream quietly at 1.01 times the dependency's `traffic.timeout`, and again when it renews its
connections (every 100 requests or 300 seconds): `STREAMS` sets both out of reach. It never closes the response of a
stream that its caller leaves, so the dependency generates to the end for nobody: `close_left_streams` repairs that.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from functools import wraps
from typing import Any

# Service options that keep streams whole; seconds and requests.
STREAMS: Mapping[str, Mapping[str, Any]] = {
    "traffic": {"timeout": 3600},
    "runner_connection": {"max_requests": 10**9, "max_age": 1e9},
}


def close_left_streams() -> None:
    """From now on, BentoML's proxies in this process close a stream's connection when its reader leaves.

    The service behind it sees its client disconnect, as it would without a front. May be called again.
    """
    from _bentoml_impl.client.proxy2 import AsyncClient

    original = AsyncClient._parse_stream_response
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    async def closing(self: Any, endpoint: Any, resp: Any) -> AsyncGenerator[Any, None]:
        try:
            async for data in original(self, endpoint, resp):
                yield data
        finally:
            resp.close()

    AsyncClient._parse_stream_response = closing
