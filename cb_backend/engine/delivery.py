"""From the engine thread to the readers on event loops.

What a reader has not taken yet is kept as one delta per choice, however slow the reader is: the engine never waits for
it, no text is lost, and the memory is that of the tokens themselves. A step may have news for hundreds of readers on
one loop, each with an event to write: only so many are woken in a turn of the loop, and probes are answered in between.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import replace
from itertools import islice

from ..request import Logprob, TokenDelta

# Readers woken in one turn of an event loop. One's work is some hundred microseconds, or milliseconds with
# log-probabilities of many alternatives.
WAKES_PER_TURN = 32

logger = logging.getLogger("cb_backend")


class DeltaBuffer:
    """The deltas of one request for the one reader of it. Used on the reader's event loop only."""

    def __init__(self) -> None:
        self._waiting: dict[int, _Joined] = {}  # by choice, the longest waiting first
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, delta: TokenDelta) -> None:
        """Keeps `delta`. Does not wake a reader that waits: see `wake`."""
        waiting = self._waiting.get(delta.index)
        if waiting is None:
            self._waiting[delta.index] = _Joined(delta)
        else:
            waiting.add(delta)

    def wake(self) -> None:
        """Lets a reader that waits take what was put."""
        self._filled.set()

    async def get(self) -> TokenDelta:
        """What came for one choice since the last time; waits until something did."""
        while not self._waiting:
            self._filled.clear()
            await self._filled.wait()
        return self._waiting.pop(next(iter(self._waiting))).delta()


class _Joined:
    """Several deltas of one choice as one."""

    def __init__(self, delta: TokenDelta) -> None:
        self._last = delta
        self._token_ids: list[int] = []
        self._logprobs: list[Logprob] = []

    def add(self, delta: TokenDelta) -> None:
        self._keep(self._last)
        cached_tokens = delta.cached_tokens or self._last.cached_tokens
        prompt_logprobs = delta.prompt_logprobs or self._last.prompt_logprobs
        timings = delta.timings or self._last.timings
        self._last = replace(delta, cached_tokens=cached_tokens, prompt_logprobs=prompt_logprobs, timings=timings)

    def delta(self) -> TokenDelta:
        if not self._token_ids:
            return self._last
        self._keep(self._last)
        return replace(self._last, token_ids=tuple(self._token_ids), logprobs=tuple(self._logprobs) or None)

    def _keep(self, delta: TokenDelta) -> None:
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs or ()


class LoopQueue:
    """From the engine thread to one event loop: all deltas of a step wake the loop once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._posts: list[tuple[DeltaBuffer, TokenDelta]] = []
        self._to_wake: dict[DeltaBuffer, None] = {}  # used on the loop only; in the order in which news came
        self._waking = False
        self._lock = threading.Lock()

    @property
    def is_closed(self) -> bool:
        return self._loop.is_closed()

    def post(self, reader: DeltaBuffer, delta: TokenDelta) -> None:
        with self._lock:
            self._posts.append((reader, delta))
            first = len(self._posts) == 1
        if first:
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is closed: nothing reads there any more
                logger.debug("a reader's event loop is closed")

    def _deliver(self) -> None:
        with self._lock:
            posts, self._posts = self._posts, []
        for reader, delta in posts:
            reader.put(delta)
            self._to_wake[reader] = None
        if not self._waking:
            self._wake()

    def _wake(self) -> None:
        """Wakes the next readers, and the others in the loop's next turns."""
        for reader in list(islice(self._to_wake, WAKES_PER_TURN)):
            del self._to_wake[reader]
            reader.wake()
        self._waking = bool(self._to_wake)
        if self._waking:
            self._loop.call_soon(self._wake)


class LoopQueues:
    """One queue per event loop on which requests are read."""

    def __init__(self) -> None:
        self._queues: dict[asyncio.AbstractEventLoop, LoopQueue] = {}

    def here(self) -> LoopQueue:
        """That of the running loop."""
        loop = asyncio.get_running_loop()
        queue = self._queues.get(loop)
        if queue is None:
            self._queues = {known: queue for known, queue in self._queues.items() if not queue.is_closed}
            queue = self._queues[loop] = LoopQueue(loop)
        return queue
