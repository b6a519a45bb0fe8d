"""The demo model: the outputs on which three independent engines agree, and bfloat16 as good as transformers' own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from cb_backend import Engine, EngineConfig, SamplingParams

from .oracle import greedy, random_prompts, reference_model

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def w64():
    requests = json.loads((DATA / "w64.json").read_text())["requests"]
    expected = json.loads((DATA / "w64_expected_float32.json").read_text())
    return [r["prompt_token_ids"] for r in requests], [r["max_tokens"] for r in requests], expected


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "fields",
    [
        {"max_num_batched_tokens": 512},
        # Half of what the running ones would need: preempted by swap and by recompute.
        {
            "num_kv_blocks": 120,
            "block_size": 16,
            "admission": {"policy": "prompt"},
            "max_num_batched_tokens": 200,
            "swap_space": "32MiB",
        },
    ],
)
def test_w64_is_what_three_engines_agree_on(demo_model_path, w64, fields):
    prompts, max_tokens, expected = w64
    config = EngineConfig(**{"model": str(demo_model_path), "dtype": "float32", "kv_cache_memory": "1GiB"} | fields)
    params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in max_tokens]
    with Engine(config) as engine:
        outputs = engine.generate(prompts, params)
        stats = engine.stats()
    assert [list(o.token_ids) for o in outputs] == expected
    if "num_kv_blocks" in fields:
        assert stats["preemptions_swap"] + stats["preemptions_recompute"] >= 12
    assert stats["kv_blocks_used"] == stats["host_blocks_used"] == 0


@pytest.mark.timeout(900)
def test_thirty_two_prompts_of_one_to_six_hundred_tokens(demo_model_path):
    prompts = random_prompts(32, (1, 600), 49000, seed=1)
    wanted = [greedy(demo_model_path, p, 8) for p in prompts]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    for fields in (
        {"max_num_batched_tokens": 512, "block_size": 32},
        {"max_num_batched_tokens": 64, "block_size": 16, "num_kv_blocks": 60, "admission": {"policy": "prompt"}},
    ):
        with Engine(model=str(demo_model_path), dtype="float32", swap_space="64MiB", **fields) as engine:
            assert [list(o.token_ids) for o in engine.generate(prompts, params)] == wanted


@pytest.mark.timeout(600)
def test_bfloat16_logprobs_are_as_close_to_float32_as_transformers_own(demo_model_path, w64):
    """Teacher-forced: the log-probabilities of a fixed continuation, against float32 `transformers`."""
    prompts, _, expected = w64
    texts = [p[-96:] + e[:32] for p, e in zip(prompts[:32], expected[:32], strict=True)]

    @torch.inference_mode()
    def by_transformers(dtype: torch.dtype) -> torch.Tensor:
        model = reference_model(demo_model_path, dtype)
        rows = []
        for ids in texts:
            table = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
            rows.append(table[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0])
        return torch.cat(rows)

    with Engine(model=str(demo_model_path), dtype="bfloat16", kv_cache_memory="256MiB") as engine:
        outputs = engine.generate(texts, SamplingParams(max_tokens=0, prompt_logprobs=0))
    ours = torch.tensor([p.logprob for o in outputs for p in (o.prompt_logprobs or ())[1:]])
    exact = by_transformers(torch.float32)
    theirs = (by_transformers(torch.bfloat16) - exact).abs()
    own = (ours - exact).abs()
    assert own.mean() <= 1.05 * theirs.mean()
    assert own.quantile(0.99) <= 1.1 * theirs.quantile(0.99)
