"""The backend `torch`: scaled-dot-product attention per sequence, anywhere, without native kernels or Triton."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.nn.functional import scaled_dot_product_attention

from .batch import RaggedBatch
from .capabilities import AttentionNeeds, Capabilities
from .hook import AttentionCall
from .reference import write_by_index


class TorchAttention:
    """Per sequence: gather its blocks, then scaled-dot-product attention with the query heads of a KV head as rows.

    Folding the heads into rows is what makes a decode fast on a CPU: the K/V of a head are read once for all query
    heads that share it, where `enable_gqa` would copy them.
    """

    capabilities: ClassVar = Capabilities(name="torch", auto_devices=frozenset({"cpu"}))
    name = capabilities.name

    @staticmethod
    def obstacle(needs: AttentionNeeds) -> str | None:
        return None

    @classmethod
    def create(cls, needs: AttentionNeeds) -> TorchAttention:
        return cls()

    def write(self, k: torch.Tensor, v: torch.Tensor, batch: RaggedBatch, layer: int) -> None:
        write_by_index(k, v, batch, layer)

    def attend(self, q: torch.Tensor, batch: RaggedBatch, call: AttentionCall) -> torch.Tensor:
        num_tokens, num_heads, head_dim = q.shape
        k_cache, v_cache = batch.storage.layers[call.layer]
        kv_heads = k_cache.shape[1]
        group = num_heads // kv_heads
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        tables = self._tables(batch)
        row = 0
        for i, (q_len, kv_len) in enumerate(zip(batch.q_lens, batch.kv_lens, strict=True)):
            first = max(0, kv_len - q_len + 1 - call.window) // batch.storage.block_size if call.window else 0
            blocks = tables[i][first:]
            start = first * batch.storage.block_size
            # [blocks, kv_heads, block_size, head_dim] -> [kv_heads, keys, head_dim]
            k = k_cache[blocks].transpose(0, 1).reshape(kv_heads, -1, head_dim)[:, : kv_len - start]
            v = v_cache[blocks].transpose(0, 1).reshape(kv_heads, -1, head_dim)[:, : kv_len - start]
            rows = q[row : row + q_len].view(q_len, kv_heads, group, head_dim).permute(1, 2, 0, 3)
            rows = rows.reshape(kv_heads, group * q_len, head_dim)
            mask = self._mask(batch, q_len, kv_len, start, group, call.window)
            if call.softcap or call.sinks is not None:
                result = _explicit_attention(rows, k, v, mask, call, q_len)
            else:
                result = scaled_dot_product_attention(rows[None], k[None], v[None], mask, scale=call.scale)[0]
            out[row : row + q_len] = (
                result.view(kv_heads, group, q_len, head_dim).permute(2, 0, 1, 3).reshape(q_len, num_heads, head_dim)
            )
            row += q_len
        return out

    @staticmethod
    def _tables(batch: RaggedBatch) -> list[torch.Tensor]:
        tables = batch.scratch.get("tables")
        if tables is None:
            size = batch.storage.block_size
            wide = batch.block_tables.long()
            tables = batch.scratch["tables"] = [wide[i, : -(-n // size)] for i, n in enumerate(batch.kv_lens)]
        return tables

    @staticmethod
    def _mask(batch: RaggedBatch, q_len: int, kv_len: int, start: int, group: int, window: int) -> torch.Tensor | None:
        """Bool [group * q_len, keys], True = visible; None where everything is."""
        if q_len == 1 and (not window or kv_len - start <= window):
            return None
        key = (q_len, kv_len, start, window)
        mask = batch.scratch.get(key)
        if mask is None:
            rows = torch.arange(kv_len - q_len, kv_len, device=batch.slots.device)[:, None]
            keys = torch.arange(start, kv_len, device=batch.slots.device)[None]
            mask = keys <= rows
            if window:
                mask &= keys > rows - window
            mask = batch.scratch[key] = mask.repeat(group, 1)
        return mask


def _explicit_attention(
    rows: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    call: AttentionCall,
    q_len: int,
) -> torch.Tensor:
    """softmax(softcap(q k)) v in float32 with optional sinks: what the fused torch kernel cannot do."""
    scores = rows.float() @ k.float().transpose(1, 2) * call.scale  # [kv_heads, group * q_len, keys]
    if call.softcap:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if call.sinks is None:
        weights = scores.softmax(-1)
    else:
        sinks = call.sinks.float().view(k.shape[0], -1, 1).expand(-1, -1, q_len).reshape(k.shape[0], -1, 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    return (weights @ v.float()).to(rows.dtype)
