"""The fast attention backends, and which one an engine uses.

triton      a GPU (or Triton's interpreter): `cb_kernels.paged_attention`
cpu         the native kernels: `cb_kernels.cpu`
torch       anywhere, without either
reference   float64, for comparison
"""

from __future__ import annotations

import os

import torch

from ..config import EngineConfig
from .attention import AttentionBackend, AttentionCall, ReferenceAttention, TorchAttention
from .batch import RaggedBatch
from .loader import LoadedModel, ModelError


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


class TritonAttention:
    """One ragged Triton kernel for decodes, chunks and mixes."""

    name = "triton"

    def write(self, k: torch.Tensor, v: torch.Tensor, batch: RaggedBatch, layer: int) -> None:
        from cb_kernels.kv_copy.launch import write_kv

        k_cache, v_cache = batch.storage.layers[layer]
        write_kv(k, v, k_cache, v_cache, batch.slots)

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
        )


def choose_backend(config: EngineConfig, loaded: LoadedModel) -> AttentionBackend:
    """The backend that `config.attention_backend` names; `auto` takes the fastest one that runs here.

    Raises:
        ModelError: the named backend does not run on this device, or not with this model; says which one does.
    """
    name = config.attention_backend
    on_cpu = loaded.device.type == "cpu"
    if name == "auto":
        name = ("cpu" if _native_runs(loaded) else "torch") if on_cpu else "triton"
    if name == "reference":
        return ReferenceAttention()
    if name == "torch":
        return TorchAttention()
    if name == "cpu":
        if not on_cpu:
            raise ModelError(f"attention_backend 'cpu' does not run on {loaded.device}; use 'triton' or 'torch'")
        backend = NativeAttention()
        if not _native_runs(loaded):
            raise ModelError(
                "attention_backend 'cpu' takes head dims that are multiples of 8 up to 256 in float32 or bfloat16, "
                f"not {loaded.geometry.head_dim} in {loaded.dtype}; use 'torch'"
            )
        return backend
    return _triton(loaded)


def _native_runs(loaded: LoadedModel) -> bool:
    from cb_kernels.cpu import load, supports

    return supports(loaded.geometry.head_dim, loaded.dtype) and load() is not None


def _triton(loaded: LoadedModel) -> AttentionBackend:
    from cb_kernels.targets import check_support

    geometry = loaded.geometry
    try:
        check_support(
            loaded.device,
            head_dim=geometry.head_dim,
            num_heads=geometry.num_heads,
            num_kv_heads=geometry.num_kv_heads,
            dtype=loaded.dtype,
            kv_dtype=loaded.dtype,
        )
    except ValueError as error:
        raise ModelError(str(error)) from None
    if loaded.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ModelError("attention_backend 'triton' needs a GPU; on a CPU use 'cpu' or 'torch'")
    return TritonAttention()
