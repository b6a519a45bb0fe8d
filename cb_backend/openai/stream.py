"""One HTTP answer from the deltas of its choices: a whole body, or server-sent events one by one.

Nothing is sent before the body or the first event, so a failure until then has a status of its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from starlette.responses import Response

from ..text.output import OutputCollector
from .answers import Answer
from .connection import Receive
from .errors import error_of, error_response
from .generation import Deltas
from .rendering import Generation

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Reply:
    """Args:
    scope, receive, send: of the ASGI call.
    headers: sent with every answer.
    """

    def __init__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send, headers: dict[str, str]) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._headers = headers
        self._streamed: Answer | None = None  # what writes the stream that has begun
        self._ended = False

    async def answer(
        self,
        opening: AbstractAsyncContextManager[tuple[Generation, Deltas]],
        shape: Callable[[Generation], Answer],
        stream: bool,
    ) -> None:
        """Generates and sends.

        Args:
            opening: from `generation.opened`.
            shape: how what is generated is written.
            stream: as events instead of a body.

        Raises:
            RequestError, GenerationFailed: as `opened` and its deltas.
        """
        async with opening as (generation, deltas):
            await (self._events if stream else self._whole)(shape(generation), deltas)

    async def _whole(self, answer: Answer, deltas: Deltas) -> None:
        """Waits for all of it, and sends one body."""
        outputs = OutputCollector()
        async for choice, delta in deltas:
            outputs.add(choice, delta)
        body = answer.body(outputs.outputs())
        self._ended = True
        response = Response(body, headers=self._headers, media_type="application/json")
        await response(self._scope, self._receive, self._send)

    async def _events(self, answer: Answer, deltas: Deltas) -> None:
        """Sends events as the deltas come; the first one brings the status with it."""
        async for choice, delta in deltas:
            await self._write(answer, answer.events(choice, delta))
        await self._end(answer, answer.last_events())

    async def _write(self, answer: Answer, data: bytes) -> None:
        if self._streamed is None:
            self._streamed = answer
            # No proxy may keep events back, and no cache may keep them at all.
            own = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            start = Response(status_code=200, headers={**self._headers, **own}, media_type="text/event-stream")
            headers = [(key, value) for key, value in start.raw_headers if key != b"content-length"]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _end(self, answer: Answer, data: bytes) -> None:
        await self._write(answer, data)
        self._ended = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def fail(self, error: Exception) -> None:
        """An error event if the stream has begun, else an error response."""
        if self._ended:
            return
        if self._streamed is not None:
            await self._end(self._streamed, self._streamed.error_event(error_of(error)[1]))
        else:
            self._ended = True
            await error_response(error, self._headers)(self._scope, self._receive, self._send)
