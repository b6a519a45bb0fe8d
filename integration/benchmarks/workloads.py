"""Workloads for the replay: four real traces, scaled down, and four synthetic mixes. Deterministic."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Callable, Iterator
from itertools import count, cycle, islice
from pathlib import Path
from typing import NamedTuple

TRACES = Path(__file__).resolve().parents[2] / "tests" / "data" / "traces"
PROMPT_SCALE, PROMPT_CAP, OUTPUT_SCALE = 16, 256, 8


class Arrival(NamedTuple):
    """One request: tokens of its prompt, of its output (which the scheduler does not know), and what it allows."""

    prompt: int
    output: int
    max_tokens: int
    request_class: str = ""


def allowed(output: int) -> int:
    """max_tokens, generous as clients set it: the next power of two above four times the output."""
    return 1 << (4 * output).bit_length()


def trace(name: str) -> Iterator[Arrival]:
    """A trace's requests in their order, repeated for ever: prompt / 16 (at most 256 tokens), output / 8."""
    with (TRACES / f"{name}.csv").open(newline="") as file:
        rows = [(int(row["prompt_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(file)]
    for prompt, output in cycle(rows):
        output = max(1, output // OUTPUT_SCALE)
        yield Arrival(min(PROMPT_CAP, max(1, prompt // PROMPT_SCALE)), output, allowed(output))


def _mix(draw: Callable[[random.Random, int], tuple[float, str]]) -> Iterator[Arrival]:
    rng = random.Random(7)
    for i in count():
        length, request_class = draw(rng, i)
        output = min(500, max(1, round(length)))
        yield Arrival(rng.randint(8, 64), output, allowed(output), request_class)


def _bimodal(rng: random.Random, _i: int) -> tuple[float, str]:
    """Half of the requests extract JSON (10 tokens), half chat (90); each says so in its class."""
    return (rng.gauss(10, 2), "json") if rng.random() < 0.5 else (rng.gauss(90, 20), "chat")


def _heavy_tail(rng: random.Random, _i: int) -> tuple[float, str]:
    return 8 * rng.paretovariate(1.1), ""


def _drift(rng: random.Random, i: int) -> tuple[float, str]:
    """The mean length wanders between 10 and 70 and back, once in 2,500 requests."""
    return rng.gammavariate(4, (40 - 30 * math.cos(2 * math.pi * i / 2500)) / 4), ""


def _jump(rng: random.Random, i: int) -> tuple[float, str]:
    """The mean length jumps from 15 to 60 at every odd 2,500th request and back at the even ones."""
    return rng.gammavariate(4, (60 if i // 2500 % 2 else 15) / 4), ""


WORKLOADS: dict[str, Callable[[], Iterator[Arrival]]] = {
    "azure code": lambda: trace("azure_code_2023"),
    "azure chat": lambda: trace("azure_conv_2023"),
    "mooncake chat": lambda: trace("mooncake_conversation"),
    "mooncake synthetic": lambda: trace("mooncake_synthetic"),
    "bimodal, classes": lambda: _mix(_bimodal),
    "heavy tail": lambda: _mix(_heavy_tail),
    "drift": lambda: _mix(_drift),
    "jumps": lambda: _mix(_jump),
}


def requests(name: str, number: int) -> list[Arrival]:
    """The first `number` requests of a workload."""
    return list(islice(WORKLOADS[name](), number))
