"""Log-probabilities are transformers' log-softmax of the model's own logits, within 1e-4, whatever is sampled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cb_backend import Engine, SamplingParams
from cb_backend.request import Logprob

from .oracle import random_prompts, reference_model

FILTERS: dict[str, Any] = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.05, "logit_bias": {7: 9.0}}
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.3, "presence_penalty": 1.0, "bad_words": ["a"], "min_tokens": 4}


def check(one: Logprob, row: torch.Tensor, token_id: int, top: int) -> None:
    assert one.token_id == token_id
    assert one.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
    values, _ = row.topk(top) if top else (row[:0], None)
    assert [value for _, value in one.top] == pytest.approx(values.tolist(), abs=1e-4)
    assert [value for _, value in one.top] == pytest.approx([float(row[i]) for i, _ in one.top], abs=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
@pytest.mark.parametrize("chunk", [512, 16], ids=["whole prompts", "prompts in chunks"])
def test_chosen_top_and_prompt(tiny_model: Callable[[str], Path], architecture: str, chunk: int) -> None:
    path = tiny_model(architecture)
    prompts = random_prompts(4, (1, 60), 512, seed=9)
    params = [
        SamplingParams(max_tokens=12, ignore_eos=True, seed=i, logprobs=i, prompt_logprobs=3 - i, **extra)
        for i, extra in enumerate(({"temperature": 0}, FILTERS, PENALTIES, {**FILTERS, **PENALTIES}))
    ]
    fields = {"dtype": "float32", "num_kv_blocks": 60, "block_size": 8, "max_num_batched_tokens": chunk}
    with Engine(model=str(path), **fields) as engine:
        outputs = engine.generate(prompts, params)
    for prompt, one, output in zip(prompts, params, outputs, strict=True):
        ids = [*prompt, *output.token_ids]
        with torch.inference_mode():
            table = reference_model(path)(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        assert output.prompt_logprobs is not None and output.logprobs is not None
        first, *others = output.prompt_logprobs
        assert first is None
        for i, found in enumerate(others, 1):
            check(found, table[i - 1], ids[i], one.prompt_logprobs or 0)
        assert len(output.logprobs) == 12
        for i, found in enumerate(output.logprobs, len(prompt)):
            check(found, table[i - 1], ids[i], one.logprobs or 0)
