"""The published past-future admission, written anew from its description, to compare with (benchmark only).

Gong et al., "Past-Future Scheduler for LLM Serving under SLA Guarantees", ASPLOS 2025, as LightLLM runs it: final
lengths are drawn from the last 200 finished ones (for a running request from those above its length so far, its
max_tokens included, between two neighbours by linear interpolation); the peak over the future of a few such draws,
the greatest of them, must fit into 95 % of the pool.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence

import numpy as np

from cb_backend.request import Request

WINDOW, RESERVE = 200, 0.05


class PastFuture:
    """Implements `AdmissionPolicy`; `first_guess`: the output length assumed before anything is known."""

    def __init__(self, num_blocks: int, block_size: int, first_guess: int, seed: int = 0) -> None:
        self._tokens = num_blocks * block_size
        self._history: deque[int] = deque([first_guess] * (WINDOW // 2), maxlen=WINDOW)
        self._rng = random.Random(seed)
        self._draws: list[list[tuple[int, int]]] = []  # per draw: (tokens now, tokens to come) of each request

    def begin(self, running: Sequence[Request]) -> None:
        history = sorted(self._history)
        number = min(5, 200 // max(1, len(running)) + 1)
        self._draws = [[(r.num_known, self._left(r, history)) for r in running] for _ in range(number)]

    def admits(self, candidate: Request, new_blocks: int, shared_blocks: int) -> bool:
        new = (candidate.num_known, self._new(candidate))
        return max(_peak([*draw, new]) for draw in self._draws) < self._tokens * (1 - RESERVE)

    def add(self, candidate: Request, new_blocks: int) -> None:
        for draw in self._draws:
            draw.append((candidate.num_known, self._new(candidate)))

    def finished(self, request: Request) -> None:
        self._history.append(request.num_settled)

    def _new(self, candidate: Request) -> int:
        return max(1, self._rng.choice(self._history) - candidate.num_output)

    def _left(self, request: Request, history: list[int]) -> int:
        done = request.num_output
        lengths = [done, *history[bisect_right(history, done) :], max(done, request.max_tokens)]
        place = self._rng.random() * (len(lengths) - 1)
        low = int(place)
        return int(lengths[low] + (place - low) * (lengths[low + 1] - lengths[low])) - done


def _peak(sequences: list[tuple[int, int]]) -> int:
    """Most tokens held at once, if each grows by one a step: looked at where each ends, the longest first."""
    table = np.array(sorted(sequences, key=lambda each: -each[1]))
    return int((table[:, 0].cumsum() + table[:, 1] * np.arange(1, len(table) + 1)).max())
