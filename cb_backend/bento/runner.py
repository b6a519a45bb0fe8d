"""Continuous batching as a BentoML legacy runner, in place of a transformers text-generation runner.

    - runner = bentoml.transformers.get("llm:latest").to_runner()
    + runner = cb_backend.to_runner("llm:latest")
      svc = bentoml.legacy.Service("chat", runners=[runner])

The call sites stay: `runner.async_run(prompt, max_new_tokens=20)`, `runner.generate.async_run(prompt, ...)`,
`runner.stream.async_stream(prompt, ...)`. BentoML runs the methods of a stock runner one at a time; this one hands all
of them to its engine at once. One runner process holds the model.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import bentoml
from bentoml.exceptions import BentoMLException, InvalidArgument, RemoteException

from ..client import EngineClient
from ..config import EngineConfig
from ..errors import RequestError
from ..openai.errors import GenerationFailed
from ..openai.generation import Deltas, opened
from ..request import RequestOutput
from ..text.output import OutputCollector
from .compat import LocalRunnerRef, RemoteRunnerClient, tracer_provider
from .devices import VisibleDevices
from .endpoints import parse, result
from .front import leave_front, watch_front
from .loading import Loading, configured
from .preflight import before_serving

if TYPE_CHECKING:
    from ..engine.engine import Engine

# A stream between BentoML's processes has no status: the only piece of a refused one begins like this.
_REFUSED = "\0refused: "


def to_runner(
    model: Any, tokenizer: str | None = None, name: str | None = None, **engine_config: Any
) -> ContinuousBatchingRunner:
    """
    Args:
        model: a tag of the model store, a directory or a hub id; a `BentoModel` or `HuggingFaceModel`.
        tokenizer: where the tokenizer is, if not beside the model.
        name: of the runner; default: made from the model's name.
        engine_config: fields of `EngineConfig`; `CB_*` environment variables win over them.

    Raises:
        ConfigError: a field of the configuration is bad.
        BentoMLException: this is `bentoml serve`, and this machine cannot serve (preflight.py).
    """
    before_serving()  # a legacy service has no hook for it
    if tokenizer is not None:
        engine_config["tokenizer"] = tokenizer
    config = configured(model, engine_config)
    return ContinuousBatchingRunner(config, name or _runner_name(config.model))


def _runner_name(reference: str) -> str:
    """The last part of a path or id, without a version, in the letters that BentoML allows."""
    last = reference.rstrip("/").rsplit("/", 1)[-1].split(":")[0]
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in last.lower()).strip("-_.") or "llm"


class ContinuousBatchingRunnable(bentoml.legacy.Runnable):
    """The methods that a service calls, in the runner's process."""

    SUPPORTED_RESOURCES = ("nvidia.com/gpu", "cpu")
    # Without this, BentoML starts a process with a model of its own for each core.
    SUPPORTS_CPU_MULTI_THREADING = True

    def __init__(self, config: dict[str, Any]) -> None:
        def make() -> Engine:
            from ..engine.engine import Engine
            from ..telemetry import follow_bentoml, service

            follow_bentoml()
            engine = Engine(EngineConfig(**config))
            engine.observe = partial(service, provider=tracer_provider())
            return engine

        self.loading = Loading(make)

    @bentoml.legacy.Runnable.method(batchable=False)
    async def __call__(self, prompt: str | list[str], **fields: Any) -> list[Any]:
        """What a transformers pipeline returns: `[{"generated_text": prompt + completion}, ...]`.

        A list of prompts gives a list of such lists. `max_new_tokens`, `num_return_sequences` and `do_sample=False` are
        understood; every other field is one of `generate`.
        """
        known = _from_transformers(fields)
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        outputs = await asyncio.gather(*(self._whole(one, known) for one in prompts))
        answers = [
            [{"generated_text": one + choice.text} for choice in output.choices or (output,)]
            for one, output in zip(prompts, outputs, strict=True)
        ]
        return answers[0] if isinstance(prompt, str) else answers

    @bentoml.legacy.Runnable.method(batchable=False)
    async def generate(self, prompt: str | list[int], **fields: Any) -> dict[str, Any]:
        """The result as in endpoints.py. Fields: those of `/v1/completions`."""
        return result(await self._whole(prompt, fields))

    @bentoml.legacy.Runnable.method(batchable=False)
    async def stream(self, prompt: str | list[int], **fields: Any) -> AsyncGenerator[str, None]:
        """The completion's text as it comes. A failure breaks the stream; leaving it ends the request."""
        try:
            if fields.get("n") not in (None, 1):
                raise InvalidArgument("'n': a stream of text has one choice")
            async with self._opened(prompt, fields, stream=True) as deltas:
                async for _choice, delta in deltas:
                    if delta.text:
                        yield delta.text
        except InvalidArgument as error:
            yield f"{_REFUSED}{error}"

    async def _whole(self, prompt: str | list[int], fields: dict[str, Any]) -> RequestOutput:
        outputs = OutputCollector()
        async with self._opened(prompt, fields) as deltas:
            async for choice, delta in deltas:
                outputs.add(choice, delta)
        return outputs.result()

    @asynccontextmanager
    async def _opened(
        self, prompt: str | list[int], fields: dict[str, Any], *, stream: bool = False
    ) -> AsyncIterator[Deltas]:
        """
        Raises:
            InvalidArgument: a field is wrong.
            BentoMLException: the request cannot be served, or ended without a result.
        """
        if not self.loading.is_ready:
            await asyncio.to_thread(self.loading.wait)
        try:
            engine: EngineClient = self.loading.ready_engine()
            call = parse({"prompt": prompt, **fields}, engine.model_name)
            async with opened(engine, call, stream=stream) as (_generation, deltas):
                yield deltas
        except GenerationFailed as error:
            raise BentoMLException(str(error)) from None
        except RequestError as error:
            self.loading.count_refusal(error)
            if error.status == 400:
                raise InvalidArgument(str(error)) from None
            raise BentoMLException(str(error)) from None


def _from_transformers(fields: dict[str, Any]) -> dict[str, Any]:
    """A pipeline's words for our fields."""
    fields = dict(fields)
    for theirs, ours in (("max_new_tokens", "max_tokens"), ("num_return_sequences", "n")):
        if theirs in fields:
            fields[ours] = fields.pop(theirs)
    if fields.pop("do_sample", True) is False:
        fields["temperature"] = 0.0
    return fields


class _Handle(LocalRunnerRef):
    """Runs the runnable's coroutines as they come, where BentoML's own would run them one after another on a thread."""

    def close(self) -> None:
        runnable: ContinuousBatchingRunnable = self._runnable
        runnable.loading.close()

    async def is_ready(self, timeout: int) -> bool:
        runnable: ContinuousBatchingRunnable = self._runnable
        return runnable.loading.is_ready

    def run_method(self, __bentoml_method: Any, *args: Any, **kwargs: Any) -> Any:
        """For `runner.run` in a script, which has no event loop."""
        return asyncio.run(getattr(self._runnable, __bentoml_method.name)(*args, **kwargs))

    async def async_run_method(self, __bentoml_method: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(self._runnable, __bentoml_method.name)
        if inspect.iscoroutinefunction(method):
            return await method(*args, **kwargs)
        return await super().async_run_method(__bentoml_method, *args, **kwargs)


class _RemoteHandle(RemoteRunnerClient):
    """The service's end: a refused request is `InvalidArgument` there too, so that its client gets a 400."""

    async def async_run_method(self, __bentoml_method: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super().async_run_method(__bentoml_method, *args, **kwargs)
        except RemoteException as error:
            refused = re.search(r"\[400\] (.*)", str(error), re.DOTALL)
            if refused is None:
                raise
            raise InvalidArgument(refused[1]) from None

    async def async_stream_method(self, __bentoml_method: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[str, None]:
        async with aclosing(super().async_stream_method(__bentoml_method, *args, **kwargs)) as pieces:
            async for piece in pieces:
                if piece.startswith(_REFUSED):
                    rest = [more async for more in pieces]
                    raise InvalidArgument("".join((piece.removeprefix(_REFUSED), *rest)))
                yield piece


class ContinuousBatchingRunner(bentoml.legacy.Runner):
    """A `bentoml.legacy.Runner` whose process holds one engine. Made by `to_runner`."""

    def __init__(self, config: EngineConfig, name: str) -> None:
        super().__init__(
            ContinuousBatchingRunnable,
            name=name,
            scheduling_strategy=VisibleDevices,
            runnable_init_params={"config": config.model_dump()},
            models=[],
        )

    def init_local(self, quiet: bool = False) -> None:
        """Starts the engine in this process; BentoML calls it in the runner's."""
        self._set_handle(_Handle)

    def init_client(self, handle_class: Any = None, *args: Any, **kwargs: Any) -> None:
        """Connects to the runner's process; BentoML calls it in the service's."""
        super().init_client(handle_class or _RemoteHandle, *args, **kwargs)
        watch_front()

    def destroy(self) -> None:
        """Ends every request and stops the engine, or ends the connection to it."""
        if isinstance(self._runner_handle, _Handle):
            self._runner_handle.close()
        elif isinstance(self._runner_handle, _RemoteHandle):
            leave_front()
        super().destroy()
