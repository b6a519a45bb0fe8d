"""Native CPU kernels: ragged paged attention, KV write and the elementwise operations of a step.

C++ with a plain C ABI under `src/`, one build for all x86-64 CPUs (portable, AVX2, AVX512, AVX512-BF16 and AMX code
chosen at run time; `CB_CPU_ISA` forces a lower one) and portable code elsewhere. Optional: `load()` gives None where it
is not built, and the caller uses torch. References: `reference.py` here and in
`cb_kernels.paged_attention`.
"""

from __future__ import annotations

import torch

from cb_kernels.cpu.library import Batch, Library, UnsupportedShape, load, supports

__all__ = ["Batch", "Library", "UnsupportedShape", "info", "load", "paged_attention", "supports", "write_kv"]


def _loaded() -> Library:
    library = load()
    if library is None:
        raise RuntimeError("the native CPU kernels are not built: run python -m cb_kernels.cpu.build")
    return library


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:
    """Causal attention of a ragged batch over the paged cache, accumulated in float32.

    Args:
        q: [num_tokens, num_heads, head_dim], float32 or bf16; the caches and out are of its dtype.
        k_cache, v_cache: [num_blocks, num_kv_heads, block_size, head_dim], strided, contiguous over head_dim.
        out: like q, overwritten.
        block_tables, seq_lens, cu_seqlens: see `Batch`, which spares repeated work when several layers share them.
        scale: factor of q k^T.
        window: keys a row sees, itself included; 0: all before it.
        softcap: c of c * tanh(s / c); 0: none.
        sinks: float32 [num_heads] logits of a key without value, or None.

    Raises:
        UnsupportedShape: use the torch backend.
        RuntimeError: the library is not built.
    """
    batch = _loaded().batch(block_tables, seq_lens, cu_seqlens)
    batch.attend(q, k_cache, v_cache, out, scale=scale, window=window, softcap=softcap, sinks=sinks)


def write_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """See `Library.write_kv`."""
    _loaded().write_kv(k, v, k_cache, v_cache, slots)


def info() -> dict[str, str | int | None]:
    """What was chosen: `isa`, `threads`, `path` of the library (None, 1-thread fallbacks included, where not built)."""
    library = load()
    if library is None:
        return {"isa": None, "threads": torch.get_num_threads(), "path": None}
    threads = torch.get_num_threads() if library.native.has_threads else 1
    return {"isa": library.isa, "threads": threads, "path": str(library.native.path)}
