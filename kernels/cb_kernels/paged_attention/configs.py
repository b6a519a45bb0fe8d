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

_DECODE: _Table = {
    ("decode", 2, 32): LaunchConfig(16, 64, 4, 5),
    ("decode", 2, 64): LaunchConfig(16, 64, 4, 5),
    ("decode", 2, 128): LaunchConfig(16, 64, 4, 5),
    ("decode", 2, 256): LaunchConfig(16, 32, 4, 5),
    ("decode", 4, 32): LaunchConfig(16, 32, 4, 5),
    ("decode", 4, 64): LaunchConfig(16, 32, 4, 5),
    ("decode", 4, 128): LaunchConfig(16, 32, 4, 5),
    ("decode", 4, 256): LaunchConfig(16, 16, 4, 5),
}
_PREFILL: _Table = {
    ("prefill", 2, 32): LaunchConfig(128, 64, 8, 5),
    ("prefill", 2, 64): LaunchConfig(128, 64, 8, 5),
    ("prefill", 2, 128): LaunchConfig(128, 64, 8, 5),
    ("prefill", 2, 256): LaunchConfig(64, 32, 4, 5),
    ("prefill", 4, 32): LaunchConfig(32, 32, 4, 5),
    ("prefill", 4, 64): LaunchConfig(32, 32, 4, 5),
    ("prefill", 4, 128): LaunchConfig(32, 16, 4, 5),
    ("prefill", 4, 256): LaunchConfig(16, 16, 4, 5),
}

CONFIGS: dict[str, _Table] = {name: {**_DECODE, **_PREFILL} for name in ("sm_80", "sm_90", "sm_100", "gfx942")}


def select_config(target: str, phase: Phase, element_size: int, padded_dim: int, group: int) -> LaunchConfig:
    """The table's entry, its tile heightened where `group` query heads would not fit into it."""
    config = CONFIGS[target][phase, element_size, max(32, padded_dim)]
    if group > config.block_m:
        return dataclasses.replace(config, block_m=1 << (group - 1).bit_length())
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
