"""The hook into transformers: `attn_implementation="cb_paged"` sends every attention layer through a paged backend.

The model's forward gets a batch of shape (1, tokens) with the ragged batch and the backend as keyword arguments; no
mask tensor is made. Each layer first writes the K/V of all tokens of the step into their blocks and only then attends,
so a request may read blocks that another request of the same step writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from .batch import RaggedBatch

IMPLEMENTATION = "cb_paged"


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one layer asks besides its tensors.

    `window`: keys a row sees, itself included (0: all). `softcap`: 0 is off. `sinks`: float [num_heads], a logit that
    takes part in each row's softmax without a value, or None.
    """

    layer: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


class AttentionBackend(Protocol):
    """q [T, num_heads, head_dim]; k, v [T, num_kv_heads, head_dim]; rows may be strided, their last dimension not."""

    name: str

    def write(self, k: torch.Tensor, v: torch.Tensor, batch: RaggedBatch, layer: int) -> None:
        """Puts the K/V of every token of the step into `batch.slots` of that layer's cache."""

    def attend(self, q: torch.Tensor, batch: RaggedBatch, call: AttentionCall) -> torch.Tensor:
        """Causal attention of every row over its own sequence's keys: [T, num_heads, head_dim], dtype of q."""


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    cb_batch: RaggedBatch | None = None,
    cb_backend: AttentionBackend | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: q, k, v [1, heads, T, head_dim] -> ([1, T, heads, head_dim], None)."""
    if cb_batch is None or cb_backend is None:
        raise RuntimeError("a model loaded for cb_backend runs only inside its engine")
    layer: int = module.layer_idx  # type: ignore[assignment]
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    cb_backend.write(k, v, cb_batch, layer)
    call = AttentionCall(
        layer,
        q.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window or 0,
        softcap or 0.0,
        s_aux,
    )
    return cb_backend.attend(q, cb_batch, call)[None], None


def register() -> None:
    """Makes `attn_implementation="cb_paged"` known to transformers. May be called more than once.

    No mask function is registered with it: transformers then makes no mask at all, where for one that returns None it
    would first look at the positions on the host, and a GPU would be waited for in every step.
    """
    AttentionInterface.register(IMPLEMENTATION, paged_attention_forward)


def write_by_index(k: torch.Tensor, v: torch.Tensor, batch: RaggedBatch, layer: int) -> None:
    """The plain way to write K/V: one indexed store each."""
    k_cache, v_cache = batch.storage.layers[layer]
    where = batch.scratch.get("where")
    if where is None:
        size = batch.storage.block_size
        where = batch.scratch["where"] = (batch.slots // size, batch.slots % size)
    k_cache[where[0], :, where[1]] = k
    v_cache[where[0], :, where[1]] = v


class ReferenceAttention:
    """The naive float64 reference: slow, obvious, runs anywhere."""

    name = "reference"

    def write(self, k: torch.Tensor, v: torch.Tensor, batch: RaggedBatch, layer: int) -> None:
        write_by_index(k, v, batch, layer)

    def attend(self, q: torch.Tensor, batch: RaggedBatch, call: AttentionCall) -> torch.Tensor:
        from cb_kernels.paged_attention.reference import reference_attention

        k_cache, v_cache = batch.storage.layers[call.layer]
        return reference_attention(
            q,
            k_cache,
            v_cache,
            batch.block_tables,
            batch.seq_lens,
            batch.cu_seqlens,
            scale=call.scale,
            window=call.window,
            softcap=call.softcap,
            sinks=call.sinks,
        ).to(q.dtype)


class TorchAttention:
    """Per sequence: gather its blocks, then scaled-dot-product attention with the query heads of a KV head as rows.

    Folding the heads into rows is what makes a decode fast on a CPU: the K/V of a head are read once for all query
    heads that share it, where `enable_gqa` would copy them.
    """

    name = "torch"

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
