"""The two ends of an HTTP exchange: reading a bounded JSON body, and noticing that the client left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request

from ..errors import RequestError
from .body_coding import check_coding, decoded
from .errors import ClientLeft

T = TypeVar("T")

MAX_VALUES = 2_000_000
_SEPARATORS = (b",", b"[", b"{")

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


async def read_json(request: Request, limit: int) -> Any:
    """The parsed body, of at most `limit` bytes, decoded or not, and `MAX_VALUES` values. NaN is no JSON.

    Raises:
        RequestError: 413, 415 or 400.
        ClientLeft: the client left while sending.
    """
    too_large = RequestError(f"the body is larger than {limit} bytes", status=413, code="body_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise too_large
    coding = request.headers.get("content-encoding", "").strip().lower()
    check_coding(coding)
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                raise too_large
    except ClientDisconnect:
        raise ClientLeft from None
    text = decoded(bytes(body), coding, limit) if coding else body
    # Counted in the bytes, some of it in texts: to parse millions of values would hold the event loop.
    if sum(map(text.count, _SEPARATORS)) > MAX_VALUES:
        raise RequestError(f"the body holds more than {MAX_VALUES} values", status=413, code="body_too_large")
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None


async def disconnected(receive: Receive) -> None:
    """Returns when the client has left. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Runs `work`; a client that leaves cancels it, whether or not anything was sent.

    Raises:
        ClientLeft: the client left first.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientLeft
    finally:
        for one in (task, watch):
            one.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
