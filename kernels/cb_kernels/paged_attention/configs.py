"""Launch configurations of paged attention: one table per target, chosen by shape on the host, never by timing.

Each table maps (phase, bytes of an element of Q, padded head dim) to a `LaunchConfig`. The gates that every entry
passes (no spills, tensor-core instructions, double-buffered K/V, shared memory) are in `cb_kernels.aot` and its test.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

Phase = Literal["decode", "prefill"]

MAX_SPLITS = 32
MIN_TILES_PER_SPLIT = 2


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """`block_m` rows (query rows times the heads of a group) by `tile` keys per program."""

    block_m: int
    tile: int
    num_warps: int
    num_stages: int


_Table = dict[tuple[Phase, int, int], LaunchConfig]

# Stages: odd and 5 keep two K/V tiles in flight on NVIDIA; AMD's pipeliner needs 4 for that.
_DECODE_NVIDIA: _Table = {
    ("decode", 2, 32): LaunchConfig(16, 64, 4, 5),
    ("decode", 2, 64): LaunchConfig(16, 64, 4, 5),
    ("decode", 2, 128): LaunchConfig(16, 64, 4, 5),
    ("decode", 2, 256): LaunchConfig(16, 32, 4, 5),
    ("decode", 4, 32): LaunchConfig(16, 32, 4, 5),
    ("decode", 4, 64): LaunchConfig(16, 32, 4, 5),
    ("decode", 4, 128): LaunchConfig(16, 16, 4, 5),
    ("decode", 4, 256): LaunchConfig(16, 16, 8, 5),
}
# 32-bit dots are exact ones on ordinary units: small tiles, or they spill.
_PREFILL_F32_NVIDIA: _Table = {
    ("prefill", 4, 32): LaunchConfig(32, 32, 4, 5),
    ("prefill", 4, 64): LaunchConfig(32, 32, 4, 5),
    ("prefill", 4, 128): LaunchConfig(16, 16, 4, 5),
    ("prefill", 4, 256): LaunchConfig(16, 16, 4, 5),
}
# 64 rows per warp group are what the warp-group and tcgen05 instructions take.
_PREFILL_SM90: _Table = {
    ("prefill", 2, 32): LaunchConfig(128, 64, 8, 5),
    ("prefill", 2, 64): LaunchConfig(128, 64, 8, 5),
    ("prefill", 2, 128): LaunchConfig(128, 64, 8, 5),
    ("prefill", 2, 256): LaunchConfig(128, 32, 8, 5),
}

CONFIGS: dict[str, _Table] = {
    "sm_80": {
        **_DECODE_NVIDIA,
        **_PREFILL_F32_NVIDIA,
        ("prefill", 2, 32): LaunchConfig(64, 64, 4, 5),
        ("prefill", 2, 64): LaunchConfig(128, 64, 8, 5),
        ("prefill", 2, 128): LaunchConfig(128, 32, 8, 5),
        ("prefill", 2, 256): LaunchConfig(32, 32, 4, 5),
    },
    "sm_90": {**_DECODE_NVIDIA, **_PREFILL_F32_NVIDIA, **_PREFILL_SM90},
    "sm_100": {
        **_DECODE_NVIDIA,
        **_PREFILL_F32_NVIDIA,
        **_PREFILL_SM90,
        ("prefill", 2, 64): LaunchConfig(128, 32, 8, 5),  # Triton 3.6 spills with 64 keys and sinks
    },
    # 64 KiB of LDS, wide registers: smaller tiles.
    "gfx942": {
        ("decode", 2, 32): LaunchConfig(16, 64, 4, 4),
        ("decode", 2, 64): LaunchConfig(16, 32, 4, 4),
        ("decode", 2, 128): LaunchConfig(16, 32, 4, 4),
        ("decode", 2, 256): LaunchConfig(16, 16, 4, 4),
        ("decode", 4, 32): LaunchConfig(16, 32, 4, 4),
        ("decode", 4, 64): LaunchConfig(16, 16, 4, 4),
        ("decode", 4, 128): LaunchConfig(16, 16, 4, 4),
        ("decode", 4, 256): LaunchConfig(16, 16, 4, 2),  # two buffers of the smallest tile would fill the LDS
        ("prefill", 2, 32): LaunchConfig(128, 64, 4, 4),
        ("prefill", 2, 64): LaunchConfig(128, 32, 4, 4),
        ("prefill", 2, 128): LaunchConfig(128, 32, 8, 4),
        ("prefill", 2, 256): LaunchConfig(64, 16, 8, 4),
        ("prefill", 4, 32): LaunchConfig(32, 32, 4, 4),
        ("prefill", 4, 64): LaunchConfig(32, 16, 4, 4),
        ("prefill", 4, 128): LaunchConfig(32, 16, 4, 4),
        ("prefill", 4, 256): LaunchConfig(16, 16, 4, 2),
    },
}


def select_config(target: str, phase: Phase, element_size: int, padded_dim: int, group: int) -> LaunchConfig:
    """The table's entry; where `group` query heads do not fit into decode's tile, prefill's, heightened if need be."""
    table = CONFIGS[target]
    config = table[phase, element_size, max(32, padded_dim)]
    if group > config.block_m:
        config = table["prefill", element_size, max(32, padded_dim)]
    if group > config.block_m:
        config = dataclasses.replace(config, block_m=1 << (group - 1).bit_length())
    return config


def split_count(programs: int, independent: int, max_keys: int, config: LaunchConfig) -> int:
    """Pieces to cut each row's keys into: `independent` programs (rows times K/V heads) become about `programs`.

    A power of two from 1 to MAX_SPLITS, and no more than leaves each piece MIN_TILES_PER_SPLIT tiles of the longest
    sequence that the block table can describe: static in a captured graph.
    """
    wanted = -(-programs // max(1, independent))
    useful = max(1, max_keys // (config.tile * MIN_TILES_PER_SPLIT))
    splits = 1
    while splits < wanted and 2 * splits <= min(useful, MAX_SPLITS):
        splits *= 2
    return splits
