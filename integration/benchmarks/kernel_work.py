"""Data and comparators for the kernel benchmark: random paged batches, and attention that others ship.

Comparators get contiguous K and V, which flatters them: no block table to follow.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Heads:
    """A model's attention."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Paged:
    """A ragged batch over a pool of blocks, in the order of `paged_attention`'s arguments around `out`."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    cu_seqlens: Tensor

    @property
    def tail(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.block_tables, self.seq_lens, self.cu_seqlens


def paged_batch(
    rows: list[int],
    contexts: list[int],
    heads: Heads,
    *,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Paged:
    """`rows[i]` query rows after `contexts[i]` keys for each sequence; blocks in random order."""
    random = torch.Generator(device=device).manual_seed(seed)
    lengths = [row + context for row, context in zip(rows, contexts, strict=True)]
    counts = [-(-length // block_size) for length in lengths]
    order = torch.randperm(sum(counts), generator=random, device=device).int()
    tables = torch.zeros(len(rows), max(counts), dtype=torch.int32, device=device)
    for seq, (count, end) in enumerate(zip(counts, itertools.accumulate(counts), strict=True)):
        tables[seq, :count] = order[end - count : end]
    shape = (sum(counts), 2, heads.num_kv_heads, block_size, heads.head_dim)
    pool = torch.randn(shape, generator=random, device=device, dtype=dtype).to(kv_dtype or dtype)
    q = torch.randn(sum(rows), heads.num_heads, heads.head_dim, generator=random, device=device, dtype=dtype)
    return Paged(
        q,
        pool[:, 0],
        pool[:, 1],
        tables,
        torch.tensor(lengths, dtype=torch.int32, device=device),
        torch.tensor([0, *itertools.accumulate(rows)], dtype=torch.int32, device=device),
    )


def decode_bytes(batch: int, context: int, heads: Heads, element_size: int) -> int:
    """K and V read once."""
    return 2 * batch * context * heads.num_kv_heads * heads.head_dim * element_size


def prefill_flops(rows: list[int], contexts: list[int], heads: Heads) -> int:
    """Multiplications and additions of both products over the visible keys alone."""
    visible = sum(row * context + row * (row + 1) // 2 for row, context in zip(rows, contexts, strict=True))
    return 4 * heads.num_heads * heads.head_dim * visible


# (q, k, v, causal), each [batch, length, heads, head_dim] -> anything
Comparator = Callable[[Tensor, Tensor, Tensor, bool], object]


def comparators() -> dict[str, Comparator]:
    """What this installation has: torch's SDPA by cuDNN and by FlashAttention-2, torch varlen, FlashAttention-3."""
    found: dict[str, Comparator] = {}
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def sdpa(backend: SDPBackend) -> Comparator:
        def run(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> object:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(
                    q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal, enable_gqa=True
                )

        return run

    found["sdpa cudnn"] = sdpa(SDPBackend.CUDNN_ATTENTION)
    found["sdpa flash"] = sdpa(SDPBackend.FLASH_ATTENTION)
    try:
        varlen_attn = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        varlen_attn = None
    if varlen_attn is not None:

        def varlen(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> object:
            firsts = [torch.arange(x.shape[0] + 1, dtype=torch.int32, device=x.device) * x.shape[1] for x in (q, k)]
            window = (-1, 0) if causal else (-1, -1)
            flat = (x.flatten(0, 1) for x in (q, k, v))
            return varlen_attn(*flat, *firsts, q.shape[1], k.shape[1], window_size=window, enable_gqa=True)

        found["torch varlen"] = varlen
    for module in ("flash_attn_interface", "fa3_fwd_interface"):
        try:
            fa3 = importlib.import_module(module)
        except ImportError:
            continue

        def flash3(q: Tensor, k: Tensor, v: Tensor, causal: bool, fa3: object = fa3) -> object:
            if q.shape[1] == 1:
                return fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=k.shape[1], causal=causal)  # type: ignore[attr-defined]
            return fa3.flash_attn_func(q, k, v, causal=causal)  # type: ignore[attr-defined]

        found["flash attention 3"] = flash3
        break
    return found
