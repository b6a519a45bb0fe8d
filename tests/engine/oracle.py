"""What transformers' own `generate` says: the oracle of the engine's greedy float32 output."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


@cache
def reference_model(path: Path, dtype: torch.dtype = torch.float32):
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


@torch.inference_mode()
def greedy(path: Path, prompt: Sequence[int], max_tokens: int, *, ignore_eos: bool = True) -> list[int]:
    """Greedy continuation by `generate`, one prompt at a time."""
    model = reference_model(path)
    ids = torch.tensor([list(prompt)])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens if ignore_eos else None,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None if ignore_eos else model.generation_config.eos_token_id,
    )
    return output[0, len(prompt) :].tolist()


def random_prompts(count: int, lengths: tuple[int, int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Prompts of random ids; the shortest and the longest allowed length are always among them."""
    rng = random.Random(seed)
    sizes = [*lengths, *(rng.randint(*lengths) for _ in range(count - 2))]
    return [[rng.randrange(3, vocab_size) for _ in range(n)] for n in sizes]
