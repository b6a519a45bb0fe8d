"""The fast attention backends, and which one an engine uses; the dtype that K and V are kept in.

triton      a GPU (or Triton's interpreter): `cb_kernels.paged_attention`
cpu         the native kernels: `cb_kernels.cpu`
torch       anywhere, without either
reference   float64, for comparison
"""

from __future__ import annotations

import os

import torch

from ..config import EngineConfig
from ..errors import ModelError
from ..models.loader import LoadedModel
from .cpu import NativeAttention
from .hook import AttentionBackend
from .reference import ReferenceAttention
from .torch import TorchAttention
from .triton import TritonAttention


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
