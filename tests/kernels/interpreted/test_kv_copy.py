"""Writing K/V by slot and copying blocks equal their references to the bit."""

from __future__ import annotations

import pytest
import torch
from cb_kernels.kv_copy.launch import copy_blocks, write_kv
from cb_kernels.kv_copy.reference import reference_copy_blocks, reference_write_kv

SLOTS = torch.tensor([3, 17, 79, -1, 40, 41, 0])


def pool(heads: int, block_size: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Five blocks of two layers; tests use layer 1, a strided view."""
    shape = (5, 2, 2, heads, block_size, head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads, head_dim", [(1, 64), (3, 64), (2, 80), (8, 128)])
def test_tokens_go_to_their_slots_and_nothing_else_changes(heads: int, head_dim: int, dtype: torch.dtype) -> None:
    fused = torch.randn(len(SLOTS), 3 * heads, head_dim).to(dtype)
    k, v = fused[:, heads : 2 * heads], fused[:, 2 * heads :]
    fast = pool(heads, 16, head_dim, dtype)
    due = fast.clone()
    write_kv(k, v, fast[:, 1, 0], fast[:, 1, 1], SLOTS)
    reference_write_kv(k, v, due[:, 1, 0], due[:, 1, 1], SLOTS)
    assert same_bits(fast, due)
    assert not same_bits(fast, pool(heads, 16, head_dim, dtype))


@pytest.mark.parametrize("scaled", [False, True])
def test_fp8_cache_rounds_to_nearest_even_and_clamps(scaled: bool) -> None:
    """Values on, between and beside all 256 codes, denormals, and beyond the range."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = codes[codes.isfinite()].sort().values
    halfway = (codes[1:] + codes[:-1]) / 2
    beside = torch.cat([torch.nextafter(halfway, codes[1:]), torch.nextafter(halfway, codes[:-1])])
    far = torch.tensor([449.0, 1e9, -1e9, 1e-9, -1e-30, 0.0, -0.0, 2.0**-10, 3 * 2.0**-10])
    values = torch.cat([codes, halfway, beside, far, torch.randn(2000) * 10])
    values = torch.nn.functional.pad(values, (0, -len(values) % 128)).view(-1, 2, 64)
    slots = torch.arange(len(values)).flip(0)
    scales = {"k_scale": torch.tensor([0.5, 3.0]), "v_scale": torch.tensor([0.3, 7.0])} if scaled else {}
    fast_k, fast_v = (torch.zeros(-(-len(values) // 16), 2, 16, 64).to(torch.float8_e4m3fn) for _ in range(2))
    due_k, due_v = fast_k.clone(), fast_v.clone()
    write_kv(values, -values, fast_k, fast_v, slots, **scales)
    reference_write_kv(values, -values, due_k, due_v, slots, **scales)
    assert same_bits(fast_k, due_k)
    assert same_bits(fast_v, due_v)


def test_write_refuses_what_does_not_fit() -> None:
    k = torch.zeros(2, 1, 64)
    cache = torch.zeros(3, 1, 16, 64)
    with pytest.raises(ValueError, match=r"slots must be int64 \[2\]"):
        write_kv(k, k, cache, cache, torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="must be .*blocks, heads"):
        write_kv(k, k, cache[..., :32], cache[..., :32], torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_gather_then_scatter_brings_blocks_back(dtype: torch.dtype) -> None:
    """Swap out to a staging buffer, overwrite, swap in to other blocks."""
    blocks = pool(3, 16, 64, dtype)
    before = blocks.clone()
    staging = torch.zeros_like(blocks)
    copy_blocks(blocks, staging, torch.tensor([4, 0, 2]), torch.tensor([0, 1, 2]))
    assert same_bits(staging[:3], before[[4, 0, 2]])
    blocks.view(torch.uint8).zero_()
    copy_blocks(staging, blocks, torch.tensor([0, 1, 2]), torch.tensor([1, 3, 0]))
    assert same_bits(blocks[[1, 3, 0]], before[[4, 0, 2]])
    assert not blocks[[2, 4]].view(torch.uint8).any()


@pytest.mark.parametrize("words", [1, 4096, 5000])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_copy_on_write_inside_one_pool(words: int, dtype: torch.dtype) -> None:
    fast = torch.randint(0, 2**31 - 1, (6, words), dtype=torch.int32)
    due = fast.clone()
    source, target = torch.tensor([5, -1, 0, 3], dtype=dtype), torch.tensor([1, 2, 4, -1], dtype=dtype)
    copy_blocks(fast, fast, source, target)
    reference_copy_blocks(due, due, source, target)
    assert torch.equal(fast, due)


def test_copy_refuses_blocks_that_differ() -> None:
    ids = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="blocks must be alike"):
        copy_blocks(torch.zeros(2, 8), torch.zeros(2, 9), ids, ids)
    with pytest.raises(ValueError, match="multiple of 4 bytes, this one has 3"):
        copy_blocks(torch.zeros(2, 3, dtype=torch.uint8), torch.zeros(2, 3, dtype=torch.uint8), ids, ids)
    with pytest.raises(ValueError, match="must be contiguous"):
        copy_blocks(torch.zeros(8, 2).t(), torch.zeros(2, 8), ids, ids)
