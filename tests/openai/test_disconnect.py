"""A client that leaves ends its requests in the engine, whatever they are doing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cb_backend.openai.app import openai_app
from tests.openai.scripted_engine import LeavingClient, ScriptedEngine, outputs

CHAT = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}
BATCH = {"model": "scripted", "prompt": ["a", "b", "c"]}
ROUTES = [("/chat/completions", CHAT, 1), ("/completions", BATCH, 3)]


async def leave(client: LeavingClient) -> None:
    client.leave()
    await asyncio.wait_for(client.done, 5)


@pytest.mark.parametrize(("path", "body", "requests"), ROUTES)
@pytest.mark.parametrize("stream", [True, False])
async def test_before_the_first_token(path: str, body: dict[str, Any], requests: int, stream: bool) -> None:
    engine = ScriptedEngine([asyncio.Event()])
    client = LeavingClient(openai_app(engine), path, {**body, "stream": stream})
    await asyncio.wait_for(engine.waiting.wait(), 5)
    assert engine.closed == []
    await leave(client)
    assert len(engine.opened) == requests
    assert sorted(engine.closed) == sorted(engine.opened)
    # It reaches no client, but middlewares that wait for a first message must get one.
    assert client.status == 499


@pytest.mark.parametrize(("path", "body", "requests"), ROUTES)
async def test_in_the_middle_of_a_stream(path: str, body: dict[str, Any], requests: int) -> None:
    engine = ScriptedEngine([outputs("one", "two")[0], asyncio.Event()])
    client = LeavingClient(openai_app(engine), path, {**body, "stream": True})
    await asyncio.wait_for(client.answered.wait(), 5)
    await asyncio.wait_for(engine.waiting.wait(), 5)
    await leave(client)
    assert len(engine.opened) == requests
    assert sorted(engine.closed) == sorted(engine.opened)
    assert b"[DONE]" not in client.body


async def test_in_the_middle_of_a_whole_answer() -> None:
    engine = ScriptedEngine([outputs("one", "two")[0], asyncio.Event()])
    client = LeavingClient(openai_app(engine), "/chat/completions", CHAT)
    await asyncio.wait_for(engine.waiting.wait(), 5)
    await leave(client)
    assert engine.closed == engine.opened


@pytest.mark.parametrize("stream", [True, False])
async def test_a_server_that_cancels_the_call_ends_the_request_too(stream: bool) -> None:
    engine = ScriptedEngine([asyncio.Event()])
    client = LeavingClient(openai_app(engine), "/chat/completions", {**CHAT, "stream": stream})
    await asyncio.wait_for(engine.waiting.wait(), 5)
    client.done.cancel()
    with pytest.raises(asyncio.CancelledError):
        await client.done
    assert engine.closed == engine.opened


async def test_one_failing_prompt_ends_the_others() -> None:
    class FailsOnB(ScriptedEngine):
        async def open(self, prompt: Any, *arguments: Any, **options: Any) -> Any:
            if prompt == "b":
                raise RuntimeError("broken")
            async for delta in super().open(prompt, *arguments, **options):
                yield delta

    engine = FailsOnB([asyncio.Event()])
    client = LeavingClient(openai_app(engine), "/completions", BATCH)
    await asyncio.wait_for(client.done, 5)
    assert client.status == 500
    assert sorted(engine.closed) == sorted(engine.opened)
