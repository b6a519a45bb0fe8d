"""Stateless Gumbel noise: a pure function of (seed, position, token id), bit-equal in torch, NumPy and Triton.

A token drawn as `argmax(logits / T + gumbel)` then depends on nothing but its own row: neighbours, batch order,
preemption and device leave it alone. Every step is either int32 arithmetic that wraps or a float32 operation rounded on
its own, in a written order: no library logarithm, no division, and no multiply-add that a compiler may fuse (the Triton
kernel is launched with `enable_fp_fusion=False`, and a test looks for fused instructions in its machine code).

    key   (x, y) = four Feistel rounds of a 32-bit mixer over (seed low, seed high), the position added in each round
    hash  h = two multiply-xorshift rounds over token id + x, y added between them; its low 31 bits are kept
    w = (h + 1/2) 2^-31 in (0, 1);   E = -ln(1 - w), an exponential variable;   noise = -ln E

The logarithm splits its argument into 2^e m with m in [2/3, 4/3) and sums a polynomial of degree 7 in m - 1: relative
error below 1.3e-6. `1 - w` rounds, and where E is small that would be all of it; the rounding error is known exactly
and is put back, so E keeps its relative precision down to 2^-32 and a token of probability 1e-9 is still drawn at its
due rate. Noise lies in (-2.9, 22.2); `reference_gumbel` agrees within 4e-6 from the same w, a float32.

The mixer is the xorshift-multiply form of MurmurHash3's finalizer with the constants of Chris Wellons' "lowbias32".
"""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

MIX_A = 0x7FEB352D
MIX_B = 0x846CA68B - 2**32  # as int32
ROUND_KEYS = (0x243F6A88, 0x85A308D3 - 2**32, 0x13198A2E, 0x03707344)  # digits of pi

# w = (h + 1/2) * STEP; a hair below 2^-31, so that the largest h stays below w = 1.
STEP = (1.0 - 2.0**-24) * 2.0**-31
TWO_THIRDS_BITS = 0x3F2AAAAB
LN2 = 0.693147182464599609375  # float32
# ln(1 + f) = f + f^2 (C0 + C1 f + ... + C5 f^5), least relative error on [-1/3, 1/3]; exact float32 values.
LN_COEFFICIENTS = (
    -0.5000212788581848,
    0.3333694636821747,
    -0.2484482377767563,
    0.19813349843025208,
    -0.1938757300376892,
    0.1701696217060089,
)

_CHUNK = 1 << 16  # elements per pass: the handful of temporaries stays in a core's L2 cache


def gumbel(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Gumbel(0, 1) noise for some tokens of some rows.

    Args:
        seeds: int64 [rows].
        positions: int64 [rows], where in its sequence the drawn token will stand; below 2^31.
        token_ids: int64 or int32 [n], the same ids in each row, or [rows, n]; below 2^31.

    Returns:
        float32 [rows, n].

    Raises:
        ValueError: shapes that do not fit together.
    """
    rows = seeds.shape[0]
    if seeds.dim() != 1 or positions.shape != seeds.shape:
        raise ValueError(f"seeds {tuple(seeds.shape)} and positions {tuple(positions.shape)} must both be [rows]")
    if token_ids.dim() not in (1, 2) or (token_ids.dim() == 2 and token_ids.shape[0] != rows):
        raise ValueError(f"token_ids must be [n] or [{rows}, n], got {tuple(token_ids.shape)}")
    x, y = row_keys(seeds, positions)
    ids = token_ids.to(torch.int32).expand(rows, -1)
    out = torch.empty(ids.shape, dtype=torch.float32, device=ids.device)
    if ids.numel() == 0:
        return out
    step = _CHUNK if ids.device.type == "cpu" else ids.shape[1]
    rows_at_once = max(1, step // ids.shape[1])
    for top in range(0, rows, rows_at_once):
        part = slice(top, top + rows_at_once)
        for left in range(0, ids.shape[1], step):
            span = slice(left, left + step)
            _noise(ids[part, span] + x[part, None], y[part, None], out[part, span])
    return out


def row_keys(seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The two int32 [rows] words that key a row's hash; distinct for distinct seeds at one position."""
    words = seeds.contiguous().view(torch.int32).view(-1, 2)
    x, y = words[:, 0].clone(), words[:, 1].clone()
    at = positions.to(torch.int32)
    for index, key in enumerate(ROUND_KEYS):
        mixed = _mix((y if index % 2 == 0 else x) + at + key)
        if index % 2 == 0:
            x ^= mixed
        else:
            y ^= mixed
    return x, y


def _mix(h: Tensor) -> Tensor:
    """Bijective 32-bit mixer, in place; masks turn int32's arithmetic shifts into logical ones."""
    h ^= (h >> 16) & 0xFFFF
    h *= MIX_A
    h ^= (h >> 15) & 0x1FFFF
    h *= MIX_B
    h ^= (h >> 16) & 0xFFFF
    return h


def _noise(h: Tensor, y: Tensor, out: Tensor) -> None:
    """`h` holds token id + x and is used up."""
    shifted = h >> 16
    h ^= shifted.bitwise_and_(0xFFFF)
    h *= MIX_A
    h += y
    torch.bitwise_right_shift(h, 15, out=shifted)
    h ^= shifted.bitwise_and_(0x1FFFF)
    h *= MIX_B
    torch.bitwise_right_shift(h, 16, out=shifted)
    h ^= shifted  # arithmetic: the sign spreads over bits that stay uniform, and is dropped by the next line
    h &= 0x7FFFFFFF
    w = h.to(torch.float32)
    w += 0.5
    w *= STEP
    u = 1.0 - w
    lost = (1.0 - u).sub_(w)  # exact: 1 - w = u + lost
    exponential = _ln_(u).add_(lost).neg_()
    torch.neg(_ln_(exponential), out=out)


def _ln_(value: Tensor) -> Tensor:
    """Natural logarithm of positive normal float32, in place, one rounding per operation."""
    bits = value.view(torch.int32)
    exponent = (bits - TWO_THIRDS_BITS) >> 23
    bits -= exponent << 23
    value -= 1.0
    poly = value * LN_COEFFICIENTS[-1]
    for coefficient in LN_COEFFICIENTS[-2::-1]:
        poly += coefficient
        poly *= value
    poly *= value
    value += poly
    value += exponent.to(torch.float32).mul_(LN2)
    return value


def reference_gumbel(seed: int, position: int, token_id: int) -> float:
    """The same noise from Python integers and a float64 logarithm."""
    words = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF]
    for index, key in enumerate(ROUND_KEYS):
        words[index % 2] ^= _reference_mix(words[1 - index % 2] + position + key)
    x, y = words
    h = (token_id + x) & 0xFFFFFFFF
    h ^= h >> 16
    h = (h * MIX_A + y) & 0xFFFFFFFF
    h ^= h >> 15
    h = (h * MIX_B) & 0xFFFFFFFF
    h ^= (h >> 16) | (0xFFFF0000 if h >> 31 else 0)
    w = _float32(_float32(_float32(h & 0x7FFFFFFF) + 0.5) * STEP)
    return -math.log(-math.log1p(-w))


def _float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def _reference_mix(h: int) -> int:
    h &= 0xFFFFFFFF
    h ^= h >> 16
    h = (h * MIX_A) & 0xFFFFFFFF
    h ^= h >> 15
    h = (h * MIX_B) & 0xFFFFFFFF
    return h ^ (h >> 16)
