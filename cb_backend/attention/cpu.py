"""The backend `cpu`: the native kernels of `cb_kernels.cpu`."""

from __future__ import annotations

from typing import ClassVar

import cb_kernels.cpu
import torch
from cb_kernels.cpu.library import DTYPES, MAX_HEAD_DIM, Library

from .batch import RaggedBatch
from .capabilities import AttentionNeeds, Capabilities
from .hook import AttentionCall


class NativeAttention:
    """C++ on the CPU. Results depend neither on the number of threads nor on the batch nor on the chunking."""

    capabilities: ClassVar = Capabilities(
        name="cpu",
        devices=frozenset({"cpu"}),
        auto_devices=frozenset({"cpu"}),
        dtypes=tuple(DTYPES),
        head_dims=range(8, MAX_HEAD_DIM + 1, 8),
        fuses_layers=True,
    )
    name = capabilities.name

    def __init__(self, library: Library) -> None:
        self.library = library

    @staticmethod
    def obstacle(needs: AttentionNeeds) -> str | None:
        if cb_kernels.cpu.load() is not None:
            return None
        return (
            "attention_backend 'cpu': the native kernels are not built; with a C++ compiler installed run "
            "`python -m cb_kernels.cpu.build`"
        )

    @classmethod
    def create(cls, needs: AttentionNeeds) -> NativeAttention:
        library = cb_kernels.cpu.load()
        assert library is not None, "the obstacle was not asked for"
        return cls(library)

    def write(self, k: torch.Tensor, v: torch.Tensor, batch: RaggedBatch, layer: int) -> None:
        k_cache, v_cache = batch.storage.layers[layer]
        self.library.write_kv(k, v, k_cache, v_cache, batch.slots)

    def attend(self, q: torch.Tensor, batch: RaggedBatch, call: AttentionCall) -> torch.Tensor:
        prepared = batch.scratch.get("native")
        if prepared is None:
            prepared = self.library.batch(batch.block_tables, batch.seq_lens, batch.cu_seqlens)
            batch.scratch["native"] = prepared
        if q.stride(2) != 1:
            q = q.contiguous()
        out = torch.empty(q.shape, dtype=q.dtype)
        k_cache, v_cache = batch.storage.layers[call.layer]
        sinks = None if call.sinks is None else call.sinks.float()
        prepared.attend(
            q, k_cache, v_cache, out, scale=call.scale, window=call.window, softcap=call.softcap, sinks=sinks
        )
        return out
