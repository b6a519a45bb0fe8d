"""The same attention by torch's `torch.nn.attention.varlen`, where the build has it: an independent cross-check.

K and V are gathered from their blocks first and lengths are read on the host, so this says what is right, not what is
fast. Only builds whose function takes a scale, a window and grouped heads can say it (torch 2.13 on CUDA does).
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_NEEDED = {"scale", "window_size", "enable_gqa"}


def varlen_attn() -> Callable[..., Any] | None:
    """torch's function, or None where this build has none that suffices."""
    try:
        found: Callable[..., Any] = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        return None
    return found if set(inspect.signature(found).parameters) >= _NEEDED else None


def varlen_attention(
    attend: Callable[..., Any],
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens: Tensor,
    *,
    scale: float,
    window: int = 0,
) -> Tensor:
    """Causal attention over paged K/V by `attend`; arguments and result as in `reference_attention`.

    Every sequence needs at least one query row, and the cache the dtype of `q`.
    """
    lengths = seq_lens.tolist()

    def gather(cache: Tensor) -> Tensor:
        num_heads, block_size, head_dim = cache.shape[1:]
        parts = [
            cache[table[: -(-n // block_size)].long()].transpose(1, 2).reshape(-1, num_heads, head_dim)[:n]
            for table, n in zip(block_tables, lengths, strict=True)
        ]
        return torch.cat(parts)

    firsts = torch.zeros_like(cu_seqlens)
    firsts[1:] = seq_lens.cumsum(0)
    longest = int(cu_seqlens.diff().max())
    # The last query row lines up with the last key: what is to its right is hidden, and all but `window` to its left.
    attended: Tensor = attend(
        q, gather(k_cache), gather(v_cache), cu_seqlens, firsts, longest, max(lengths),
        scale=scale, window_size=(window - 1 if window else -1, 0), enable_gqa=True,
    )  # fmt: skip
    return attended
