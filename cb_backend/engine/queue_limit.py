"""The bound of the queue: how many requests may wait, counted from before their text is tokenized.

A request takes a `QueueSlot` first of all and leaves it when it was sent to the engine thread, and is counted there
from then on. So a burst beyond the bound is refused before its texts are tokenized. Knows nothing of requests.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from ..errors import RequestError


class QueueLimit:
    """
    Args:
        bound: most requests that wait, those that hold a slot included.
        waiting: number of requests that were sent to the engine thread and wait.
        seconds_until_start: seconds until a request behind so many others may begin.
    """

    def __init__(self, bound: int, waiting: Callable[[], int], seconds_until_start: Callable[[int], float]) -> None:
        self._bound = bound
        self._waiting = waiting
        self._seconds_until_start = seconds_until_start
        self._num_held = 0
        self._lock = threading.Lock()

    @property
    def is_empty(self) -> bool:
        """No slot is held."""
        return self._num_held == 0

    def enter(self) -> QueueSlot:
        """
        Raises:
            RequestError: 429, the queue is full; it says when to come back.
        """
        with self._lock:
            waiting = self._waiting() + self._num_held
            if waiting < self._bound:
                self._num_held += 1
                return QueueSlot(self._left)
        seconds = max(1.0, math.ceil(self._seconds_until_start(waiting)))
        raise RequestError(
            f"the queue is full ({waiting} of {self._bound} wait); retry in {seconds:.0f} s",
            status=429,
            code="queue_full",
            retry_after=seconds,
        )

    def _left(self) -> None:
        with self._lock:
            self._num_held -= 1


class QueueSlot:
    """What a request holds until it is sent to the engine thread. A context manager; it may be left twice."""

    def __init__(self, on_leave: Callable[[], None]) -> None:
        self._on_leave: Callable[[], None] | None = on_leave

    def leave(self) -> None:
        left, self._on_leave = self._on_leave, None
        if left is not None:
            left()

    def __enter__(self) -> QueueSlot:
        return self

    def __exit__(self, *exc: object) -> None:
        self.leave()
