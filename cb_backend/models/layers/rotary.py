"""Rotary forms brought to the one that the native kernels have: pairs (i, i + head_dim / 2) over the whole head.

A model that rotates only the first numbers of a head has its query and key rows reordered, both in the same way, which
leaves their products as they are; the numbers that are not rotated get cos 1 and sin 0.
"""

from __future__ import annotations

import torch


def reordering(rotated: int, head_dim: int) -> torch.Tensor | None:
    """int64 [head_dim]: which number of a head goes where; None: all stay.

    Args:
        rotated: how many numbers at the front of a head are rotated, as two halves.
    """
    if rotated == head_dim:
        return None
    half, rest = rotated // 2, (head_dim - rotated) // 2
    order = torch.arange(head_dim)
    passed = order[rotated:]
    return torch.cat([order[:half], passed[:rest], order[half:rotated], passed[rest:]])


def widen(cos: torch.Tensor, sin: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors [rows, rotated] for reordered heads: [rows, head_dim]."""
    rows, rotated = cos.shape
    if rotated == head_dim:
        return cos, sin
    half, whole = rotated // 2, head_dim // 2
    wide_cos, wide_sin = cos.new_ones(rows, 2, whole), sin.new_zeros(rows, 2, whole)
    wide_cos[:, :, :half] = cos.view(rows, 2, half)
    wide_sin[:, :, :half] = sin.view(rows, 2, half)
    return wide_cos.view(rows, head_dim), wide_sin.view(rows, head_dim)


def reorder_heads(rows: torch.Tensor, order: torch.Tensor | None, num_heads: int) -> torch.Tensor:
    """`rows` with its first dimension, num_heads heads, reordered within each head."""
    if order is None:
        return rows
    heads = rows.unflatten(0, (num_heads, -1))
    ordered: torch.Tensor = heads.index_select(1, order).flatten(0, 1)
    return ordered
