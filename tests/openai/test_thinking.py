"""Thoughts over HTTP: apart from the answer, whole and streamed; grammars after them; calls in them are drafts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cb_backend import Engine
from cb_backend.client import OutputDelta
from cb_backend.openai.app import openai_app
from cb_backend.request import Usage

from .scripted_engine import LeavingClient, ScriptedEngine

HI = [{"role": "user", "content": "Hi"}]
OPENING = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"
TELLING = "{{ '<think></think>' if false }}{{ enable_thinking }} {{ reasoning_effort }}"
FORMAT = {"type": "choice", "choice": ["yes"]}
THINKING = {"model": "tiny", "messages": HI, "chat_template": OPENING, "response_format": FORMAT, "max_tokens": 60}
TOOL = {"type": "function", "function": {"name": "f"}}
DRAFT = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Iterator[Engine]:
    with Engine(
        model=str(tiny_llama),
        served_model_name="tiny",
        dtype="float32",
        device="cpu",
        max_model_len=256,
        num_kv_blocks=40,
        block_size=16,
        swap_space=0,
        num_threads=1,
        allow_request_template=True,
    ) as engine:
        yield engine


async def test_a_budget_ends_the_thought_and_the_grammar_begins_after_it(client: httpx.AsyncClient) -> None:
    body = {**THINKING, "thinking_token_budget": 4, "logit_bias": {"50": 60}}  # id 50 is "P"
    whole = (await client.post("/chat/completions", json=body)).json()
    message = whole["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("yes", "PPPP")
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] >= 5
    assert whole["choices"][0]["finish_reason"] == "stop"
    streamed = await client.post("/chat/completions", json={**body, "stream": True})
    deltas = [
        json.loads(line[6:])["choices"][0]["delta"] for line in streamed.text.splitlines() if line.startswith("data: {")
    ]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "PPPP"
    assert "".join(delta.get("content", "") for delta in deltas) == "yes"
    silent = (await client.post("/chat/completions", json={**body, "include_reasoning": False})).json()
    assert "reasoning_content" not in silent["choices"][0]["message"]


async def test_a_budget_for_a_model_without_thoughts_is_refused(client: httpx.AsyncClient) -> None:
    for field, value in (("thinking_token_budget", 4), ("reasoning_effort", "high")):
        answer = await client.post("/chat/completions", json={"model": "tiny", "messages": HI, field: value})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == field


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, " "),
        ({"reasoning_effort": "none"}, "False none"),
        ({"reasoning_effort": "high"}, "True high"),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, "False high"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "True "),
    ],
)
async def test_effort_reaches_the_template(
    client: httpx.AsyncClient, engine: Engine, fields: dict[str, Any], shown: str
) -> None:
    body = {"model": "tiny", "messages": HI, "chat_template": TELLING, "max_tokens": 1, **fields}
    answer = (await client.post("/chat/completions", json=body)).json()
    assert answer["usage"]["prompt_tokens"] == len(engine.tokenizer(shown, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("stream", [True, False])
async def test_a_call_drafted_in_a_thought_is_none(stream: bool) -> None:
    """lmstudio#1592."""
    deltas = [
        OutputDelta("s", 0, "", (1,), usage=Usage(3, 1, 0, 1), reasoning=f"I could write {DRAFT}"),
        OutputDelta("s", 0, "No call.", (1, 2), finish_reason="stop", usage=Usage(3, 2, 0, 1)),
    ]
    engine = ScriptedEngine(deltas, template="{{ tools }}<think><tool_call>")
    body = {"model": "scripted", "messages": HI, "tools": [TOOL], "stream": stream}
    client = LeavingClient(openai_app(engine), "/chat/completions", body)
    await asyncio.wait_for(client.done, 5)
    assert b'"tool_calls"' not in client.body
    assert b"No call." in client.body
    assert DRAFT in client.body.decode().replace('\\"', '"')
    assert b'"finish_reason":"stop"' in client.body


def thinking_deltas() -> list[OutputDelta]:
    return [
        OutputDelta("s", 0, "", (1,), usage=Usage(3, 1, 0, 1), reasoning="Hm"),
        OutputDelta("s", 0, "", (1, 2), usage=Usage(3, 2, 0, 2), reasoning=", so."),
        OutputDelta("s", 0, "Yes", (1, 2, 3), finish_reason="stop", usage=Usage(3, 3, 0, 2)),
    ]


async def respond(deltas: list[OutputDelta], **fields: Any) -> LeavingClient:
    engine = ScriptedEngine(deltas, template="<think>")
    client = LeavingClient(openai_app(engine), "/responses", {"model": "scripted", "input": "Hi", **fields})
    await asyncio.wait_for(client.done, 5)
    assert client.status == 200, client.body
    return client


async def test_a_response_has_a_reasoning_item_before_its_message() -> None:
    body = json.loads((await respond(thinking_deltas(), reasoning={"effort": None})).body)
    thought, message = body["output"]
    assert (thought["type"], thought["content"]) == ("reasoning", [{"type": "reasoning_text", "text": "Hm, so."}])
    assert message["content"][0]["text"] == "Yes"
    assert body["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}
    plain = json.loads((await respond(thinking_deltas()[2:])).body)
    assert [item["type"] for item in plain["output"]] == ["message"]


async def test_a_streamed_thought_is_an_item_that_ends_before_the_message_begins() -> None:
    events = [
        json.loads(line[6:])
        for line in (await respond(thinking_deltas(), stream=True)).body.decode().splitlines()
        if line.startswith("data: ")
    ]
    assert [(event["type"], event.get("output_index")) for event in events] == [
        ("response.created", None),
        ("response.in_progress", None),
        ("response.output_item.added", 0),
        ("response.reasoning_text.delta", 0),
        ("response.reasoning_text.delta", 0),
        ("response.reasoning_text.done", 0),
        ("response.output_item.done", 0),
        ("response.output_item.added", 1),
        ("response.content_part.added", 1),
        ("response.output_text.delta", 1),
        ("response.output_text.done", 1),
        ("response.content_part.done", 1),
        ("response.output_item.done", 1),
        ("response.completed", None),
    ]
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["reasoning", "message"]


async def test_thoughts_that_are_sent_back_are_taken_and_faults_after_them_are_numbered_right() -> None:
    items = [{"role": "user", "content": "Hi"}, {"type": "reasoning", "id": "rs_1", "summary": []}]
    await respond(thinking_deltas(), input=[*items, {"role": "assistant", "content": "Yes"}, items[0]])
    engine = ScriptedEngine(thinking_deltas(), template="<think>")
    body = {"model": "scripted", "input": [*items, {"type": "function_call"}]}
    client = LeavingClient(openai_app(engine), "/responses", body)
    await asyncio.wait_for(client.done, 5)
    assert json.loads(client.body)["error"]["param"] == "input.2"
