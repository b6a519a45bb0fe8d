"""Compiles, before the first request, every variant of the attention kernel that a model will be served with."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from cb_kernels.paged_attention.launch import paged_attention


def warm_up(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Iterator[str]:
    """Runs decode with split keys, decode without, and prefill once each; call it for each kind of layer.

    Args:
        q: [2 or more, num_heads, head_dim], strided as the model hands it to `paged_attention`; its values are unused.
        k_cache, v_cache: one layer's views of the pool; only read.
        window, softcap, sinks, k_scale, v_scale: as that layer passes them.

    Yields:
        What was compiled, after each of the three: for a progress display.
    """
    rows = q[:2]
    out = torch.empty_like(rows)
    tables = torch.zeros(2, 1, dtype=torch.int32, device=q.device)
    one_each = torch.arange(3, dtype=torch.int32, device=q.device)
    lengths = torch.ones(2, dtype=torch.int32, device=q.device)

    def run(lens: Tensor, firsts: Tensor, num_decodes: int, num_splits: int) -> None:
        paged_attention(
            rows, k_cache, v_cache, out, tables[: len(lens)], lens, firsts,
            scale=1.0, num_decodes=num_decodes, num_splits=num_splits,
            window=window, softcap=softcap, sinks=sinks, k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip

    run(lengths, one_each, num_decodes=2, num_splits=2)
    yield "attention: decode, split keys"
    run(lengths, one_each, num_decodes=2, num_splits=1)
    yield "attention: decode, whole keys"
    run(lengths[:1] * min(2, k_cache.shape[2]), one_each[:2] * 2, num_decodes=0, num_splits=1)
    yield "attention: prefill"
