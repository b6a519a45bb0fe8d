"""One step's sequences as flat tensors: all tokens in one row, no padding, no mask.

Made on the host from a `StepPlan` and the block tables, and copied to the device in one go; read by the attention
backends through `RaggedBatch`, which travels to them as a keyword argument of the model's forward.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ..attention.batch import RaggedBatch
from ..device.transfer import to_device
from ..kv.storage import KVStorage
from ..scheduling.plan import ON_DEVICE, StepPlan


def build_batch(
    plan: StepPlan,
    tables: npt.NDArray[np.int32],
    storage: KVStorage,
    device: torch.device,
    *,
    padded: int = 0,
    indices: Sequence[npt.NDArray[np.int64]] = (),
) -> RaggedBatch:
    """The ragged batch of a plan's sequences, in their order. Ids still on the device are 0 here (see executor.py).

    Args:
        tables: [slots, blocks], the block table of each slot's sequence (execution/tables.py).
        padded: add sequences of one row and no key until there are this many; their K/V go to the trash block.
        indices: row numbers that the step needs on the device; they travel in the same transfer.
    """
    size = storage.block_size
    num_seqs, num_tokens = len(plan.slots), len(plan.token_ids)
    padding = max(0, padded - num_seqs)
    ends = plan.starts + plan.lengths
    q_lens = np.concatenate([plan.lengths, np.ones(padding, dtype=np.int64)])
    kv_lens = np.concatenate([ends, np.zeros(padding, dtype=np.int64)])
    cu = np.zeros(num_seqs + padding + 1, dtype=np.int32)
    np.cumsum(q_lens, out=cu[1:])

    block_tables = np.zeros((num_seqs + padding, max(1, -(-int(ends.max(initial=0)) // size))), dtype=np.int32)
    block_tables[:num_seqs] = tables[plan.slots, : block_tables.shape[1]]
    ids = np.zeros(num_tokens + padding, dtype=np.int64)
    ids[:num_tokens] = np.where(plan.token_ids == ON_DEVICE, 0, plan.token_ids)
    positions = np.zeros(num_tokens + padding, dtype=np.int64)
    slots = np.full(num_tokens + padding, storage.trash_block * size, dtype=np.int64)
    at = token_positions(plan)
    positions[:num_tokens] = at
    slots[:num_tokens] = tables[np.repeat(plan.slots, plan.lengths), at // size].astype(np.int64) * size + at % size

    tensors = to_device([ids, positions, slots, block_tables, kv_lens.astype(np.int32), cu, *indices], device)
    input_ids, places, slot_ids, block_table_rows, seq_lens, cu_seqlens = tensors[:6]
    return RaggedBatch(
        input_ids,
        places,
        slot_ids,
        block_table_rows,
        seq_lens,
        cu_seqlens,
        q_lens.tolist(),
        kv_lens.tolist(),
        storage,
        tensors[6:],
    )


def token_positions(plan: StepPlan) -> npt.NDArray[np.int64]:
    """[tokens]: the position of each token of a step in its sequence."""
    firsts = np.cumsum(plan.lengths) - plan.lengths
    positions: npt.NDArray[np.int64] = np.arange(len(plan.token_ids)) + np.repeat(plan.starts - firsts, plan.lengths)
    return positions


def written_blocks(plan: StepPlan, tables: npt.NDArray[np.int32], block_size: int) -> set[int]:
    """Device blocks that the step's computation writes."""
    blocks = tables[np.repeat(plan.slots, plan.lengths), token_positions(plan) // block_size]
    return set(np.unique(blocks).tolist())
