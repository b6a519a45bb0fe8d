"""How fast this machine is now: tests of time compare with it instead of with seconds.

A limit in seconds is wrong on a slower machine and beside a busy neighbour. `pure_python()` times a fixed piece of
work, so that "at most 50 times that" means the same everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable


def seconds_of(work: Callable[[], object], runs: int = 1) -> float:
    """The least wall-clock seconds of `runs` runs."""
    best = float("inf")
    for _ in range(runs):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best


def pure_python() -> float:
    """Seconds of 100,000 additions and dictionary writes: 5 to 10 ms on a machine of today that is not busy."""

    def work() -> None:
        table: dict[int, int] = {}
        for number in range(100_000):
            table[number & 1023] = number + 1

    return seconds_of(work, runs=3)
