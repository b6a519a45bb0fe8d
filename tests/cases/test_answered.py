"""Reports of answers that were wrong, cut, mixed up or miscounted: the same requests through HTTP on a real model."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import httpx
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

from cb_backend import Engine

from .asking import GREEDY, choices, chunks, complete, joined
from .conftest import CONTEXT

HOT: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True}


@pytest.mark.parametrize("seed", range(6))
async def test_case_007_whatever_a_model_says_is_valid_json(client: httpx.AsyncClient, seed: int) -> None:
    hot = {"temperature": 1.5, "top_k": 100, "repetition_penalty": 1.2, "max_tokens": 60, "seed": seed}
    for logprobs in (None, 3):
        whole = await choices(client, logprobs=logprobs, **hot)
        assert joined(await chunks(client, logprobs=logprobs, **hot)) == whole[0]["text"]


async def test_case_016_ignoring_the_end_ignores_all_end_ids(scarce: httpx.AsyncClient) -> None:
    to_the_end = {"logit_bias": {"7": 100}, "temperature": 0, "max_tokens": 10}
    body = await complete(scarce, ignore_eos=True, **to_the_end)
    assert body["usage"]["completion_tokens"] == 10
    assert body["choices"][0]["finish_reason"] == "length"
    own = await choices(scarce, ignore_eos=True, stop_token_ids=[7], **to_the_end)
    assert (own[0]["finish_reason"], own[0]["stop_reason"]) == ("stop", 7)


@pytest.mark.parametrize("end_id", [2, 7])
async def test_case_017_184_185_every_end_id_ends_but_not_before_min_tokens(
    scarce: httpx.AsyncClient, end_id: int
) -> None:
    wanted = {"logit_bias": {str(end_id): 100}, "temperature": 0, "max_tokens": 10}
    for least in (0, 5):
        body = await complete(scarce, min_tokens=least, **wanted)
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["completion_tokens"] == least + 1


@pytest.mark.parametrize("stop", [None, [], "zzz", ["zzz", "yyy"]])
async def test_case_019_stops_that_are_none(client: httpx.AsyncClient, stop: Any) -> None:
    assert await choices(client, stop=stop, max_tokens=5, **GREEDY) == await choices(client, max_tokens=5, **GREEDY)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("ending", [{}, {"stop": ["e"]}, {"ignore_eos": False, "logit_bias": {"2": 4}}])
async def test_case_020_streamed_counts_are_the_whole_ones(
    client: httpx.AsyncClient, n: int, ending: dict[str, Any]
) -> None:
    wanted = {"max_tokens": 17, "n": n, "seed": 3, **HOT, **ending}
    whole = (await complete(client, **wanted))["usage"]
    streamed = (await chunks(client, stream_options={"include_usage": True}, **wanted))[-1]
    assert streamed["choices"] == []
    for usage in (whole, streamed["usage"]):
        assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]
    assert streamed["usage"]["completion_tokens"] == whole["completion_tokens"]
    if not ending:
        assert whole["completion_tokens"] == 17 * n


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"max_tokens": 5, **GREEDY}, "length"),
        ({"max_tokens": 5, "min_tokens": 4, "logit_bias": {"2": 100}, "temperature": 0}, "stop"),
        ({"prompt": [5] * (CONTEXT - 5), **GREEDY}, "length"),
    ],
    ids=["limit", "end id at the limit", "context"],
)
async def test_case_023_why_it_ended(client: httpx.AsyncClient, fields: dict[str, Any], reason: str) -> None:
    whole = await complete(client, **fields)
    assert (whole["choices"][0]["finish_reason"], whole["usage"]["completion_tokens"]) == (reason, 5)
    streamed = await chunks(client, **{"max_tokens": None, **fields})
    assert streamed[-1]["choices"][0]["finish_reason"] == reason


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("path", ["/completions", "/chat/completions"])
async def test_case_025_026_reasons_are_null_until_the_end_and_no_chunk_is_without_choices(
    client: httpx.AsyncClient, path: str, n: int
) -> None:
    events = await chunks(client, path, max_tokens=8, n=n, **HOT)
    shape: Any = ChatCompletionChunk if "chat" in path else Completion
    reasons: dict[int, list[Any]] = {}
    for event in events:
        if "chat" in path:
            shape.model_validate(event)
        assert len(event["choices"]) == 1
        reasons.setdefault(event["choices"][0]["index"], []).append(event["choices"][0]["finish_reason"])
    assert sorted(reasons) == list(range(n))
    for own in reasons.values():
        assert own == [None] * (len(own) - 1) + ["length"]


async def test_case_028_029_scoring_generates_nothing_whole_or_streamed(client: httpx.AsyncClient) -> None:
    wanted = {"prompt": "Your answer: Yes", "echo": True, "logprobs": 1, "max_tokens": 0}
    whole = await complete(client, **wanted)
    [choice] = whole["choices"]
    events = await chunks(client, stream_options={"include_usage": True}, **wanted)
    assert choice["text"] == joined(events) == "Your answer: Yes"
    assert whole["usage"]["completion_tokens"] == events[-1]["usage"]["completion_tokens"] == 0
    assert len(choice["logprobs"]["tokens"]) == whole["usage"]["prompt_tokens"]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert None not in choice["logprobs"]["token_logprobs"][1:]
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-8, 1e-30])
async def test_case_044_tiny_temperatures_are_greedy(client: httpx.AsyncClient, temperature: float) -> None:
    wanted = {"max_tokens": 20, "ignore_eos": True}
    assert await choices(client, temperature=temperature, **wanted) == await choices(client, temperature=0, **wanted)


async def test_case_046_a_banned_token_stays_banned_at_a_low_temperature(
    client: httpx.AsyncClient, engine: Engine
) -> None:
    first = (await choices(client, max_tokens=1, logprobs=0, **GREEDY))[0]["logprobs"]["tokens"][0]
    [banned] = [i for i in range(engine.vocab_size) if engine.tokenizer.decode([i]) == first][:1]
    seen = await choices(client, max_tokens=1, n=100, temperature=2e-4, logit_bias={str(banned): -100}, logprobs=0)
    assert all(choice["logprobs"]["tokens"] != [first] for choice in seen)


@pytest.mark.parametrize(("top_k", "same_as"), [(-1, 0), (512, 0), (513, 0), (9_999_999, 0)])
async def test_case_050_top_k_past_the_vocabulary_is_off(client: httpx.AsyncClient, top_k: int, same_as: int) -> None:
    wanted = {"max_tokens": 20, "seed": 5, **HOT}
    assert await choices(client, top_k=top_k, **wanted) == await choices(client, top_k=same_as, **wanted)


async def test_case_050_top_k_of_one_is_greedy(client: httpx.AsyncClient) -> None:
    wanted = {"max_tokens": 20, "ignore_eos": True}
    assert await choices(client, top_k=1, seed=5, **wanted) == await choices(client, temperature=0, **wanted)


async def test_case_053_penalties_see_the_whole_history_in_any_company(client: httpx.AsyncClient) -> None:
    prompts = ["A request joins", "The cache", "def forward(self, tokens):" * 4]
    wanted = {"repetition_penalty": 1.3, "max_tokens": 20, **GREEDY}
    alone = [await choices(client, prompt=prompt, **wanted) for prompt in prompts]
    together = await asyncio.gather(*(choices(client, prompt=prompt, **wanted) for prompt in prompts))
    assert together == alone
    assert alone[0] != await choices(client, prompt=prompts[0], max_tokens=20, **GREEDY)


async def test_case_055_056_a_seed_decides_alone_whoever_is_beside(client: httpx.AsyncClient) -> None:
    wanted = {"max_tokens": 16, "seed": 42, "temperature": 0.8, "ignore_eos": True}
    alone = await choices(client, **wanted)
    mates = [choices(client, max_tokens=length, **HOT) for length in (4, 9, 16)]
    seeded = await asyncio.gather(*itertools.chain.from_iterable((choices(client, **wanted), mate) for mate in mates))
    assert seeded[::2] == [alone] * 3
    assert await choices(client, **{**wanted, "seed": 43}) != alone


async def test_case_058_059_choices_differ_repeat_and_end_one_by_one(client: httpx.AsyncClient) -> None:
    wanted = {"n": 4, "seed": 7, "max_tokens": 20, "temperature": 1.0, "logit_bias": {"2": 2}, "logprobs": 0}
    whole = await complete(client, **wanted)
    assert whole["choices"] == (await complete(client, **wanted))["choices"]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert len({choice["text"] for choice in whole["choices"]}) == 4
    counts = [len(choice["logprobs"]["tokens"]) for choice in whole["choices"]]
    assert sum(counts) == whole["usage"]["completion_tokens"]
    events = await chunks(client, **wanted)
    assert [joined(events, i) for i in range(4)] == [choice["text"] for choice in whole["choices"]]
    endings = [one["index"] for event in events for one in event["choices"] if one["finish_reason"]]
    assert sorted(endings) == [0, 1, 2, 3]


async def test_case_061_062_offsets_and_values_go_on_from_the_prompt(client: httpx.AsyncClient) -> None:
    wanted = {"prompt": "Grüße, 東京", "echo": True, "logprobs": 2, "max_tokens": 5, **GREEDY}
    whole = await complete(client, **wanted)
    shape = whole["choices"][0]["logprobs"]
    streamed: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for event in await chunks(client, **wanted):
        for key, values in (event["choices"][0]["logprobs"] or {}).items():
            streamed[key] += values
    assert streamed == shape
    assert len(shape["tokens"]) == whole["usage"]["total_tokens"]
    assert shape["text_offset"] == sorted(shape["text_offset"])
    assert shape["text_offset"][whole["usage"]["prompt_tokens"]] == len("Grüße, 東京")


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 48, 100, 200])
async def test_case_097_116_a_prompt_is_scored_alike_cold_and_warm(client: httpx.AsyncClient, length: int) -> None:
    prompt = [(7 * i + length) % 500 + 3 for i in range(length)]
    wanted = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 2, **GREEDY}
    cold = await choices(client, **wanted)
    assert await choices(client, **wanted) == cold
    again = await complete(client, prompt=prompt, max_tokens=2, **GREEDY)
    assert cold[0]["text"].endswith(again["choices"][0]["text"])
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] <= length - 1


async def test_case_139_140_company_changes_no_greedy_answer(client: httpx.AsyncClient) -> None:
    alone = await choices(client, max_tokens=20, **GREEDY)
    for mates in (1, 3, 8):
        others = [choices(client, prompt=[9 + i] * (5 * i + 1), max_tokens=9, **GREEDY) for i in range(mates)]
        got = await asyncio.gather(choices(client, max_tokens=20, **GREEDY), *others)
        assert got[0] == alone
    same = await asyncio.gather(*(choices(client, max_tokens=20, **GREEDY) for _ in range(8)))
    assert same == [alone] * 8
