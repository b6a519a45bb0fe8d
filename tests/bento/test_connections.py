"""Connections that make no progress are ended, and a real server survives clients that only hold on to it."""

from __future__ import annotations

import json
import signal
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cb_backend.bento.connections import ConnectionKeeper, ConnectionLimits
from tests.bento.servers import Server, serving


@dataclass
class Transport:
    closing: bool = False
    buffered: int = 0
    reading: bool = True
    aborted: bool = False

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return self.buffered

    def is_reading(self) -> bool:
        return self.reading

    def get_extra_info(self, name: str) -> None:
        return None

    def abort(self) -> None:
        self.aborted = True


@dataclass
class Flow:
    write_paused: bool = False


@dataclass
class Cycle:
    response_complete: bool = False
    more_body: bool = False


@dataclass(eq=False)
class Connection:
    """What the keeper reads of one of uvicorn's connections."""

    cycle: Cycle | None = None
    transport: Transport = field(default_factory=Transport)
    flow: Flow = field(default_factory=Flow)
    pipeline: list[Any] = field(default_factory=list)
    timeout_keep_alive_task: object | None = None
    client: tuple[str, int] = ("127.0.0.1", 1)
    cb_received: int = 0


class Kept:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.now = 0.0
        self.keeper = ConnectionKeeper(lambda: [connection], ConnectionLimits(10, 20, 40), lambda: self.now)

    def ended_after(self, most: int = 100, each: Any = lambda second: None) -> int | None:
        """The second in which the connection is ended; None if it is not."""
        for second in range(most):
            self.now = float(second)
            each(second)
            self.keeper.check()
            if self.connection.transport.aborted:
                return second
        return None


def test_a_head_that_does_not_come_ends_the_connection() -> None:
    assert Kept(Connection()).ended_after() == 10


def test_an_idle_connection_between_two_requests_is_uvicorns_own_matter() -> None:
    connection = Connection(cycle=Cycle(response_complete=True), timeout_keep_alive_task=object())
    kept = Kept(connection)
    assert kept.ended_after() is None
    connection.timeout_keep_alive_task = None  # the next head begins, and does not end
    assert kept.ended_after() is not None


def test_a_body_that_stops_ends_the_connection_and_a_slow_one_does_not() -> None:
    connection = Connection(cycle=Cycle(more_body=True))
    assert Kept(connection).ended_after() == 20

    def comes(second: int) -> None:
        slow.cb_received += 1

    slow = Connection(cycle=Cycle(more_body=True))
    assert Kept(slow).ended_after(each=comes) is None


def test_an_answer_that_is_not_read_ends_the_connection() -> None:
    connection = Connection(Cycle(), Transport(buffered=65536), Flow(write_paused=True))
    assert Kept(connection).ended_after() == 40

    def reads(second: int) -> None:
        slow.transport.buffered = 65536 - second

    slow = Connection(Cycle(), Transport(buffered=65536), Flow(write_paused=True))
    assert Kept(slow).ended_after(each=reads) is None


def test_a_request_that_is_being_answered_is_left_alone() -> None:
    assert Kept(Connection(cycle=Cycle())).ended_after(1000) is None


# -- a real server ------------------------------------------------------------------------------------------------


def send(server: Server, data: bytes) -> socket.socket:
    sender = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
    sender.sendall(data)
    return sender


def post(**fields: Any) -> bytes:
    body = json.dumps({"model": "tiny", "prompt": "A", "temperature": 0, "ignore_eos": True, **fields}).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body


@pytest.mark.timeout(200)
def test_a_server_outlives_those_that_send_half_a_head_or_never_read(tiny_llama: Path, tmp_path: Path) -> None:
    options = ("--timeout-graceful-shutdown", "3")
    sizes = {"num_kv_blocks": 4000, "block_size": 16}
    with serving("integration.service:LLM", tmp_path, tiny_llama, options=options, **sizes) as server:
        halves = [send(server, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n") for _ in range(50)]
        greedy = [send(server, post(stream=True, max_tokens=900, n=20, logprobs=5)) for _ in range(2)]
        ahead = send(server, post(stream=True, max_tokens=900, n=20) + post(max_tokens=1))
        ahead.recv(100)
        before = server.post("/stats")["finished_abort"]
        ahead.close()  # a second request lies in the way of its end
        server.until(lambda: server.post("/stats")["finished_abort"] - before >= 20, "its request ended", seconds=30)
        assert server.status("/livez") == 200
        halves[0].settimeout(60)
        assert halves[0].recv(100) == b""  # ended by the server
        assert server.status("/livez") == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
        for one in (*halves, *greedy):
            one.close()
