"""How much memory an engine takes: KV blocks on the device, blocks in host memory, the longest sequence.

Numbers first, tensors later: nothing is allocated here.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from ..attention.registry import kv_dtype
from ..config import EngineConfig
from ..device.cgroups import memory_limit
from ..device.headroom import Room
from ..errors import ModelError
from ..models.loader import LoadedModel

logger = logging.getLogger("cb_backend")

# On a CPU the pool shares the memory with all other processes: a quarter of what is free, and at most a laptop's share.
_CPU_SHARE = 0.25
_CPU_MOST = 4 * 2**30


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    num_blocks: int
    num_host_blocks: int
    max_model_len: int


def plan_memory(config: EngineConfig, loaded: LoadedModel, room: Room | None = None) -> MemoryPlan:
    """Sizes the pools.

    Args:
        room: what was measured on a GPU; None on a CPU.

    Raises:
        ModelError: the pool cannot hold one sequence, or is more than the GPU has left, or the swap space is larger
            than the machine's memory.
    """
    block_bytes = config.block_size * loaded.geometry.bytes_per_token(kv_dtype(config, loaded.dtype))
    wanted_len = config.max_model_len or loaded.max_model_len
    if config.max_model_len is not None and config.max_model_len > loaded.max_model_len:
        raise ModelError(
            f"max_model_len {config.max_model_len} is more than the {loaded.max_model_len} positions the model has"
        )
    most_useful = config.max_num_seqs * -(-wanted_len // config.block_size)
    if config.num_kv_blocks is not None:
        num_blocks = config.num_kv_blocks
    elif config.kv_cache_memory is not None:
        num_blocks = min(config.kv_cache_memory // block_bytes, most_useful)
    else:
        spare = _cpu_spare() if room is None else int(room.left * config.gpu_memory_utilization)
        num_blocks = min(spare // block_bytes - (room is not None), most_useful)  # a GPU holds the trash block too
    if num_blocks < 1:
        where, remedy = "", "free memory, or set kv_cache_memory, a smaller block_size or a smaller model"
        if room is not None:
            where = f" on the GPU ({room})"
            remedy = "lower max_num_batched_tokens or max_num_seqs, or use a smaller model or a larger GPU"
        raise ModelError(
            f"no memory is left for the KV pool{where}: one block of {config.block_size} tokens takes {block_bytes} "
            f"bytes; {remedy}"
        )
    if room is not None and (num_blocks + 1) * block_bytes > room.left:
        raise ModelError(
            f"a KV pool of {num_blocks} blocks takes {(num_blocks + 1) * block_bytes} bytes, more than the "
            f"{max(0, room.left)} that the GPU has left ({room}); lower num_kv_blocks or kv_cache_memory"
        )
    pool_tokens = num_blocks * config.block_size
    if config.max_model_len is not None and pool_tokens < config.max_model_len:
        raise ModelError(
            f"the KV pool holds {pool_tokens} tokens ({num_blocks} blocks), less than one sequence of max_model_len "
            f"{config.max_model_len}; raise num_kv_blocks or kv_cache_memory, or lower max_model_len"
        )
    max_model_len = min(wanted_len, pool_tokens)
    if max_model_len < wanted_len:
        logger.warning("the KV pool holds %d tokens: sequences are limited to that, not %d", pool_tokens, wanted_len)
    return MemoryPlan(num_blocks, _host_blocks(config, block_bytes, num_blocks), max_model_len)


def _host_blocks(config: EngineConfig, block_bytes: int, num_blocks: int) -> int:
    if config.preemption == "recompute":
        return 0
    total = _meminfo("MemTotal")
    if total and config.swap_space > total:
        raise ModelError(
            f"swap_space {config.swap_space} bytes is more than the machine's memory of {total} bytes; "
            "lower it (0 turns swapping off)"
        )
    # More host blocks than device blocks could only be filled by swapping every sequence out twice over.
    return min(config.swap_space // block_bytes, 4 * num_blocks)


def _cpu_spare() -> int:
    available = _meminfo("MemAvailable") or 4 * 2**30
    limit = memory_limit()
    return int(min(_CPU_SHARE * min(available, limit or available), _CPU_MOST))


def _meminfo(field: str) -> int | None:
    """Bytes of one line of /proc/meminfo, None where there is no such file."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
