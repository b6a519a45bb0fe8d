"""What a step and graphs take of a GPU is measured and kept free; the GPU is played."""

from __future__ import annotations

import pytest

from cb_backend.device.headroom import Room, measure_room
from cb_backend.errors import ModelError
from tests.replaying import PlayedMemory


def trial_on(memory: PlayedMemory, pool: int = 0, graphs: dict[int, int] | None = None):
    """Makes trials that take `pool` bytes, and `graphs[size]` for each captured size, until they are dropped."""

    class Graph:
        def __init__(self, size: int) -> None:
            self.bytes = (graphs or {})[size]
            memory.used += self.bytes

        def __del__(self) -> None:
            memory.used -= self.bytes

    class Trial:
        def __init__(self) -> None:
            self.steps = 0
            memory.used += pool

        def __del__(self) -> None:
            memory.used -= pool

        def largest_step(self) -> None:
            self.steps += 1

        def capture(self, size: int) -> Graph:
            return Graph(size)

    return Trial


def test_what_is_free_beside_weights_and_the_largest_step_is_left():
    memory = PlayedMemory(total=1000, used=300, step=150)
    room = measure_room(memory, trial_on(memory, pool=40))
    assert room == Room(free=700, step=150)
    assert room.left == 550
    assert memory.log[-1] == "free", "the trial's own pool is not counted against the engine"


def test_graphs_are_estimated_from_the_largest_and_the_smallest():
    memory = PlayedMemory(total=1000, used=300, step=100)
    room = measure_room(memory, trial_on(memory, 40, {64: 50, 1: 5}), (1, 2, 4, 64))
    assert room == Room(free=700, step=100, graphs=50 + 3 * 5)
    assert room.left == 535


def test_a_card_that_cannot_hold_one_step_says_what_to_lower():
    memory = PlayedMemory(total=1000, used=900, step=150)
    with pytest.raises(ModelError, match="does not hold one step.*allocate 150 bytes.*lower max_num_batched_tokens"):
        measure_room(memory, trial_on(memory))


def test_what_was_measured_is_said_in_words():
    assert str(Room(2**31, 2**30)) == "2.00 GiB free beside the weights, a step takes 1.00 GiB"
    assert str(Room(2**31, 2**30, 2**29)).endswith(", CUDA graphs 0.50 GiB")
