"""The tensors behind the block ids: one KV tensor on the device, one pool of blocks in host memory.

    device  [num_blocks + 1, num_layers, 2, num_kv_heads, block_size, head_dim]   (the last block is the trash block)
    host    [num_host_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]  (pinned where the device is CUDA)

A block is one contiguous run of bytes over all layers, so swapping a block is one copy. Knows tensors and ids, no
requests. Padding rows of static-shape batches write to the trash block, which is never read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from cb_kernels.cpu.memory import zeros

from .swap import CopyBlocks, CudaStreams, Swap


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """Shape of one token's K/V. `head_dim` and `num_kv_heads` are the same in every layer."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_heads: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * dtype.itemsize


class KVStorage:
    """Args:
    dtype: of K and V, which may be narrower than the model's.
    copy_blocks: a kernel that swaps many small blocks at once; None copies them one by one.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        copy_blocks: CopyBlocks | None = None,
    ) -> None:
        self.geometry = geometry
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.trash_block = num_blocks
        shape = (geometry.num_layers, 2, geometry.num_kv_heads, block_size, geometry.head_dim)
        # Zeroed: a never-written slot that a masked tile reads must not be NaN.
        self.device = _zeros((num_blocks + 1, *shape), dtype, device)
        # Empty: host pages are touched, and so taken, only when something is swapped.
        self.host = torch.empty(num_host_blocks, *shape, dtype=dtype, pin_memory=device.type == "cuda")
        streams = CudaStreams(device) if device.type == "cuda" else None
        self.swap = Swap(self.device, self.host, streams, copy_blocks)
        self.bytes_per_block = block_size * geometry.bytes_per_token(dtype)
        # [num_blocks + 1, num_kv_heads, block_size, head_dim] views, one K and one V per layer
        self.layers = [(self.device[:, i, 0], self.device[:, i, 1]) for i in range(geometry.num_layers)]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU the pages are taken from the system only when blocks come into use."""
    return zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
