"""The host side of the K/V copies. Imports Triton; never reads device memory; safe in a captured CUDA graph."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from cb_kernels.kv_copy.kernel import copy_blocks_kernel, write_kv_kernel

COPY_CHUNK = 4096  # 4-byte words per program
COPY_WARPS = 8
WRITE_WARPS = 4


def write_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Writes K and V of new tokens into their slots; `reference_write_kv` says how.

    Args:
        k, v: [num_tokens, num_kv_heads, head_dim], unit stride in head_dim, e.g. views of a fused projection.
        k_cache, v_cache: [num_blocks, num_kv_heads, block_size, head_dim], strided views with head_dim innermost.
        slots: int64 [num_tokens], contiguous; negative: skipped.
        k_scale, v_scale: float32 [num_kv_heads], both or neither, for a float8_e4m3fn cache.

    Raises:
        ValueError: shapes, dtypes or strides that the kernel cannot take.
    """
    num_tokens, num_heads, head_dim = k.shape
    block_size = k_cache.shape[2]
    if v.shape != k.shape or k_cache.shape != v_cache.shape or k_cache.shape[1::2] != (num_heads, head_dim):
        raise ValueError(
            f"k {tuple(k.shape)}, v {tuple(v.shape)} and the caches {tuple(k_cache.shape)}, {tuple(v_cache.shape)} "
            "must be [tokens, heads, head_dim] and [blocks, heads, block size, head_dim]"
        )
    if slots.shape != (num_tokens,) or slots.dtype != torch.int64:
        raise ValueError(f"slots must be int64 [{num_tokens}], got {slots.dtype} {tuple(slots.shape)}")
    if any(tensor.stride(-1) != 1 for tensor in (k, v, k_cache, v_cache)):
        raise ValueError("k, v and the caches must have stride 1 in head_dim")
    if (k_scale is None) != (v_scale is None):
        raise ValueError("k_scale and v_scale must be given together")
    if num_tokens == 0:
        return
    to_fp8 = k_cache.dtype == torch.float8_e4m3fn
    if to_fp8:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    write_kv_kernel[(num_tokens,)](
        k, v, k_cache, v_cache, slots, slots if k_scale is None else k_scale, slots if v_scale is None else v_scale,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), *k_cache.stride()[:3], *v_cache.stride()[:3],
        BLOCK_SIZE=block_size, NUM_HEADS=num_heads, PADDED_HEADS=triton.next_power_of_2(num_heads),
        HEAD_DIM=head_dim, PADDED_DIM=triton.next_power_of_2(head_dim), TO_FP8=to_fp8, SCALED=k_scale is not None,
        num_warps=WRITE_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def copy_blocks(source: Tensor, target: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    """Copies whole blocks, bit for bit: `target[target_ids[i]] = source[source_ids[i]]`.

    Copy on write (both are one pool), gathering blocks into a staging buffer that one transfer takes to the host, and
    scattering them back are this one operation.

    Args:
        source, target: contiguous, blocks along the first dimension, of equal block shape and dtype; pinned host memory
            is allowed where the device can address it. Where both are one pool, no block may be read by one pair and
            written by another.
        source_ids, target_ids: int32 or int64 [pairs]; a pair with a negative id is skipped.

    Raises:
        ValueError: blocks that differ or whose size is no multiple of 4 bytes.
    """
    if source.shape[1:] != target.shape[1:] or source.dtype != target.dtype:
        raise ValueError(
            f"blocks must be alike: source {source.dtype} {tuple(source.shape[1:])}, "
            f"target {target.dtype} {tuple(target.shape[1:])}"
        )
    if not (source.is_contiguous() and target.is_contiguous()):
        raise ValueError("source and target must be contiguous, blocks along the first dimension")
    block_bytes = source[0].numel() * source.element_size()
    if block_bytes % 4:
        raise ValueError(f"a block must be a multiple of 4 bytes, this one has {block_bytes}")
    if source_ids.shape != target_ids.shape or source_ids.dim() != 1:
        raise ValueError(f"ids must be [pairs] twice: {tuple(source_ids.shape)}, {tuple(target_ids.shape)}")
    pairs = source_ids.shape[0]
    if pairs == 0:
        return
    words = block_bytes // 4
    copy_blocks_kernel[(pairs, triton.cdiv(words, COPY_CHUNK))](
        _as_words(source), _as_words(target), source_ids, target_ids, words, CHUNK=COPY_CHUNK, num_warps=COPY_WARPS
    )


def _as_words(blocks: Tensor) -> Tensor:
    return blocks.view(-1).view(torch.uint8).view(torch.int32)
