"""Who may take memory: the forecast of the pool's use over the future, and the two policies that other systems have.

    forecast    admit while P(use t steps from now > pool) <= risk for every t, by the length curves
    worst_case  admit while prompt + max_tokens of all running requests fits
    prompt      admit whatever fits now

Looking at the peak over the future is the idea of LightLLM's past-future scheduler (Gong et al., ASPLOS 2025); moments
(forecast.py) take the place of its drawn lengths, so that the same state gives the same answer and the risk is a
number. Blocks that several requests share are counted once, and until all of them ended. Knows no clock and changes
no request.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import NamedTuple, Protocol

import numpy as np

from ..config import AdmissionConfig
from ..kv.blocks import blocks_for
from ..request import FinishReason, Request
from .forecast import Floats, Moments, Sequences, choose_horizons, forecast, overlap
from .lengths import NEVER_ENDS, Ints, LengthCurves
from .reserve import Member, Reserve, most_blocks

_ASK_AGAIN = 8  # rounds after which the same question about the same running set is calculated again


class AdmissionPolicy(Protocol):
    """What the scheduler asks before a request takes memory."""

    def begin(self, running: Sequence[Request]) -> None:
        """Starts a round of questions about this running set."""

    def admits(self, candidate: Request, new_blocks: int, shared_blocks: int) -> bool:
        """May `candidate` join? It would take `new_blocks` and share `shared_blocks` that others already hold."""

    def add(self, candidate: Request, new_blocks: int) -> None:
        """`candidate` joined: later questions of this round count it."""

    def finished(self, request: Request) -> None:
        """`request` ended: its length is an observation."""


class PoolUse(Protocol):
    """What admission reads of the block pool (kv/blocks.py)."""

    @property
    def num_used(self) -> int: ...

    def refs(self, block: int) -> int: ...


class _Asked(NamedTuple):
    """The last question, which is usually about the next to join."""

    candidate: Request
    moments: Moments
    contested: bool  # admitted, but not with the largest reserve


class _Refused:
    """The forecast's last no. While the same requests run they only take more, and what their getting on says about
    lengths is looked at from time to time."""

    def __init__(self, candidate: Request, running: Sequence[Request]) -> None:
        self._candidate = candidate
        self._running = list(running)
        self._left = _ASK_AGAIN

    def again(self, candidate: Request, running: Sequence[Request]) -> bool:
        """Whether the answer to this question is still no."""
        self._left -= 1
        return (
            self._left > 0
            and candidate is self._candidate
            and len(running) == len(self._running)
            and all(map(is_, running, self._running))
        )


class Admission:
    """The `AdmissionPolicy` that is served with. Without `pool`, running requests share nothing."""

    def __init__(
        self,
        config: AdmissionConfig,
        num_blocks: int,
        block_size: int,
        curves: LengthCurves,
        pool: PoolUse | None = None,
    ) -> None:
        self.policy = config.policy
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.curves = curves
        self.pool = pool
        self.reserve = Reserve(config.risk, num_blocks, block_size)
        self._running: Sequence[Request] = ()
        self._begun = False  # whether the sums below are those of `_running`
        self._refused: _Refused | None = None
        self._count = 0  # sequences counted in this round
        self._persistent = 0  # blocks shared by several of them
        self._reserved = 0  # worst_case: private blocks of all members at max_tokens
        self._horizons: Ints = np.zeros(1, dtype=np.int64)
        self._asked: _Asked | None = None
        self._moments = Moments(np.zeros((6, 1), dtype=np.float32))
        self._overlap: Floats | float = 1.0
        self._members: list[Member] = []  # who runs, with those that joined in this round

    # -- AdmissionPolicy --------------------------------------------------------------------------------------------

    def begin(self, running: Sequence[Request]) -> None:
        """Starts a round of questions about this running set."""
        self._running = running
        self._members = []
        self._count = len(running)
        self._asked = None
        self._begun = False

    def _sum_up(self, candidate: Request) -> None:
        """The sums of the round, made when first needed: in most rounds no request fits, or the answer is known.

        They are made again for a candidate that may go on for longer than was looked ahead.
        """
        if self.policy == "prompt":
            return
        left = candidate.max_tokens - candidate.num_output
        if self._begun and (self.policy == "worst_case" or left <= self._horizons[-1] + 1):
            return
        running = [member.request for member in self._members] if self._begun else self._running
        self._begun = True
        self._count = len(running)
        shared = self._shared_blocks(running)
        self._members = [Member(*pair) for pair in zip(running, shared, strict=True)]
        self._persistent = self._distinct(running, shared)
        if self.policy == "worst_case":
            self._reserved = sum(self._worst(r, own) for r, own in self._members)
        else:
            self._begin_forecast(running, shared, candidate.max_tokens, left)

    def admits(self, candidate: Request, new_blocks: int, shared_blocks: int) -> bool:
        """May `candidate` join? It would take `new_blocks` and share `shared_blocks` that others already hold."""
        if self._count == 0 or self.policy == "prompt":
            return new_blocks <= self.num_blocks
        if self._refused is not None and self._refused.again(candidate, self._running):
            return False
        self._sum_up(candidate)
        if self.policy == "worst_case":
            return self._persistent + self._reserved + self._worst(candidate, shared_blocks) <= self.num_blocks
        joined = self._sequences(candidate, new_blocks)
        together = self._moments.plus(joined)
        # Blocks shared with one request so far outlive it if the candidate does.
        inherited = max(0, shared_blocks - self._persistent) * (1.0 - self._moments.alive / self._count)
        lasting = self._persistent + inherited * np.minimum(joined.alive, 1.0)
        admitted = bool((together.quantile(self.reserve.z, self._overlap) + lasting).max() <= self.num_blocks)
        contested = admitted and bool(
            (together.quantile(self.reserve.most, self._overlap) + lasting).max() > self.num_blocks
        )
        self._asked = _Asked(candidate, joined, contested)
        self._refused = None if admitted else _Refused(candidate, self._running)
        return admitted

    def add(self, candidate: Request, new_blocks: int) -> None:
        """`candidate` joined: later questions of this round count it."""
        self._sum_up(candidate)
        self._count += 1
        if self.policy == "worst_case":
            self._reserved += self._worst(candidate, self._blocks(candidate.num_known) - new_blocks)
        elif self.policy == "forecast":
            asked = self._asked if self._asked is not None and self._asked.candidate is candidate else None
            joined = self._sequences(candidate, new_blocks) if asked is None else asked.moments
            self._moments = self._moments.plus(joined)
            self._members.append(Member(candidate, self._blocks(candidate.num_known) - new_blocks))
            if asked is not None and asked.contested:
                self.reserve.admitted(self._members, self._persistent)

    def finished(self, request: Request) -> None:
        """`request` ended: its length is an observation, a censored one unless it ended by itself."""
        self.reserve.ended(request)
        if self._row(request) == NEVER_ENDS:
            return
        by_itself = request.finish_reason is FinishReason.STOP
        self.curves.observe(request.request_class, request.num_settled, by_itself)

    # -- the parts of the sum ---------------------------------------------------------------------------------------

    def _blocks(self, num_tokens: int) -> int:
        return blocks_for(num_tokens, self.block_size)

    def _row(self, request: Request) -> int:
        if request.stop_ids or request.constraint is not None or request.params.stop:
            return self.curves.row(request.request_class)
        return NEVER_ENDS

    def _worst(self, request: Request, shared: int) -> int:
        """Blocks that `request` needs at most, without `shared` ones."""
        return most_blocks(request, self.block_size) - shared

    def _shared_blocks(self, running: Sequence[Request]) -> list[int]:
        """For each request, how many of its blocks others hold too: a beginning of its list, found by bisection."""
        pool = self.pool
        if pool is None or sum(len(request.blocks) for request in running) <= pool.num_used:
            return [0] * len(running)
        counts = []
        for request in running:
            low, high = 0, len(request.blocks)
            while low < high:
                middle = (low + high) // 2
                low, high = (middle + 1, high) if pool.refs(request.blocks[middle]) > 1 else (low, middle)
            counts.append(low)
        return counts

    def _distinct(self, running: Sequence[Request], shared: Sequence[int]) -> int:
        """Number of different shared blocks: what the pool uses beyond the private ones."""
        if self.pool is None or not any(shared):
            return 0
        private = sum(len(request.blocks) for request in running) - sum(shared)
        return max(0, min(self.pool.num_used - private, sum(shared)))

    def _begin_forecast(self, running: Sequence[Request], shared: Sequence[int], max_tokens: int, left: int) -> None:
        """Sums up `running`, looking as far ahead as they go on, or a candidate that has `left` of `max_tokens`."""
        row_of = self._row
        columns = [
            [len(r.token_ids) + r.num_in_flight for r in running],
            [r.prompt_len for r in running],
            [r.max_tokens for r in running],
            [row_of(r) for r in running],
            shared,
        ]
        known, prompt, most, rows, own = np.array(columns, dtype=np.int64).reshape(5, -1)
        sequences = Sequences(known, known - prompt, most - (known - prompt), rows, own)
        self.curves.include_running(rows, sequences.generated)
        typical = self.curves.remaining("", 0, max(max_tokens, int(most.max(initial=0))))
        self._horizons = choose_horizons(typical, np.append(sequences.left, left))
        self._overlap = overlap(sequences.generated, self._horizons)
        self._moments = forecast(sequences, self._horizons, self.curves, self.block_size)

    def _sequences(self, candidate: Request, new_blocks: int) -> Moments:
        """The candidate alone, as one sequence."""
        known = candidate.num_known
        generated = known - candidate.prompt_len
        shared = self._blocks(known) - new_blocks
        columns = [[known], [generated], [candidate.max_tokens - generated], [self._row(candidate)], [shared]]
        sequences = Sequences(*np.array(columns, dtype=np.int64))
        return forecast(sequences, self._horizons, self.curves, self.block_size)
