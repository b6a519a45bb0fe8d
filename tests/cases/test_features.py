"""A report of features that work alone and fail together: every pair of them, on one model, with one right answer."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from cb_backend import Engine, SamplingParams

# Engine options and request options, each of two values. A request's grammar and log-probabilities vary within a run.
FACTORS: dict[str, tuple[Any, Any]] = {
    "model": ("llama", "mistral"),  # the second has a sliding window
    "max_num_batched_tokens": (512, 16),  # the second cuts prompts into chunks
    "enable_prefix_caching": (False, True),
    "preemption": ("recompute", "swap"),
    "num_kv_blocks": (200, 15),  # the second is so small that requests are preempted
    "admission": ({"policy": "worst_case"}, {"policy": "prompt"}),
}
# Rows of a two-level covering array: any two columns show all four pairs.
ROWS = ["000000", "001111", "110011", "011001", "100110", "111100"]
REGEX = "[a-z ]{10,20}"
PROMPTS = [[(7 * i + 3 * k) % 500 + 3 for i in range(20 + 5 * k)] for k in range(6)]


def test_the_rows_hold_every_pair() -> None:
    for a, b in combinations(range(len(FACTORS)), 2):
        assert {(row[a], row[b]) for row in ROWS} == set(product("01", repeat=2)), (a, b)


def params(kind: int) -> SamplingParams:
    greedy: dict[str, Any] = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    if kind % 2:
        greedy |= {"logprobs": 2, "prompt_logprobs": 1}
    if kind % 3 == 0:
        greedy |= {"response_format": {"type": "regex", "regex": REGEX}}
    return SamplingParams(**greedy)


def answers(tiny_model: Callable[[str], Path], row: str) -> tuple[Any, dict[str, float]]:
    options = {name: values[int(bit)] for (name, values), bit in zip(FACTORS.items(), row, strict=True)}
    model = tiny_model(options.pop("model"))
    with Engine(model=str(model), dtype="float32", device="cpu", block_size=8, num_threads=1, **options) as engine:
        outputs = engine.generate(PROMPTS, [params(kind) for kind in range(len(PROMPTS))])
        return outputs, engine.stats()


@pytest.fixture(scope="module")
def plain(tiny_model: Callable[[str], Path]) -> dict[str, Any]:
    return {model: answers(tiny_model, f"{bit}00000")[0] for bit, model in enumerate(FACTORS["model"])}


@pytest.mark.parametrize("row", ROWS)
def test_case_101_any_two_features_work_together(tiny_model: Callable[[str], Path], plain: Any, row: str) -> None:
    outputs, stats = answers(tiny_model, row)
    for kind, (got, wanted) in enumerate(zip(outputs, plain[FACTORS["model"][int(row[0])]], strict=True)):
        assert (got.token_ids, got.finish_reason) == (wanted.token_ids, wanted.finish_reason)
        if kind % 3 == 0:
            assert re.fullmatch(REGEX, got.text)
        if kind % 2:
            assert len(got.logprobs) == len(got.token_ids)
            assert len(got.prompt_logprobs) == len(PROMPTS[kind])
            values = [one.logprob for one in (*got.prompt_logprobs[1:], *got.logprobs)]
            known = [one.logprob for one in (*wanted.prompt_logprobs[1:], *wanted.logprobs)]
            assert values == pytest.approx(known, abs=1e-4)
    if row[4] == row[5] == "1":
        assert stats["preemptions_swap"] + stats["preemptions_recompute"] > 0
    assert stats["kv_blocks_used"] == stats["host_blocks_used"] == 0
