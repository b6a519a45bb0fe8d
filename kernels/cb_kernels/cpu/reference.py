"""What the elementwise kernels compute, in torch: the arithmetic and the roundings of transformers' Llama modules."""

from __future__ import annotations

import torch
from torch import Tensor


def reference_rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [rows, size] (+ residual) over its root mean square, times weight; also the sum that was normalized."""
    total = x if residual is None else x + residual
    wide = total.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype), total


def reference_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [num_tokens, heads, head_dim] turned by cos, sin [num_tokens, head_dim]; its halves are the two axes."""
    low, high = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-high, low), -1) * sin[:, None]


def reference_silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) * up of x [rows, 2 * size] = gate and up side by side."""
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up
