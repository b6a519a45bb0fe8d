"""Who waits, best rank first, and whose time runs out: two heaps that forget the ended lazily.

Adding, taking the head and leaving cost O(log n) amortized, whatever the length of the queue. The entry of an ended
request holds a few numbers and not the request, and at most as many ended as live ones stay.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from ..request import Request


class _LazyHeap:
    """Keys by rank, with an id each; of removed ids, at most as many entries stay as there are live ones."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, ...], int]] = []
        self._live: dict[int, tuple[float, ...]] = {}

    def __len__(self) -> int:
        return len(self._live)

    @property
    def num_entries(self) -> int:
        """Entries in memory, of removed ids too."""
        return len(self._heap)

    def push(self, key: tuple[float, ...], seq_id: int) -> None:
        self._live[seq_id] = key
        heapq.heappush(self._heap, (key, seq_id))

    def first(self) -> tuple[tuple[float, ...], int] | None:
        while self._heap:
            key, seq_id = self._heap[0]
            if self._live.get(seq_id) == key:
                return self._heap[0]
            heapq.heappop(self._heap)
        return None

    def remove(self, seq_id: int) -> None:
        """Takes `seq_id` out, if it is there."""
        if self._live.pop(seq_id, None) is not None and len(self._heap) > 2 * len(self._live):
            self._heap = [(key, live) for live, key in self._live.items()]
            heapq.heapify(self._heap)


class WaitingQueue:
    """Order: priority, then those that were preempted, then arrival, then choice."""

    def __init__(self) -> None:
        self._ranks = _LazyHeap()
        self._requests: dict[int, Request] = {}  # by seq_id

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_entries(self) -> int:
        """Entries in memory: at most twice as many as requests wait."""
        return self._ranks.num_entries

    def push(self, request: Request) -> None:
        self._requests[request.seq_id] = request
        self._ranks.push((request.priority, not request.preempted, request.order, request.index), request.seq_id)

    def head(self) -> Request | None:
        """The request to be served next."""
        first = self._ranks.first()
        return None if first is None else self._requests[first[1]]

    def pop(self) -> None:
        """Takes the head out."""
        head = self.head()
        if head is None:
            raise IndexError("no request waits")
        self.leave(head)

    def leave(self, request: Request) -> None:
        """`request` ended, or is served; it need not wait here."""
        if self._requests.pop(request.seq_id, None) is not None:
            self._ranks.remove(request.seq_id)


class Deadlines:
    """The unfinished requests that have a deadline."""

    def __init__(self) -> None:
        self._ranks = _LazyHeap()

    def __len__(self) -> int:
        return len(self._ranks)

    @property
    def num_entries(self) -> int:
        """Entries in memory: at most twice as many as requests have a deadline."""
        return self._ranks.num_entries

    def add(self, request: Request) -> None:
        if request.deadline is not None:
            self._ranks.push((request.deadline,), request.seq_id)

    def leave(self, request: Request) -> None:
        """`request` ended."""
        self._ranks.remove(request.seq_id)

    def passed(self, now: float) -> Iterator[int]:
        """The seq_id of every deadline at or before `now`."""
        while (first := self._ranks.first()) is not None and first[0][0] <= now:
            self._ranks.remove(first[1])
            yield first[1]
