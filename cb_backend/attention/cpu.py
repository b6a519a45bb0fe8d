"""The backend `cpu`: the native kernels of `cb_kernels.cpu`."""

from __future__ import annotations

import torch

from ..errors import ModelError
from .batch import RaggedBatch
from .hook import AttentionCall


class NativeAttention:
    """C++ on the CPU. Results depend neither on the number of threads nor on the batch nor on the chunking."""

    name = "cpu"

    def __init__(self) -> None:
        from cb_kernels.cpu import load

        library = load()
        if library is None:
            raise ModelError(
                "attention_backend 'cpu': the native kernels are not built; with a C++ compiler installed run "
                "`python -m cb_kernels.cpu.build`, or use 'torch'"
            )
        self.library = library

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
