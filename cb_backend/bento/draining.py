"""SIGTERM, gently: refuse what comes, finish what is there, and only then let the server stop.

BentoML's server stops to accept at once but keeps its socket, so that a client that connects during a drain hangs until
its end. Here the signal first makes the service unready: a new request gets 503 with Retry-After, probes see it, and
the streams go on. When none is left, or the time of `--timeout-graceful-shutdown` is over (then what is left is aborted
and its clients are told so), the server gets its signal. A second signal is the server's at once.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

logger = logging.getLogger("cb_backend")

_POLL_SECONDS = 0.05
_LAST_BYTES_SECONDS = 2
# Where `--timeout-graceful-shutdown` is not given: uvicorn itself would wait for ever, BentoML's supervisor for a day.
DEFAULT_GRACE_SECONDS = 30


def drain_on_sigterm(begin: Callable[[], None], is_idle: Callable[[], bool], abort: Callable[[], None]) -> bool:
    """Takes SIGTERM from a running uvicorn. False where there is none in this thread, and nothing was done.

    Args:
        begin: from now on, refuse.
        is_idle: whether nothing is left to finish.
        abort: ends what is left; called on another thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    stop = signal.getsignal(signal.SIGTERM)
    config = getattr(getattr(stop, "__self__", None), "config", None)
    if not callable(stop) or not hasattr(config, "timeout_graceful_shutdown"):
        return False
    loop = asyncio.get_running_loop()
    drain = _Drain(begin, is_idle, abort, config)

    def on_signal(number: int, frame: FrameType | None) -> None:
        if drain.begun:
            stop(number, frame)
        else:
            drain.begun = True
            loop.call_soon_threadsafe(drain.start, lambda: stop(number, frame))

    signal.signal(signal.SIGTERM, on_signal)
    return True


class _Drain:
    """`config`: uvicorn's, for its limit: what the drain leaves of it is the server's."""

    def __init__(
        self, begin: Callable[[], None], is_idle: Callable[[], bool], abort: Callable[[], None], config: Any
    ) -> None:
        self.begun = False
        self._begin = begin
        self._is_idle = is_idle
        self._abort = abort
        self._config = config
        self._task: asyncio.Task[Any] | None = None  # asyncio itself keeps no reference to a task

    def start(self, stop: Callable[[], Any]) -> None:
        self._begin()
        self._task = asyncio.ensure_future(self._run(stop))

    async def _run(self, stop: Callable[[], Any]) -> None:
        logger.info("asked to stop: requests are refused, those begun are finished")
        limit, began = self._config.timeout_graceful_shutdown, time.monotonic()
        limit = DEFAULT_GRACE_SECONDS if limit is None else limit
        try:
            await asyncio.wait_for(self._until_idle(), limit)
        except asyncio.TimeoutError:
            logger.warning("requests are unfinished after %s s: they are aborted", limit)
            await asyncio.to_thread(self._abort)
        finally:
            left = limit - (time.monotonic() - began)
            self._config.timeout_graceful_shutdown = max(_LAST_BYTES_SECONDS, round(left))
            stop()

    async def _until_idle(self) -> None:
        while not self._is_idle():
            await asyncio.sleep(_POLL_SECONDS)
