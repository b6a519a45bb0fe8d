"""What makes a stream safe to `bentoml.depends` on, where BentoML 1.4 itself does not.

BentoML's proxy ends a stream quietly at 1.01 times the dependency's `traffic.timeout`, and again when it renews its
connections (every 100 requests or 300 seconds): `STREAMS` sets both out of reach. It never closes the response of a
stream that its caller leaves, so the dependency generates to the end for nobody; and the process of the front exports
a span per streamed chunk and loses its last spans: `repair_proxies` repairs that.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from functools import wraps
from typing import Any

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
    from _bentoml_impl.client.proxy2 import AsyncClient

    parse, make, close = AsyncClient._parse_stream_response, AsyncClient.__init__, AsyncClient.close
    if hasattr(parse, "__wrapped__"):
        return

    @wraps(parse)
    async def closing(self: Any, endpoint: Any, resp: Any) -> AsyncGenerator[Any, None]:
        try:
            async for data in parse(self, endpoint, resp):
                yield data
        finally:
            resp.close()

    @wraps(make)
    def watched(self: Any, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        watch_front()

    @wraps(close)
    async def left(self: Any) -> None:
        await close(self)
        await asyncio.to_thread(leave_front)

    AsyncClient._parse_stream_response = closing
    AsyncClient.__init__ = watched
    AsyncClient.close = left
