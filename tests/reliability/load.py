"""Load with trouble on a real server, and what must hold after it.

    python -m tests.reliability.load --requests 10000 --clients 500            # one run, counted in requests
    python -m tests.reliability.load --minutes 30 --clients 64 --rate 20       # a soak, counted in time

Starts `bentoml serve integration.service:LLM` with a tiny model on 48 KV blocks with swap. Every client in turn sends
a request drawn from fixed shares: good ones (whole and streamed), clients that leave, deadlines that cannot be kept,
bad bodies, and readers that read slowly. What a good request must be answered is computed beforehand by an offline
engine with the same weights, so an answer is right or wrong, not plausible. Meanwhile `/livez` is asked ten times a
second, and the server's resident memory is read.

Prints one JSON object and ends with status 1 where one of these fails: every good request has exactly its answer (or a
429 with Retry-After, after which it is sent again), every bad one its status, nothing is held when all is over, probes
are answered within 250 ms at p99, and memory grows by less than 1 MB per 1,000 requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from cb_backend import Engine, SamplingParams
from tests.bento.servers import Server, serving
from tests.tiny_models import build_model

PROBE_SECONDS = 0.1
PROBE_LIMIT = 0.25  # seconds at p99
SLOPE_LIMIT = 1.0  # MB per 1,000 requests
BLOCKS, BLOCK_SIZE = 48, 16
# Shares of the kinds of request; the rest is good.
SHARES = {"leaves": 0.20, "late": 0.05, "bad": 0.05, "slow": 0.05}

# Bodies that must be refused, with the status.
BAD: tuple[tuple[str, dict[str, Any], int], ...] = (
    ("/v1/completions", {"prompt": []}, 400),
    ("/v1/completions", {"prompt": "x", "max_tokens": -1}, 400),
    ("/v1/completions", {"prompt": "x", "max_tokens": 10**9}, 400),
    ("/v1/completions", {"prompt": [10**9]}, 400),
    ("/v1/completions", {"prompt": "x", "temperature": "hot"}, 400),
    ("/v1/completions", {"prompt": "x", "unknown_field": 1}, 400),
    ("/v1/completions", {"prompt": "x", "model": "another"}, 404),
    ("/v1/chat/completions", {"messages": []}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "robot", "content": "x"}]}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 0}, 400),
)


@dataclass(frozen=True)
class Case:
    """A good request: its body and the text it must be answered with."""

    body: dict[str, Any]
    text: str
    finish_reason: str


def cases(model: Path, count: int, seed: int) -> list[Case]:
    """Requests of varied lengths, a third of them sampled with a seed, and their answers by an offline engine."""
    rng = random.Random(seed)
    prompts, params = [], []
    for number in range(count):
        # Some share a beginning, which the prefix cache will find.
        shared = [7] * 32 if number % 3 == 0 else []
        prompts.append(shared + [rng.randrange(3, 500) for _ in range(rng.randrange(1, 48))])
        sampled = number % 3 == 1
        params.append(
            SamplingParams(
                max_tokens=rng.randrange(1, 40),
                temperature=0.9 if sampled else 0.0,
                seed=number if sampled else None,
                ignore_eos=number % 2 == 0,
            )
        )
    with Engine(
        model=str(model), dtype="float32", device="cpu", num_threads=1, num_kv_blocks=400, block_size=BLOCK_SIZE
    ) as engine:
        outputs = engine.generate(prompts, params)
    made = []
    for prompt, one, output in zip(prompts, params, outputs, strict=True):
        body = {"model": "tiny", "prompt": prompt, **one.model_dump(exclude_unset=True, exclude_none=True)}
        assert output.finish_reason is not None
        made.append(Case(body, output.text, output.finish_reason))
    return made


@dataclass
class Report:
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    probes: list[float] = field(default_factory=list)
    memory: list[tuple[int, float]] = field(default_factory=list)  # (requests done, resident MB)
    done: int = 0

    def fault(self, what: str) -> None:
        self.counts["wrong"] += 1
        if len(self.wrong) < 20:
            self.wrong.append(what[:300])


class Load:
    def __init__(self, server: Server, good: Sequence[Case], seed: int) -> None:
        self.server = server
        self.good = good
        self.rng = random.Random(seed)
        self.report = Report()
        self.over = False

    async def client(self, session: aiohttp.ClientSession, take: Any) -> None:
        while take():
            kind = self._kind()
            try:
                await getattr(self, f"_{kind}")(session)
            except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
                self.report.fault(f"{kind}: {type(error).__name__}: {error}")
            self.report.done += 1

    def _kind(self) -> str:
        at = self.rng.random()
        for kind, share in SHARES.items():
            if at < share:
                return kind
            at -= share
        return "good"

    async def _good(self, session: aiohttp.ClientSession, pause: float = 0.0) -> None:
        case = self.rng.choice(self.good)
        stream = self.rng.random() < 0.5 or pause > 0
        while True:
            async with session.post("/v1/completions", json={**case.body, "stream": stream}) as response:
                if response.status == 429:
                    self.report.counts["429"] += 1
                    if "Retry-After" not in response.headers:
                        self.report.fault("429 without Retry-After")
                    await response.read()
                    await asyncio.sleep(min(2.0, float(response.headers.get("Retry-After", 1))) * self.rng.random())
                    continue
                if response.status != 200:
                    self.report.fault(f"good: {response.status} {(await response.text())[:200]}")
                    return
                text, reason = await (self._events(response, pause) if stream else self._whole(response))
                break
        self.report.counts["good"] += 1
        if (text, reason) != (case.text, case.finish_reason):
            self.report.fault(f"good: {text!r} ({reason}) for {case.text!r} ({case.finish_reason})")

    @staticmethod
    async def _whole(response: aiohttp.ClientResponse) -> tuple[str, str]:
        choice = (await response.json())["choices"][0]
        return choice["text"], choice["finish_reason"]

    @staticmethod
    async def _events(response: aiohttp.ClientResponse, pause: float) -> tuple[str, str]:
        text, reason, ended = "", "", False
        async for line in response.content:
            if pause:
                await asyncio.sleep(pause)
            if not line.startswith(b"data: "):
                continue
            if line.strip() == b"data: [DONE]":
                ended = True
                continue
            event = json.loads(line[6:])
            if "error" in event:
                return text, f"error event {event['error']}"
            for choice in event["choices"]:
                text += choice["text"]
                reason = choice["finish_reason"] or reason
        return text, reason if ended else "cut off"

    async def _slow(self, session: aiohttp.ClientSession) -> None:
        await self._good(session, pause=0.02)

    async def _leaves(self, session: aiohttp.ClientSession) -> None:
        """Leaves after a random time, whole or streamed, before or after the first token."""
        body = {**self.rng.choice(self.good).body, "max_tokens": 200, "ignore_eos": True}
        limit = aiohttp.ClientTimeout(total=self.rng.uniform(0.001, 0.3))
        try:
            async with session.post(
                "/v1/completions", json={**body, "stream": self.rng.random() < 0.5}, timeout=limit
            ) as response:
                await response.read()
        except (asyncio.TimeoutError, aiohttp.ClientError):
            pass
        self.report.counts["left"] += 1

    async def _late(self, session: aiohttp.ClientSession) -> None:
        """A deadline too near: refused at once, or ended in time with what there was."""
        body = {**self.rng.choice(self.good).body, "max_tokens": 150, "ignore_eos": True, "timeout": 0.02}
        async with session.post("/v1/completions", json=body) as response:
            answer = await response.json()
            self.report.counts[f"late {response.status}"] += 1
            if response.status == 200:
                if answer["choices"][0]["finish_reason"] not in ("timeout", "length"):
                    self.report.fault(f"late: {answer}")
            elif response.status not in (429, 503, 504):
                self.report.fault(f"late: {response.status} {answer}")

    async def _bad(self, session: aiohttp.ClientSession) -> None:
        path, fields, wanted = self.rng.choice(BAD)
        async with session.post(path, json={"model": "tiny", **fields}) as response:
            text = await response.text()
            self.report.counts[f"bad {response.status}"] += 1
            # A full queue is said before what takes work to find out.
            if response.status not in (wanted, 429) or "error" not in json.loads(text):
                self.report.fault(f"bad: {fields} gave {response.status} {text[:200]}, not {wanted}")

    async def watch_memory(self) -> None:
        while not self.over:
            self.report.memory.append((self.report.done, resident_mb(self.server.process.pid)))
            await asyncio.sleep(PROBE_SECONDS)


@contextmanager
def probing(url: str, report: Report) -> Iterator[None]:
    """Asks `/livez` all the while, from a process of its own: what it waits is not this one's load."""
    command = [sys.executable, "-m", "tests.reliability.probe", url, str(PROBE_SECONDS)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield
    finally:
        output, _ = process.communicate("stop\n", timeout=90)
        answers = json.loads(output)
        report.probes += answers["seconds"]
        for fault in answers["faults"]:
            report.fault(f"/livez: {fault}")


def resident_mb(pid: int) -> float:
    """Resident memory of a process and its children, MB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return pages * 4096 / 1e6 + sum(resident_mb(int(child)) for child in children)


def slope(points: Sequence[tuple[int, float]]) -> float:
    """MB per 1,000 requests over the second half, where caches are full: least squares."""
    half = [(x / 1000, y) for x, y in points[len(points) // 2 :]]
    mean_x = sum(x for x, _ in half) / len(half)
    mean_y = sum(y for _, y in half) / len(half)
    spread = sum((x - mean_x) ** 2 for x, _ in half)
    return sum((x - mean_x) * (y - mean_y) for x, y in half) / spread if spread else 0.0


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def run(load: Load, clients: int, requests: int, seconds: float | None) -> None:
    sent = 0
    end = None if seconds is None else time.monotonic() + seconds

    def take() -> bool:
        nonlocal sent
        if time.monotonic() >= end if end is not None else sent >= requests:
            return False
        sent += 1
        return True

    timeout = aiohttp.ClientTimeout(total=300)
    connector = aiohttp.TCPConnector(limit=0, force_close=False)
    async with aiohttp.ClientSession(load.server.url, connector=connector, timeout=timeout) as session:
        memory = asyncio.ensure_future(load.watch_memory())
        await asyncio.gather(*(load.client(session, take) for _ in range(clients)))
        load.over = True
        await memory


def left_over(server: Server) -> dict[str, float]:
    """What the engine still holds after a moment; empty where nothing is."""
    held: dict[str, float] = {}
    for _ in range(100):
        stats = server.post("/stats")
        names = ("running", "waiting", "swapped", "kv_blocks_used", "host_blocks_used")
        held = {name: stats[name] for name in names if stats[name]}
        if not held:
            return {}
        time.sleep(0.1)
    return held


def measure(
    *, requests: int = 10_000, clients: int = 500, seconds: float | None = None, seed: int = 0, count: int = 120
) -> dict[str, Any]:
    """One run; see the module's head. `passed` in the result says whether everything held."""
    with tempfile.TemporaryDirectory(prefix="cb-load-") as folder:
        model = build_model("llama", Path(folder) / "model")
        good = cases(model, count, seed)
        # Admission by the prompt alone: the pool overflows all the time, and requests are swapped.
        pool = {"num_kv_blocks": BLOCKS, "block_size": BLOCK_SIZE, "swap_space": "64MiB", "max_queue_size": 256}
        options = {**pool, "admission__policy": "prompt"}
        with serving("integration.service:LLM", Path(folder), model, **options) as server:
            load = Load(server, good, seed)
            began = time.monotonic()
            with probing(server.url, load.report):
                asyncio.run(run(load, clients, requests, seconds))
            held = left_over(server)
            stats = server.post("/stats")
            wall = time.monotonic() - began
    report = load.report
    probes = {f"p{int(100 * q)}": round(percentile(report.probes, q), 4) for q in (0.5, 0.9, 0.99)}
    grown = slope(report.memory)
    result = {
        "requests": report.done,
        "seconds": round(wall, 1),
        "counts": dict(sorted(report.counts.items())),
        "wrong": report.wrong,
        "held": held,
        "probe_seconds": {**probes, "max": round(max(report.probes), 4), "asked": len(report.probes)},
        "rss_mb_over_requests": load.report.memory[:: max(1, len(load.report.memory) // 20)],
        "rss_mb": {"first": round(report.memory[0][1], 1), "last": round(report.memory[-1][1], 1)},
        "rss_mb_per_1000_requests": round(grown, 3),
        "preemptions": stats["preemptions_swap"] + stats["preemptions_recompute"],
    }
    result["passed"] = (
        not report.wrong and not held and probes["p99"] < PROBE_LIMIT and grown < SLOPE_LIMIT and report.done > 0
    )
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.reliability.load", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--minutes", type=float, help="run this long instead of a number of requests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", choices=["good", *SHARES], help="one kind of request, to find what a fault comes from"
    )
    options = parser.parse_args(arguments)
    if options.only:
        SHARES.clear()
        if options.only != "good":
            SHARES[options.only] = 1.0
    seconds = None if options.minutes is None else options.minutes * 60
    result = measure(requests=options.requests, clients=options.clients, seconds=seconds, seed=options.seed)
    print(json.dumps(result, indent=1))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
