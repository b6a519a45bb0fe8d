"""The private parts of BentoML that this project uses, and every change it makes to BentoML at run time.

No other file imports `bentoml._internal`, `_bentoml_sdk`, `_bentoml_impl` or `simple_di`, so an upgrade of BentoML is
checked here. Written against BentoML 1.4.30 to 1.4.40.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextvars import Context
from functools import cache, wraps
from pathlib import Path
from typing import Any

from _bentoml_sdk import IODescriptor
from bentoml._internal.configuration.containers import BentoMLContainer
from bentoml._internal.models import ModelStore
from bentoml._internal.resource import get_resource, system_resources
from bentoml._internal.runner.runner_handle.local import LocalRunnerRef
from bentoml._internal.runner.runner_handle.remote import RemoteRunnerClient
from bentoml._internal.runner.strategy import DefaultStrategy
from starlette.middleware import Middleware

__all__ = [
    "DefaultStrategy",
    "IODescriptor",
    "LocalRunnerRef",
    "ModelStore",
    "RemoteRunnerClient",
    "close_streams_that_are_left",
    "describe_mounted_applications",
    "end_timers_with_their_requests",
    "get_resource",
    "guard_services",
    "http_address",
    "running_server",
    "store_path",
    "system_resources",
    "tracer_provider",
    "watch_connections",
]

JSON = dict[str, Any]


def store_path() -> Path:
    """Where BentoML keeps models: `$BENTOML_HOME/models`."""
    return Path(BentoMLContainer.model_store_dir.get())


def http_address() -> tuple[str, int]:
    """Host and port that `bentoml serve` listens on where its command line names none."""
    http = BentoMLContainer.http
    return http.host.get(), http.port.get()


def tracer_provider() -> Any:
    """The provider that BentoML builds from `tracing=`; it never becomes OpenTelemetry's global one."""
    return BentoMLContainer.tracer_provider.get()


def close_streams_that_are_left(on_open: Callable[[], None], on_close: Callable[[], None]) -> None:
    """From now on, for BentoML's proxies of services in this process. May be called again; the first call counts.

    The response of a stream is closed when its reader leaves; BentoML 1.4 leaves it open, and the service behind it
    goes on generating.

    Args:
        on_open: called when a proxy is made.
        on_close: called on another thread when a proxy is closed.
    """
    from _bentoml_impl.client.proxy2 import AsyncClient

    parse, make, close = AsyncClient._parse_stream_response, AsyncClient.__init__, AsyncClient.close
    if hasattr(parse, "__wrapped__"):
        return

    @wraps(parse)
    async def closing(self: Any, endpoint: Any, resp: Any) -> AsyncGenerator[Any, None]:
        try:
            async for data in parse(self, endpoint, resp):
                yield data
        finally:
            resp.close()

    @wraps(make)
    def opened(self: Any, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        on_open()

    @wraps(close)
    async def closed(self: Any) -> None:
        await close(self)
        await asyncio.to_thread(on_close)

    AsyncClient._parse_stream_response = closing
    AsyncClient.__init__ = opened
    AsyncClient.close = closed


class _WithMounted:
    """BentoML's description of a service and those of its mounted applications."""

    def __init__(self, own: Any, mounted: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        self._own = own
        self._mounted = mounted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def asdict(self) -> JSON:
        whole: JSON = self._own.asdict()
        for path, description in self._mounted:
            for inner, operations in description["paths"].items():
                whole["paths"][path.rstrip("/") + inner] = operations
            whole.setdefault("components", {}).setdefault("schemas", {}).update(description["components"]["schemas"])
        return whole


@cache
def describe_mounted_applications() -> None:
    """From now on `/docs.json` of BentoML services in this process also describes the mounted applications that have
    an `app.state.describe`; BentoML itself describes only FastAPI's.
    """
    from _bentoml_sdk.service import openapi

    original: Callable[..., Any] = openapi.generate_spec

    @wraps(original)
    def generate_spec(svc: Any, **options: Any) -> Any:
        own = original(svc, **options)
        mounted = [
            (path.removeprefix(svc.path_prefix or ""), app.state.describe())
            for app, path, _ in svc.mount_apps
            if hasattr(getattr(app, "state", None), "describe")
        ]
        return _WithMounted(own, mounted) if mounted else own

    openapi.generate_spec = generate_spec


@cache
def end_timers_with_their_requests(too_late: Callable[[Any, float], Any]) -> None:
    """From now on the timer of `traffic.timeout` ends with its request. Applies to all services in this process.

    BentoML 1.4 leaves it running, and with it the request's context and span: 5 KB each for `traffic.timeout` seconds,
    260 MB at 160 requests per second and 300 seconds.

    Args:
        too_late: from the ASGI scope and the seconds to the ASGI response of a request that has sent nothing by then.
    """
    from bentoml._internal.server.http.traffic import TimeoutMiddleware

    async def call(self: Any, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        begun = expired = False

        async def sending(message: Any) -> None:
            nonlocal begun
            begun = True
            await send(message)

        def expire() -> None:
            nonlocal expired
            expired = not begun and task.cancel()

        task = asyncio.ensure_future(self.app(scope, receive, sending))
        # An empty context: the timer keeps its own until it is taken out of the loop's heap, also when cancelled.
        timer = asyncio.get_running_loop().call_later(self.timeout, expire, context=Context())
        try:
            await task
        except asyncio.CancelledError:
            if not expired or begun:
                raise
            await too_late(scope, self.timeout)(scope, receive, send)
        finally:
            timer.cancel()

    TimeoutMiddleware.__call__ = call


def guard_services(base: type, guard: Any, origins_are_checked: Callable[[], Any]) -> None:
    """From now on the outermost ASGI layer of every service whose class inherits from `base` is `guard`.

    Args:
        guard: an ASGI middleware; made with no further arguments.
        origins_are_checked: called to make the guard's `settings` where BentoML's own CORS is on.
    """
    from _bentoml_impl.server.app import ServiceAppFactory

    original = ServiceAppFactory.middlewares.fget

    def middlewares(self: Any) -> list[Middleware]:
        found: list[Middleware] = original(self)
        if issubclass(self.service.inner, base) and not any(layer.cls is guard for layer in found):
            options = {"settings": origins_are_checked()} if self.enable_access_control else {}
            found.insert(0, Middleware(guard, **options))
        return found

    ServiceAppFactory.middlewares = property(middlewares)


def running_server() -> Any:
    """The uvicorn server that runs in this thread, found by its signal handler; None where there is none."""
    server = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return server if hasattr(getattr(server, "server_state", None), "connections") else None


@cache
def watch_connections() -> None:
    """From now on uvicorn's connections count the bytes of bodies that came, as `cb_received`, and a lost connection
    is told to the request that is being answered on it.

    uvicorn tells only the one that came last: with a second request sent ahead, the first never hears of it.
    """
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    protocol: Any = HttpToolsProtocol
    start, lost, body_came = protocol._start_asgi_task, protocol.connection_lost, protocol.on_body

    @wraps(start)
    def starting(self: Any, cycle: Any, app: Any) -> None:
        self.cb_answered = cycle
        start(self, cycle, app)

    @wraps(lost)
    def losing(self: Any, error: Exception | None) -> None:
        lost(self, error)
        cycle = getattr(self, "cb_answered", None)
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()

    @wraps(body_came)
    def counting(self: Any, body: bytes) -> None:
        self.cb_received += len(body)
        body_came(self, body)

    protocol.cb_received = 0
    protocol._start_asgi_task = starting
    protocol.connection_lost = losing
    protocol.on_body = counting
