"""From the engine thread to readers on a loop: nothing is lost, and a turn of the loop wakes a bounded number."""

from __future__ import annotations

import asyncio
from collections import Counter

from cb_backend.engine.delivery import WAKES_PER_TURN, DeltaBuffer, LoopQueue
from cb_backend.request import FinishReason, TokenDelta


def delta(request: int, token: int, last: bool = False) -> TokenDelta:
    return TokenDelta(f"r{request}", 0, (token,), finish_reason=FinishReason.LENGTH if last else None)


async def test_a_turn_wakes_a_bounded_number_of_readers_and_every_token_arrives() -> None:
    queue, turn, steps, readers = LoopQueue(asyncio.get_running_loop()), 0, 5, 150
    buffers = [DeltaBuffer() for _ in range(readers)]
    woken: list[int] = []
    tokens: dict[int, list[int]] = {number: [] for number in range(readers)}

    async def read(number: int) -> None:
        while True:
            got = await buffers[number].get()
            woken.append(turn)
            tokens[number] += got.token_ids
            if got.finish_reason is not None:
                return

    tasks = [asyncio.ensure_future(read(number)) for number in range(readers)]
    await asyncio.sleep(0)

    def generate() -> None:
        """The engine thread: it does not wait for any reader."""
        for step in range(steps):
            for number, buffer in enumerate(buffers):
                queue.post(buffer, delta(number, step, last=step == steps - 1))

    async def count_turns() -> None:
        nonlocal turn
        while True:
            await asyncio.sleep(0)
            turn += 1

    counting = asyncio.ensure_future(count_turns())
    await asyncio.to_thread(generate)
    await asyncio.gather(*tasks)
    counting.cancel()
    assert tokens == {number: list(range(steps)) for number in range(readers)}
    # The count goes on somewhere within a turn, so two turns' readers may fall between two of its values.
    assert max(Counter(woken).values()) <= 2 * WAKES_PER_TURN < readers
