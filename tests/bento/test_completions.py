"""The completions endpoint on a real tiny model: whole and streamed, many prompts and choices, echo and scoring."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from cb_backend import Engine, SamplingParams

GREEDY = {"temperature": 0, "ignore_eos": True}


async def post(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    answer = await client.post("/completions", json={"model": "tiny", **GREEDY, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def stream(client: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    answer = await client.post("/completions", json={"model": "tiny", "stream": True, **GREEDY, **body})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def test_a_completion_is_what_the_engine_says_offline(client: httpx.AsyncClient, engine: Engine) -> None:
    [expected] = engine.generate(["A request"], SamplingParams(max_tokens=8, **GREEDY))
    body = await post(client, prompt="A request", max_tokens=8)
    assert body["object"] == "text_completion"
    assert body["model"] == "tiny"
    assert body["choices"] == [
        {"index": 0, "text": expected.text, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    prompt_tokens = len(expected.prompt_token_ids)
    assert body["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 8,
        "total_tokens": prompt_tokens + 8,
        "prompt_tokens_details": {"cached_tokens": body["usage"]["prompt_tokens_details"]["cached_tokens"]},
    }


async def test_streamed_text_joined_is_the_whole_text(client: httpx.AsyncClient) -> None:
    whole = await post(client, prompt="Grüße", max_tokens=40)
    chunks = await stream(client, prompt="Grüße", max_tokens=40, stream_options={"include_usage": True})
    *texts, usage = chunks
    assert "".join(chunk["choices"][0]["text"] for chunk in texts) == whole["choices"][0]["text"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in texts] == [None] * (len(texts) - 1) + ["length"]
    assert {chunk["usage"] for chunk in texts} == {None}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 40


async def test_without_include_usage_no_chunk_has_a_usage(client: httpx.AsyncClient) -> None:
    chunks = await stream(client, prompt="A", max_tokens=3)
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


async def test_choices_go_prompt_by_prompt(client: httpx.AsyncClient) -> None:
    options = {"n": 2, "temperature": 1.0, "seed": 3, "max_tokens": 6}
    alone = [await post(client, prompt=prompt, **options) for prompt in ("A request", "The cache")]
    both = await post(client, prompt=["A request", "The cache"], **options)
    expected = [choice["text"] for body in alone for choice in body["choices"]]
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in both["choices"]] == expected
    assert both["usage"]["prompt_tokens"] == sum(body["usage"]["prompt_tokens"] for body in alone)
    assert both["usage"]["completion_tokens"] == 24
    texts = [""] * 4
    for chunk in await stream(client, prompt=["A request", "The cache"], **options):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == expected


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7]]])
async def test_prompts_may_be_token_ids(client: httpx.AsyncClient, engine: Engine, prompt: Any) -> None:
    [expected] = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=5, **GREEDY))
    body = await post(client, prompt=prompt, max_tokens=5)
    assert [choice["text"] for choice in body["choices"]] == [expected.text]


async def test_max_tokens_null_goes_to_the_end_of_the_context(client: httpx.AsyncClient) -> None:
    body = await post(client, prompt=[5] * 250, max_tokens=None)
    assert body["usage"]["completion_tokens"] == 6
    assert body["choices"][0]["finish_reason"] == "length"


async def test_a_stop_string_ends_a_choice_before_it(client: httpx.AsyncClient) -> None:
    text = (await post(client, prompt="A request", max_tokens=20))["choices"][0]["text"]
    stop = text[4:7]
    [choice] = (await post(client, prompt="A request", max_tokens=20, stop=[stop]))["choices"]
    assert choice["text"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    chunks = await stream(client, prompt="A request", max_tokens=20, stop=stop)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]


@pytest.mark.parametrize("stop", [None, []])
async def test_no_stop_is_fine(client: httpx.AsyncClient, stop: Any) -> None:
    assert (await post(client, prompt="A", max_tokens=2, stop=stop))["usage"]["completion_tokens"] == 2


async def test_echo_brings_the_prompt_first(client: httpx.AsyncClient) -> None:
    plain = (await post(client, prompt="The cache", max_tokens=4))["choices"][0]["text"]
    echoed = (await post(client, prompt="The cache", max_tokens=4, echo=True))["choices"][0]["text"]
    assert echoed == "The cache" + plain
    chunks = await stream(client, prompt="The cache", max_tokens=4, echo=True)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == echoed


async def test_logprobs_name_each_token_and_where_it_begins(client: httpx.AsyncClient) -> None:
    [choice] = (await post(client, prompt="The cache", max_tokens=6, logprobs=2))["choices"]
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["text_offset"]) == 6
    for token, value, top in zip(*(logprobs[k] for k in ("tokens", "token_logprobs", "top_logprobs")), strict=True):
        assert value == max(top.values()) == top[token]
        assert len(top) == 2
    ends = [*logprobs["text_offset"][1:], len(choice["text"])]
    pieces = [choice["text"][a:b] for a, b in zip(logprobs["text_offset"], ends, strict=True)]
    assert [p for p, t in zip(pieces, logprobs["tokens"], strict=True) if t and not t.startswith("bytes:")] == [
        t for t in logprobs["tokens"] if t and not t.startswith("bytes:")
    ]


async def test_streamed_logprobs_joined_are_the_whole_ones(client: httpx.AsyncClient) -> None:
    options = {"prompt": "The cache", "max_tokens": 6, "logprobs": 1, "echo": True, "n": 2, "seed": 1}
    whole = (await post(client, **options))["choices"]
    joined: list[dict[str, list[Any]]] = [{}, {}]
    for chunk in await stream(client, **options):
        [choice] = chunk["choices"]
        for key, values in (choice["logprobs"] or {}).items():
            joined[choice["index"]].setdefault(key, []).extend(values)
    assert joined[0]["text_offset"] == whole[0]["logprobs"]["text_offset"]
    assert joined[1]["tokens"] == whole[1]["logprobs"]["tokens"]
    assert joined[1]["token_logprobs"] == pytest.approx(whole[1]["logprobs"]["token_logprobs"], abs=1e-4, nan_ok=False)


async def test_a_prompt_is_scored_without_generating(client: httpx.AsyncClient, engine: Engine) -> None:
    prompt = "The cache of keys"
    [choice] = (await post(client, prompt=prompt, max_tokens=0, echo=True, logprobs=1))["choices"]
    ids = engine.tokenizer(prompt)["input_ids"]
    [expected] = engine.generate([prompt], SamplingParams(max_tokens=0, prompt_logprobs=1))
    assert choice["text"] == prompt
    assert choice["logprobs"]["token_logprobs"] == [None] + [
        pytest.approx(one.logprob, abs=1e-4) for one in expected.prompt_logprobs[1:]
    ]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert "".join(choice["logprobs"]["tokens"]) == prompt
    assert choice["logprobs"]["text_offset"] == [len(engine.tokenizer.decode(ids[:i])) for i in range(len(ids))]
