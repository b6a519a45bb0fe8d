"""Who waits, best rank first, and whose time runs out: two heaps that forget the ended lazily.

Adding, taking the head and leaving cost O(log n) whatever the length of the queue.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from ..request import Request, Status


class WaitingQueue:
    """Order: priority, then those that were preempted, then arrival, then choice."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, bool, int, int, Request]] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, request: Request) -> None:
        entry = (request.priority, not request.preempted, request.order, request.index, request)
        heapq.heappush(self._heap, entry)
        request.queued = True
        self._size += 1

    def head(self) -> Request | None:
        """The request to be served next; entries of ended ones are dropped here."""
        while self._heap:
            request = self._heap[0][-1]
            if request.status is not Status.FINISHED:
                return request
            heapq.heappop(self._heap)
        return None

    def pop(self) -> None:
        """Takes the head out."""
        heapq.heappop(self._heap)[-1].queued = False
        self._size -= 1

    def leave(self, request: Request) -> None:
        """`request` ended. Its entry, if it has one, is dropped when it comes to the head."""
        if request.queued:
            request.queued = False
            self._size -= 1


class Deadlines:
    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []  # (deadline, seq_id)

    def add(self, request: Request) -> None:
        if request.deadline is not None:
            heapq.heappush(self._heap, (request.deadline, request.seq_id))

    def passed(self, now: float) -> Iterator[int]:
        """The seq_id of every deadline at or before `now`; the request may have ended already."""
        while self._heap and self._heap[0][0] <= now:
            yield heapq.heappop(self._heap)[1]
