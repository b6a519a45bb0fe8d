"""`/responses` is the chat route in other words: the same text and counts, whole and as named events."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response

from cb_backend import Engine, SamplingParams
from cb_backend.openai.app import openai_app
from tests.openai.scripted_engine import LeavingClient, ScriptedEngine, outputs

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


async def post(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await client.post("/responses", json={"model": "tiny", "input": "hi", **GREEDY, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_response_is_what_the_engine_says_of_the_rendered_messages(
    client: httpx.AsyncClient, engine: Engine
) -> None:
    ids = engine.chat.render([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}])
    [expected] = engine.generate([ids], SamplingParams(max_tokens=12, **GREEDY))
    body = await post(client, instructions="Be brief.", max_output_tokens=12)
    Response.model_validate(body)
    [message] = body["output"]
    assert message["content"] == [{"type": "output_text", "text": expected.text, "annotations": [], "logprobs": []}]
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (body["usage"]["input_tokens"], body["usage"]["output_tokens"]) == (len(ids), 12)
    assert body["store"] is False


async def test_messages_and_parts_are_their_text(client: httpx.AsyncClient) -> None:
    parts = [{"type": "input_text", "text": "h"}, {"type": "input_text", "text": "i"}]
    same = [{"type": "message", "role": "user", "content": parts}]
    plain, split = await post(client, max_output_tokens=8), await post(client, input=same, max_output_tokens=8)
    assert split["output"][0]["content"] == plain["output"][0]["content"]


async def test_the_official_client_reads_the_events(engine: Engine) -> None:
    http = httpx.AsyncClient(transport=httpx.ASGITransport(openai_app(engine)))
    async with openai.AsyncOpenAI(base_url="http://test", api_key="none", http_client=http) as client:
        wanted: dict[str, Any] = {"model": "tiny", "input": "hi", "max_output_tokens": 20, "temperature": 0}
        whole = await client.responses.create(**wanted)
        async with client.responses.stream(**wanted) as stream:
            events = [event async for event in stream]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == whole.output_text


async def test_events_come_in_order_with_running_numbers() -> None:
    body = {"model": "scripted", "input": "hi", "stream": True}
    client = LeavingClient(openai_app(ScriptedEngine(outputs("one", "two"))), "/responses", body)
    await client.done
    *events, rest = client.body.decode().split("\n\n")
    assert rest == ""
    lines = [event.split("\n") for event in events]
    data = [json.loads(line.removeprefix("data: ")) for _, line in lines]
    assert [name.removeprefix("event: ") for name, _ in lines] == [one["type"] for one in data]
    assert [one["sequence_number"] for one in data] == list(range(len(data)))
    assert [one["type"].removeprefix("response.") for one in data] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert data[-1]["response"]["output"][0]["content"][0]["text"] == "onetwo"


async def test_a_format_is_kept(client: httpx.AsyncClient) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    wanted = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    body = await post(client, text=wanted, max_output_tokens=30)
    assert json.loads(body["output"][0]["content"][0]["text"])["a"] in (1, 2)
    assert body["text"] == wanted


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": [{"type": "function_call_output", "call_id": "1", "output": "2"}]}, "input.0"),
    ({"input": [{"role": "wizard", "content": "hi"}]}, "input.0.role"),
    ({"input": [{"role": "user", "content": "hi", "name": {}}]}, "input.0.name"),
    ({"instructions": "x", "input": [{"role": "wizard", "content": "hi"}]}, "input.0.role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "file:///"}]}]}, "input.0.content.0"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"store": True}, "store"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"background": True}, "background"),
    ({"text": {"format": {"type": "yaml"}}}, "text.format"),
    ({"text": {"verbosity": "high"}}, "text.verbosity"),
    ({"mesages": []}, "mesages"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: str(value)[:60])
async def test_refused_with_the_field_named(client: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    answer = await client.post("/responses", json={"model": "tiny", "input": "hi", **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert param in answer.json()["error"]["message"]
