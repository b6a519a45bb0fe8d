"""Continuous batching as a BentoML service: a mixin for a service class, and a factory for `bentoml.depends`.

    @bentoml.asgi_app(cb_backend.openai_app(), path="/v1")
    @bentoml.service(resources={"gpu": 1}, traffic={"timeout": 300})
    class LLM(cb_backend.ContinuousBatching):
        model = bentoml.models.BentoModel("smollm2-135m-instruct:latest")
        engine_config = {"max_num_seqs": 64}

One worker holds one engine; scale by replicas. `/readyz` is 503 until the model is loaded, `/livez` is 503 once loading
failed or the engine thread died.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ClassVar

import bentoml
from bentoml.exceptions import BentoMLException

from ..client import EngineClient
from ..errors import RequestError
from ..models.source import resolve_model
from ..openai.connection import Receive, while_connected
from ..openai.errors import ClientLeft, GenerationFailed, error_of
from ..openai.generation import Deltas, opened
from ..openai.rendering import Generation
from ..request import RequestOutput
from ..text.output import OutputCollector
from . import endpoints
from .compat import end_timers_with_their_requests, guard_services, tracer_provider
from .connections import keep_connections
from .dependency import STREAMS, repair_proxies
from .draining import drain_on_sigterm
from .guard import Guard, GuardSettings
from .loading import Loading, configured
from .preflight import before_serving
from .timeouts import too_late

if TYPE_CHECKING:
    from ..engine.engine import Engine

logger = logging.getLogger("cb_backend")


class ContinuousBatching:
    """Mixin of a service class. Undecorated: `@bentoml.service` goes on the class that inherits it.

    Attributes:
        model: a directory, a tag of the model store, a hub id, or a `BentoModel` or `HuggingFaceModel`.
        engine_config: fields of `EngineConfig`. `CB_*` environment variables win over both.
    """

    model: ClassVar[Any] = None
    engine_config: ClassVar[Mapping[str, Any]] = {}
    _loading: Loading | None = None
    _keeping: asyncio.Task[None] | None = None  # asyncio itself keeps no reference to a task

    # -- life -------------------------------------------------------------------------------------------------------

    @bentoml.on_deployment
    def check_the_machine() -> None:
        """Ends `bentoml serve` with one line where it could not serve; BentoML calls this static method once."""
        before_serving()

    @bentoml.on_startup
    async def start_loading(self) -> None:
        """Begins to load the model, once; returns at once."""
        end_timers_with_their_requests(too_late)
        self._keeping = keep_connections()
        loading = self._start()
        drain_on_sigterm(loading.drain, lambda: loading.is_idle, loading.close)

    def _start(self) -> Loading:
        if self._loading is None:
            self._loading = Loading(self._make_engine)
        return self._loading

    def _make_engine(self) -> Engine:
        # The class attribute itself: looked up through the instance, BentoML would resolve it to a directory.
        config = configured(inspect.getattr_static(type(self), "model"), self.engine_config)
        # A wrong name is told before torch is imported, which takes seconds.
        resolve_model(config.model, config.tokenizer)
        from ..engine.engine import Engine
        from ..telemetry import follow_bentoml, service

        follow_bentoml()
        engine = Engine(config)
        engine.observe = partial(service, provider=tracer_provider())
        return engine

    @bentoml.on_shutdown
    async def stop_engine(self) -> None:
        """Ends unfinished requests with an error event and stops the engine."""
        if self._loading is not None:
            await asyncio.to_thread(self._loading.close)

    def __is_ready__(self) -> bool:
        return self._loading is not None and self._loading.is_ready

    def __is_alive__(self) -> bool:
        return self._loading is None or self._loading.is_alive

    def ready_engine(self) -> Engine:
        """
        Raises:
            RequestError: 503, the model is not loaded (yet).
        """
        return self._start().ready_engine()

    # -- endpoints --------------------------------------------------------------------------------------------------

    @bentoml.api(input_spec=endpoints.GenerateInput)
    async def generate(self, prompt: Any, *, ctx: bentoml.Context = None, **fields: Any) -> dict[str, Any]:
        """Completes a text or a list of token ids; the result is in endpoints.py. Fields: as in `/v1/completions`."""
        return await self._whole({**fields, "prompt": prompt}, ctx)

    @bentoml.api(input_spec=endpoints.ChatInput)
    async def chat(self, messages: list[Any], *, ctx: bentoml.Context = None, **fields: Any) -> dict[str, Any]:
        """Answers a chat. Fields: those of `/v1/chat/completions`."""
        return await self._whole({**fields, "messages": messages}, ctx)

    @bentoml.api(input_spec=endpoints.StreamInput)
    async def stream(
        self, prompt: Any = None, messages: Any = None, *, ctx: bentoml.Context = None, **fields: Any
    ) -> AsyncGenerator[str, None]:
        """Completes a prompt or answers a chat, as server-sent events (endpoints.py)."""
        await self._wait_without_probes(ctx)
        begun = False
        try:
            async with self._opened({**fields, "prompt": prompt, "messages": messages}, stream=True) as (_, deltas):
                # BentoML watches the connection only after the first event.
                _choice, delta = await while_connected(_receive_of(ctx), anext(deltas))
                begun = True
                yield endpoints.event(delta)
                async for _choice, delta in deltas:
                    if event := endpoints.event(delta):
                        yield event
        except ClientLeft:
            return
        except Exception as error:
            if not begun:
                if isinstance(error, (RequestError, GenerationFailed)):
                    raise self._refused(error, ctx) from None
                raise
            # BentoML would end the stream as if nothing had happened.
            if not isinstance(error, GenerationFailed):
                logger.exception("a stream failed")
            yield endpoints.error_event(error_of(error)[1])

    @bentoml.api
    async def stats(self) -> dict[str, float]:
        """The engine's plain numbers of this moment: running and waiting requests, KV blocks, steps, tokens."""
        return self.ready_engine().stats()

    # -- from fields to outputs -------------------------------------------------------------------------------------

    async def _whole(self, fields: dict[str, Any], ctx: Any) -> dict[str, Any]:
        await self._wait_without_probes(ctx)

        async def collect() -> RequestOutput:
            outputs = OutputCollector()
            async with self._opened(fields, stream=False) as (_, deltas):
                async for choice, delta in deltas:
                    outputs.add(choice, delta)
            return outputs.result()

        try:
            return endpoints.result(await while_connected(_receive_of(ctx), collect()))
        except ClientLeft:
            return {}
        except (RequestError, GenerationFailed) as error:
            raise self._refused(error, ctx) from None

    async def _wait_without_probes(self, ctx: Any) -> None:
        """A call within the process (a dependency that is not served on its own) waits for the model instead."""
        if ctx is None and not self.__is_ready__():
            await asyncio.to_thread(self._start().wait)

    def _opened(
        self, fields: Mapping[str, Any], *, stream: bool
    ) -> AbstractAsyncContextManager[tuple[Generation, Deltas]]:
        """
        Raises:
            RequestError: the fields are wrong or the engine is not ready.
        """
        engine: EngineClient = self.ready_engine()
        return opened(engine, endpoints.parse(fields, engine.model_name), stream=stream)

    def _refused(self, error: RequestError | GenerationFailed, ctx: Any) -> BentoMLException:
        """As BentoML reports it: the status, and below 500 the message."""
        if isinstance(error, RequestError):
            self._start().count_refusal(error)
        retry_after = getattr(error, "retry_after", None)
        if retry_after is not None and ctx is not None:
            ctx.response.headers["retry-after"] = str(max(1, math.ceil(retry_after)))
        if error.status >= 500:
            logger.warning("refused: %s", error)
        return BentoMLException(str(error), error_code=HTTPStatus(error.status))


guard_services(ContinuousBatching, Guard, lambda: replace(GuardSettings.from_environment(), origins=None))


def llm_service(
    model: Any, name: str = "llm", *, engine_config: Mapping[str, Any] | None = None, **options: Any
) -> Any:
    """A service with an engine, for other services to depend on; assign it at a module's top level.

        LLM = cb_backend.llm_service("smollm2-135m-instruct:latest", name="llm")

        @bentoml.service
        class Front:
            llm = bentoml.depends(LLM)

    Streams stay whole for an hour and more, and a front's client that leaves ends its request (see dependency.py).

    Args:
        model, engine_config: as in `ContinuousBatching`.
        name: unique among the services of a Bento.
        options: of `bentoml.service`; `traffic` and `runner_connection` are merged with what streams need.
    """
    repair_proxies()
    for option, needed in STREAMS.items():
        options[option] = {**needed, **options.get(option, {})}
    body = {"model": model, "engine_config": dict(engine_config or {}), "__doc__": ContinuousBatching.__doc__}
    service_class = type(name, (ContinuousBatching,), body)
    return bentoml.service(name=name, **options)(service_class)


def _receive_of(ctx: Any) -> Receive:
    """The connection of the HTTP request that is being served; a call within the process has none and never leaves."""
    if ctx is None:
        return _never
    receive: Receive = ctx.request.receive
    return receive


async def _never() -> Any:
    await asyncio.get_running_loop().create_future()
