"""Load on any OpenAI-compatible server, and what its clients see.

    python -m integration.benchmarks.serving --url http://127.0.0.1:3000 --workload FILE --rate 4      # open, Poisson
    python -m integration.benchmarks.serving ... --trace tests/data/traces/azure_conv_2023.csv \
        --requests 200 --rate 4 --prompt-scale 8 --output-scale 8                                      # open, a trace
    python -m integration.benchmarks.serving ... --concurrency 32                                      # closed

Without any of them all requests are sent at once. `--chat` sends messages to /v1/chat/completions (`--tokenizer DIR`
turns the workload's ids into text), otherwise ids go to /v1/completions; both stream. `--start COMMAND` starts the
server first and ends it afterwards. Answers are greedy and `ignore_eos`, so that lengths are the workload's; `--extra`
replaces those fields for a server that does not know them.

Prints one JSON object (`latency.summary`, the client's own share of a core, `foreign_cpu`: cores that all others kept
busy, the server included). Ends with status 1 if a request failed. `--plot` draws the latencies as SVG. The client
keeps bytes and times while it runs and reads the events afterwards, so that it takes little from a server beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from .arrivals import Job, from_trace, poisson, together
from .latency import Answer, outcomes, parse_slo, samples, summary
from .meter import Meter, load_workload, percentile
from .plot import chart
from .server import started

_WARM_UP = 4  # requests of 64 tokens that are sent first and not counted


@dataclass
class Client:
    """Sends jobs to one server and keeps what comes back. `clock` gives seconds; the tests bring their own."""

    url: str
    model: str
    to_body: Callable[[Job], dict[str, Any]]
    path: str = "/v1/completions"
    clock: Callable[[], float] = time.perf_counter
    finished: int = 0
    running: int = 0
    answers: list[Answer] = field(default_factory=list)

    async def ask(self, session: aiohttp.ClientSession, job: Job, due: float | None = None) -> Answer:
        sent = self.clock()
        answer = Answer(sent if due is None else due, sent)
        self.answers.append(answer)
        self.running += 1
        body = {"model": self.model, **self.to_body(job), "stream": True, "stream_options": {"include_usage": True}}
        try:
            async with session.post(self.url + self.path, json=body) as response:
                if response.status != 200:
                    answer.error = f"HTTP {response.status}: {(await response.text())[:500]}"
                async for data in response.content.iter_any():
                    answer.pieces.append((self.clock(), data))
            answer.ended = answer.pieces[-1][0] if answer.pieces else self.clock()
        except (aiohttp.ClientError, OSError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        except asyncio.CancelledError:
            answer.error = "unfinished when the run's time was over"
            raise
        finally:
            self.running -= 1
            self.finished += 1
        return answer

    async def open_loop(self, session: aiohttp.ClientSession, jobs: Sequence[Job]) -> None:
        """Sends every job at its time, whatever became of those before it."""
        begin = self.clock()
        async with _all_of() as tasks:
            for job in jobs:
                due = begin + job.at
                while (wait := due - self.clock()) > 0:
                    await asyncio.sleep(wait)
                tasks.append(asyncio.create_task(self.ask(session, job, due)))

    async def closed_loop(self, session: aiohttp.ClientSession, jobs: Sequence[Job], concurrency: int) -> None:
        """Keeps `concurrency` requests running until there are no more."""
        left = iter(jobs)

        async def stream() -> None:
            for job in left:
                await self.ask(session, job)

        async with _all_of() as tasks:
            tasks += [asyncio.create_task(stream()) for _ in range(concurrency)]


class _all_of:
    """Waits for all tasks in its list at the end of the block; cancels them if the block is cancelled."""

    async def __aenter__(self) -> list[asyncio.Task[Any]]:
        self.tasks: list[asyncio.Task[Any]] = []
        return self.tasks

    async def __aexit__(self, *exc: object) -> None:
        try:
            await asyncio.gather(*self.tasks)
        finally:
            for task in self.tasks:
                task.cancel()


async def drive(client: Client, load: Callable[[aiohttp.ClientSession], Awaitable[None]], limit: float) -> None:
    """Runs a load for at most `limit` seconds; what is unfinished then has failed."""
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        try:
            await asyncio.wait_for(load(session), limit)
        except asyncio.TimeoutError:
            print(f"the run's {limit:.0f} s are over", file=sys.stderr)


async def show_progress(client: Client, total: int, interval: float = 0.5) -> None:
    """A bar on a terminal, a line every ten seconds elsewhere, on standard error."""
    bar, shown = sys.stderr.isatty(), 0.0
    while True:
        await asyncio.sleep(interval)
        shown += interval
        if bar or shown >= 10:
            print(progress_line(client.finished, client.running, total), end="\r" if bar else "\n", file=sys.stderr)
            shown = 0.0


def progress_line(finished: int, running: int, total: int) -> str:
    filled = 30 * finished // total
    return f"[{'#' * filled}{'.' * (30 - filled)}] {finished}/{total} finished, {running} running "


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """A pause of the collector would look like one of the server."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def serve_load(client: Client, jobs: Sequence[Job], concurrency: int | None, limit: float) -> Meter:
    """Warm-up, then the load with its progress; the meter of the load alone."""
    warm = [Job(tuple(range(3, 67)), 4)] * _WARM_UP
    await drive(client, lambda session: client.open_loop(session, warm), limit)
    for answer in client.answers:
        if answer.error is not None:
            raise SystemExit(f"the warm-up failed: {answer.error}")
    client.answers, client.finished = [], 0
    progress = asyncio.create_task(show_progress(client, len(jobs)))
    with _without_garbage_collection(), Meter() as meter:
        if concurrency is None:
            await drive(client, lambda session: client.open_loop(session, jobs), limit)
        else:
            await drive(client, lambda session: client.closed_loop(session, jobs, concurrency), limit)
    progress.cancel()
    print(progress_line(client.finished, client.running, len(jobs)), file=sys.stderr)
    return meter


async def first_model(url: str) -> str:
    async with aiohttp.ClientSession(raise_for_status=True) as session, session.get(url + "/v1/models") as response:
        return (await response.json())["data"][0]["id"]


def body_of(
    chat: bool, extra: dict[str, Any], decode: Callable[[Sequence[int]], str]
) -> Callable[[Job], dict[str, Any]]:
    def completion(job: Job) -> dict[str, Any]:
        return {"prompt": list(job.prompt), "max_tokens": job.max_tokens, **extra}

    def conversation(job: Job) -> dict[str, Any]:
        messages = [{"role": "user", "content": decode(job.prompt)}]
        return {"messages": messages, "max_tokens": job.max_tokens, **extra}

    return conversation if chat else completion


def latency_chart(answers: Sequence[Answer], title: str) -> str:
    """Seconds over percentile, logarithmic, of everything that `summary` has percentiles of."""
    curves = {}
    for name, values in samples(outcomes(answers)[0]).items():
        curve = [(float(percent), percentile(values, percent)) for percent in range(1, 101)] if values else []
        curves[name.upper()] = [(x, y) for x, y in curve if y > 0]
    return chart(title, "percentile", "seconds", curves, log_y=True)


def jobs_of(args: argparse.Namespace) -> list[Job]:
    requests = load_workload(args.workload)
    if args.trace is not None:
        return from_trace(
            args.trace,
            requests,
            number=args.requests,
            rate=args.rate,
            prompt_scale=args.prompt_scale,
            output_scale=args.output_scale,
            most_tokens=args.most_tokens,
            seed=args.seed,
        )
    if args.rate is not None:
        return poisson(requests, args.rate, args.requests, args.seed)
    return together(requests, args.requests)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m integration.benchmarks.serving", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--url", required=True, help="of the server, without /v1")
    parser.add_argument("--workload", required=True, type=Path, help="prompts and lengths; see offline")
    parser.add_argument("--requests", type=int, help="how many; default: the workload's or the trace's")
    parser.add_argument("--rate", type=float, help="requests a second, on average")
    parser.add_argument("--trace", type=Path, help="CSV with arrival_s, prompt_tokens, output_tokens")
    parser.add_argument("--prompt-scale", type=float, default=1.0, help="divides the trace's prompt lengths")
    parser.add_argument("--output-scale", type=float, default=1.0, help="divides the trace's output lengths")
    parser.add_argument("--most-tokens", type=int, default=1024, help="of a trace's prompt and output together")
    parser.add_argument("--concurrency", type=int, help="closed loop with so many streams")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--tokenizer", type=Path, help="directory with tokenizer.json, for --chat")
    parser.add_argument("--model", help="id to ask for; default: the server's first")
    parser.add_argument("--extra", type=json.loads, default={"temperature": 0, "ignore_eos": True})
    parser.add_argument("--slo", default="", help="ttft=2,tpot=0.1,e2e=20: seconds, for the goodput")
    parser.add_argument("--start", help="command of the server; ended afterwards")
    parser.add_argument("--start-limit", type=float, default=240.0, help="seconds")
    parser.add_argument("--server-log", type=Path, default=Path("server.log"))
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that the load may take")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    parser.add_argument("--plot", type=Path, help="SVG of the latencies")
    args = parser.parse_args(argv)
    if args.concurrency is not None and (args.rate is not None or args.trace is not None):
        parser.error("--concurrency is a closed loop: it goes with neither --rate nor --trace")
    if args.chat and args.tokenizer is None:
        parser.error("--chat needs --tokenizer DIR, to turn the workload's token ids into text")
    try:
        args.slo = parse_slo(args.slo)
    except ValueError as error:
        parser.error(str(error))
    for name in ("requests", "rate", "concurrency", "limit", "prompt_scale", "output_scale"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            parser.error(f"--{name.replace('_', '-')} must be greater than 0, not {value}")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    url, jobs = args.url.rstrip("/"), jobs_of(args)
    decode: Callable[[Sequence[int]], str] = str
    if args.chat:
        from tokenizers import Tokenizer

        decode = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json")).decode
    path = "/v1/chat/completions" if args.chat else "/v1/completions"
    with ExitStack() as stack:
        start_s = None
        if args.start is not None:
            server = started(args.start, url + "/v1/models", log=args.server_log, limit=args.start_limit)
            start_s = round(stack.enter_context(server), 2)
        model = args.model or asyncio.run(first_model(url))
        client = Client(url, model, body_of(args.chat, args.extra, decode), path)
        meter = asyncio.run(serve_load(client, jobs, args.concurrency, args.limit))
    figures = {
        **summary(client.answers, args.slo),
        "start_s": start_s,
        "client_cpu": round(meter.cpu / meter.wall, 3),
        "foreign_cpu": round(meter.foreign, 2),
    }
    text = json.dumps(figures)
    print(text, flush=True)
    if args.out is not None:
        args.out.write_text(text + "\n", encoding="utf-8")
    if args.plot is not None:
        args.plot.write_text(latency_chart(client.answers, f"{model}: {len(jobs)} requests"), encoding="utf-8")
    if figures["failed"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
