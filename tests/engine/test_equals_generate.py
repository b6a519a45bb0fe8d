"""Greedy float32 output is transformers' own, token for token, whatever the schedule."""

from __future__ import annotations

from pathlib import Path

import pytest

from cb_backend import Engine, EngineConfig, SamplingParams

from .oracle import greedy, random_prompts

ARCHITECTURES = ("llama", "gpt2", "qwen3", "gemma2", "gemma3", "mistral")
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def generate(path: Path, prompts, params=GREEDY, **fields):
    small = {"model": str(path), "dtype": "float32", "swap_space": "16MiB", "kv_cache_memory": "64MiB"}
    with Engine(EngineConfig(**small | fields)) as engine:
        outputs = engine.generate(prompts, params)
        stats = engine.stats()
    assert stats["kv_blocks_used"] == stats["running"] == stats["waiting"] == stats["swapped"] == 0
    return [list(output.token_ids) for output in outputs], stats


@pytest.fixture(scope="module")
def expected(tiny_model):
    """Per architecture: 16 prompts of 1 to 120 tokens and what `generate` makes of them."""
    made: dict[str, tuple[list[list[int]], list[list[int]]]] = {}

    def of(architecture: str):
        if architecture not in made:
            path = tiny_model(architecture)
            prompts = random_prompts(16, (1, 120), 512)
            made[architecture] = prompts, [greedy(path, p, GREEDY.max_tokens) for p in prompts]
        return made[architecture]

    return of


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("budget, block_size", [(16, 1), (64, 16), (512, 32)])
def test_every_architecture(tiny_model, expected, architecture, budget, block_size):
    prompts, wanted = expected(architecture)
    outputs, _ = generate(
        tiny_model(architecture), prompts, max_num_batched_tokens=budget, block_size=block_size, max_num_seqs=16
    )
    assert outputs == wanted


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("budget", [16, 64, 512])
@pytest.mark.parametrize("block_size", [1, 16, 32])
def test_reference_backend_and_every_budget_and_block_size(tiny_model, expected, architecture, budget, block_size):
    prompts, wanted = expected(architecture)
    outputs, _ = generate(
        tiny_model(architecture),
        prompts[:6],
        max_num_batched_tokens=budget,
        block_size=block_size,
        attention_backend="reference",
    )
    assert outputs == wanted[:6]


@pytest.fixture(scope="module")
def many(tiny_llama):
    prompts = random_prompts(40, (20, 40), 512, seed=3)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    return prompts, params, [greedy(tiny_llama, p, 40) for p in prompts]


@pytest.mark.parametrize("preemption", ["recompute", "swap", "auto"])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_a_pool_so_small_that_preemption_happens_dozens_of_times(tiny_llama, many, preemption, prefix_caching):
    prompts, params, wanted = many
    outputs, stats = generate(
        tiny_llama,
        prompts,
        params,
        num_kv_blocks=45,
        block_size=4,
        max_num_batched_tokens=64,
        preemption=preemption,
        admission={"policy": "prompt"},
        enable_prefix_caching=prefix_caching,
    )
    assert outputs == wanted
    assert stats["preemptions_swap"] + stats["preemptions_recompute"] >= 24
    if preemption != "auto":
        assert stats[f"preemptions_{preemption}"] >= 24


def test_end_ids_of_the_model_end_a_request_and_are_part_of_its_ids(tiny_llama):
    prompts = random_prompts(40, (2, 30), 512, seed=5)
    params = SamplingParams(max_tokens=60, temperature=0.0)
    wanted = [greedy(tiny_llama, p, 60, ignore_eos=False) for p in prompts]
    assert any(len(w) < 60 for w in wanted)  # the oracle does end early somewhere
    outputs, stats = generate(tiny_llama, prompts, params)
    assert outputs == wanted
    assert stats["finished_stop"] == sum(w[-1] == 2 for w in wanted)
