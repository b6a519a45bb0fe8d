"""Reports that only a real server shows: probes under load, slow readers, its metrics, its spans and its log."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from tests.bento.servers import Server, serving
from tests.pace import seconds_of
from tests.telemetry.collector import SERVER_KIND, Collector, attributes, tracing
from tests.tiny_models import build_tokenizer

from .test_traced import parent_of

pytestmark = pytest.mark.timeout(180)

GREEDY = {"model": "tiny", "temperature": 0, "ignore_eos": True}
DEPLOYMENT = Path(__file__).resolve().parents[2] / "integration/kubernetes/deployment.yaml"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def server(collector: Collector, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    config = folder / "bentoml.yaml"
    config.write_text(tracing(collector.endpoint), encoding="utf-8")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("BENTOML_CONFIG", str(config))
        environment.setenv("TRACEPARENT", parent_of(0xBAD))
        with serving("integration.service:LLM", folder, tiny_llama, num_kv_blocks=4000, block_size=16) as server:
            yield server


class Probe:
    """Asks for readiness again and again while its block runs; `slowest` is in seconds."""

    def __init__(self, server: Server) -> None:
        self.slowest = 0.0
        self.answers: list[int] = []
        self._server = server
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._done.wait(0.05):
            began = time.monotonic()
            self.answers.append(self._server.status("/readyz", timeout=30))
            self.slowest = max(self.slowest, time.monotonic() - began)

    def __enter__(self) -> Probe:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._thread.join()
        assert self.answers
        assert set(self.answers) == {200}


def post(server: Server, body: Any, path: str = "/v1/completions", **headers: str) -> int:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(server.url + path, content=content, headers=headers, timeout=60).status_code


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/tokenize", "/generate"])
def test_case_151_five_megabytes_of_text_hold_up_no_probe(server: Server, path: str) -> None:
    text = "A request joins the batch. " * 185_000
    # What holding a probe up would take: the text tokenized by the thread that answers probes.
    whole = seconds_of(lambda: build_tokenizer()(text))
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    named = body if path == "/generate" else {"model": "tiny", **body}
    with Probe(server) as probe:
        assert post(server, named, path, **{"content-type": "application/json"}) in (200, 400, 413)
        time.sleep(0.3)
    assert probe.slowest < whole / 4, (probe.slowest, whole)


async def flood(server: Server, count: int, body: dict[str, Any]) -> list[int]:
    """The statuses of `count` requests that are sent before any answer is read."""
    port = int(server.url.rsplit(":", 1)[1])
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"

    async def one() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + content)
        status = int((await reader.readline()).split()[1])
        await reader.read()
        writer.close()
        return status

    return await asyncio.gather(*(one() for _ in range(count)))


async def test_case_158_1280_requests_at_once_do_not_look_like_death(server: Server) -> None:
    """No probe takes as long as the liveness probe of our manifest waits, let alone thrice in a row."""
    manifest = next(iter(yaml.safe_load_all(DEPLOYMENT.read_text(encoding="utf-8"))))
    [container] = manifest["spec"]["template"]["spec"]["containers"]
    body = {**GREEDY, "prompt": "A", "max_tokens": 8}
    with Probe(server) as probe:
        began = time.monotonic()
        statuses = await flood(server, 1280, body)
        whole = time.monotonic() - began
    assert len(probe.answers) > 3
    assert probe.slowest < max(whole / 3, 0.5), (probe.slowest, whole)  # probes are answered in the middle of it
    assert probe.slowest < container["livenessProbe"]["timeoutSeconds"] or whole > 60
    assert set(statuses) <= {200, 429}
    assert statuses.count(200) >= 256
    assert server.post("/stats")["kv_blocks_used"] == 0


def worker_of(server: Server) -> psutil.Process:
    children = psutil.Process(server.process.pid).children(recursive=True)
    return max(children, key=lambda child: child.memory_info().rss)


@pytest.mark.timeout(300)
def test_case_148_readers_that_sleep_cost_little_and_lose_nothing(server: Server) -> None:
    port = int(server.url.rsplit(":", 1)[1])
    body = json.dumps({**GREEDY, "prompt": "A", "max_tokens": 1000, "stream": True, "logprobs": 3}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    before = worker_of(server).memory_info().rss
    with contextlib.ExitStack() as stack:
        sleepers = []
        for _ in range(50):
            sleeper = stack.enter_context(socket.socket())
            sleeper.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sleeper.connect(("127.0.0.1", port))
            sleeper.sendall(head + body)
            sleepers.append(sleeper)
        awake = server.post("/v1/completions", **GREEDY, prompt="A", max_tokens=50)
        assert awake["usage"]["completion_tokens"] == 50
        # The engine waits for no reader: it has finished all of them while none reads. Without native kernels the
        # 50,000 tokens took 41 s on two cores that another job shared.
        server.until(lambda: server.post("/stats")["running"] == 0, "all generated", seconds=150)
        assert worker_of(server).memory_info().rss - before < 150 * 2**20
        received = b""
        sleepers[0].settimeout(20)
        while b"[DONE]" not in received:
            received += sleepers[0].recv(65536)
    tokens = [
        token
        for line in re.findall(rb"data: (\{.*\})", received)
        for token in (json.loads(line)["choices"][0]["logprobs"] or {"tokens": []})["tokens"]
    ]
    assert len(tokens) == 1000
    server.until(lambda: server.post("/stats")["kv_blocks_used"] == 0, "no block used", seconds=10)


def counted(server: Server) -> dict[str, float]:
    """BentoML's requests to the completions route, by status."""
    metrics = httpx.get(f"{server.url}/metrics").text
    found: dict[str, float] = {}
    for line in metrics.splitlines():
        if line.startswith("bentoml_service_request_total{") and 'endpoint="/v1/completions"' in line:
            status = line.split('http_response_code="')[1][:3]
            found[status] = found.get(status, 0) + float(line.rsplit(" ", 1)[1])
    return found


def test_case_167_every_status_is_counted(server: Server) -> None:
    before = counted(server)
    for body in ({"model": "tiny"}, b"{", {"model": "tiny", "prompt": "A", "top_p": 7}):
        assert post(server, body) == 400
    assert post(server, {"model": "other", "prompt": "A"}) == 404
    assert post(server, {**GREEDY, "prompt": "A" * 900, "max_tokens": 90, "timeout": 1e-6}) in (503, 504)
    after = counted(server)
    added = {status: count - before.get(status, 0) for status, count in after.items()}
    assert added["400"] == 3
    assert added["404"] == 1
    assert added.get("503", 0) + added.get("504", 0) == 1


def test_case_172_173_what_is_refused_has_a_span_in_its_callers_trace(server: Server, collector: Collector) -> None:
    refused: list[tuple[int, Any, int]] = [
        (0x71, {**GREEDY, "prompt": [5] * 2000}, 400),
        (0x72, b'{"model": ', 400),
        (0x73, {"model": "other", "prompt": "A"}, 404),
    ]
    for number, body, status in refused:
        # Header names as the client spells them: httpx would write them small.
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=20)
        content = body if isinstance(body, bytes) else json.dumps(body)
        connection.request("POST", "/v1/completions", content, {"TraceParent": parent_of(number)})
        assert connection.getresponse().status == status
        connection.close()
    assert post(server, {**GREEDY, "prompt": "A", "max_tokens": 1}) == 200
    sent = {number for number, *_ in refused}
    server.until(lambda: sent <= {int(trace, 16) for trace in collector.by_trace()}, "the refusals' spans", seconds=20)
    traces = {int(trace, 16): spans for trace, spans in collector.by_trace().items()}
    for number, _, status in refused:
        [span] = [span for span in traces[number] if span.kind == SERVER_KIND]
        assert attributes(span)["http.status_code"] == status
        assert span.parent_span_id.hex() == f"{number:016x}"
    assert 0xBAD not in traces  # TRACEPARENT of the environment is no request's parent


async def test_case_175_a_client_that_leaves_mid_stream_leaves_no_error_in_the_log(server: Server) -> None:
    earlier = server.log.stat().st_size
    async with httpx.AsyncClient() as client:
        for path in ("/v1/completions", "/stream"):
            body = {**GREEDY, "prompt": "A", "max_tokens": 900, "stream": True}
            sent = {k: v for k, v in body.items() if path.startswith("/v1") or k not in ("model", "stream")}
            async with client.stream("POST", server.url + path, json=sent) as answer:
                assert answer.status_code == 200
                await anext(answer.aiter_bytes())
    server.until(lambda: server.post("/stats")["running"] == 0, "both ended", seconds=10)
    log = server.log.read_bytes()[earlier:].decode()
    assert "path=/v1/completions" in log
    assert "Failed to detach context" not in log
    assert "Traceback" not in log
