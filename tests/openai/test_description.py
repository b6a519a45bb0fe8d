"""Real answers fit the schemas that describe them, which allow no field that they do not name."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from cb_backend.openai.answer_shapes import ANSWERS
from cb_backend.openai.app import openai_app
from tests.openai.scripted_engine import ScriptedEngine, outputs

COMPLETION = {"model": "tiny", "prompt": "The cache", "max_tokens": 4}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
CALLING = {**CHAT, "model": "scripted", "tools": [TOOL]}
CALL = ("<tool_call>", '{"name": "now", "arguments": {}}', "</tool_call>")
RESPONSE = {"model": "tiny", "input": "hi", "max_output_tokens": 4}

WHOLE: list[tuple[str, dict[str, Any], str]] = [
    ("/completions", COMPLETION, "Completion"),
    ("/completions", {**COMPLETION, "logprobs": 2, "echo": True, "n": 2}, "Completion"),
    ("/completions", {**COMPLETION, "prompt": ["a", "b"], "timeout": 60, "stop": ["x"]}, "Completion"),
    ("/chat/completions", CHAT, "ChatCompletion"),
    ("/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2, "n": 2}, "ChatCompletion"),
    ("/responses", RESPONSE, "Response"),
    ("/tokenize", {"prompt": "a", "return_token_strs": True}, "Tokens"),
    ("/detokenize", {"tokens": [5]}, "Text"),
]
EVENTS = {"Completion": "CompletionEvent", "ChatCompletion": "ChatCompletionEvent", "Response": "ResponseEvent"}
STREAMED = [(path, body, EVENTS[name]) for path, body, name in WHOLE if name in EVENTS]


def check(name: str, body: Any) -> None:
    Draft202012Validator(ANSWERS[name]).validate(body)


def check_events(name: str, text: str) -> int:
    """How many events there were."""
    [*data, last] = ANSWERS[name]["properties"]["data"]["anyOf"]
    *events, rest = text.split("\n\n")
    assert rest == ""
    if data:
        assert events.pop() == "data: [DONE]"
    for event in events:
        body = json.loads(event.partition("data: ")[2])
        Draft202012Validator(last["contentSchema"]).validate(body)
    return len(events)


@pytest.mark.parametrize(("path", "body", "name"), WHOLE)
async def test_a_whole_answer(client: httpx.AsyncClient, path: str, body: dict[str, Any], name: str) -> None:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    check(name, answer.json())


@pytest.mark.parametrize(("path", "body", "name"), STREAMED)
async def test_a_stream(client: httpx.AsyncClient, path: str, body: dict[str, Any], name: str) -> None:
    usage = {} if path == "/responses" else {"stream_options": {"include_usage": True}}
    answer = await client.post(path, json={**body, "stream": True, **usage})
    assert answer.status_code == 200, answer.text
    assert check_events(name, answer.text) > 2


async def test_models_and_errors(client: httpx.AsyncClient) -> None:
    check("ModelList", (await client.get("/models")).json())
    check("Model", (await client.get("/models/tiny")).json())
    for path, body in (("/completions", {}), ("/nowhere", {}), ("/completions", {**COMPLETION, "top_p": 7})):
        answer = await client.post(path, json=body)
        assert answer.status_code >= 400
        if answer.headers["content-type"] == "application/json":
            check("OpenAIError", answer.json())


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_call(stream: bool) -> None:
    app = openai_app(ScriptedEngine(outputs(*CALL), template="{{ tools }}<tool_call>"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        answer = await client.post("/chat/completions", json={**CALLING, "stream": stream})
    assert '"tool_calls":[{' in answer.text
    if stream:
        check_events("ChatCompletionEvent", answer.text)
    else:
        check("ChatCompletion", answer.json())


@pytest.mark.parametrize("name", ["ChatCompletionEvent", "ResponseEvent"])
async def test_a_stream_that_breaks(name: str) -> None:
    app = openai_app(ScriptedEngine([outputs("one", "two")[0], RuntimeError("broken")]))
    path, body = ("/responses", RESPONSE) if name == "ResponseEvent" else ("/chat/completions", CHAT)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        text = (await client.post(path, json={**body, "model": "scripted", "stream": True})).text
    ending = "" if name == "ResponseEvent" else "data: [DONE]\n\n"  # which a broken stream lacks
    assert "[DONE]" not in text
    assert check_events(name, text + ending) >= 2
