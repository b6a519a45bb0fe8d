"""How many standard deviations admission keeps free: as many as it takes for `risk` to come true, no more.

The forecast's quantile would be right if all of its assumptions were. Whether it is can be seen afterwards: when those
who ran after an admission have ended, it is known whether they alone would have overflowed the pool. Each such verdict
moves z: up by STEP * (1 - aim) after an overflow, down by STEP * aim after none, so that over time the share of
overflows approaches the aim, AIM * risk, whatever the lengths do (adaptive conformal inference: Gibbs and Candes,
NeurIPS 2021).

Only admissions at which it mattered are judged: those that a reserve at its upper bound would have refused. An idle
night is no reason to be bold in the morning.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

from ..kv.blocks import blocks_for
from ..request import Request

STEP = 0.5
AIM = 0.6  # of the risk: verdicts come late, and a promise is to be kept
LEAST = 0.0  # the mean is always kept free
MORE = 2.0  # and no more than this above where a right forecast would stay
_WATCHED = 1024  # members of open verdicts: bounds the cost of an ending


def most_blocks(request: Request, block_size: int) -> int:
    """Blocks that `request` holds at most, if it runs to max_tokens: its last token is never stored."""
    return blocks_for(request.prompt_len + max(0, request.max_tokens - 1), block_size)


class Member(NamedTuple):
    """Somebody who ran after an admission, and how many of its blocks are counted elsewhere."""

    request: Request
    shared: int


class _Verdict:
    """On one admission: would those who ran after it, alone, have overflowed the pool?"""

    __slots__ = ("common", "left", "worst")

    def __init__(self, left: dict[Request, int], common: int, worst: int) -> None:
        self.left = left  # who still runs, and how many of its blocks are counted elsewhere
        self.common = common  # blocks that several share, less those of `left` that are counted elsewhere
        self.worst = worst  # blocks that those who still run may need at most


class Reserve:
    """Attributes: `z`, the standard deviations to keep free, and `most`, its upper bound; `judged`, `overflowed`:
    verdicts so far; `watched`: members of verdicts that are open."""

    def __init__(self, risk: float, num_blocks: int, block_size: int) -> None:
        self.risk = risk
        self.z = NormalDist().inv_cdf(1.0 - risk)  # where a right forecast would stay
        self.most = self.z + MORE
        self.judged = self.overflowed = self.watched = 0
        self._least = min(LEAST, self.z)
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._open: list[_Verdict] = []

    def admitted(self, members: Sequence[Member], common: int) -> None:
        """Somebody joined, and now `members` run, who share `common` blocks. Not judged if too many are watched."""
        if self._open and self.watched + len(members) > _WATCHED:
            return
        private = common - sum(shared for _request, shared in members)
        worst = private + sum(most_blocks(request, self._block_size) for request, _shared in members)
        self._open.append(_Verdict(dict(members), private, worst))
        self.watched += len(members)

    def ended(self, request: Request) -> None:
        """`request` ended. Use only falls at endings, so this is where a peak shows."""
        concerned = [verdict for verdict in self._open if request in verdict.left]
        if not concerned:
            return
        held = {member: self._held(member) for member in set().union(*(verdict.left for verdict in concerned))}
        worst = most_blocks(request, self._block_size)
        for verdict in concerned:
            use = verdict.common + sum(map(held.__getitem__, verdict.left))
            shared = verdict.left.pop(request)
            verdict.common += shared
            verdict.worst -= worst - shared
            self.watched -= 1
            if use > self._num_blocks or verdict.worst <= self._num_blocks:
                self._judge(verdict, use > self._num_blocks)

    def _judge(self, verdict: _Verdict, overflowed: bool) -> None:
        self._open.remove(verdict)
        self.watched -= len(verdict.left)
        self.judged += 1
        self.overflowed += overflowed
        self.z = min(self.most, max(self._least, self.z + STEP * (overflowed - AIM * self.risk)))

    def _held(self, request: Request) -> int:
        """Blocks that it had in the step that is settled now: its newest token is not stored yet."""
        return blocks_for(max(request.prompt_len, request.num_known - 1), self._block_size)
