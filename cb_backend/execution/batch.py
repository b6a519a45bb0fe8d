"""One step's sequences as flat tensors: all tokens in one row, no padding, no mask.

Made on the host from a `StepPlan` and copied to the device in one go; read by the attention backends through
`RaggedBatch`, which travels to them as a keyword argument of the model's forward.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..attention.batch import RaggedBatch
from ..device.transfer import to_device
from ..kv.storage import KVStorage
from ..request import Assignment


def build_batch(
    assignments: Sequence[Assignment],
    storage: KVStorage,
    device: torch.device,
    *,
    padded: int = 0,
    indices: Sequence[Sequence[int]] = (),
) -> RaggedBatch:
    """The ragged batch of these assignments, in their order. Ids still on the device are 0 here (see executor.py).

    Args:
        padded: add sequences of one row and no key until there are this many; their K/V go to the trash block.
        indices: lists of row numbers that the step needs on the device; they travel in the same transfer.
    """
    size = storage.block_size
    padding = max(0, padded - len(assignments))
    num_seqs = len(assignments) + padding
    q_lens = [item.num_tokens for item in assignments] + [1] * padding
    kv_lens = [item.start + item.num_tokens for item in assignments] + [0] * padding
    total = sum(q_lens)
    widest = max(-(-n // size) for n in kv_lens)

    ids = np.zeros(total, dtype=np.int64)
    positions = np.empty(total, dtype=np.int64)
    slots = np.empty(total, dtype=np.int64)
    tables = np.zeros((num_seqs, widest), dtype=np.int32)
    cu = np.zeros(num_seqs + 1, dtype=np.int32)
    np.cumsum(q_lens, out=cu[1:])
    row = 0
    for i, item in enumerate(assignments):
        request, start, n = item.request, item.start, item.num_tokens
        blocks = request.blocks[: -(-kv_lens[i] // size)]
        tables[i, : len(blocks)] = blocks
        if n == 1:
            if start < len(request.token_ids):
                ids[row] = request.token_ids[start]
            positions[row] = start
            slots[row] = blocks[start // size] * size + start % size
        else:
            known = request.token_ids[start : start + n]
            ids[row : row + len(known)] = known
            where = np.arange(start, start + n)
            positions[row : row + n] = where
            slots[row : row + n] = tables[i, where // size].astype(np.int64) * size + where % size
        row += n

    positions[row:] = 0
    slots[row:] = storage.trash_block * size

    arrays: list[np.ndarray] = [ids, positions, slots, tables, np.asarray(kv_lens, dtype=np.int32), cu]
    arrays += [np.asarray(each, dtype=np.int64) for each in indices]
    tensors = to_device(arrays, device)
    input_ids, places, slot_ids, block_tables, seq_lens, firsts = tensors[:6]
    return RaggedBatch(
        input_ids, places, slot_ids, block_tables, seq_lens, firsts, q_lens, kv_lens, storage, tensors[6:]
    )
