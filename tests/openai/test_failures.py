"""What goes wrong has a status before the first byte, and is an error event after it; `[DONE]` means success."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from cb_backend import RequestError
from cb_backend.openai.app import openai_app
from cb_backend.request import Usage
from tests.openai.scripted_engine import LeavingClient, ScriptedEngine, outputs

CHAT = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}


async def call(engine: ScriptedEngine, **fields: Any) -> LeavingClient:
    client = LeavingClient(openai_app(engine), "/chat/completions", {**CHAT, **fields})
    await asyncio.wait_for(client.done, 5)
    return client


def header(client: LeavingClient, name: bytes) -> bytes | None:
    return dict(client.messages[0]["headers"]).get(name)


EARLY: list[tuple[Any, int, str]] = [
    (RequestError("'x': bad", param="x"), 400, "invalid_value"),
    (RequestError("full", status=429, code="queue_full", retry_after=7.0), 429, "queue_full"),
    (RequestError("stopped", status=503, code="engine_stopped", retry_after=5.0), 503, "engine_stopped"),
    (RuntimeError("secret detail"), 500, "internal_error"),
    (outputs("", reason="error", error="NaN")[0], 500, "engine_error"),
    (outputs("", reason="abort")[0], 503, "aborted"),
]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("failure", "status", "code"), EARLY)
async def test_a_failure_before_the_first_token_has_its_status(
    failure: Any, status: int, code: str, stream: bool
) -> None:
    client = await call(ScriptedEngine([failure]), stream=stream)
    assert client.status == status
    error = json.loads(client.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert "secret" not in error["message"]
    assert header(client, b"content-type") == b"application/json"
    retry = getattr(failure, "retry_after", None)
    assert header(client, b"retry-after") == (None if retry is None else b"%d" % retry)


LATE: list[tuple[Any, str]] = [
    (RuntimeError("broken"), "internal_error"),
    (RequestError("stopped", status=503, code="engine_stopped"), "engine_stopped"),
    (outputs("one", "two", reason="error", error="NaN in its logits")[1], "engine_error"),
    (outputs("one", "two", reason="abort")[1], "aborted"),
]


@pytest.mark.parametrize(("failure", "code"), LATE)
async def test_a_failure_after_the_first_token_is_an_event_and_no_clean_end(failure: Any, code: str) -> None:
    client = await call(ScriptedEngine([outputs("one", "two")[0], failure]), stream=True)
    assert client.status == 200
    *_, last, end = client.body.split(b"\n\n")
    assert end == b""
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == code
    assert b"[DONE]" not in client.body
    assert client.messages[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


@pytest.mark.parametrize("failure", [failure for failure, _ in LATE])
async def test_the_same_failure_without_streaming_is_an_error(failure: Any) -> None:
    client = await call(ScriptedEngine([outputs("one", "two")[0], failure]))
    assert client.status >= 500
    assert "choices" not in json.loads(client.body)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_timeout_without_a_token_is_504(stream: bool) -> None:
    import dataclasses

    late = dataclasses.replace(outputs("", reason="timeout")[0], token_ids=(), usage=Usage(3, 0, 0))
    client = await call(ScriptedEngine([late]), stream=stream, timeout=0.5)
    assert client.status == 504
    assert json.loads(client.body)["error"]["code"] == "timeout"


async def test_a_timeout_after_tokens_keeps_them_and_says_that_they_are_not_all() -> None:
    client = await call(ScriptedEngine(outputs("one", "two", reason="timeout")), timeout=0.5)
    [choice] = json.loads(client.body)["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("onetwo", "length")


@pytest.mark.parametrize("path", ["/chat/completions", "/completions"])
async def test_an_engine_that_is_not_ready_is_503_with_retry_after(path: str) -> None:
    client = LeavingClient(openai_app(ScriptedEngine([], ready=False)), path, {**CHAT, "prompt": "a"})
    await asyncio.wait_for(client.done, 5)
    assert client.status == 503
    assert header(client, b"retry-after") == b"5"
