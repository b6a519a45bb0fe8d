"""Reports of servers that broke when much was asked at once, or when something inside them failed."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cb_backend import Engine
from cb_backend.openai.app import openai_app
from cb_backend.text.grammar import GrammarConstraint
from tests.openai.scripted_engine import LeavingClient, ScriptedEngine, outputs

from .asking import GREEDY, choices
from .conftest import connected

QUEUE = 4


@pytest.fixture(scope="module")
def narrow_engine(tiny_llama: Path) -> Iterator[Engine]:
    """One request at a time, 16 tokens a step, a queue of four."""
    made = Engine(
        model=str(tiny_llama),
        served_model_name="tiny",
        dtype="float32",
        device="cpu",
        max_num_seqs=1,
        max_num_batched_tokens=16,
        max_queue_size=QUEUE,
        num_kv_blocks=20,
        block_size=16,
        num_threads=1,
    )
    with made as engine:
        yield engine


@pytest.fixture
async def narrow(narrow_engine: Engine) -> AsyncIterator[httpx.AsyncClient]:
    async with connected(narrow_engine) as client:
        yield client


async def test_case_092_a_prompt_larger_than_a_step_is_served(
    narrow: httpx.AsyncClient, client: httpx.AsyncClient
) -> None:
    wanted = {"prompt": [(3 * i) % 500 + 3 for i in range(100)], "max_tokens": 5, **GREEDY}
    assert await choices(narrow, **wanted) == await choices(client, **wanted)


async def test_case_098_a_prompt_in_chunks_is_scored_once_and_whole(
    narrow: httpx.AsyncClient, client: httpx.AsyncClient
) -> None:
    prompt = [(3 * i) % 500 + 3 for i in range(50)]
    wanted = {"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 1, **GREEDY}
    chunked = (await choices(narrow, **wanted))[0]["logprobs"]
    assert len(chunked["tokens"]) == 51
    whole = (await choices(client, **wanted))[0]["logprobs"]
    assert chunked["tokens"] == whole["tokens"]
    assert chunked["token_logprobs"][1:] == pytest.approx(whole["token_logprobs"][1:], abs=1e-4)


async def test_case_094_the_queue_is_bounded_and_says_when_to_come_back(narrow: httpx.AsyncClient) -> None:
    body = {"model": "tiny", "prompt": "A", "max_tokens": 30, **GREEDY}
    answers = await asyncio.gather(*(narrow.post("/completions", json=body) for _ in range(100)))
    served = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(served) + len(refused) == 100
    assert len(served) >= QUEUE
    assert refused
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    assert (await narrow.post("/completions", json=body)).status_code == 200


@pytest.mark.parametrize("path", ["/completions", "/chat/completions", "/responses"])
async def test_case_095_a_burst_beyond_the_bound_is_not_tokenized(
    narrow: httpx.AsyncClient, narrow_engine: Engine, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    texts: list[str] = []
    tokenizer = narrow_engine.tokenizer
    call = type(tokenizer).__call__

    def slow(self: Any, text: str, *args: Any, **options: Any) -> Any:
        texts.append(text)
        time.sleep(0.02)
        return call(self, text, *args, **options)

    monkeypatch.setattr(type(tokenizer), "__call__", slow)
    text = "A" * 20_001  # long enough to be tokenized beside the event loop, and refused after it
    kinds: dict[str, dict[str, Any]] = {
        "/completions": {"prompt": text},
        "/chat/completions": {"messages": [{"role": "user", "content": text}]},
        "/responses": {"input": text},
    }
    body = {"model": "tiny", **kinds[path]}
    answers = await asyncio.gather(*(narrow.post(path, json=body) for _ in range(100)))
    assert len(texts) == QUEUE
    assert sorted(answer.status_code for answer in answers) == [400] * QUEUE + [429] * (100 - QUEUE)
    assert (await choices(narrow, max_tokens=3, **GREEDY))[0]["finish_reason"] == "length"


async def test_case_076_a_grammar_that_fails_ends_the_stream_with_an_error(
    client: httpx.AsyncClient, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted = 0
    accept = GrammarConstraint.accept

    def fail_later(self: GrammarConstraint, token_id: int) -> None:
        nonlocal accepted
        accepted += 1
        accept(self, token_id)

    monkeypatch.setattr(GrammarConstraint, "accept", fail_later)
    monkeypatch.setattr(GrammarConstraint, "error", property(lambda self: "broken" if accepted >= 5 else None))
    wanted = {"response_format": {"type": "regex", "regex": "[a-z]{20,30}"}, "max_tokens": 40, "stream": True}
    answer = await client.post("/completions", json={"model": "tiny", "prompt": "A", **wanted, **GREEDY})
    *_, last, rest = answer.text.split("\n\n")
    assert rest == ""
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_error"
    monkeypatch.undo()
    assert (await choices(client, max_tokens=3, **GREEDY))[0]["finish_reason"] == "length"


async def test_case_082_waiting_for_a_first_token_is_no_disconnect() -> None:
    go = asyncio.Event()
    app = openai_app(ScriptedEngine([go, *outputs("one", "two")]))
    body: dict[str, Any] = {"model": "scripted", "prompt": "x", "stream": True}
    clients = [LeavingClient(app, "/completions", body) for _ in range(200)]
    await asyncio.sleep(0)
    assert not any(client.messages for client in clients)
    go.set()
    await asyncio.wait_for(asyncio.gather(*(client.done for client in clients)), 20)
    assert all(client.status == 200 and client.body.endswith(b"data: [DONE]\n\n") for client in clients)
