"""The load generator against a scripted server: exact figures, because server and client share one clock."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from integration.benchmarks.arrivals import Job
from integration.benchmarks.latency import summary
from integration.benchmarks.serving import Client, drive, parse, progress_line

ROOT = Path(__file__).parents[2]
JOB = Job((1, 2, 3), 3)


class SharedClock:
    """Seconds that the server sets; it waits after every write until the client has looked at the clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.seen = asyncio.Event()

    def __call__(self) -> float:
        self.seen.set()
        return self.now

    async def write(self, at: float, response: web.StreamResponse, data: bytes) -> None:
        self.now = at
        self.seen.clear()
        await response.write(data)
        await self.seen.wait()


def token(text: str = "x") -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": text}]}).encode() + b"\n\n"


def usage(out_tok: int) -> bytes:
    counts = {"prompt_tokens": 3, "completion_tokens": out_tok}
    return b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\ndata: [DONE]\n\n"


async def stream_to(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    return response


@asynccontextmanager
async def serving(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    async def models(_request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "scripted"}]})

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.post("/v1/{kind:.*}", handler)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def client_of(url: str, **fields: object) -> Client:
    return Client(url, "scripted", lambda job: {"prompt": list(job.prompt), "max_tokens": job.max_tokens}, **fields)


async def test_a_script_of_four_streams_gives_exactly_its_percentiles():
    clock, arrived = SharedClock(), asyncio.Event()
    responses: list[web.StreamResponse] = []
    done = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        responses.append(await stream_to(request))
        if len(responses) == 4:
            arrived.set()
        await done.wait()
        return responses[0]

    async def play() -> None:
        await arrived.wait()
        for i, response in enumerate(responses):  # first tokens at 1, 2, 3 and 4 s
            await clock.write(1.0 + i, response, token())
        for i, response in enumerate(responses):  # second ones at 5, 6, 7 and 8 s: 4 s later each
            await clock.write(5.0 + i, response, token())
        for i, response in enumerate(responses):  # third ones at 10, 12, 14 and 16 s: 5, 6, 7 and 8 s later
            await clock.write(10.0 + 2 * i, response, token() + usage(3))
            await response.write_eof()
        done.set()

    async with serving(handler) as url:
        client = client_of(url, clock=clock)
        script = asyncio.create_task(play())
        await drive(client, lambda session: client.open_loop(session, [JOB] * 4), limit=30)
        await script
    figures = summary(client.answers, {"ttft": 3.0, "tpot": 5.0})
    assert figures["failed"] == 0
    assert [figures[f"ttft_p{p}_s"] for p in (50, 90, 99)] == [2.0, 4.0, 4.0]
    assert [figures[f"itl_p{p}_s"] for p in (50, 90, 99)] == [4.0, 8.0, 8.0]
    assert [figures[f"tpot_p{p}_s"] for p in (50, 90, 99)] == [5.0, 6.0, 6.0]
    assert [figures[f"e2e_p{p}_s"] for p in (50, 90, 99)] == [12.0, 16.0, 16.0]
    assert (figures["wall_s"], figures["out_tok"], figures["out_tok_s"]) == (16.0, 12, 0.75)
    assert (figures["slo_kept"], figures["goodput_req_s"]) == (0.5, 0.125)


async def test_a_closed_loop_keeps_its_number_of_streams_and_no_more():
    running = most = 0
    all_there = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 3:
            all_there.set()
        await all_there.wait()
        response = await stream_to(request)
        running -= 1
        await response.write(token() + usage(1))
        return response

    async with serving(handler) as url:
        client = client_of(url)
        await drive(client, lambda session: client.closed_loop(session, [JOB] * 10, 3), limit=30)
    assert most == 3
    assert summary(client.answers, {})["failed"] == 0
    assert client.finished == 10


async def test_an_open_loop_sends_on_time_however_slow_the_server_is():
    hold = asyncio.Event()
    asked = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        if asked == 3:
            hold.set()
        await hold.wait()  # no request is answered before the last one came
        response = await stream_to(request)
        await response.write(token() + usage(1))
        return response

    async with serving(handler) as url:
        client = client_of(url)
        jobs = [Job((1,), 1, at) for at in (0.0, 0.05, 0.1)]
        await drive(client, lambda session: client.open_loop(session, jobs), limit=30)
    dues = [answer.due - client.answers[0].due for answer in client.answers]
    assert dues == pytest.approx([0.0, 0.05, 0.1])
    assert all(answer.sent >= answer.due for answer in client.answers)
    assert summary(client.answers, {})["failed"] == 0


async def test_refusals_broken_streams_and_what_takes_too_long_are_failures_with_a_reason():
    async def handler(request: web.Request) -> web.StreamResponse:
        [kind] = (await request.json())["prompt"]
        if kind == 0:
            return web.Response(status=429, text="the queue is full")
        response = await stream_to(request)
        await response.write(token())
        if kind == 1:
            assert request.transport is not None
            request.transport.abort()
        await asyncio.sleep(60)
        return response

    async with serving(handler) as url:
        client = client_of(url)
        jobs = [Job((kind,), 1) for kind in range(3)]
        await drive(client, lambda session: client.open_loop(session, jobs), limit=0.5)
    errors = [answer.error or "" for answer in client.answers]
    assert errors[0] == "HTTP 429: the queue is full"
    assert errors[1].startswith(("ClientPayloadError", "ClientOSError", "ServerDisconnectedError"))
    assert errors[2] == "unfinished when the run's time was over"
    assert summary(client.answers, {})["failed"] == 3


@pytest.mark.parametrize("status", [200, 500])
async def test_the_command_prints_its_figures_draws_them_and_fails_with_a_request(tmp_path, status):
    asked: list[dict[str, object]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        asked.append(await request.json())
        if status != 200 and len(asked) == 5:  # the first after the warm-up
            return web.Response(status=status, text="no")
        response = await stream_to(request)
        for _ in range(3):
            await response.write(token())
        await response.write(usage(3))
        return response

    workload = tmp_path / "w.json"
    workload.write_text(json.dumps({"requests": [{"prompt_token_ids": [7, 8], "max_tokens": 3}] * 5}))
    plot, out = tmp_path / "plot.svg", tmp_path / "out.json"
    async with serving(handler) as url:
        command = ["-m", "integration.benchmarks.serving", "--url", url, "--workload", str(workload)]
        command += ["--concurrency", "1", "--plot", str(plot), "--out", str(out), "--limit", "60"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, cwd=ROOT, env=os.environ, stdout=asyncio.subprocess.PIPE
        )
        printed, _ = await process.communicate()
    figures = json.loads(printed)
    assert process.returncode == (0 if status == 200 else 1)
    assert (figures["requests"], figures["failed"]) == (5, 0 if status == 200 else 1)
    assert figures["out_tok"] == 3 * (figures["requests"] - figures["failed"])
    assert 0 < figures["client_cpu"] < 8
    assert json.loads(out.read_text()) == figures
    assert plot.read_text().startswith("<svg")
    assert asked[-1] == {
        "model": "scripted",
        "prompt": [7, 8],
        "max_tokens": 3,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@pytest.mark.parametrize(
    "wrong, message",
    [
        (["--concurrency", "4", "--rate", "2"], "goes with neither --rate nor --trace"),
        (["--chat"], "--chat needs --tokenizer DIR"),
        (["--rate", "0"], "--rate must be greater than 0"),
        (["--slo", "ttft=fast"], "must be NAME=SECONDS"),
    ],
)
def test_options_that_make_no_load_are_refused(capsys, wrong, message):
    with pytest.raises(SystemExit):
        parse(["--url", "http://x", "--workload", "w", *wrong])
    assert message in capsys.readouterr().err


def test_progress_is_a_bar_of_what_is_finished():
    assert progress_line(15, 4, 30) == f"[{'#' * 15}{'.' * 15}] 15/30 finished, 4 running "
