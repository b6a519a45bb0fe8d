"""The one way from a parsed request to its tokens: enter the queue, render, open. All front ends take it.

    async with opened(engine, call, stream=True) as (generation, deltas):
        async for choice, delta in deltas: ...

Every way out of it, also cancellation, closes the engine's streams, and with them their requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

from ..client import EngineClient, OutputDelta, QueueSlot
from ..errors import RequestError
from .errors import check_outcome
from .protocol import GenerationRequest
from .rendering import Generation, prepare

# The number of a choice, and what is new of it. Choice `p * n + i` is the i-th of prompt p.
Deltas = AsyncGenerator[tuple[int, OutputDelta], None]


@asynccontextmanager
async def opened(
    engine: EngineClient, call: GenerationRequest, ident: str | None = None, *, stream: bool
) -> AsyncIterator[tuple[Generation, Deltas]]:
    """
    Args:
        ident: the request's id in the engine; several prompts are numbered behind it.
        stream: the client gets tokens as they come; for traces.

    Raises:
        RequestError: it cannot be served; entering, or at the first delta.
        GenerationFailed: at a delta: a request ended without a result.
    """
    with engine.enter() as slot:  # before anything is rendered for it
        generation = await prepare(engine, call, stream=stream)
        alone = len(generation.prompts) == 1
        deltas = _one(engine, generation, 0, ident, slot) if alone else _all(engine, generation, ident, slot)
        async with aclosing(deltas):
            yield generation, deltas


async def _one(
    engine: EngineClient, generation: Generation, number: int, request_id: str | None, slot: QueueSlot | None
) -> Deltas:
    """The deltas of one prompt."""
    stream = engine.open(
        generation.prompts[number],
        generation.params,
        generation.options,
        request_id=request_id,
        continues_prompt=generation.continues_prompt,
        slot=slot,
    )
    first = number * generation.params.n
    try:
        async with aclosing(stream):
            async for delta in stream:
                if delta.finish_reason is not None:
                    check_outcome(delta)
                yield first + delta.index, delta
    except RequestError as error:
        if error.path[:1] != ("response_format",) or generation.grammar_path == ("response_format",):
            raise
        raise error.at(*generation.grammar_path) from None


async def _all(engine: EngineClient, generation: Generation, ident: str | None, slot: QueueSlot | None) -> Deltas:
    """The deltas of all prompts as they come. `slot` is the first prompt's."""
    queue: asyncio.Queue[tuple[int, OutputDelta] | Exception | None] = asyncio.Queue()

    async def read(number: int) -> None:
        request_id = None if ident is None else f"{ident}-{number}"
        try:
            async with aclosing(_one(engine, generation, number, request_id, None if number else slot)) as deltas:
                async for one in deltas:
                    queue.put_nowait(one)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    readers = [asyncio.ensure_future(read(number)) for number in range(len(generation.prompts))]
    try:
        unfinished = len(readers)
        while unfinished:
            item = await queue.get()
            if item is None:
                unfinished -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
