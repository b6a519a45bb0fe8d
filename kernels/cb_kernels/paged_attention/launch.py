"""The host side of paged attention: picks a configuration from shapes and launches. Imports Triton.

CUDA-graph contract. Nothing here reads device memory, and the grid, the configuration, the number of splits and every
pointer follow from tensor shapes, strides and the keyword arguments alone. A captured call may therefore be replayed
as long as the tensors keep their addresses, whatever their contents become. A batch padded to a larger bucket gives the
same rows as the unpadded one (to the bit, when `num_splits` is the same); a padding sequence is either empty (equal
neighbours in `cu_seqlens`: its rows of `out` are left as they were) or one row of length 1 or 0 whose table names a
trash block (its row of `out` is written and ignored). Pass `workspace`, so that the partials live at one address and
their memory is counted.
"""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from cb_kernels.paged_attention.configs import (
    MAX_SPLITS,
    MIN_TILES_PER_SPLIT,
    LaunchConfig,
    select_config,
    split_count,
)
from cb_kernels.paged_attention.kernel import combine_splits_kernel, paged_attention_kernel
from cb_kernels.targets import TARGETS, target_of

LOG2E = 1.4426950408889634


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens: Tensor,
    *,
    scale: float,
    num_decodes: int = 0,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    workspace: Tensor | None = None,
    num_splits: int | None = None,
    config: LaunchConfig | None = None,
) -> Tensor:
    """Writes causal attention over paged K/V to `out` and returns it; `reference_attention` defines the numbers.

    Args:
        q, out: [num_tokens, num_heads, head_dim], bf16, f16 or f32, unit stride in head_dim.
        k_cache, v_cache: [num_blocks, num_kv_heads, block_size, head_dim] of q's dtype or float8_e4m3fn; any strides
            with head_dim innermost, e.g. one layer's view of a pool that holds all layers.
        block_tables: int32 [num_seqs, max_blocks], contiguous rows; anything past a sequence's last block.
        seq_lens: int32 [num_seqs], keys that the last query row sees.
        cu_seqlens: int32 [num_seqs + 1], first query row of each sequence.
        num_decodes: how many sequences, from the front, have at most one query row. They run as a launch of their own
            with split keys; the rest run in tiles made for prefill chunks. Any value is correct where it is true.
        window, softcap, sinks, k_scale, v_scale: as in `reference_attention`.
        workspace: float32 of `workspace_size` elements or more, for split keys; None: allocated by torch.
        num_splits, config: for tests and benchmarks, instead of what the tables choose.

    Raises:
        ValueError: shapes, dtypes or strides that the kernel cannot take.
    """
    _check(q, k_cache, v_cache, out, block_tables, seq_lens, cu_seqlens, num_decodes)
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = k_cache.shape[1:3]
    num_seqs = seq_lens.shape[0]
    group = num_heads // num_kv_heads
    target = _device_target(q.device)
    padded_dim = padded_head_dim(head_dim)
    interpreted = isinstance(paged_attention_kernel, InterpretedFunction)
    options = {
        "NUM_HEADS": num_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": padded_dim,
        "BLOCK_SIZE": block_size,
        "MIN_TILES": MIN_TILES_PER_SPLIT,
        "WINDOWED": window > 0,
        "SOFTCAP": softcap > 0.0,
        "SINKS": sinks is not None,
        "SCALED_KV": k_scale is not None,
        "UPCAST": interpreted,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "enable_fp_fusion": True,
    }
    unused = seq_lens  # stands in for pointers that the chosen variant never follows

    def launch(first: int, last: int, grid_rows: int, decode: bool) -> None:
        chosen = config or select_config(target, "decode" if decode else "prefill", q.element_size(), padded_dim, group)
        splits = 1
        if decode:
            max_keys = block_tables.shape[1] * block_size
            splits = num_splits or split_count(
                TARGETS[target].programs, (last - first) * num_kv_heads, max_keys, chosen
            )
        partial, lse = out, out
        if splits > 1:
            partial, lse = _partials(workspace, q.device, (last - first) * num_heads * splits, padded_dim)
        block_q = chosen.block_m // group
        grid_blocks = grid_rows if decode else grid_rows // block_q + (last - first)
        tables, lens, firsts = block_tables[first:last], seq_lens[first:last], cu_seqlens[first : last + 1]
        paged_attention_kernel[(grid_blocks, num_kv_heads, splits)](
            out, partial, lse, q, k_cache, v_cache, tables, lens, firsts,
            *(unused if tensor is None else tensor for tensor in (sinks, k_scale, v_scale)),
            scale if softcap > 0.0 else scale * LOG2E, softcap or 1.0, window, last - first, splits, tables.stride(0),
            q.stride(0), q.stride(1), out.stride(0), out.stride(1),
            *k_cache.stride()[:3], *v_cache.stride()[:3],
            BLOCK_M=chosen.block_m, BLOCK_Q=block_q, TILE=chosen.tile, DECODE=decode, SPLIT=splits > 1,
            num_warps=chosen.num_warps, num_stages=chosen.num_stages, **options,
        )  # fmt: skip
        if splits > 1:
            combine_splits_kernel[(last - first, num_heads)](
                out, partial, lse, firsts, splits, out.stride(0), out.stride(1),
                NUM_HEADS=num_heads, HEAD_DIM=head_dim, PADDED_DIM=padded_dim, MAX_SPLITS=MAX_SPLITS,
                num_warps=2, enable_fp_fusion=True,
            )  # fmt: skip

    if num_decodes:
        launch(0, num_decodes, num_decodes, decode=True)
    if num_decodes < num_seqs and num_tokens:
        launch(num_decodes, num_seqs, num_tokens, decode=False)
    return out


def padded_head_dim(head_dim: int) -> int:
    """The power of two that the tile's inner side has."""
    return max(16, int(triton.next_power_of_2(head_dim)))


def workspace_size(max_decodes: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device) -> int:
    """Float32 elements that the partials of up to `max_decodes` decode sequences need: a few MiB, however many.

    `split_count` stops at the power of two at or above programs / (sequences * K/V heads), and at 1 once the sequences
    alone fill the device; so sequences * K/V heads * splits stays below four times the programs.
    """
    at_most = 4 * TARGETS[_device_target(device)].programs * (num_heads // num_kv_heads)
    return min(max_decodes * num_heads * MAX_SPLITS, at_most) * (padded_head_dim(head_dim) + 1)


def _partials(workspace: Tensor | None, device: torch.device, cells: int, padded_dim: int) -> tuple[Tensor, Tensor]:
    need = cells * (padded_dim + 1)
    if workspace is None:
        workspace = torch.empty(need, dtype=torch.float32, device=device)
    if workspace.dtype != torch.float32 or workspace.numel() < need:
        raise ValueError(
            f"workspace must be float32 with at least {need} elements for this batch, got {workspace.dtype} "
            f"with {workspace.numel()}; size it with workspace_size()"
        )
    return workspace[: cells * padded_dim], workspace[cells * padded_dim : need]


@functools.lru_cache(maxsize=8)
def _device_target(device: torch.device) -> str:
    return target_of(device)


def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens: Tensor,
    num_decodes: int,
) -> None:
    num_seqs = seq_lens.shape[0]
    if q.dim() != 3 or out.shape != q.shape or out.dtype != q.dtype:
        raise ValueError(
            f"q {q.dtype} {tuple(q.shape)} and out {out.dtype} {tuple(out.shape)} must be alike, "
            "[tokens, heads, head_dim]"
        )
    if k_cache.dim() != 4 or k_cache.shape != v_cache.shape or k_cache.shape[3] != q.shape[2]:
        raise ValueError(
            f"k_cache {tuple(k_cache.shape)} and v_cache {tuple(v_cache.shape)} must both be "
            f"[blocks, kv heads, block size, {q.shape[2]}]"
        )
    if q.shape[1] % k_cache.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads are not a multiple of {k_cache.shape[1]} K/V heads")
    if any(tensor.stride(-1) != 1 for tensor in (q, out, k_cache, v_cache, block_tables)):
        raise ValueError("q, out, the caches and block_tables must have stride 1 in their last dimension")
    if block_tables.shape[0] != num_seqs or cu_seqlens.shape != (num_seqs + 1,):
        raise ValueError(
            f"block_tables {tuple(block_tables.shape)}, seq_lens {tuple(seq_lens.shape)} and cu_seqlens "
            f"{tuple(cu_seqlens.shape)} must be [n, max_blocks], [n] and [n + 1]"
        )
    if any(tensor.dtype != torch.int32 for tensor in (block_tables, seq_lens, cu_seqlens)):
        raise ValueError("block_tables, seq_lens and cu_seqlens must be int32")
    if not 0 <= num_decodes <= num_seqs:
        raise ValueError(f"num_decodes must be between 0 and the {num_seqs} sequences, got {num_decodes}")
