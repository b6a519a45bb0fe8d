"""The backend `triton`: `cb_kernels.paged_attention`, on a GPU or in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..kv.storage import KVStorage
from .batch import RaggedBatch
from .hook import AttentionCall
from .scales import KVScales


class TritonAttention:
    """One ragged Triton kernel for decodes, chunks and mixes.

    Args:
        workspace: float32, for the partial results of split keys; None: allocated in every call.
        scales: what stored K and V are multiplied by, for a float8 cache.
    """

    name = "triton"

    def __init__(self, workspace: torch.Tensor | None = None, scales: KVScales | None = None) -> None:
        self._workspace = workspace
        self._scales = scales

    def with_scales(self, scales: KVScales) -> TritonAttention:
        return TritonAttention(self._workspace, scales)

    def _scales_of(self, layer: int) -> dict[str, Any]:
        if self._scales is None:
            return {}
        return {"k_scale": self._scales.k[layer], "v_scale": self._scales.v[layer]}

    def write(self, k: torch.Tensor, v: torch.Tensor, batch: RaggedBatch, layer: int) -> None:
        from cb_kernels.kv_copy.launch import write_kv

        k_cache, v_cache = batch.storage.layers[layer]
        write_kv(k, v, k_cache, v_cache, batch.slots, **self._scales_of(layer))

    def attend(self, q: torch.Tensor, batch: RaggedBatch, call: AttentionCall) -> torch.Tensor:
        from cb_kernels.paged_attention.launch import paged_attention

        if q.stride(2) != 1:
            q = q.contiguous()
        k_cache, v_cache = batch.storage.layers[call.layer]
        return paged_attention(
            q,
            k_cache,
            v_cache,
            torch.empty(q.shape, dtype=q.dtype, device=q.device),
            batch.block_tables,
            batch.seq_lens,
            batch.cu_seqlens,
            scale=call.scale,
            num_decodes=batch.num_decodes,
            window=call.window,
            softcap=call.softcap,
            sinks=call.sinks,
            workspace=self._workspace,
            **self._scales_of(call.layer),
        )

    def warm_up(self, q: torch.Tensor, storage: KVStorage, call: AttentionCall) -> Iterator[str]:
        """Compiles what layers like this one launch; `q` [2 or more, num_heads, head_dim] is strided as the model's."""
        from cb_kernels.paged_attention.warmup import warm_up

        k_cache, v_cache = storage.layers[call.layer]
        return warm_up(
            q,
            k_cache,
            v_cache,
            window=call.window,
            softcap=call.softcap,
            sinks=call.sinks,
            **self._scales_of(call.layer),
        )
