"""Ends connections that keep a place and do nothing: half a request's head, half a body, an answer that is not read.

uvicorn limits none of these. A few hundred such connections use up the process's file descriptors, and then probes are
not answered either; one that never reads keeps a stopping process alive. Looks at all connections once a second, so
what it does per request is nothing.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from .compat import running_server, watch_connections

logger = logging.getLogger("cb_backend")


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Seconds without progress after which a connection is ended.

    Attributes:
        head: from the connection's beginning, or its last answer, to the end of a request's head.
        body: between two pieces of a request's body.
        send: between two moments at which the client took something of an answer that waits to be sent.
    """

    head: float = 15.0
    body: float = 30.0
    send: float = 60.0


class ConnectionKeeper:
    """Args:
    connections: gives the protocol objects of uvicorn's open connections.
    clock: monotonic seconds.
    """

    def __init__(
        self,
        connections: Callable[[], Iterable[Any]],
        limits: ConnectionLimits = ConnectionLimits(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connections = connections
        self._limits = limits
        self._clock = clock
        self._seen: dict[Any, tuple[Any, float]] = {}  # connection -> (what it waits for, since when)

    async def run(self, pace: float = 1.0) -> None:
        while True:
            await asyncio.sleep(pace)
            self.check()

    def check(self) -> int:
        """Ends what has made no progress for too long; returns how many connections that were."""
        now, seen, ended = self._clock(), self._seen, 0
        self._seen = {}
        for connection in list(self._connections()):
            state = _state(connection)
            if state is None:
                continue
            before, since = seen.get(connection, (None, now))
            since = since if before == state else now
            self._seen[connection] = (state, since)
            if now - since >= getattr(self._limits, state[0]):
                _end(connection, state[0])
                ended += 1
        return ended


def _state(connection: Any) -> tuple[str, Any] | None:
    """What the connection waits for its client to do, and a value that changes when the client does some of it."""
    transport, cycle = connection.transport, getattr(connection, "cycle", None)
    if transport is None or transport.is_closing():
        # Closed by the server, with an answer still to be sent.
        return ("send", transport.get_write_buffer_size()) if transport is not None else None
    if connection.flow is not None and connection.flow.write_paused:
        return "send", transport.get_write_buffer_size()
    if getattr(connection, "pipeline", None) and _has_left(transport):
        transport.abort()  # reading is paused for the request that was sent ahead, so asyncio does not see it
        return None
    if cycle is None or cycle.response_complete:
        # Between two requests uvicorn's own timer of idle connections runs, until the next head begins.
        return None if connection.timeout_keep_alive_task is not None else ("head", id(cycle))
    received = getattr(connection, "cb_received", None)  # compat.watch_connections counts it
    if cycle.more_body and received is not None and transport.is_reading():
        return "body", (id(cycle), received)
    return None


def _has_left(transport: Any) -> bool:
    """Whether the client closed its side."""
    found = transport.get_extra_info("socket")
    if found is None:
        return False
    try:
        # A copy of the descriptor: asyncio's own socket object cannot be read from.
        with socket.socket(fileno=socket.dup(found.fileno())) as peek:
            peek.setblocking(False)
            # What was sent ahead may lie before the end; then the next look finds it.
            return peek.recv(1, socket.MSG_PEEK) == b""
    except (BlockingIOError, InterruptedError):
        return False
    except OSError:
        return True


def _end(connection: Any, what: str) -> None:
    client = connection.client
    logger.info("connection of %s ended: no progress (%s)", f"{client[0]}:{client[1]}" if client else "?", what)
    connection.transport.abort()


def keep_connections() -> asyncio.Task[None] | None:
    """Keeps the connections of the uvicorn server in this thread; None where there is none. Keep the task."""
    server = running_server()
    if server is None:
        return None
    watch_connections()
    return asyncio.ensure_future(ConnectionKeeper(lambda: server.server_state.connections).run())
