"""Fewer threads while other processes keep cores busy.

Threads that compute a step together wait for the last of them. On a core that another process shares, that is the one
the system has put aside for some milliseconds, over and over, and the others idle meanwhile: two threads beside one
busy process get less done than one. So the time that threads are kept from running is measured, a thread is given up
when that takes more than its share, and after a while all of them are tried again. Results do not depend on the number
of threads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

logger = logging.getLogger("cb_backend")

_WINDOW = 0.2  # seconds of computing that are judged together
# One thread of n less costs 1 / n of the speed; a thread kept back for a part of the time costs all of them that part.
# A little less than 1 / n pays already, as fewer threads also wait less for each other.
_WORTH_A_THREAD = 0.8
# Seconds with fewer threads before all are tried again; they double each time in vain.
_FIRST_HOLD, _LONGEST_HOLD = 1.0, 8.0


class SharedCores:
    """Sets the calling thread's number of threads by how its parallel steps went.

    Args:
        get_threads, set_threads: of the calling thread; torch's by default.
    """

    def __init__(
        self,
        get_threads: Callable[[], int] = torch.get_num_threads,
        set_threads: Callable[[int], None] = torch.set_num_threads,
    ) -> None:
        self._get_threads, self._set_threads = get_threads, set_threads
        self._all: int | None = None  # how many there were before any was given up
        self._computed = self._kept_back = 0.0
        self._hold, self._until = _FIRST_HOLD, 0.0
        self._trying = False
        self._told = False

    def saw(self, now: float, computed: float, kept_back: float) -> None:
        """Judges a step.

        Args:
            now: seconds of a monotonic clock.
            computed: seconds that it took.
            kept_back: those of them in which the thread that others hindered most did not run.
        """
        self._computed += computed
        self._kept_back += kept_back
        if self._computed < _WINDOW:
            return
        share = self._kept_back / self._computed
        self._computed = self._kept_back = 0.0
        threads = self._get_threads()
        if threads > 1 and share * threads > _WORTH_A_THREAD:
            self._give_one_up(now, threads)
        elif self._all is not None and now >= self._until:
            self._trying = True
            self._set_threads(self._all)
            self._all = None
        elif self._all is None:
            self._trying, self._hold = False, _FIRST_HOLD

    def _give_one_up(self, now: float, threads: int) -> None:
        if self._trying:
            self._trying, self._hold = False, min(2 * self._hold, _LONGEST_HOLD)
        self._all = self._all or threads
        self._until = now + self._hold
        self._set_threads(threads - 1)
        if not self._told:
            self._told = True
            logger.info("other processes keep cores busy: %d of %d threads for a while", threads - 1, self._all)
