"""Triton kernels that write K/V by slot and copy whole blocks."""

# Triton's language is not typed Python.
# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _to_e4m3(value):
    """Byte of the float8_e4m3fn nearest to a float32 (ties to even, clamped to 448, NaN kept).

    Integer arithmetic, because sm_80 has no such conversion and the interpreter's loses carries.
    """
    bits = value.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    magnitude = tl.minimum(magnitude, 0x43E00000)  # 448
    # 20 mantissa bits go; half of what goes, less one when the kept part is even, makes the carry.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the grid is even: adding 2^14, whose float32 neighbours are 2^-9 apart, rounds to it.
    shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
    subnormal = shifted.to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, subnormal, normal)
    return (sign | tl.where(is_nan, 0x7F, code)).to(tl.uint8)


@triton.jit
def write_kv_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, k_scale_ptr, v_scale_ptr,
    k_stride_token, k_stride_head, v_stride_token, v_stride_head,
    k_stride_block, k_cache_stride_head, k_stride_row, v_stride_block, v_cache_stride_head, v_stride_row,
    BLOCK_SIZE: tl.constexpr, NUM_HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, TO_FP8: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens,). With TO_FP8 the caches are given as bytes."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    head = tl.arange(0, PADDED_HEADS)[:, None]
    dim = tl.arange(0, PADDED_DIM)[None, :]
    held = (head < NUM_HEADS) & (dim < HEAD_DIM)
    k = tl.load(k_ptr + token * k_stride_token + head * k_stride_head + dim, mask=held)
    v = tl.load(v_ptr + token * v_stride_token + head * v_stride_head + dim, mask=held)
    if TO_FP8:
        k = k.to(tl.float32)
        v = v.to(tl.float32)
        if SCALED:
            k = tl.div_rn(k, tl.load(k_scale_ptr + head, mask=head < NUM_HEADS, other=1.0) + tl.zeros_like(k))
            v = tl.div_rn(v, tl.load(v_scale_ptr + head, mask=head < NUM_HEADS, other=1.0) + tl.zeros_like(v))
        k = _to_e4m3(k)
        v = _to_e4m3(v)
    else:
        k = k.to(k_cache_ptr.dtype.element_ty)
        v = v.to(v_cache_ptr.dtype.element_ty)
    block = slot // BLOCK_SIZE
    row = slot % BLOCK_SIZE
    tl.store(k_cache_ptr + block * k_stride_block + row * k_stride_row + head * k_cache_stride_head + dim, k, mask=held)
    tl.store(v_cache_ptr + block * v_stride_block + row * v_stride_row + head * v_cache_stride_head + dim, v, mask=held)


@triton.jit
def copy_blocks_kernel(
    source_ptr, target_ptr, source_ids_ptr, target_ids_ptr, block_words, CHUNK: tl.constexpr
):  # fmt: skip
    """Grid: (pairs, chunks of CHUNK 4-byte words). Either side may be pinned host memory that the device addresses."""
    pair = tl.program_id(0)
    read = tl.load(source_ids_ptr + pair).to(tl.int64)
    written = tl.load(target_ids_ptr + pair).to(tl.int64)
    if (read < 0) | (written < 0):
        return
    word = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    held = word < block_words
    tl.store(
        target_ptr + written * block_words + word,
        tl.load(source_ptr + read * block_words + word, mask=held),
        mask=held,
    )
