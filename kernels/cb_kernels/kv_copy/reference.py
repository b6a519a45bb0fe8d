"""What the copies do, one row or block at a time: the yardstick of the fast kernels."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0


def reference_write_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Puts each token's K and V at its slot.

    Args:
        k, v: [num_tokens, num_kv_heads, head_dim].
        k_cache, v_cache: [num_blocks, num_kv_heads, block_size, head_dim], written in place.
        slots: int64 [num_tokens], block * block_size + offset; negative: the token is not written.
        k_scale, v_scale: float32 [num_kv_heads] of a float8_e4m3fn cache, which holds value / scale, rounded to nearest
            even and clamped to +-448.
    """
    block_size = k_cache.shape[2]
    for values, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        rows = values
        if cache.dtype == torch.float8_e4m3fn:
            rows = rows.float() if scale is None else rows.float() / scale[None, :, None]
            rows = rows.clamp(-E4M3_MAX, E4M3_MAX)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                cache[slot // block_size, :, slot % block_size] = rows[token].to(cache.dtype)


def reference_copy_blocks(source: Tensor, target: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    """`target[target_ids[i]] = source[source_ids[i]]` for whole blocks; pairs with a negative id are skipped.

    Where both are one pool, no block may be read by one pair and written by another.
    """
    for read, written in zip(source_ids.tolist(), target_ids.tolist(), strict=True):
        if read >= 0 and written >= 0:
            target[written] = source[read]
