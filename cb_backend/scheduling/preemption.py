"""Which request loses its memory when it runs short, and how it will come back. Reads requests, changes nothing.

The victim is of the worst priority. Within it, one that made progress since it last came back goes before one that did
not, so that no request is preempted twice in a row for nothing; then the one that is cheapest to bring back per block
freed. Swap or recompute follows from two constants that the executor measures at start-up; blocks that another request
also holds cost nothing to recompute, because the prefix index will still find them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ..kv.blocks import BlockPool, HostPool
from ..request import Request

Mode = Literal["swap", "recompute"]


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds to move one block in one direction, and to compute one token of prefill."""

    swap_seconds_per_block: float = 1.0
    recompute_seconds_per_token: float = 1.0

    def swap(self, blocks: int) -> float:
        return 2 * blocks * self.swap_seconds_per_block

    def recompute(self, tokens: int) -> float:
        return tokens * self.recompute_seconds_per_token


@dataclass(frozen=True, slots=True)
class Victim:
    request: Request
    mode: Mode


class Preemption:
    def __init__(
        self,
        pool: BlockPool,
        host: HostPool,
        mode: Literal["auto", "swap", "recompute"] = "auto",
        cost: CostModel | None = None,
    ) -> None:
        self.pool = pool
        self.host = host
        self.mode = mode
        self.cost = cost or CostModel()

    def choose(self, candidates: Iterable[Request]) -> Victim | None:
        """The best victim among `candidates`, or None where there is none."""
        best: tuple[tuple[int, bool, float, int], Victim] | None = None
        for request in candidates:
            freed = sum(1 for block in request.blocks if self.pool.refs(block) == 1)
            mode, seconds = self._way_back(request)
            key = (-request.priority, not request.progressed, seconds / max(freed, 0.5), -request.order)
            if best is None or key < best[0]:
                best = (key, Victim(request, mode))
        return None if best is None else best[1]

    def _way_back(self, request: Request) -> tuple[Mode, float]:
        used = self.pool.blocks_for(request.num_computed)
        shared = 0
        if self.pool.shares_under(request.salt):
            shared = sum(1 for block in request.blocks[:used] if self.pool.refs(block) > 1)
        recompute = self.cost.recompute(max(0, request.num_computed - shared * self.pool.block_size))
        swap = self.cost.swap(used)
        can_swap = 0 < used <= self.host.available
        if not can_swap or self.mode == "recompute" or (self.mode == "auto" and recompute <= swap):
            return "recompute", recompute
        return "swap", swap
