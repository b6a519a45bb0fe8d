"""The Triton side of paged attention: one ragged kernel for decode, prefill chunks and mixes, and its split-KV combine.

Work is cut into q-blocks: BLOCK_Q consecutive query rows of one sequence, times the GROUP query heads that share a K/V
head, packed as the rows of one tile. A program finds its sequence by binary search over `cu_seqlens`, so the grid is a
bound known from shapes alone and no length is read on the host. Keys pass by in tiles of TILE: those visible to every
row run in a loop without masks, the edges (causal diagonal, window start, end of sequence) in a masked one.

Softmax runs in base 2 with the scale folded in. K/V addresses come from a load (the block table), and Triton then keeps
(num_stages - 1) // 2 tiles in flight: stages must be odd and at least 5 to overlap loading with arithmetic.
"""

# Triton's language is not typed Python, and its compile-time branches are statements.
# mypy: ignore-errors
# ruff: noqa: SIM102, SIM108
from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _sequence_of(cu_seqlens, num_seqs, q_block, BLOCK_Q: tl.constexpr):
    """The sequence that owns `q_block`: sequence i's begin at rows_before(i) // BLOCK_Q + i, disjoint and in order."""
    base = tl.load(cu_seqlens)
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        if (tl.load(cu_seqlens + middle) - base) // BLOCK_Q + middle <= q_block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _locate(table, first_key, num_keys, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr):
    """Block id and row inside the block of TILE keys from `first_key` on. int64, as id times stride passes 2^31."""
    lane = tl.arange(0, TILE)
    if BLOCK_SIZE % TILE == 0:
        block = tl.load(table + first_key // BLOCK_SIZE) + tl.zeros([TILE], tl.int32)
        row = first_key % BLOCK_SIZE + lane
    elif TILE == 2 * BLOCK_SIZE:
        # Two scalar loads instead of TILE loads of two distinct words.
        entry = table + first_key // BLOCK_SIZE
        if MASKED:
            second = tl.load(entry + 1, mask=first_key + BLOCK_SIZE < num_keys, other=0)
        else:
            second = tl.load(entry + 1)
        block = tl.where(lane < BLOCK_SIZE, tl.load(entry), second)
        row = lane % BLOCK_SIZE
    else:
        key = first_key + lane
        if MASKED:
            block = tl.load(table + key // BLOCK_SIZE, mask=key < num_keys, other=0)
        else:
            block = tl.load(table + key // BLOCK_SIZE)
        row = key % BLOCK_SIZE
    return block.to(tl.int64), row


@triton.jit
def _attend(
    q, top, total, acc, tile, num_keys, position, table,
    k_ptr, v_ptr, k_stride_block, k_stride_row, v_stride_block, v_stride_row,
    qk_scale, softcap, window, dim,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys: updates running maximum `top`, denominator `total` and weighted sum `acc` of every row."""
    first_key = tile * TILE
    key = first_key + tl.arange(0, TILE)
    block, row = _locate(table, first_key, num_keys, BLOCK_SIZE, TILE, MASKED)
    k_at = k_ptr + (block * k_stride_block + row * k_stride_row)[None, :] + dim[:, None]
    v_at = v_ptr + (block * v_stride_block + row * v_stride_row)[:, None] + dim[None, :]
    # Unused rows of a block hold anything, NaN included, and 0 * NaN would spoil the sum: they are never loaded.
    if MASKED:
        held = key < num_keys
        if HEAD_DIM == PADDED_DIM:
            k = tl.load(k_at, mask=held[None, :], other=0.0)
            v = tl.load(v_at, mask=held[:, None], other=0.0)
        else:
            k = tl.load(k_at, mask=held[None, :] & (dim < HEAD_DIM)[:, None], other=0.0)
            v = tl.load(v_at, mask=held[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    elif HEAD_DIM == PADDED_DIM:
        k = tl.load(k_at)
        v = tl.load(v_at)
    else:
        k = tl.load(k_at, mask=(dim < HEAD_DIM)[:, None], other=0.0)
        v = tl.load(v_at, mask=(dim < HEAD_DIM)[None, :], other=0.0)
    if UPCAST:
        k = k.to(tl.float32)
        v = v.to(tl.float32)
    else:
        k = k.to(q.dtype)
        v = v.to(q.dtype)

    score = tl.dot(q, k, input_precision=PRECISION)
    if SOFTCAP:
        # tanh(x) = sign(x) (1 - e) / (1 + e) with e = exp(-2 |x|): cannot overflow. qk_scale is the plain scale here.
        x = score * (qk_scale / softcap)
        e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
        tanh = (1.0 - e) / (1.0 + e)
        score = tl.where(x < 0.0, -tanh, tanh) * (softcap * LOG2E)
    else:
        score = score * qk_scale
    if MASKED:
        visible = key[None, :] <= position[:, None]
        if WINDOWED:
            visible = visible & (key[None, :] > position[:, None] - window)
        score = tl.where(visible, score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, 1))
    reference = new_top
    if MASKED:
        # A row that has seen no key yet: -inf - -inf is NaN.
        reference = tl.where(new_top == float("-inf"), 0.0, new_top)
    weight = tl.exp2(score - reference[:, None])
    decay = tl.exp2(top - reference)
    total = total * decay + tl.sum(weight, 1)
    acc = tl.dot(weight.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
    return new_top, total, acc


# What changes from step to step is not specialized: else the number 1, multiples of 16 and aligned addresses would each
# compile anew. A mixed batch passes slices of its tables, which start anywhere.
@triton.jit(
    do_not_specialize=[
        *("num_seqs", "table_stride", "num_splits", "window"),
        *("table_ptr", "seq_lens_ptr", "cu_seqlens_ptr", "sinks_ptr", "k_scale_ptr", "v_scale_ptr"),
    ]
)
def paged_attention_kernel(
    out_ptr, partial_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, table_ptr, seq_lens_ptr, cu_seqlens_ptr,
    sinks_ptr, k_scale_ptr, v_scale_ptr,
    qk_scale, softcap, window, num_seqs, num_splits, table_stride,
    q_stride_row, q_stride_head, out_stride_row, out_stride_head,
    k_stride_block, k_stride_head, k_stride_row, v_stride_block, v_stride_head, v_stride_row,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, TILE: tl.constexpr,
    DECODE: tl.constexpr, SPLIT: tl.constexpr, MIN_TILES: tl.constexpr,
    WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, SCALED_KV: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: (bound on q-blocks, K/V heads, splits). With SPLIT, writes normalized partials and their base-2 log-sum.

    DECODE: every sequence has at most one query row, q-block i is sequence i. UPCAST: the interpreter's dot multiplies
    the bit patterns of bf16, so there everything becomes float32 right after its load.
    """
    # Last q-blocks first: under a causal mask they see the most keys, and should not be left for the end.
    q_block = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if DECODE:
        seq = q_block
    else:
        seq = _sequence_of(cu_seqlens_ptr, num_seqs, q_block, BLOCK_Q)
    first_row = tl.load(cu_seqlens_ptr + seq)
    q_len = tl.load(cu_seqlens_ptr + seq + 1) - first_row
    if DECODE:
        first_token = 0
    else:
        first_token = (q_block - ((first_row - tl.load(cu_seqlens_ptr)) // BLOCK_Q + seq)) * BLOCK_Q
    if first_token >= q_len:
        return
    context = tl.load(seq_lens_ptr + seq) - q_len  # keys before the sequence's first query row

    lane = tl.arange(0, BLOCK_M)
    token = first_token + lane // GROUP
    head = kv_head * GROUP + lane % GROUP
    in_use = (token < q_len) & (lane < BLOCK_Q * GROUP)
    position = context + token
    dim = tl.arange(0, PADDED_DIM)
    row = (first_row + token).to(tl.int64)
    in_tile = in_use[:, None] & (dim < HEAD_DIM)[None, :]
    q_at = q_ptr + row[:, None] * q_stride_row + head[:, None] * q_stride_head + dim[None, :]
    q = tl.load(q_at, mask=in_tile, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    if SCALED_KV:
        qk_scale = qk_scale * tl.load(k_scale_ptr + kv_head)

    # Tiles [first_tile, end_tile) hold every key that some row of this q-block sees.
    first_position = context + first_token
    last_position = context + tl.minimum(first_token + BLOCK_Q, q_len) - 1
    num_keys = last_position + 1
    end_tile = tl.cdiv(num_keys, TILE)
    first_tile = 0
    if WINDOWED:
        first_tile = tl.maximum(first_position - window + 1, 0) // TILE
    if SPLIT:
        # Short sequences use fewer splits than the grid offers: each gets MIN_TILES or more.
        per_split = tl.maximum(tl.cdiv(end_tile - first_tile, num_splits), MIN_TILES)
        first_tile = first_tile + split * per_split
        end_tile = tl.minimum(first_tile + per_split, end_tile)
    # Of these, [full_from, full_to) are visible to all rows.
    full_to = tl.maximum(tl.minimum((first_position + 1) // TILE, end_tile), first_tile)
    full_from = first_tile
    if WINDOWED:
        full_from = tl.minimum(tl.cdiv(tl.maximum(last_position - window + 1, 0), TILE), full_to)
        full_from = tl.maximum(full_from, first_tile)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        # A sink is a key without a value, counted once over all splits.
        if split == 0:
            top = tl.load(sinks_ptr + head, mask=in_use, other=0.0).to(tl.float32) * LOG2E
            total = tl.full([BLOCK_M], 1.0, tl.float32)
    acc = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    table = table_ptr + seq.to(tl.int64) * table_stride
    k_head = k_ptr + kv_head.to(tl.int64) * k_stride_head
    v_head = v_ptr + kv_head.to(tl.int64) * v_stride_head

    if WINDOWED:
        for tile in range(first_tile, full_from):
            top, total, acc = _attend(
                q, top, total, acc, tile, num_keys, position, table,
                k_head, v_head, k_stride_block, k_stride_row, v_stride_block, v_stride_row,
                qk_scale, softcap, window, dim,
                HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE, WINDOWED, SOFTCAP, True, UPCAST, PRECISION,
            )  # fmt: skip
    for tile in range(full_from, full_to):
        top, total, acc = _attend(
            q, top, total, acc, tile, num_keys, position, table,
            k_head, v_head, k_stride_block, k_stride_row, v_stride_block, v_stride_row,
            qk_scale, softcap, window, dim,
            HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE, WINDOWED, SOFTCAP, False, UPCAST, PRECISION,
        )  # fmt: skip
    for tile in range(full_to, end_tile):
        top, total, acc = _attend(
            q, top, total, acc, tile, num_keys, position, table,
            k_head, v_head, k_stride_block, k_stride_row, v_stride_block, v_stride_row,
            qk_scale, softcap, window, dim,
            HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE, WINDOWED, SOFTCAP, True, UPCAST, PRECISION,
        )  # fmt: skip

    scale = 1.0 / tl.where(total == 0.0, 1.0, total)
    if SCALED_KV:
        scale = scale * tl.load(v_scale_ptr + kv_head)
    acc = acc * scale[:, None]
    if SPLIT:
        at = (row * NUM_HEADS + head) * num_splits + split
        tl.store(partial_ptr + at[:, None] * PADDED_DIM + dim[None, :], acc, mask=in_use[:, None])
        lse = tl.where(total == 0.0, float("-inf"), top + tl.log2(tl.where(total == 0.0, 1.0, total)))
        tl.store(lse_ptr + at, lse, mask=in_use)
    else:
        out_at = out_ptr + row[:, None] * out_stride_row + head[:, None] * out_stride_head + dim[None, :]
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=in_tile)


@triton.jit(do_not_specialize=["num_splits", "cu_seqlens_ptr"])
def combine_splits_kernel(
    out_ptr, partial_ptr, lse_ptr, cu_seqlens_ptr, num_splits, out_stride_row, out_stride_head,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """Grid: (sequences, heads). Sums a decode row's partials, each weighted by 2^(its log-sum - the largest)."""
    seq = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(cu_seqlens_ptr + seq).to(tl.int64)
    if tl.load(cu_seqlens_ptr + seq + 1) == row:
        return
    split = tl.arange(0, MAX_SPLITS)
    dim = tl.arange(0, PADDED_DIM)
    at = (row * NUM_HEADS + head) * num_splits + split
    lse = tl.load(lse_ptr + at, mask=split < num_splits, other=float("-inf"))
    top = tl.max(lse, 0)
    weight = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top))
    used = (lse > float("-inf"))[:, None] & (dim < HEAD_DIM)[None, :]
    partial = tl.load(partial_ptr + at[:, None] * PADDED_DIM + dim[None, :], mask=used, other=0.0)
    total = tl.sum(weight, 0)
    result = tl.sum(partial * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    out_at = out_ptr + row * out_stride_row + head * out_stride_head + dim
    tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)
