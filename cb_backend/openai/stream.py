"""One HTTP answer: a whole body, or server-sent events one by one. Nothing is sent before the first of them."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

from starlette.responses import Response

from .errors import error_of, error_response


class Reply:
    """Args:
    scope, receive, send: of the ASGI call.
    headers: sent with whatever comes.

    `error_event` writes an error, in OpenAI's shape, as an event of the stream that `event` begins; to be set before.
    """

    error_event: Callable[[dict[str, Any]], bytes]

    def __init__(self, scope: MutableMapping[str, Any], receive: Any, send: Any, headers: dict[str, str]) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._headers = headers
        self._streaming = False
        self._ended = False

    async def whole(self, body: bytes) -> None:
        self._ended = True
        response = Response(body, headers=self._headers, media_type="application/json")
        await response(self._scope, self._receive, self._send)

    async def event(self, data: bytes) -> None:
        """Sends events; the first ones bring the status with them."""
        if not self._streaming:
            self._streaming = True
            # No proxy may keep events back, and no cache may keep them at all.
            own = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            start = Response(status_code=200, headers={**self._headers, **own}, media_type="text/event-stream")
            headers = [(key, value) for key, value in start.raw_headers if key != b"content-length"]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes) -> None:
        await self.event(data)
        self._ended = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def fail(self, error: Exception) -> None:
        """An error event if the stream has begun, else an error response."""
        if self._ended:
            return
        if self._streaming:
            await self.end(self.error_event(error_of(error)[1]))
        else:
            self._ended = True
            await error_response(error, self._headers)(self._scope, self._receive, self._send)
