"""Reports of limits and ends: BentoML's seconds and places, several workers, and servers that are asked to stop."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.bento.servers import Server, serving

pytestmark = pytest.mark.timeout(180)

SIZES = {"num_kv_blocks": 4000, "block_size": 16}
LONG = {"model": "tiny", "prompt": "A", "temperature": 0, "ignore_eos": True, "max_tokens": 1000}
# Seconds of work.
SLOW = {**LONG, "n": 60, "temperature": 1}


@pytest.fixture(scope="module")
def limited(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    target, folder = "tests.cases.limited_services:Limited", tmp_path_factory.mktemp("limited")
    with serving(target, folder, tiny_llama, **SIZES) as server:
        yield server


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
async def test_case_181_182_bentomls_limits_hold_and_end_the_work(limited: Server, path: str) -> None:
    before = limited.post("/stats")["finished_abort"]
    body = {key: value for key, value in SLOW.items() if key != "model" or path != "/generate"}
    began = time.monotonic()
    async with httpx.AsyncClient(timeout=30) as client:
        answers = await asyncio.gather(*(client.post(limited.url + path, json=body) for _ in range(5)))
    assert sorted(answer.status_code for answer in answers) == [429, 429, 429, 504, 504]
    assert time.monotonic() - began < 8
    limited.until(lambda: limited.post("/stats")["kv_blocks_used"] == 0, "the work ended", seconds=10)
    assert limited.post("/stats")["finished_abort"] - before >= 2
    assert limited.status("/readyz") == 200


def test_case_169_two_workers_count_every_request_once(tiny_llama: Path, tmp_path: Path) -> None:
    with serving("tests.cases.limited_services:Twins", tmp_path, tiny_llama, **SIZES) as server:
        # Both workers must have loaded: one that has not would refuse.
        server.until(lambda: [server.status("/readyz") for _ in range(12)] == [200] * 12, "both ready")
        body = {**LONG, "max_tokens": 3}
        for _ in range(20):
            assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=30).status_code == 200

        def total(name: str) -> float:
            lines = httpx.get(f"{server.url}/metrics").text.splitlines()
            return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))

        server.until(lambda: total("cb_requests_finished_total") == 20, "all counted", seconds=10)
        assert {total("cb_requests_finished_total") for _ in range(10)} == {20}
        assert {total("bentoml_service_request_total") for _ in range(3)} != {0}


def begin_stream(server: Server, client: httpx.Client, **fields: object):
    return client.stream("POST", f"{server.url}/v1/completions", json={**LONG, "stream": True, **fields}, timeout=60)


def test_case_163_161_a_stopping_server_refuses_what_comes_and_finishes_what_runs(
    tiny_llama: Path, tmp_path: Path
) -> None:
    with (
        serving("integration.service:LLM", tmp_path, tiny_llama, **SIZES) as server,
        httpx.Client() as client,
        begin_stream(server, client) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        server.until(lambda: server.status("/readyz") == 503, "unready", seconds=5)
        refused = httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=5)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stopping")
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.headers["connection"] == "close"
        assert httpx.post(f"{server.url}/generate", json={"prompt": "A"}, timeout=5).status_code == 503
        assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.process.wait(10) == 0


def test_case_163_what_is_left_after_the_drain_is_told_that_it_is_aborted(tiny_llama: Path, tmp_path: Path) -> None:
    options = ("--timeout-graceful-shutdown", "1")
    with (
        serving("integration.service:LLM", tmp_path, tiny_llama, options=options, **SIZES) as server,
        httpx.Client() as client,
        begin_stream(server, client, n=60, temperature=1) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        last = [line for line in lines if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "aborted"
        assert 0.9 < time.monotonic() - began < 5
        assert server.process.wait(10) == 0


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_case_164_an_interrupt_ends_the_process(tiny_llama: Path, tmp_path: Path, busy: bool) -> None:
    with serving("integration.service:LLM", tmp_path, tiny_llama, **SIZES) as server:
        if busy:
            sender = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
            body = json.dumps({**LONG, "stream": True}).encode()
            sender.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            assert sender.recv(100).startswith(b"HTTP/1.1 200")
        began = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(20) == 0
        assert time.monotonic() - began < 15  # the slowest part is Python's own end, on a busy machine
        if busy:
            rest = b""
            while received := sender.recv(65536):
                rest += received
            sender.close()
            assert b"[DONE]" in rest
