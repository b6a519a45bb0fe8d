"""The shipped service under a real `bentoml serve`, used by the openai client and by plain HTTP."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.bento.servers import Server, serving

pytestmark = pytest.mark.timeout(180)

LONG = {"max_tokens": 600, "temperature": 0.0}


@pytest.fixture(scope="module")
def server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    with serving("integration.service:LLM", folder, tiny_llama, num_kv_blocks=1500, block_size=16) as server:
        yield server


@pytest.fixture
def client(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def test_the_probes_say_when_the_model_is_loaded(server: Server) -> None:
    assert 503 in server.readiness
    assert set(server.readiness) <= {0, 503, 200}
    assert server.status("/livez") == 200


def used_blocks(server: Server) -> float:
    return server.post("/stats")["kv_blocks_used"]


async def chat(client: openai.AsyncOpenAI, number: int, **options: object):
    return await client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": f"Question {number}"}], **options
    )


async def test_32_chats_stream_at_once_and_each_is_what_it_is_alone(client: openai.AsyncOpenAI) -> None:
    options = {"max_tokens": 24, "temperature": 0.0, "extra_body": {"ignore_eos": True}}

    async def streamed(number: int) -> tuple[str, str | None]:
        text, reason = "", None
        async for chunk in await chat(client, number, stream=True, **options):
            text += chunk.choices[0].delta.content or ""
            reason = chunk.choices[0].finish_reason
        return text, reason

    answers = await asyncio.gather(*(streamed(number) for number in range(32)))
    assert [reason for _, reason in answers] == ["length"] * 32
    for number in (0, 31):
        alone = await chat(client, number, **options)
        assert answers[number][0] == alone.choices[0].message.content


async def test_the_models_are_listed(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny"]
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")


async def test_clients_that_leave_mid_stream_leave_no_block_used(client: openai.AsyncOpenAI, server: Server) -> None:
    async def read(number: int) -> int:
        stream = await chat(client, number, stream=True, extra_body={"ignore_eos": True}, **LONG)
        chunks = 0
        async for _ in stream:
            chunks += 1
            if number % 2 and chunks == 5:
                await stream.close()
                return 0
        return chunks

    counts = await asyncio.gather(*(read(number) for number in range(16)))
    assert all(count > 5 for count in counts[::2])
    server.until(lambda: used_blocks(server) == 0, "no block used", seconds=10)
    assert server.post("/stats")["finished_abort"] >= 8


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
async def test_a_client_that_leaves_before_its_answer_ends_its_request(server: Server, path: str) -> None:
    before = server.post("/stats")["finished_abort"]
    body = {"prompt": "The cache", "ignore_eos": True, **LONG, "max_tokens": 1000}
    body |= {"model": "tiny"} if path == "/v1/completions" else {}
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.post(server.url + path, json=body, timeout=httpx.Timeout(5, read=0.3))
    server.until(lambda: used_blocks(server) == 0, "no block used", seconds=10)
    assert server.post("/stats")["finished_abort"] == before + 1


async def test_own_endpoints_agree_with_each_other(server: Server) -> None:
    body = {"prompt": "Grüße aus Köln", "max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    whole = server.post("/generate", **body)
    async with httpx.AsyncClient(timeout=60) as client:
        streams = await asyncio.gather(*(client.post(f"{server.url}/stream", json=body) for _ in range(32)))
    assert {answer.headers["content-type"] for answer in streams} == {"text/event-stream; charset=utf-8"}
    for answer in streams:
        events = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line]
        assert "".join(event["text"] for event in events) == whole["text"]
        assert [token for event in events for token in event["token_ids"]] == whole["token_ids"]
        assert events[-1]["finish_reason"] == whole["finish_reason"] == "length"
        assert events[-1]["usage"]["completion_tokens"] == 40


async def test_own_endpoints_refuse_with_the_fields_name(server: Server) -> None:
    wrong = {"/generate": {"prompt": "A", "top_p": 2.0}, "/stream": {"prompt": "A", "max_tokns": 3}, "/chat": {}}
    async with httpx.AsyncClient() as client:
        for (path, body), name in zip(wrong.items(), ("top_p", "max_tokns", "messages"), strict=True):
            answer = await client.post(server.url + path, json=body)
            assert (answer.status_code, name in answer.text) == (400, True), answer.text


def test_a_model_that_cannot_be_loaded_fails_the_liveness_probe_and_says_why(tmp_path: Path) -> None:
    with serving("integration.service:LLM", tmp_path, tmp_path / "nowhere", wait=False) as server:
        server.until(lambda: server.status("/livez") == 503, "not alive")
        assert server.status("/readyz") == 503
        answer = httpx.get(f"{server.url}/v1/models")
        assert answer.status_code == 503
        assert "nowhere" in answer.json()["error"]["message"]
        assert "the model could not be loaded" in server.log.read_text()


def test_a_server_that_is_asked_to_stop_finishes_its_streams(server: Server) -> None:
    """The last test of this file: it ends the server."""
    body = {"model": "tiny", "prompt": "A", "stream": True, "ignore_eos": True, **LONG}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert server.process.wait(20) == 0
