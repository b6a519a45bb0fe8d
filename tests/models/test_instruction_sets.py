"""Whole models on every instruction set that this CPU has: what transformers generates, however it is stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from cb_kernels.cpu import Library, load
from cb_kernels.cpu.binding import ISA_VARIABLE

from cb_backend import Engine, SamplingParams
from cb_backend.models.loader import choose_dtype
from tests.engine.oracle import greedy, random_prompts
from tests.tiny_models import build_model

PROMPTS = random_prompts(9, (1, 70), 120, seed=3)
TOKENS = 12


@pytest.fixture(params=("portable", "avx2", "avx512", "avx512_bf16", "amx"))
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, native_kernels: Library) -> Iterator[str]:
    """The instruction set that engines take; skips those that this CPU lacks."""
    monkeypatch.setenv(ISA_VARIABLE, request.param)
    load.cache_clear()
    chosen = load()
    if chosen is not None:
        yield request.param
    monkeypatch.setenv(ISA_VARIABLE, native_kernels.isa)
    load.cache_clear()
    load()
    if chosen is None:
        pytest.skip(f"this CPU or compiler lacks {request.param}")


def test_auto_is_bfloat16_only_where_the_instruction_set_multiplies_it(isa: str) -> None:
    expected = torch.bfloat16 if isa in ("avx512_bf16", "amx") else torch.float32
    assert choose_dtype("auto", torch.bfloat16, torch.device("cpu")) == expected


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, torch.dtype], Path]:
    """A tiny model's checkpoint in `dtype`."""

    @cache
    def directory(architecture: str, dtype: torch.dtype) -> Path:
        return build_model(architecture, tmp_path_factory.mktemp("stored") / architecture, dtype=dtype)

    return directory


def generate(path: Path, prompts: list[list[int]], **fields: object) -> list[list[int]]:
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    with Engine(model=str(path), dtype="float32", num_kv_blocks=64, **fields) as engine:
        assert len(engine.parts.core.executor.body.layers) == 1  # all layers in one call
        return [list(output.token_ids) for output in engine.generate(prompts, params)]


@pytest.mark.parametrize(
    ("architecture", "storage"),
    [
        ("llama", torch.float32),
        ("llama", torch.bfloat16),
        ("llama", torch.float16),
        ("qwen3", torch.float32),
        ("mistral", torch.bfloat16),
    ],
    ids=str,
)
def test_greedy_tokens_are_transformers(
    isa: str, stored: Callable[..., Path], architecture: str, storage: torch.dtype
) -> None:
    path = stored(architecture, storage)
    wanted = [greedy(path, prompt, TOKENS) for prompt in PROMPTS]
    assert generate(path, PROMPTS, max_num_batched_tokens=32, max_num_seqs=6) == wanted
