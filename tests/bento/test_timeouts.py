"""BentoML's `traffic.timeout` as this project leaves it: it ends with its request; its 504 is shaped as the route."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import pytest
from bentoml._internal.server.http.traffic import TimeoutMiddleware

from cb_backend.bento.compat import end_timers_with_their_requests
from cb_backend.bento.timeouts import too_late


@pytest.fixture(autouse=True)
def ours() -> Iterator[None]:
    before = TimeoutMiddleware.__call__
    end_timers_with_their_requests.cache_clear()
    end_timers_with_their_requests(too_late)
    yield
    TimeoutMiddleware.__call__ = before  # type: ignore[method-assign]


def scope(path: str = "/v1/completions", **headers: str) -> dict[str, Any]:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "path": path, "root_path": "", "headers": raw, "method": "POST"}


async def receive() -> Any:
    await asyncio.sleep(60)


async def answer(app: Any, seconds: float, **request: Any) -> list[Any]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await TimeoutMiddleware(app, seconds)(scope(**request), receive, send)
    return sent


class Held:
    """What a request's context holds."""


_HELD: ContextVar[Held] = ContextVar("held")


async def test_nothing_of_an_answered_request_waits_for_its_timeout() -> None:
    refs: list[weakref.ref[Held]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def request() -> None:
        held = Held()
        refs.append(weakref.ref(held))
        _HELD.set(held)
        await answer(app, 3600)

    for _ in range(10):
        await asyncio.create_task(request())
    await asyncio.sleep(0)  # the loop lets go of the last task
    gc.collect()
    assert [ref() for ref in refs] == [None] * 10


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
async def test_a_request_that_sent_nothing_is_cancelled_and_told_so(path: str) -> None:
    ended: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    start, body = await answer(app, 0.01, path=path, x_request_id="mine")
    assert ended == ["cancelled"]
    assert start["status"] == 504
    headers = dict(start["headers"])
    assert (headers[b"retry-after"], headers[b"x-request-id"]) == (b"5", b"mine")
    error = json.loads(body["body"])["error"]
    if path.startswith("/v1"):
        assert (error["type"], error["code"]) == ("timeout_error", "timeout")
    else:
        assert "traffic.timeout" in error


async def test_a_stream_that_has_begun_goes_on() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.sleep(0.05)
        await send({"type": "http.response.body", "body": b"late", "more_body": False})

    _start, body = await answer(app, 0.01)
    assert body["body"] == b"late"


async def test_an_error_of_the_application_and_a_cancelled_server_pass_through() -> None:
    async def failing(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("its own")

    with pytest.raises(ValueError, match="its own"):
        await answer(failing, 3600)

    async def waiting(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(60)

    task = asyncio.ensure_future(answer(waiting, 3600))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
