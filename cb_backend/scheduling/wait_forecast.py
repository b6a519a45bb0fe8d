"""How long clients have to wait: what Retry-After and the refusal of unreachable deadlines are computed from.

`WaitForecaster` belongs to the engine thread, as the length curves do. What it gives is a frozen value that any thread
may compute with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .lengths import LengthCurves

_MOST_NEW = 32  # observations after which the mean length is computed again, at the latest


class WaitForecast(NamedTuple):
    """Numbers of one moment.

    Attributes:
        seconds_per_step: moving average.
        steps_per_end: steps until the next running request ends, in the mean.
        budget: most tokens of one step.
        shortest: tokens of the shortest known output by request class; classes that are not in it: 1.
    """

    seconds_per_step: float
    steps_per_end: float
    budget: int
    shortest: Mapping[str, int]

    def seconds_until_start(self, waiting_ahead: int) -> float:
        """When a request behind `waiting_ahead` others may be let in: what a 429 gives as Retry-After.

        Little's law: as many sequences as run now end per mean output length (in steps of one token each).
        """
        return (waiting_ahead + 1) * self.steps_per_end * self.seconds_per_step

    def seconds_until_finish(self, prompt_len: int, max_tokens: int, request_class: str, waiting_ahead: int) -> float:
        """A lower bound of the time to a request's end: what a deadline is refused for if it is earlier.

        Its own steps with the whole token budget for itself: its prefill in chunks of `budget` and behind one token
        of each request ahead, then one token a step to the shortest output that its class is known to have (1 token
        until enough is known, and never more than max_tokens).
        """
        shortest = min(max_tokens, self.shortest.get(request_class, 1))
        prefill = -(-(prompt_len + waiting_ahead) // self.budget)
        return (prefill + max(0, shortest - 1)) * self.seconds_per_step


class WaitForecaster:
    """Computes the mean output length again only after enough new observations: a step costs microseconds.

    Args:
        curves: output lengths so far; asking may bring their tables up to date.
        pool_tokens: the longest output that the KV pool could hold.
        budget: most tokens of one step.
    """

    def __init__(self, curves: LengthCurves, pool_tokens: int, budget: int) -> None:
        self._curves = curves
        self._pool_tokens = pool_tokens
        self._budget = budget
        self._mean_length = 1.0
        self._known_at: int | None = None  # observations when the mean was computed

    def forecast(self, num_running: int, seconds_per_step: float) -> WaitForecast:
        observed = self._curves.num_observed
        if self._known_at is None or observed - self._known_at >= min(_MOST_NEW, max(1, self._known_at // 16)):
            known = self._curves.effective_observations() >= 1.0
            self._mean_length = self._curves.remaining("", 0, self._pool_tokens) if known else 1.0
            self._known_at = observed
        return WaitForecast(
            seconds_per_step, self._mean_length / max(1, num_running), self._budget, self._curves.shortest_by_class()
        )
