"""The two other ways to use an engine in BentoML, under a real `bentoml serve`: a front that depends on it, and a
legacy service."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.bento.servers import Server, serving

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def front(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("front")
    with serving("tests.bento.front_service:Front", folder, tiny_llama, num_kv_blocks=1500, block_size=16) as server:
        yield server


@pytest.fixture(scope="module")
def legacy(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("legacy")
    with serving("integration.legacy_service:svc", folder, tiny_llama, num_kv_blocks=1500, block_size=16) as server:
        yield server


async def test_32_streams_through_a_front_are_what_the_whole_answer_is(front: Server) -> None:
    whole = front.post("/ask", question="Who is there?", max_tokens=24)
    async with httpx.AsyncClient(timeout=60) as client:
        body = {"question": "Who is there?", "max_tokens": 24}
        answers = await asyncio.gather(*(client.post(f"{front.url}/tell", json=body) for _ in range(32)))
    assert [answer.text for answer in answers] == [whole] * 32
    assert whole


async def test_a_client_that_leaves_a_front_ends_its_request_in_the_engine(front: Server) -> None:
    body = {"question": "Who is there?", "max_tokens": 900, "n": 16}
    with httpx.stream("POST", f"{front.url}/tell", json=body, timeout=30) as answer:
        assert answer.status_code == 200, answer.read()
        next(answer.iter_raw())
    front.until(lambda: front.post("/stats")["kv_blocks_used"] == 0, "no block used", seconds=10)
    assert front.post("/stats")["finished_abort"] == 16


async def test_a_long_stream_survives_more_requests_than_a_proxy_connection_may_have(front: Server) -> None:
    body = {"question": "Who is there?", "max_tokens": 800}
    async with httpx.AsyncClient(timeout=60) as client:
        streaming = asyncio.create_task(client.post(f"{front.url}/tell", json=body))
        await asyncio.gather(*(client.post(f"{front.url}/stats", json={}) for _ in range(120)))
        text = (await streaming).text
    assert text == front.post("/ask", **body)


async def test_legacy_calls_run_together_and_return_what_a_pipeline_returned(legacy: Server) -> None:
    body = {"prompt": "The cache", "max_new_tokens": 20, "do_sample": False, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=60) as client:
        answers = await asyncio.gather(*(client.post(f"{legacy.url}/generate", json=body) for _ in range(32)))
        streamed = {"prompt": "The cache", "max_tokens": 20, "temperature": 0.0, "ignore_eos": True}
        texts = await asyncio.gather(*(client.post(f"{legacy.url}/stream", json=streamed) for _ in range(32)))
    [[first]] = {tuple(map(str, answer.json())) for answer in answers}
    assert first.startswith("{'generated_text': 'The cache")
    assert [{"generated_text": "The cache" + text.text} for text in texts] == [answers[0].json()[0]] * 32


async def test_clients_that_leave_a_legacy_service_leave_no_block_used(legacy: Server) -> None:
    body = {"prompt": "Who is there?", "max_tokens": 900, "ignore_eos": True}

    async def read(number: int) -> int:
        async with (
            httpx.AsyncClient(timeout=60) as client,
            client.stream("POST", f"{legacy.url}/stream", json=body) as it,
        ):
            received = 0
            async for piece in it.aiter_raw():
                received += len(piece)
                if number % 2:
                    return 0
            return received

    counts = await asyncio.gather(*(read(number) for number in range(16)))
    assert min(counts[::2]) > 500

    def settled() -> bool:
        metrics = httpx.get(f"{legacy.url}/metrics").text
        return (
            'cb_kv_blocks{model="tiny",state="used"} 0.0' in metrics
            and 'reason="abort",request_class="default"} 8.0' in metrics
        )

    legacy.until(settled, "no block used, 8 aborts", seconds=10)


async def test_a_bad_legacy_stream_breaks_and_tells_the_service_why(legacy: Server) -> None:
    # A legacy service has sent its status by then.
    async with httpx.AsyncClient(timeout=60) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post(f"{legacy.url}/stream", json={"prompt": "A", "min_p": 7})
    legacy.until(lambda: "InvalidArgument: 'min_p'" in legacy.log.read_text(), "the reason in the log", seconds=5)


async def test_a_bad_legacy_request_is_refused_with_the_fields_name(legacy: Server) -> None:
    async with httpx.AsyncClient(timeout=60) as client:
        answer = await client.post(f"{legacy.url}/generate", json={"prompt": "A", "top_p": 7})
    assert answer.status_code == 400
    assert "top_p" in answer.text
