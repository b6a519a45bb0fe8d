"""The backend `reference`: float64, slow, obvious, runs anywhere; and the plain way to write K/V."""

from __future__ import annotations

from typing import ClassVar

import torch

from .batch import RaggedBatch
from .capabilities import AttentionNeeds, Capabilities
from .hook import AttentionCall


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

    capabilities: ClassVar = Capabilities(name="reference", comparison_only=True)
    name = capabilities.name

    @staticmethod
    def obstacle(needs: AttentionNeeds) -> str | None:
        return None

    @classmethod
    def create(cls, needs: AttentionNeeds) -> ReferenceAttention:
        return cls()

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
