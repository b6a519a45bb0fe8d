"""Bodies that no client should send, at every route, with a clock on the event loop.

    python -m tests.reliability.fuzz_bodies --count 100000 --seed 1

Each body is a right one with faults put into it: values of other types, sizes up to the limits, deep nesting, patterns
and schemas that are costly to judge, numbers at the edges, unknown keys. The application runs in this
process on a tiny engine, one request after the other, so the processor time that the event loop's thread spends
between two turns is the last body's.

Prints one JSON object and ends with status 1 where an answer was a 500 or no error of OpenAI's shape, where a body
held the loop for more than `LIMIT` seconds of processor time, or where the engine is not idle at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from cb_backend import Engine
from cb_backend.openai.app import openai_app
from tests.tiny_models import build_model

LIMIT = 0.25  # seconds of the loop's thread for one body
ALLOWED = {200, 400, 404, 413, 415, 422, 429, 503, 504}
MODEL = "tiny"

Rng = random.Random
Body = dict[str, Any]


# -- right bodies -------------------------------------------------------------------------------------------------


def _tool(rng: Rng) -> Body:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}}
    return {"type": "function", "function": {"name": f"f{rng.randrange(9)}", "parameters": parameters}}


def _messages(rng: Rng) -> list[Body]:
    return [
        {"role": rng.choice(["system", "user", "assistant", "user"]), "content": "words " * rng.randrange(1, 5)}
        for _ in range(rng.randrange(1, 4))
    ] + [{"role": "user", "content": "go on"}]


def _common(rng: Rng) -> Body:
    fields: list[Body] = [
        {},
        {"temperature": rng.random() * 2, "seed": rng.randrange(100)},
        {"stop": ["zzz"], "top_p": 0.5, "top_k": 5},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"logit_bias": {"5": 1.5}, "presence_penalty": 0.5},
        {"bad_words": ["word"], "min_tokens": 1},
        {"response_format": {"type": "json_object"}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}},
            }
        },
        {"n": 2, "priority": 1, "timeout": 5, "request_class": "x", "cache_salt": "y"},
    ]
    return {"model": MODEL, "max_tokens": rng.randrange(1, 4), **rng.choice(fields)}


def _completion(rng: Rng) -> Body:
    prompts: list[Any] = ["text", [5, 6, 7], ["a", "b"], [[5], [6, 7]]]
    return {**_common(rng), "prompt": rng.choice(prompts), **rng.choice([{}, {"logprobs": 2}, {"echo": True}])}


def _chat(rng: Rng) -> Body:
    extras: list[Body] = [
        {},
        {"tools": [_tool(rng) for _ in range(rng.randrange(1, 4))]},
        {"tools": [_tool(rng)], "tool_choice": "required"},
        {"logprobs": True, "top_logprobs": 3},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ]
    return {**_common(rng), "messages": _messages(rng), **rng.choice(extras)}


def _response(rng: Rng) -> Body:
    extras: list[Body] = [{}, {"instructions": "be brief"}, {"metadata": {"a": "b"}}, {"stream": True}]
    inputs: list[Any] = ["hello", [{"role": "user", "content": "hello"}]]
    return {"model": MODEL, "max_output_tokens": 3, "input": rng.choice(inputs), **rng.choice(extras)}


def _tokenize(rng: Rng) -> Body:
    return rng.choice([{"model": MODEL, "prompt": "some text"}, {"model": MODEL, "messages": _messages(rng)}])


def _detokenize(rng: Rng) -> Body:
    return {"model": MODEL, "tokens": [rng.randrange(500) for _ in range(5)]}


ROUTES: dict[str, Callable[[Rng], Body]] = {
    "/completions": _completion,
    "/chat/completions": _chat,
    "/responses": _response,
    "/tokenize": _tokenize,
    "/detokenize": _detokenize,
}


# -- faults -------------------------------------------------------------------------------------------------------


def _deep(depth: int, leaf: Any) -> Any:
    for level in range(depth):
        leaf = [leaf] if level % 2 else {"a": leaf}
    return leaf


def _value(rng: Rng) -> Any:
    """A value of any type and size."""
    size = int(10 ** rng.uniform(0, 6.3))
    makers: list[Callable[[], Any]] = [
        lambda: None,
        lambda: rng.choice([True, False]),
        lambda: rng.choice([0, -1, 1, 2**31, 2**63, -(2**63), 10**18, 1e308, -1e308, 5e-324, 0.1]),
        lambda: rng.choice(["", " ", "\u0000", "\ud7ff", "\U0001f600", "\u2028", "a\r\nb", "<|im_start|>", "%s"]),
        lambda: rng.choice("abc \u00e9\u4e2d") * size,
        list,
        dict,
        lambda: [rng.randrange(600)] * size,
        lambda: ["x"] * min(size, 200_000),
        lambda: [[5]] * min(size, 200_000),
        lambda: {str(i): i for i in range(min(size, 100_000))},
        lambda: _deep(rng.choice([3, 50, 200, 900]), 1),
        lambda: {"role": "user", "content": "x" * size},
    ]
    return rng.choice(makers)()


def _pattern(rng: Rng) -> str:
    size = int(10 ** rng.uniform(0, 5))
    return rng.choice(
        [
            "(?i)" + "[\\x00-\\uffff]" * min(size, 3000),
            "a" * size,
            "(a+)+" * min(size, 2000),
            "(" * min(size, 2000),
            f"a{{1,{min(size, 99999)}}}",
            "\\p{L}+",
            "(?<y>\\d{4})",
            "[\\w-.]",
        ]
    )


def _schema(rng: Rng, depth: int = 0) -> Any:
    size = int(10 ** rng.uniform(0, 3.5))
    makers: list[Callable[[], Any]] = [
        lambda: {"type": "string", "pattern": _pattern(rng)},
        lambda: {"enum": list(range(size))},
        lambda: {"oneOf": [{"enum": list(range(size))}, {"enum": list(range(size, 2 * size))}]},
        lambda: {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(size)}},
        lambda: {"anyOf": [{"const": f"v{i}"} for i in range(size)]},
        lambda: {"type": "array", "items": {"type": "number"}, "minItems": size, "maxItems": 10 * size},
        lambda: {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        lambda: {"type": "string", "format": rng.choice(["date", "path", "password", "binary", "uuid"])},
        lambda: {"paramaters": {}, "typ": "object"},
        lambda: _deep(rng.choice([10, 100, 900]), {"type": "string"}),
    ]
    if depth < 3 and rng.random() < 0.4:
        inner = {f"q{i}": _schema(rng, depth + 1) for i in range(rng.randrange(1, 5))}
        return {"type": "object", "properties": inner, "required": list(inner), "additionalProperties": False}
    return rng.choice(makers)()


def _costly(rng: Rng) -> Body:
    """A field whose judging could cost more than its size says."""
    function = {"name": "f", "parameters": _schema(rng)}
    makers: list[Callable[[], Body]] = [
        lambda: {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _schema(rng)}}},
        lambda: {"response_format": {"type": "regex", "regex": _pattern(rng)}},
        lambda: {
            "tools": [{"type": "function", "function": function}],
            "tool_choice": rng.choice(["auto", "required"]),
        },
        lambda: {"bad_words": [f"w{i} " * rng.randrange(1, 100) for i in range(rng.choice([10, 1024]))]},
        lambda: {"stop": [f"s{i}" * 100 for i in range(16)]},
        lambda: {"logit_bias": {str(i): 1 for i in range(rng.choice([10, 4096, 20000]))}},
        lambda: {"chat_template_kwargs": {f"k{i}": "v" * rng.randrange(1000) for i in range(rng.choice([3, 2000]))}},
        lambda: {"chat_template_kwargs": {rng.choice(["self", "conversations", "tokenize", "x"]): _value(rng)}},
        lambda: {"messages": [{"role": "user", "content": "hi"}] * rng.choice([10, 2000, 50000])},
        lambda: {"prompt": [[5, 6]] * rng.choice([10, 100, 5000])},
        lambda: {"prompt": [5] * rng.choice([1000, 100_000, 2_000_000])},
        lambda: {"prompt": "word " * rng.choice([1000, 100_000, 1_000_000])},
        lambda: {"tokens": [5] * rng.choice([1000, 100_000, 1_500_000])},
        lambda: {"metadata": {f"k{i}": "v" for i in range(rng.choice([10, 20000]))}},
    ]
    return rng.choice(makers)()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every value inside."""
    keys: Any = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in list(keys):
        yield value, key
        if not isinstance(value[key], (list, dict)) or len(value[key]) < 50:
            yield from _places(value[key])


def make_body(rng: Rng) -> tuple[str, Any]:
    """A route, and a body for it with none to three faults."""
    route = rng.choice(list(ROUTES))
    body: Any = ROUTES[route](rng)
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        kind = rng.random()
        if kind < 0.35:
            body |= _costly(rng)
        elif kind < 0.85:
            container, key = rng.choice(list(_places(body)))
            container[key] = _value(rng)
        elif kind < 0.95:
            body[rng.choice(["unknown", "modle", "n", "user", "store", "stop_token_ids", ""])] = _value(rng)
        else:
            body.pop(rng.choice(list(body)))
        if not body:
            break
    return route, body


def make_bytes(rng: Rng, body: Any) -> bytes:
    """Its JSON; now and then not quite, or nested beyond what a parser's stack takes."""
    data = json.dumps(body).encode()
    kind = rng.random()
    if kind < 0.02:
        return data[: rng.randrange(len(data))]
    if kind < 0.03:
        return b"[" * 100_000 + b"]" * 100_000
    if kind < 0.04:
        return data.replace(b'"', b'"\xff', 1)
    if kind < 0.05:
        return data[:-1] + b',"x":' + rng.choice([b"NaN", b"1e999", b'"\\ud800"', b"0" * 1000, b"9" * 5000]) + b"}"
    return data


# -- the run ------------------------------------------------------------------------------------------------------


@dataclass
class LoopClock:
    """Processor seconds that the loop's thread spent between two turns, the most since `reset`."""

    worst: float = 0.0
    _last: float = field(default_factory=time.thread_time)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.tick()

    def tick(self) -> None:
        now = time.thread_time()
        self.worst = max(self.worst, now - self._last)
        self._last = now

    def reset(self) -> None:
        self.worst, self._last = 0.0, time.thread_time()


@contextmanager
def tiny_engine() -> Iterator[Engine]:
    with (
        tempfile.TemporaryDirectory(prefix="cb-fuzz-") as folder,
        Engine(
            model=str(build_model("llama", Path(folder) / "model")),
            served_model_name=MODEL,
            dtype="float32",
            device="cpu",
            num_kv_blocks=64,
            block_size=16,
            swap_space=0,
            num_threads=1,
        ) as engine,
    ):
        # As a service does once it has loaded: else collections walk a million objects of modules and model.
        gc.collect()
        gc.freeze()
        yield engine
        gc.unfreeze()


async def fuzz(engine: Engine, count: int, seed: int) -> dict[str, Any]:
    statuses: Counter[str] = Counter()
    faults: list[str] = []
    held: list[tuple[float, str]] = []
    clock = LoopClock()
    ticking = asyncio.ensure_future(clock.run())
    transport = httpx.ASGITransport(openai_app(engine), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=300) as client:
        for number in range(count):
            rng = random.Random(seed * 1_000_003 + number)
            route, body = make_body(rng)
            data = make_bytes(rng, body)
            where = f"body {number} of seed {seed} ({route}, {len(data)} bytes): "
            request = client.build_request("POST", route, content=data, headers={"content-type": "application/json"})
            await asyncio.sleep(0)
            clock.reset()
            answer = await client.send(request)
            clock.tick()
            statuses[f"{route} {answer.status_code}"] += 1
            held.append((clock.worst, where + data[:200].decode(errors="replace")))
            if clock.worst > LIMIT:
                faults.append(f"{where}held the loop for {clock.worst:.2f} s: {data[:200]!r}")
            if answer.status_code not in ALLOWED:
                faults.append(f"{where}{answer.status_code} {answer.text[:200]}: {data[:200]!r}")
            elif answer.status_code != 200 and "message" not in answer.json().get("error", {}):
                faults.append(f"{where}{answer.status_code} without an error: {answer.text[:200]}")
    ticking.cancel()
    for _ in range(200):
        if engine.is_idle and not engine.stats()["running"] + engine.stats()["waiting"]:
            break
        await asyncio.sleep(0.05)
    else:
        faults.append(f"not idle: {engine.stats()}")
    held.sort(reverse=True)
    return {
        "bodies": count,
        "statuses": dict(sorted(statuses.items())),
        "faults": faults[:40],
        "num_faults": len(faults),
        "longest_seconds_on_the_loop": [(round(seconds, 4), where) for seconds, where in held[:5]],
        "passed": not faults,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.reliability.fuzz_bodies", description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    with tiny_engine() as engine:
        result = asyncio.run(fuzz(engine, options.count, options.seed))
    print(json.dumps(result, indent=1))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
