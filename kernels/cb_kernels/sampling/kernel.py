"""Triton kernels that adjust logits and draw tokens without sorting the vocabulary."""

# Triton's language is not typed Python.
# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from cb_kernels.sampling import noise

MIX_A = tl.constexpr(noise.MIX_A)
MIX_B = tl.constexpr(noise.MIX_B)
KEY_0 = tl.constexpr(noise.ROUND_KEYS[0])
KEY_1 = tl.constexpr(noise.ROUND_KEYS[1])
KEY_2 = tl.constexpr(noise.ROUND_KEYS[2])
KEY_3 = tl.constexpr(noise.ROUND_KEYS[3])
STEP = tl.constexpr(noise.STEP)
TWO_THIRDS_BITS = tl.constexpr(noise.TWO_THIRDS_BITS)
LN2 = tl.constexpr(noise.LN2)
C0 = tl.constexpr(noise.LN_COEFFICIENTS[0])
C1 = tl.constexpr(noise.LN_COEFFICIENTS[1])
C2 = tl.constexpr(noise.LN_COEFFICIENTS[2])
C3 = tl.constexpr(noise.LN_COEFFICIENTS[3])
C4 = tl.constexpr(noise.LN_COEFFICIENTS[4])
C5 = tl.constexpr(noise.LN_COEFFICIENTS[5])


@triton.jit
def _mix(h):
    h = h ^ ((h >> 16) & 0xFFFF)
    h = h * MIX_A
    h = h ^ ((h >> 15) & 0x1FFFF)
    h = h * MIX_B
    return h ^ ((h >> 16) & 0xFFFF)


@triton.jit
def _ln(value):
    bits = value.to(tl.int32, bitcast=True)
    exponent = (bits - TWO_THIRDS_BITS) >> 23
    f = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    poly = f * C5
    poly = (poly + C4) * f
    poly = (poly + C3) * f
    poly = (poly + C2) * f
    poly = (poly + C1) * f
    poly = (poly + C0) * f
    return (f + poly * f) + exponent.to(tl.float32) * LN2


@triton.jit
def row_key(seed, position):
    """The two int32 words that key a row; `noise.row_keys` in torch. seed int64, position int64, scalars."""
    x = seed.to(tl.int32)
    y = (seed >> 32).to(tl.int32)
    at = position.to(tl.int32)
    x = x ^ _mix(y + at + KEY_0)
    y = y ^ _mix(x + at + KEY_1)
    x = x ^ _mix(y + at + KEY_2)
    y = y ^ _mix(x + at + KEY_3)
    return x, y


@triton.jit
def gumbel(x, y, token_id):
    """Bit for bit what `noise.gumbel` gives. Launch with enable_fp_fusion=False: no multiply and add may fuse."""
    h = token_id + x
    h = h ^ ((h >> 16) & 0xFFFF)
    h = h * MIX_A + y
    h = h ^ ((h >> 15) & 0x1FFFF)
    h = h * MIX_B
    h = (h ^ (h >> 16)) & 0x7FFFFFFF
    w = (h.to(tl.float32) + 0.5) * STEP
    u = 1.0 - w
    lost = (1.0 - u) - w
    return -_ln(-(_ln(u) + lost))


@triton.jit(do_not_specialize=["num_listed"])
def adjust_logits_kernel(
    logits_ptr, row_stride, ids_ptr, bias_ptr, counts_ptr, seen_ptr,
    repetition_ptr, presence_ptr, frequency_ptr, num_listed, vocab, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, chunks of listed ids). Touches only the tokens that a row lists; their ids are distinct in a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    at = row * num_listed + column
    listed = column < num_listed
    token = tl.load(ids_ptr + at, mask=listed, other=-1)
    listed = listed & (token >= 0) & (token < vocab)
    count = tl.load(counts_ptr + at, mask=listed, other=0)
    seen = (tl.load(seen_ptr + at, mask=listed, other=0) != 0) | (count > 0)
    logit_at = logits_ptr + row * row_stride + token
    logit = tl.load(logit_at, mask=listed, other=0.0).to(tl.float32)
    logit = logit + tl.load(bias_ptr + at, mask=listed, other=0.0)
    repetition = tl.load(repetition_ptr + row) + tl.zeros_like(logit)
    repeated = tl.where(logit > 0.0, tl.div_rn(logit, repetition), logit * repetition)
    logit = tl.where(seen, repeated, logit)
    logit = logit - tl.load(frequency_ptr + row) * count.to(tl.float32)
    logit = logit - tl.where(count > 0, tl.load(presence_ptr + row), 0.0)
    tl.store(logit_at, logit, mask=listed)


@triton.jit
def _scaled(row_ptr, column, vocab, temperature):
    logit = tl.load(row_ptr + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
    return tl.div_rn(logit, temperature + tl.zeros_like(logit))


@triton.jit
def _count_and_mass(row_ptr, vocab, temperature, top, threshold, CHUNK: tl.constexpr):
    """How many values are >= threshold, and the sum of their exp(value - top)."""
    count = tl.zeros([CHUNK], tl.int32)
    mass = tl.zeros([CHUNK], tl.float32)
    for start in range(0, vocab, CHUNK):
        value = _scaled(row_ptr, start + tl.arange(0, CHUNK), vocab, temperature)
        kept = value >= threshold
        count += kept.to(tl.int32)
        mass += tl.where(kept, tl.exp(value - top), 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _ordered(value):
    """Float32 to int32 with the same order; its own inverse (with a bitcast on either side)."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _unordered(bits):
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _middle(low, high):
    return (low & high) + ((low ^ high) >> 1)  # cannot overflow


@triton.jit
def sample_kernel(
    out_ptr, logits_ptr, row_stride, vocab, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid: (rows,). Bisects for the smallest logit that top-k and top-p keep, then draws by Gumbel-max above it.

    A threshold is bisected over the float32 values themselves, as integers of the same order, and the search stops as
    soon as it is exact: some 20 passes over a row that lies in L2, fewer bytes than one radix sort of it moves.
    """
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    temperature = tl.load(temperature_ptr + row)
    greedy = temperature < 1e-5
    temperature = tl.where(greedy, 1.0, temperature)
    lane = tl.arange(0, CHUNK)

    best = tl.full([CHUNK], float("-inf"), tl.float32)
    least = tl.full([CHUNK], float("inf"), tl.float32)
    for start in range(0, vocab, CHUNK):
        value = _scaled(row_ptr, start + lane, vocab, temperature)
        best = tl.maximum(best, value)
        least = tl.minimum(least, tl.where(value > float("-inf"), value, float("inf")))
    top = tl.max(best, 0)
    bottom = tl.min(least, 0)
    floor = bottom

    top_k = tl.where(greedy, 0, tl.load(top_k_ptr + row))
    if (top_k > 0) & (top_k < vocab) & (bottom < top):
        # Invariant: count(>= low) >= top_k > count(>= high).
        low = _ordered(bottom)
        high = _ordered(top) + 1
        while low + 1 < high:
            middle = _middle(low, high)
            count, mass = _count_and_mass(row_ptr, vocab, temperature, top, _unordered(middle), CHUNK)
            if count >= top_k:
                low = middle
                if count == top_k:
                    high = low
            else:
                high = middle
        floor = tl.maximum(floor, _unordered(low))

    top_p = tl.where(greedy, 1.0, tl.load(top_p_ptr + row))
    if (top_p < 1.0) & (floor < top):
        count, total = _count_and_mass(row_ptr, vocab, temperature, top, floor, CHUNK)
        wanted = total * top_p
        # Invariant: mass(>= low) >= wanted > mass(>= high).
        low = _ordered(floor)
        high = _ordered(top) + 1
        while low + 1 < high:
            middle = _middle(low, high)
            count, mass = _count_and_mass(row_ptr, vocab, temperature, top, _unordered(middle), CHUNK)
            if mass >= wanted:
                low = middle
            else:
                high = middle
        floor = tl.maximum(floor, _unordered(low))

    min_p = tl.load(min_p_ptr + row)
    if min_p > 0.0:
        floor = tl.maximum(floor, tl.minimum(top, top + tl.log(min_p)))

    x, y = row_key(tl.load(seed_ptr + row), tl.load(position_ptr + row))
    best = tl.full([CHUNK], float("-inf"), tl.float32)
    winner = tl.zeros([CHUNK], tl.int32)
    for start in range(0, vocab, CHUNK):
        token = start + lane
        value = _scaled(row_ptr, token, vocab, temperature)
        score = value
        if not greedy:
            score = tl.where(value >= floor, value + gumbel(x, y, token), float("-inf"))
        better = score > best
        best = tl.where(better, score, best)
        winner = tl.where(better, token, winner)
    largest = tl.max(best, 0)
    tl.store(out_ptr + row, tl.min(tl.where(best == largest, winner, 0x7FFFFFFF), 0).to(tl.int64))


@triton.jit
def gumbel_kernel(out_ptr, seed_ptr, position_ptr, ids_ptr, width, CHUNK: tl.constexpr):
    """Grid: (rows, chunks of ids). The noise alone, for tests and for host-side samplers on a GPU."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    held = column < width
    x, y = row_key(tl.load(seed_ptr + row), tl.load(position_ptr + row))
    token = tl.load(ids_ptr + column, mask=held, other=0).to(tl.int32)
    tl.store(out_ptr + row * width + column, gumbel(x, y, token), mask=held)
