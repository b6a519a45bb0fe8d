"""A checked request through the engine to its reply: one stream per prompt, merged as their outputs come.

Every path out of here, also cancellation, closes the engine's streams, and with them their requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from ..errors import RequestError
from ..params import SamplingParams
from ..request import RequestOutput
from .answers import Answer
from .errors import check_outcome
from .stream import Reply


@dataclass(frozen=True, slots=True)
class Job:
    """A checked HTTP request, ready for the engine."""

    prompts: list[str | list[int]]
    params: SamplingParams
    options: dict[str, Any]
    stream: bool
    answer: Answer
    ident: str
    trace_context: Any
    grammar_field: str = "response_format"  # what the client sent that became the grammar


async def answer(engine: Any, job: Job, reply: Reply, place: Any = None) -> None:
    """Generates and sends; raises what `_outputs` raises. `place`: the first prompt's place in the queue."""
    try:
        await _answer(engine, job, reply, place)
    except RequestError as error:
        if error.path[:1] != ("response_format",) or job.grammar_field == "response_format":
            raise
        raise error.at(*job.grammar_field.split(".")) from None


async def _answer(engine: Any, job: Job, reply: Reply, place: Any) -> None:
    async with aclosing(_outputs(engine, job, place)) as outputs:
        if not job.stream:
            last: dict[int, RequestOutput] = {}
            async for choice, output in outputs:
                last[choice] = output
            await reply.whole(job.answer.body(last))
            return
        reply.error_event = job.answer.error_event
        async for choice, output in outputs:
            await reply.event(job.answer.events(choice, output))
        await reply.end(job.answer.last_events())


async def _outputs(engine: Any, job: Job, place: Any) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """All prompts' outputs as they come, with the number of their choice.

    Raises:
        RequestError: a prompt cannot be served.
        GenerationFailed: a request ended without a result.
    """
    if len(job.prompts) == 1:
        async with aclosing(_one(engine, job, 0, place)) as outputs:
            async for one in outputs:
                yield one
        return
    queue: asyncio.Queue[tuple[int, RequestOutput] | Exception | None] = asyncio.Queue()

    async def read(number: int) -> None:
        try:
            async with aclosing(_one(engine, job, number, None if number else place)) as outputs:
                async for one in outputs:
                    queue.put_nowait(one)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    readers = [asyncio.ensure_future(read(number)) for number in range(len(job.prompts))]
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


async def _one(engine: Any, job: Job, number: int, place: Any) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    request_id = job.ident if len(job.prompts) == 1 else f"{job.ident}-{number}"
    stream = engine.stream(
        job.prompts[number],
        job.params,
        request_id=request_id,
        trace_context=job.trace_context,
        place=place,
        **job.options,
    )
    async with aclosing(stream) as outputs:
        async for output in outputs:
            if output.finish_reason is not None:
                check_outcome(output)
            yield number * job.params.n + output.index, output
