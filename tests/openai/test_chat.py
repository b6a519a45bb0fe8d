"""The chat endpoint on a real tiny model: whole and streamed, choices, log-probabilities, limits."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from cb_backend import Engine, SamplingParams

MESSAGES = [{"role": "user", "content": "Grüße aus Köln"}]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


async def post(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    answer = await client.post("/chat/completions", json={"model": "tiny", "messages": MESSAGES, **GREEDY, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def stream(client: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    sent = {"model": "tiny", "messages": MESSAGES, "stream": True, **GREEDY, **body}
    answer = await client.post("/chat/completions", json=sent)
    *events, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def test_a_chat_is_what_the_engine_says_of_the_rendered_messages(
    client: httpx.AsyncClient, engine: Engine
) -> None:
    ids = engine.chat.render(MESSAGES)
    [expected] = engine.generate([ids], SamplingParams(max_tokens=12, **GREEDY))
    body = await post(client, max_tokens=12)
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": expected.text, "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert body["usage"]["prompt_tokens"] == len(ids)
    assert body["usage"]["completion_tokens"] == 12


async def test_streamed_deltas_joined_are_the_whole_message_and_reasons_come_last(client: httpx.AsyncClient) -> None:
    whole = await post(client, max_tokens=40)
    chunks = await stream(client, max_tokens=40)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    joined = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert joined == whole["choices"][0]["message"]["content"]
    assert all("usage" not in chunk for chunk in chunks)


async def test_streamed_choices_are_those_of_the_whole_answer(client: httpx.AsyncClient) -> None:
    wanted = {"n": 3, "seed": 7, "temperature": 1.0, "max_tokens": 12}
    whole = await post(client, **wanted)
    joined = ["", "", ""]
    roles = [0, 0, 0]
    for chunk in await stream(client, **wanted):
        [choice] = chunk["choices"]
        joined[choice["index"]] += choice["delta"].get("content", "")
        roles[choice["index"]] += "role" in choice["delta"]
    assert joined == [choice["message"]["content"] for choice in whole["choices"]]
    assert roles == [1, 1, 1]
    assert len(set(joined)) == 3
    assert whole["usage"]["completion_tokens"] == 36


async def test_logprobs_spell_the_text_byte_by_byte_streamed_or_not(client: httpx.AsyncClient) -> None:
    wanted = {"logprobs": True, "top_logprobs": 3, "max_tokens": 20, "skip_special_tokens": False}
    whole = await post(client, **wanted)
    content = whole["choices"][0]["logprobs"]["content"]
    assert len(content) == 20
    raw = bytes(byte for entry in content for byte in entry["bytes"])
    assert raw.decode(errors="replace") == whole["choices"][0]["message"]["content"]
    for entry in content:
        assert len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][0]["token"] == entry["token"]  # greedy
    streamed = [
        entry
        for chunk in await stream(client, **wanted)
        for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert [entry["bytes"] for entry in streamed] == [entry["bytes"] for entry in content]


@pytest.mark.parametrize("fields", [{}, {"max_tokens": None}, {"max_completion_tokens": None}])
async def test_without_a_limit_it_goes_to_the_end_of_the_context(
    client: httpx.AsyncClient, engine: Engine, fields: dict[str, Any]
) -> None:
    body = await post(client, **fields)
    assert body["usage"]["total_tokens"] == engine.max_model_len
    assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("fields", [{"max_completion_tokens": 3}, {"max_tokens": 3, "max_completion_tokens": 3}])
async def test_max_completion_tokens_is_max_tokens(client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    assert (await post(client, **fields))["usage"]["completion_tokens"] == 3


async def test_text_parts_are_their_text(client: httpx.AsyncClient) -> None:
    parts = [{"type": "text", "text": "Grüße "}, {"type": "text", "text": "aus Köln"}]
    split = await post(client, messages=[{"role": "user", "content": parts}], max_tokens=8)
    assert split["choices"] == (await post(client, max_tokens=8))["choices"]


async def test_a_prefilled_answer_goes_on(client: httpx.AsyncClient, engine: Engine) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "A request"}]
    ids = engine.chat.render(messages, add_generation_prompt=False, continue_final_message=True)
    [expected] = engine.generate([ids], SamplingParams(max_tokens=8, **GREEDY))
    body = await post(client, messages=messages, continue_final_message=True, max_tokens=8)
    assert body["choices"][0]["message"]["content"] == expected.text


NO_EFFECT: dict[str, Any] = {
    "user": "u",
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "parallel_tool_calls": True,
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
    "store": False,
    "tools": [],
    "tool_choice": "none",
    "modalities": ["text"],
    "response_format": {"type": "text"},
    "stop": None,
    "seed": None,
    "logit_bias": None,
    "stream": False,
    "stream_options": None,
}


async def test_fields_that_change_nothing_are_accepted(client: httpx.AsyncClient) -> None:
    assert (await post(client, max_tokens=5, **NO_EFFECT))["choices"] == (await post(client, max_tokens=5))["choices"]
