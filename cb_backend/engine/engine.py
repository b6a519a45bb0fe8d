"""The public engine: checks and tokenizes requests, hands them to the engine thread, turns tokens into text.

    with Engine(EngineConfig(model="path/to/model")) as engine:
        outputs = engine.generate(["Once upon a time"], SamplingParams(max_tokens=16, temperature=0.0))

Everything here runs on the caller's thread or event loop. Knows nothing of HTTP or bentoml.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any

from ..client import GenerationOptions, OutputDelta, Prompt, QueueSlot
from ..config import EngineConfig
from ..errors import RequestError, shown
from ..params import SamplingParams, check_text
from ..request import Constraint, FinishReason, Request, RequestOutput, Sink, Timings, TokenDelta
from ..sampling.seeds import seed_of_choice
from ..telemetry import Telemetry, offline, own_caller, phase
from ..text.output import OutputCollector
from .build import Parts, build, needs_constraint
from .core import EngineCore
from .delivery import DeltaBuffer, LoopQueues
from .limits import check_options
from .messages import AbortMessage, AddMessage
from .queue_limit import QueueLimit
from .reader import Reader

logger = logging.getLogger("cb_backend")

# A prompt of more characters than this is tokenized off the event loop.
_TOKENIZE_INLINE = 20_000


class Engine:
    """One model, one KV pool, one engine thread.

    Args:
        config: or the fields of an `EngineConfig` as keywords: `Engine(model="...")`.
    """

    def __init__(self, config: EngineConfig | None = None, **fields: Any) -> None:
        self.config = config if config is not None else EngineConfig(**fields)
        self.observe: Callable[[Parts], Telemetry] = offline  # a service sets telemetry.service before the start
        self.telemetry: Telemetry | None = None
        self._parts: Parts | None = None
        self._arrivals = itertools.count()
        self._open_ids: set[str] = set()
        self._lock = threading.Lock()  # guards _open_ids and starting
        self._loop_queues = LoopQueues()
        self._queue_limit = QueueLimit(
            self.config.max_queue_size,
            lambda: self.core.num_waiting,
            lambda waiting: self.core.snapshot.forecast.seconds_until_start(waiting),
        )

    # -- life -------------------------------------------------------------------------------------------------------

    def start(self) -> Engine:
        """Loads the model and starts the engine thread; returns when requests can be served. May be called again.

        Raises:
            ModelError: the model cannot be found, loaded or served; the message says what to do.
        """
        with self._lock:
            if self._parts is None:
                parts = build(self.config)
                self.telemetry = self.observe(parts)
                self._parts = parts
                parts.core.start()
                parts.core.call(lambda: None, timeout=None)  # by then the thread has taken its measurements
        return self

    def close(self) -> None:
        """Aborts what is unfinished, stops the engine thread and frees the memory."""
        with self._lock:
            parts, self._parts = self._parts, None
        if parts is not None:
            if parts.core.stop():
                parts.save_state()
            else:
                logger.error("the engine thread did not end: the length curves are not saved")
            if self.telemetry is not None:
                self.telemetry.close()

    def __enter__(self) -> Engine:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def parts(self) -> Parts:
        if self._parts is None:
            raise RuntimeError("the engine is not started: use `with Engine(...)` or call start()")
        return self._parts

    @property
    def core(self) -> EngineCore:
        return self.parts.core

    @property
    def is_ready(self) -> bool:
        return self._parts is not None and self._parts.core.is_alive

    @property
    def is_alive(self) -> bool:
        """False once the engine thread died; true while it runs and before it was started."""
        return self._parts is None or self._parts.core.is_alive

    @property
    def is_idle(self) -> bool:
        """No request is open, whether on its way, waiting, running or unread."""
        return not self._open_ids and self._queue_limit.is_empty

    @property
    def tokenizer(self) -> Any:
        return self.parts.tokenizer

    @property
    def chat(self) -> Any:
        return self.parts.chat

    @property
    def model_name(self) -> str:
        return self.parts.model_name

    @property
    def max_model_len(self) -> int:
        return self.parts.max_model_len

    @property
    def vocab_size(self) -> int:
        return self.parts.vocab_size

    def stats(self) -> dict[str, float]:
        """Plain numbers of this moment and counts since the start; the source of the metrics."""
        return self.core.stats()

    # -- generating -------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Runs all prompts together and returns their outputs in order. Blocks the calling thread.

        Args:
            prompts: texts or lists of token ids, or a single one.
            params: one for all, or one per prompt; default: `SamplingParams()`.
            options: as for `stream`, for all prompts.

        Returns:
            One output per prompt; with `n > 1` it is the first choice and `choices` holds all of them.
        """
        self.start()
        batch = _as_batch(prompts)
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(batch)
        if len(each) != len(batch):
            raise ValueError(f"{len(batch)} prompts but {len(each)} sampling parameters")
        own = {name: options.pop(name) for name in ("request_id", "continues_prompt") if name in options}
        served = GenerationOptions(**options)
        deltas: queue.SimpleQueue[TokenDelta] = queue.SimpleQueue()
        readers: dict[str, Reader] = {}
        outputs: dict[str, OutputCollector] = {}
        try:
            for prompt, one in zip(batch, each, strict=True):
                with self._counting_refusals():
                    reader = self.submit(self._encode(prompt), one, deltas.put, served, **own)
                readers[reader.request_id] = reader
                outputs[reader.request_id] = OutputCollector()
            unfinished = set(readers)
            while unfinished:
                delta = deltas.get()
                reader = readers[delta.request_id]
                output = reader.feed(delta)
                if output is not None:
                    outputs[delta.request_id].add(output.index, output)
                if reader.done:
                    unfinished.discard(delta.request_id)
        finally:
            for reader in readers.values():
                reader.close()
        return [collector.result() for collector in outputs.values()]

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        request_class: str | None = None,
        salt: str | None = None,
        trace_context: Any = None,
        continues_prompt: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields cumulative outputs as their tokens come; the last one of each choice has a `finish_reason`.

        Closing the generator (or cancelling the task that reads it) ends the request in the engine.

        Args:
            priority, timeout, request_class, salt, trace_context, continues_prompt: see cb_backend/client.py.

        Raises:
            RequestError: before the first output, if the request cannot be served.
        """
        options = GenerationOptions(priority, timeout, request_class, salt, trace_context=trace_context)
        outputs = OutputCollector()
        deltas = self.open(
            prompt, params or SamplingParams(), options, request_id=request_id, continues_prompt=continues_prompt
        )
        async with aclosing(deltas):
            async for delta in deltas:
                outputs.add(delta.index, delta)
                yield outputs.output(delta.index)

    async def open(
        self,
        prompt: Prompt,
        params: SamplingParams,
        options: GenerationOptions = GenerationOptions(),  # noqa: B008 (it is frozen)
        *,
        request_id: str | None = None,
        continues_prompt: bool = False,
        slot: QueueSlot | None = None,
    ) -> AsyncGenerator[OutputDelta, None]:
        """`stream` in deltas, for front ends: see `EngineClient.open`."""
        arrival = time.monotonic()
        options = replace(options, trace_context=own_caller(options.trace_context))
        deltas, loop_queue = DeltaBuffer(), self._loop_queues.here()
        # First of all: what is refused costs no more than this.
        with self._counting_refusals(), slot or self.enter():
            token_ids = await self._encode_on_loop(prompt, options.trace_context)
            if sum(map(len, params.bad_words)) > _TOKENIZE_INLINE // 10:  # each is tokenized twice, on its own
                await asyncio.to_thread(self.parts.bad_word_ids, params)
            constraint = None
            if needs_constraint(params):
                with phase(options.trace_context, "compile grammar"):
                    constraint = await asyncio.to_thread(self.parts.compile_constraint, params)
            reader = self.submit(
                token_ids,
                params,
                lambda delta: loop_queue.post(deltas, delta),
                options,
                arrival=arrival,
                request_id=request_id,
                constraint=constraint,
                continues_prompt=continues_prompt,
            )
        try:
            while not reader.done:
                output = reader.feed(await deltas.get())
                if output is not None:
                    yield output
        finally:
            reader.close()

    def enter(self) -> QueueSlot:
        """A slot in the queue for a request whose prompt is yet to be made; it must be left, or given to `stream`.

        Raises:
            RequestError: 429, the queue is full.
        """
        return self._queue_limit.enter()

    def abort(self, request_id: str) -> None:
        """Ends a request: its reader gets what was generated, with reason `abort`. Unknown ids do nothing."""
        self.core.send(AbortMessage(request_id, FinishReason.ABORT))

    def count_refusal(self, error: RequestError) -> None:
        """Counts a request that was refused, here or by a reader of requests before it came here; once."""
        if self.telemetry is not None and not error.counted:
            error.counted = True
            self.telemetry.refused(error.code)

    # -- from a client's request to the engine's --------------------------------------------------------------------

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("this model has no tokenizer: send token ids", param="prompt")
            self.parts.limits.check_characters(prompt)
            token_ids: list[int] = self.tokenizer(check_text(prompt, "prompt"))["input_ids"]
            return token_ids
        if isinstance(prompt, bytes) or not isinstance(prompt, Iterable):
            raise RequestError(f"must be a text or token ids (got {shown(prompt)})", path=("prompt",))
        return list(prompt)

    async def _encode_on_loop(self, prompt: Prompt, trace_context: Any) -> list[int]:
        """The token ids; a long text is tokenized on another thread."""
        if not isinstance(prompt, str):
            return self._encode(prompt)
        with phase(trace_context, "tokenize"):
            if len(prompt) > _TOKENIZE_INLINE:
                return await asyncio.to_thread(self._encode, prompt)
            return self._encode(prompt)

    def submit(
        self,
        token_ids: list[int],
        params: SamplingParams,
        sink: Sink,
        options: GenerationOptions = GenerationOptions(),  # noqa: B008 (it is frozen)
        *,
        arrival: float | None = None,
        request_id: str | None = None,
        constraint: Constraint | None = None,
        continues_prompt: bool = False,
    ) -> Reader:
        """Checks a request and sends it to the engine thread, which gives its deltas to `sink`.

        Raises:
            RequestError: it cannot be served; nothing was changed.
        """
        parts, now = self.parts, time.monotonic()
        arrival = now if arrival is None else arrival
        max_tokens = parts.limits.check_prompt(token_ids, params)
        parts.limits.check_params(params)
        check_options(options, request_id)
        deadline = None if options.timeout is None else arrival + options.timeout
        if not parts.core.is_alive:
            raise RequestError("the engine has stopped", status=503, code="engine_stopped", retry_after=5.0)
        request_class = parts.check_class(options.request_class)
        parts.check_deadline(deadline, now, len(token_ids), max_tokens, request_class)
        order = next(self._arrivals)
        request_id = request_id or f"cb-{uuid.uuid4().hex}"
        trace_context = options.trace_context or own_caller(None)
        if constraint is None and needs_constraint(params):
            with phase(trace_context, "compile grammar"):
                constraint = parts.compile_constraint(params)
            now = time.monotonic()
        choices = [
            Request(
                request_id,
                len(token_ids),
                list(token_ids),
                params,
                max_tokens,
                parts.stop_ids(params),
                seed_of_choice(params.seed, self.config.seed, order, index),
                Timings(arrival, now),
                sink,
                index=index,
                priority=options.priority,
                order=order,
                deadline=deadline,
                request_class=request_class,
                salt=options.salt or "",
                bad_word_ids=parts.bad_word_ids(params),
                constraint=constraint if index == 0 or constraint is None else constraint.fork(),
                trace_context=trace_context,
            )
            for index in range(params.n)
        ]
        with self._lock:
            if request_id in self._open_ids:
                raise RequestError(f"{request_id!r} is already in use", path=("request_id",))
            self._open_ids.add(request_id)
        reader = Reader(parts.core, parts.tokenizer, choices, self._release, self._left, continues_prompt)
        parts.core.send(AddMessage(choices))
        return reader

    @contextmanager
    def _counting_refusals(self) -> Iterator[None]:
        try:
            yield
        except RequestError as error:
            self.count_refusal(error)
            raise

    def _release(self, request_id: str) -> None:
        with self._lock:
            self._open_ids.discard(request_id)

    def _left(self) -> None:
        if self.telemetry is not None:
            self.telemetry.disconnected()


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
