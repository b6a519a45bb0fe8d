"""The host side of sampling on a GPU. Imports Triton; never reads device memory; safe in a captured CUDA graph."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from cb_kernels.sampling.kernel import adjust_logits_kernel, sample_kernel

ADJUST_CHUNK = 256
SAMPLE_CHUNK = 4096
SAMPLE_WARPS = 8
SAMPLE_STAGES = 3


def adjust_logits(
    logits: Tensor,
    ids: Tensor,
    bias: Tensor,
    counts: Tensor,
    seen: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """Applies bias and penalties to the listed tokens, in place; arguments as in `reference_adjust_logits`.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    rows, vocab = logits.shape
    _expect(logits, "logits", torch.float32, (rows, vocab))
    listed = (rows, ids.shape[-1])
    for name, tensor, dtype in (
        ("ids", ids, torch.int32),
        ("bias", bias, torch.float32),
        ("counts", counts, torch.int32),
        ("seen", seen, torch.bool),
    ):
        _expect(tensor, name, dtype, listed)
    for name, tensor in (("repetition", repetition), ("presence", presence), ("frequency", frequency)):
        _expect(tensor, name, torch.float32, (rows,))
    if ids.numel() == 0:
        return
    adjust_logits_kernel[(rows, triton.cdiv(listed[1], ADJUST_CHUNK))](
        logits, logits.stride(0), ids, bias, counts, seen.view(torch.uint8), repetition, presence, frequency,
        listed[1], vocab, CHUNK=ADJUST_CHUNK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """Draws one token per row; arguments and result as in `reference_sample`, `out` (int64 [rows]) is written if given.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    rows, vocab = logits.shape
    _expect(logits, "logits", torch.float32, (rows, vocab))
    for name, tensor, dtype in (
        ("temperature", temperature, torch.float32),
        ("top_k", top_k, torch.int32),
        ("top_p", top_p, torch.float32),
        ("min_p", min_p, torch.float32),
        ("seeds", seeds, torch.int64),
        ("positions", positions, torch.int64),
    ):
        _expect(tensor, name, dtype, (rows,))
    if out is None:
        out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _expect(out, "out", torch.int64, (rows,))
    if rows:
        # Fused multiply-adds would change the noise's bits.
        sample_kernel[(rows,)](
            out, logits, logits.stride(0), vocab, temperature, top_k, top_p, min_p, seeds, positions,
            CHUNK=SAMPLE_CHUNK, num_warps=SAMPLE_WARPS, num_stages=SAMPLE_STAGES, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _expect(tensor: Tensor, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tensor.shape != shape or tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} must be {dtype} {list(shape)} with stride 1 in the last dimension, got {tensor.dtype} "
            f"{list(tensor.shape)} with strides {list(tensor.stride())}"
        )
