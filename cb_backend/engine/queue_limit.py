"""The bound of the queue: who may begin to wait, counted from before its text is tokenized.

A request takes a `Place` first of all and leaves it when the engine thread has been sent the request, which counts it
from then on. So a burst beyond the bound is refused before anybody tokenizes for it. Knows nothing of requests.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from ..errors import RequestError


class Entrance:
    """Args:
    bound: most requests that wait, those on their way included.
    waiting: how many the engine knows of.
    seconds_until_start: when one behind that many others may begin.
    """

    def __init__(self, bound: int, waiting: Callable[[], int], seconds_until_start: Callable[[int], float]) -> None:
        self._bound = bound
        self._waiting = waiting
        self._seconds_until_start = seconds_until_start
        self._on_their_way = 0
        self._lock = threading.Lock()

    @property
    def is_empty(self) -> bool:
        """Nobody is on the way."""
        return self._on_their_way == 0

    def enter(self) -> Place:
        """
        Raises:
            RequestError: 429, the queue is full; it says when to come back.
        """
        with self._lock:
            waiting = self._waiting() + self._on_their_way
            if waiting < self._bound:
                self._on_their_way += 1
                return Place(self._left)
        seconds = max(1.0, math.ceil(self._seconds_until_start(waiting)))
        raise RequestError(
            f"the queue is full ({waiting} of {self._bound} wait); retry in {seconds:.0f} s",
            status=429,
            code="queue_full",
            retry_after=seconds,
        )

    def _left(self) -> None:
        with self._lock:
            self._on_their_way -= 1


class Place:
    """What one request on its way holds. A context manager; leaving twice is leaving once."""

    def __init__(self, on_leave: Callable[[], None]) -> None:
        self._on_leave: Callable[[], None] | None = on_leave

    def leave(self) -> None:
        left, self._on_leave = self._on_leave, None
        if left is not None:
            left()

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *exc: object) -> None:
        self.leave()
