"""The bytes of a stream, exactly: one JSON line and an empty line per event, equal heads, `[DONE]` last."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from cb_backend.openai.app import openai_app
from tests.openai.scripted_engine import LeavingClient, ScriptedEngine, outputs

CHAT = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}], "stream": True}


async def read(script: list[Any], path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
    client = LeavingClient(openai_app(ScriptedEngine(script)), path, body, headers)
    await asyncio.wait_for(client.done, 5)
    return client


async def test_a_chat_with_usage() -> None:
    client = await read(
        outputs("Grüße\n", '"\u2028"'), "/chat/completions", {**CHAT, "stream_options": {"include_usage": True}}
    )
    body = client.body.decode()
    head = json.loads(body.split("\n\n")[0].removeprefix("data: "))
    fixed = f'"id":"{head["id"]}","object":"chat.completion.chunk","created":{head["created"]},"model":"scripted"'
    assert body == (
        f'data: {{{fixed},"choices":[{{"index":0,"delta":{{"role":"assistant","content":""}},"logprobs":null,'
        f'"finish_reason":null}}],"usage":null}}\n\n'
        f'data: {{{fixed},"choices":[{{"index":0,"delta":{{"content":"Grüße\\n"}},"logprobs":null,'
        f'"finish_reason":null}}],"usage":null}}\n\n'
        f'data: {{{fixed},"choices":[{{"index":0,"delta":{{"content":"\\"\u2028\\""}},"logprobs":null,'
        f'"finish_reason":"stop"}}],"usage":null}}\n\n'
        f'data: {{{fixed},"choices":[],"usage":{{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5,'
        f'"prompt_tokens_details":{{"cached_tokens":2}}}}}}\n\n'
        "data: [DONE]\n\n"
    )


async def test_a_completion_without_usage() -> None:
    client = await read(outputs("a", "b"), "/completions", {"model": "scripted", "prompt": "x", "stream": True})
    body = client.body.decode()
    head = json.loads(body.split("\n\n")[0].removeprefix("data: "))
    fixed = f'"id":"{head["id"]}","object":"text_completion","created":{head["created"]},"model":"scripted"'
    assert body == (
        f'data: {{{fixed},"choices":[{{"index":0,"text":"a","logprobs":null,"finish_reason":null}}]}}\n\n'
        f'data: {{{fixed},"choices":[{{"index":0,"text":"b","logprobs":null,"finish_reason":"stop"}}]}}\n\n'
        "data: [DONE]\n\n"
    )


async def test_a_token_without_text_sends_no_event_and_no_event_lacks_choices() -> None:
    client = await read(outputs("", "", "x"), "/completions", {"model": "scripted", "prompt": "x", "stream": True})
    events = client.body.decode().split("\n\n")
    assert len(events) == 3
    assert json.loads(events[0].removeprefix("data: "))["choices"][0]["text"] == "x"


async def test_headers_that_keep_proxies_and_caches_out() -> None:
    client = await read(outputs("a"), "/chat/completions", CHAT)
    headers = dict(client.messages[0]["headers"])
    assert headers[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert headers[b"cache-control"] == b"no-cache"
    assert headers[b"x-accel-buffering"] == b"no"
    assert b"content-length" not in headers


@pytest.mark.parametrize("wanted", ["req-1:a.b_c", "x" * 128])
async def test_a_clients_request_id_is_kept(wanted: str) -> None:
    client = await read(outputs("a"), "/chat/completions", CHAT, {"X-Request-Id": wanted})
    assert dict(client.messages[0]["headers"])[b"x-request-id"] == wanted.encode()
    assert f'"id":"chatcmpl-{wanted}-'.encode() in client.body


@pytest.mark.parametrize("wanted", ["x" * 129, "a b", "a\tb", "", "café"])
async def test_an_unsafe_request_id_is_replaced(wanted: str) -> None:
    client = await read(outputs("a"), "/chat/completions", CHAT, {"X-Request-Id": wanted})
    assert re.fullmatch(b"[0-9a-f]{32}", dict(client.messages[0]["headers"])[b"x-request-id"])


async def test_two_requests_with_one_id_are_two_requests_in_the_engine() -> None:
    engine = ScriptedEngine(outputs("a"))
    app = openai_app(engine)
    for _ in range(2):
        await LeavingClient(app, "/chat/completions", CHAT, {"X-Request-Id": "same"}).done
    assert len(set(engine.opened)) == 2
