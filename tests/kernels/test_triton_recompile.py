"""Steps that differ in batch size, lengths or mix ask Triton for the kernels it already has, all of them warmed up.

What Triton compiles is a function of what its own binder makes of a launch; it is asked here for each launch, without
a GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cb_kernels.paged_attention import launch as launch_module
from cb_kernels.paged_attention.kernel import combine_splits_kernel, paged_attention_kernel
from cb_kernels.paged_attention.launch import paged_attention
from cb_kernels.paged_attention.warmup import warm_up
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

POOL = torch.zeros(40, 2, 2, 8, 32, 128, dtype=torch.bfloat16)


class Compiled:
    """Stands in for a kernel and keeps the key that Triton would compile each launch under."""

    def __init__(self, kernel: Any) -> None:
        backend = make_backend(GPUTarget("cuda", 90, 32))
        self.bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        self.keys: set[str] = set()

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            _, specialization, left = self.bind(*args, **options)
            self.keys.add(f"{specialization} {left}")

        return launch


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Compiled, Compiled]]:
    stand_ins = Compiled(paged_attention_kernel), Compiled(combine_splits_kernel)
    monkeypatch.setattr(launch_module, "paged_attention_kernel", stand_ins[0])
    monkeypatch.setattr(launch_module, "combine_splits_kernel", stand_ins[1])
    yield stand_ins


def step(rows: list[int], max_blocks: int, layer: int = 0, window: int = 0) -> None:
    q = torch.zeros(sum(rows), 32, 128, dtype=torch.bfloat16)
    tables = torch.zeros(len(rows), max_blocks, dtype=torch.int32)
    firsts = torch.tensor([0, *itertools.accumulate(rows)], dtype=torch.int32)
    lens = torch.tensor(rows, dtype=torch.int32)
    paged_attention(
        q, POOL[:, layer, 0], POOL[:, layer, 1], torch.empty_like(q), tables, lens, firsts,
        scale=0.1, num_decodes=sum(1 for n in rows if n == 1), window=window,
    )  # fmt: skip


def test_warm_up_compiles_all_that_serving_needs(kernels: tuple[Compiled, Compiled]) -> None:
    attention, combine = kernels
    q = torch.zeros(2, 32, 128, dtype=torch.bfloat16)
    assert list(warm_up(q, POOL[:, 0, 0], POOL[:, 0, 1])) == [
        "attention: decode, split keys",
        "attention: decode, whole keys",
        "attention: prefill",
    ]
    warmed = set(attention.keys), set(combine.keys)
    assert (len(warmed[0]), len(warmed[1])) == (3, 1)
    for decodes in [0, 1, 2, 3, 5, 15, 16, 17, 31, 64, 200]:
        for chunks in [[], [2], [7, 300], [16] * 3]:
            for max_blocks in [1, 2, 16, 33, 64]:
                if decodes or chunks:
                    step([1] * decodes + chunks, max_blocks, layer=decodes % 2)
    assert (attention.keys, combine.keys) == warmed


def test_window_sizes_share_one_kernel_per_phase(kernels: tuple[Compiled, Compiled]) -> None:
    for window in (1, 16, 128, 1024, 4095):
        step([1, 1, 9], 4, window=window)
    assert len(kernels[0].keys) == 2
    step([1, 1, 9], 4)
    assert len(kernels[0].keys) == 4
