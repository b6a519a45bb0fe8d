"""Which requests a serving benchmark sends, and when: pure, seeded, no network.

Prompts are token ids of a workload file; a trace decides lengths and times and cuts its prompts out of all of the
workload's ids, so that no two requests share a beginning by design.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Job:
    """One request. `at`: seconds after the beginning of the run; closed loops send as soon as there is room."""

    prompt: tuple[int, ...]
    max_tokens: int
    at: float = 0.0


def together(requests: Sequence[dict[str, Any]], number: int | None = None) -> list[Job]:
    """The workload's requests, repeated up to `number`, all at time 0."""
    taken = requests if number is None else islice(cycle(requests), number)
    return [Job(tuple(request["prompt_token_ids"]), request["max_tokens"]) for request in taken]


def poisson(requests: Sequence[dict[str, Any]], rate: float, number: int | None = None, seed: int = 0) -> list[Job]:
    """The same at `rate` requests a second on average, with exponential gaps; the first comes at 0."""
    rng, at, jobs = random.Random(seed), 0.0, []
    for job in together(requests, number):
        jobs.append(Job(job.prompt, job.max_tokens, at))
        at += rng.expovariate(rate)
    return jobs


def from_trace(
    path: Path,
    requests: Sequence[dict[str, Any]],
    *,
    number: int | None = None,
    rate: float | None = None,
    prompt_scale: float = 1.0,
    output_scale: float = 1.0,
    most_tokens: int = 1024,
    seed: int = 0,
) -> list[Job]:
    """A trace's arrivals: a CSV with `arrival_s`, `prompt_tokens` and `output_tokens`.

    Args:
        number: only the trace's first ones.
        rate: stretches time so that so many come in a second on average; None keeps the trace's own times.
        prompt_scale, output_scale: lengths are divided by these; at least one token stays.
        most_tokens: prompts and outputs are cut to half of this each, so that a small model's context holds both.

    Raises:
        ValueError: the file lacks a column, has no row, or its times go backwards.
    """
    with path.open(newline="", encoding="utf-8") as file:
        try:
            rows = [
                (float(row["arrival_s"]), int(row["prompt_tokens"]), int(row["output_tokens"]))
                for row in islice(csv.DictReader(file), number)
            ]
        except KeyError as missing:
            raise ValueError(f"{path} has no column {missing}") from None
    times = [at for at, _, _ in rows]
    if not rows or times != sorted(times):
        raise ValueError(f"{path}: needs at least one row, in the order of arrival_s")
    corpus = list(chain.from_iterable(request["prompt_token_ids"] for request in requests))
    span = times[-1] - times[0]
    stretch = 1.0 if rate is None or span == 0 else (len(rows) - 1) / rate / span
    rng, most = random.Random(seed), most_tokens // 2
    jobs = []
    for at, prompt, output in rows:
        length = min(most, len(corpus), max(1, round(prompt / prompt_scale)))
        start = rng.randrange(len(corpus) - length + 1)
        tokens = min(most, max(1, round(output / output_scale)))
        jobs.append(Job(tuple(corpus[start : start + length]), tokens, (at - times[0]) * stretch))
    return jobs
