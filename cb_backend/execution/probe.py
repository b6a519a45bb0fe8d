"""Made-up sequences for what an engine measures and checks before its first request."""

from __future__ import annotations

from collections.abc import Sequence

from ..kv.storage import KVStorage
from ..params import SamplingParams
from ..request import Assignment, Request, Timings

_STRIDE = 7919  # a prime: neighbouring tokens differ, and all of a vocabulary comes up


def probe_request(token_ids: Sequence[int], **params: object) -> Request:
    """A request that nobody waits for."""
    sampling = SamplingParams.parse(params)
    return Request(
        "probe", len(token_ids), list(token_ids), sampling, 1, frozenset(), 0, Timings(0.0), lambda delta: None
    )


def probe(num_tokens: int, storage: KVStorage, vocab_size: int, longest: int | None = None) -> list[Assignment]:
    """Prompts of `num_tokens` varied tokens in all, none longer than `longest`, over the first blocks of the pool.

    A sequence takes whole blocks, so `longest` should be a multiple of the block size, or the pool larger.
    """
    assignments: list[Assignment] = []
    first_block = start = 0
    while start < num_tokens:
        length = min(num_tokens - start, longest or num_tokens)
        request = probe_request([i * _STRIDE % vocab_size for i in range(start, start + length)])
        blocks = -(-length // storage.block_size)
        request.blocks = list(range(first_block, first_block + blocks))
        assignments.append(Assignment(request, 0, length, False))
        start += length
        first_block += blocks
    return assignments


def probe_blocks(num_tokens: int, block_size: int, longest: int) -> int:
    """Blocks that `probe` needs."""
    whole, rest = divmod(num_tokens, min(longest, num_tokens))
    return whole * -(-min(longest, num_tokens) // block_size) + -(-rest // block_size)
