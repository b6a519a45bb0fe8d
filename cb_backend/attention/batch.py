"""One step's sequences as flat tensors: all tokens in one row, no padding, no mask.

Made by execution/batch.py; read by the attention backends, to which it travels as a keyword argument of the model's
forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..kv.storage import KVStorage


@dataclass(slots=True, eq=False)
class RaggedBatch:
    """S sequences with T query tokens in all; `q_lens[i]` of them belong to sequence i and end at key `kv_lens[i]`."""

    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slots: torch.Tensor  # [T] int64: block * block_size + offset where the token's K/V go
    block_tables: torch.Tensor  # [S, max_blocks] int32, padded with 0
    seq_lens: torch.Tensor  # [S] int32: keys that the last query row of each sequence sees
    cu_seqlens: torch.Tensor  # [S + 1] int32: first query row of each sequence
    q_lens: list[int]
    kv_lens: list[int]
    storage: KVStorage
    indices: Sequence[torch.Tensor] = ()  # int64 arrays that travelled along (see build_batch)
    scratch: dict[Any, Any] = field(default_factory=dict)  # what a backend makes once a step for all its layers

    @property
    def num_decodes(self) -> int:
        """Sequences at the front with one query token each."""
        return next((i for i, n in enumerate(self.q_lens) if n != 1), len(self.q_lens))
