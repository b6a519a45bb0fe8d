"""Tests of the Triton kernels on the CPU: only in a process started with TRITON_INTERPRET=1.

Triton decides at import, for the whole process, whether it interprets: `test_triton_interpreted.py` starts that process
and shows its result; in any other one nothing here is collected. All batches are hostile: blocks in random order, NaN
in every slot that holds no token, garbage in unused table entries, caches that are strided views.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["*"]

GARBAGE = 2**30


@dataclass(frozen=True)
class Ragged:
    """A batch in the engine's layout: `rows[i]` query rows after `contexts[i]` cached keys, per sequence i."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    cu_seqlens: Tensor
    num_decodes: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.q, self.k_cache, self.v_cache, self.block_tables, self.seq_lens, self.cu_seqlens


def build(
    rows: list[int],
    contexts: list[int],
    heads: tuple[int, int, int] = (3, 1, 64),
    block_size: int = 16,
    kv_dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Ragged:
    num_heads, num_kv_heads, head_dim = heads
    random = torch.Generator().manual_seed(seed)
    lens = [row + context for row, context in zip(rows, contexts, strict=True)]
    counts = [-(-length // block_size) for length in lens]
    num_blocks = sum(counts) + 2
    order = torch.randperm(num_blocks, generator=random).int()
    tables = torch.full((len(rows), max(counts) + 1), GARBAGE, dtype=torch.int32)
    pool = torch.full((num_blocks, 2, 2, num_kv_heads, block_size, head_dim), float("nan"))
    taken = 0
    for seq, count in enumerate(counts):
        tables[seq, :count] = order[taken : taken + count]
        for index in range(count):
            held = min(block_size, lens[seq] - index * block_size)
            shape = (2, num_kv_heads, held, head_dim)
            pool[order[taken + index], 1, :, :, :held] = torch.randn(shape, generator=random)
        taken += count
    pool = pool.to(kv_dtype)
    return Ragged(
        q=torch.randn(sum(rows), num_heads, head_dim, generator=random),
        k_cache=pool[:, 1, 0],
        v_cache=pool[:, 1, 1],
        block_tables=tables,
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        cu_seqlens=torch.tensor([0, *itertools.accumulate(rows)], dtype=torch.int32),
        num_decodes=sum(1 for _ in itertools.takewhile(lambda n: n <= 1, rows)),
    )


@pytest.fixture(scope="session")
def ragged() -> Callable[..., Ragged]:
    return build
