"""torch's varlen attention as a cross-check: it is asked for the same attention; older builds are left out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cb_kernels.paged_attention import varlen
from cb_kernels.paged_attention.reference import reference_attention
from torch import Tensor

from integration.benchmarks.kernel_work import Heads, paged_batch


def played(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *,
    scale: float, window_size: tuple[int, int], enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """What the function promises, one sequence at a time: it runs on CUDA only."""
    assert enable_gqa
    assert (max_q, max_k) == (int(cu_q.diff().max()), int(cu_k.diff().max()))
    out = torch.empty_like(q)
    left, right = window_size
    for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
        rows = torch.arange(int(d - c) - int(b - a), int(d - c))[:, None]
        keys = torch.arange(int(d - c))[None]
        visible = keys <= rows + right
        if left >= 0:
            visible &= keys >= rows - left
        parts = (q[a:b].transpose(0, 1), k[c:d].transpose(0, 1), v[c:d].transpose(0, 1))
        out[a:b] = torch.nn.functional.scaled_dot_product_attention(
            *(part[None] for part in parts), visible, scale=scale, enable_gqa=True
        )[0].transpose(0, 1)
    return out


@pytest.mark.parametrize("window", [0, 5])
def test_it_is_asked_for_the_same_attention(window: int) -> None:
    heads = Heads("small", 4, 2, 16)
    batch = paged_batch(
        [1, 1, 7, 3], [0, 20, 9, 0], heads, block_size=8, dtype=torch.float32, device=torch.device("cpu")
    )
    got = varlen.varlen_attention(played, batch.q, batch.k_cache, batch.v_cache, *batch.tail, scale=0.3, window=window)
    due = reference_attention(batch.q, batch.k_cache, batch.v_cache, *batch.tail, scale=0.3, window=window)
    torch.testing.assert_close(got, due, rtol=1e-5, atol=1e-5)


def test_this_builds_function_is_found() -> None:
    assert varlen.varlen_attn() is not None


@pytest.mark.parametrize("attribute", [{}, {"varlen_attn": lambda query, key, value, is_causal=False: None}])
def test_a_build_without_it_or_with_an_older_one_has_none(
    monkeypatch: pytest.MonkeyPatch, attribute: dict[str, Any]
) -> None:
    monkeypatch.setattr(varlen.importlib, "import_module", lambda name: SimpleNamespace(**attribute))
    assert varlen.varlen_attn() is None
