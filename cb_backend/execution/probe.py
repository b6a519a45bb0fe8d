"""Made-up sequences for what an engine measures and checks before its first request."""

from __future__ import annotations

import numpy as np

from ..kv.storage import KVStorage
from ..params import SamplingParams
from ..request import Request, Timings
from ..sampling.batch import SamplingBatch, batch_of
from ..scheduling.plan import StepPlan, TableDelta

_STRIDE = 7919  # a prime: neighbouring tokens differ, and all of a vocabulary comes up


def probe_sampling(rows: int, **params: object) -> SamplingBatch:
    """Rows that sample alike, for requests that do not exist."""
    sampling = SamplingParams.parse(params)
    request = Request("probe", 1, [0], sampling, 1, frozenset(), 0, Timings(0.0), lambda delta: None, num_in_flight=1)
    return batch_of([request] * rows)


def probe(num_tokens: int, storage: KVStorage, vocab_size: int, longest: int | None = None) -> StepPlan:
    """Prompts of `num_tokens` varied tokens in all, none longer than `longest`, over the first blocks of the pool.

    A sequence takes whole blocks, so `longest` should be a multiple of the block size, or the pool larger.
    """
    longest = longest or num_tokens
    lengths = [min(longest, num_tokens - start) for start in range(0, num_tokens, longest)]
    tables: list[TableDelta] = []
    first_block = 0
    for slot, length in enumerate(lengths):
        blocks = -(-length // storage.block_size)
        tables.append(TableDelta(slot, 0, tuple(range(first_block, first_block + blocks))))
        first_block += blocks
    count = len(lengths)
    return StepPlan(
        0,
        tuple(range(count)),
        np.arange(count),
        np.zeros(count, dtype=np.int64),
        np.array(lengths, dtype=np.int64),
        np.zeros(count, dtype=np.bool_),
        np.arange(num_tokens) * _STRIDE % vocab_size,
        probe_sampling(0),
        tuple(tables),
    )


def probe_blocks(num_tokens: int, block_size: int, longest: int) -> int:
    """Blocks that `probe` needs."""
    whole, rest = divmod(num_tokens, min(longest, num_tokens))
    return whole * -(-min(longest, num_tokens) // block_size) + -(-rest // block_size)
