"""What paged attention computes, in float64 and one sequence at a time: the yardstick of every fast kernel."""

from __future__ import annotations

import torch
from torch import Tensor


def reference_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Causal attention over paged K/V.

    Args:
        q: [num_tokens, num_heads, head_dim], any float dtype; num_heads is a multiple of num_kv_heads.
        k_cache, v_cache: [num_blocks, num_kv_heads, block_size, head_dim], any float dtype, fp8 too; may be strided.
        block_tables: int [num_seqs, max_blocks]; entries past a sequence's last block are never read.
        seq_lens: int [num_seqs], keys that the sequence's last query row sees (itself included).
        cu_seqlens: int [num_seqs + 1], first query row of each sequence; rows from cu_seqlens[-1] on are padding.
        scale: multiplies q . k.
        window: a query at position p sees keys in (p - window, p]; 0: all keys up to p.
        softcap: scores become softcap * tanh(score / softcap); 0: off.
        sinks: [num_heads], a further logit per head in the softmax's denominator, without value; not scaled or capped.
        k_scale, v_scale: [num_kv_heads], what stored K and V are multiplied by (quantized caches).

    Returns:
        [num_tokens, num_heads, head_dim] in q's dtype; zero where a row sees no key and in padding rows.
    """
    out = torch.zeros_like(q)
    num_kv_heads, block_size, head_dim = k_cache.shape[1:]
    group = q.shape[1] // num_kv_heads
    firsts = cu_seqlens.tolist()
    for seq, num_keys in enumerate(seq_lens.tolist()):
        first, last = firsts[seq], firsts[seq + 1]
        if last == first or num_keys == 0:
            continue
        blocks = block_tables[seq, : -(-num_keys // block_size)].long()

        def gather(cache: Tensor, head_scale: Tensor | None, blocks: Tensor = blocks, n: int = num_keys) -> Tensor:
            held = cache[blocks].double()  # [blocks, num_kv_heads, block_size, head_dim]
            rows = held.transpose(0, 1).reshape(num_kv_heads, -1, head_dim)[:, :n]
            if head_scale is not None:
                rows = rows * head_scale.double()[:, None, None]
            return rows.repeat_interleave(group, 0)  # [num_heads, num_keys, head_dim]

        k, v = gather(k_cache, k_scale), gather(v_cache, v_scale)
        scores = torch.einsum("thd,hkd->htk", q[first:last].double(), k) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        position = torch.arange(num_keys - (last - first), num_keys, device=q.device)[:, None]
        key = torch.arange(num_keys, device=q.device)[None, :]
        visible = key <= position
        if window:
            visible = visible & (key > position - window)
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is None:
            weights = scores.softmax(-1)
        else:
            column = sinks.double()[:, None, None].expand(-1, last - first, 1)
            weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
        out[first:last] = torch.einsum("htk,hkd->thd", weights, v).to(q.dtype)
    return out
