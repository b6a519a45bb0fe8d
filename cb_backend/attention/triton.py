"""The backend `triton`: `cb_kernels.paged_attention`, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from ..kv.storage import KVStorage
from .batch import RaggedBatch
from .capabilities import AttentionNeeds, Capabilities
from .hook import AttentionCall
from .scales import KVScales


class TritonAttention:
    """One ragged Triton kernel for decodes, chunks and mixes.

    Args:
        workspace: float32, for the partial results of split keys; None: allocated in every call.
        scales: what stored K and V are multiplied by, for a float8 cache.
    """

    capabilities: ClassVar = Capabilities(
        name="triton",
        devices=frozenset({"cuda", "cpu"}),  # a CPU with Triton's interpreter only
        auto_devices=frozenset({"cuda"}),
        dtypes=(torch.bfloat16, torch.float16, torch.float32),
        head_dims=range(1, 257),
        max_group=128,
        narrow_kv_dtypes=frozenset({torch.float8_e4m3fn}),
        graph_safe=True,
        compiles=True,
        runs_triton=True,
    )
    name = capabilities.name

    @staticmethod
    def obstacle(needs: AttentionNeeds) -> str | None:
        from cb_kernels.targets import OTHER_BACKEND, check_support

        geometry = needs.geometry
        try:
            check_support(
                needs.device,
                head_dim=geometry.head_dim,
                num_heads=geometry.num_heads,
                num_kv_heads=geometry.num_kv_heads,
                dtype=needs.dtype,
                kv_dtype=needs.kv_dtype,
            )
        except ValueError as error:
            return str(error).removesuffix(f"; {OTHER_BACKEND}")
        if needs.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            return "attention_backend 'triton' needs a GPU"
        return None

    @classmethod
    def create(cls, needs: AttentionNeeds) -> TritonAttention:
        from cb_kernels.paged_attention.launch import workspace_size

        geometry = needs.geometry
        size = workspace_size(
            needs.max_decodes, geometry.num_heads, geometry.num_kv_heads, geometry.head_dim, needs.device
        )
        return cls(torch.empty(size, dtype=torch.float32, device=needs.device))

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
