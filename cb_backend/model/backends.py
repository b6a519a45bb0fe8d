"""The fast attention backends, and which one an engine uses; the dtype that K and V are kept in.

triton      a GPU (or Triton's interpreter): `cb_kernels.paged_attention`
cpu         the native kernels: `cb_kernels.cpu`
torch       anywhere, without either
reference   float64, for comparison
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch

from ..config import EngineConfig
from ..kv.storage import KVStorage
from .attention import AttentionBackend, AttentionCall, ReferenceAttention, TorchAttention
from .batch import RaggedBatch
from .kv_scales import KVScales
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


def choose_backend(config: EngineConfig, loaded: LoadedModel) -> AttentionBackend:
    """The backend that `config.attention_backend` names; `auto` takes the fastest one that runs here.

    Raises:
        ModelError: the named backend does not run on this device, or not with this model; says which one does.
    """
    name = config.attention_backend
    on_cpu = loaded.device.type == "cpu"
    if name == "auto":
        name = ("cpu" if _native_runs(loaded) else "torch") if on_cpu else "triton"
    if name != "triton" and config.kv_cache_dtype != "auto":
        raise ModelError(
            f"kv_cache_dtype '{config.kv_cache_dtype}' needs attention_backend 'triton' on a GPU, this engine has "
            f"'{name}' on {loaded.device}; use kv_cache_dtype 'auto'"
        )
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
    return _triton(config, loaded)


def kv_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """What K and V of a model of that dtype are kept in."""
    return torch.float8_e4m3fn if config.kv_cache_dtype == "fp8_e4m3" else dtype


def _native_runs(loaded: LoadedModel) -> bool:
    from cb_kernels.cpu import load, supports

    return supports(loaded.geometry.head_dim, loaded.dtype) and load() is not None


def _triton(config: EngineConfig, loaded: LoadedModel) -> AttentionBackend:
    from cb_kernels.targets import check_support

    geometry = loaded.geometry
    try:
        check_support(
            loaded.device,
            head_dim=geometry.head_dim,
            num_heads=geometry.num_heads,
            num_kv_heads=geometry.num_kv_heads,
            dtype=loaded.dtype,
            kv_dtype=kv_dtype(config, loaded.dtype),
        )
    except ValueError as error:
        raise ModelError(str(error)) from None
    if loaded.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ModelError("attention_backend 'triton' needs a GPU; on a CPU use 'cpu' or 'torch'")
    from cb_kernels.paged_attention.launch import workspace_size

    decodes = min(config.max_num_seqs, config.max_num_batched_tokens)
    size = workspace_size(decodes, geometry.num_heads, geometry.num_kv_heads, geometry.head_dim, loaded.device)
    return TritonAttention(torch.empty(size, dtype=torch.float32, device=loaded.device))
