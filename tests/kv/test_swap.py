"""Swapping is byte-exact, and on two streams nothing is overwritten before it left or read before it came."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from cb_backend.kv.swap import Swap


class PlayedStreams:
    """Two queues that run only when they are waited for, as late as a device may."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.done: set[int] = set()
        self.events = 0

    @contextmanager
    def on_copies(self):
        self.log.append("copy")
        yield

    def copies_wait_for_compute(self):
        self.log.append("copies wait for compute")

    def compute_waits_for_copies(self):
        self.log.append("compute waits for copies")

    def mark_copies(self):
        self.events += 1
        return self.events

    def compute_waits_for(self, event):
        self.log.append(f"compute waits for {event}")

    def is_done(self, event):
        return event in self.done


@pytest.fixture
def tensors():
    device = torch.randn(6, 2, 4, generator=torch.Generator().manual_seed(0))
    return device, torch.zeros(4, 2, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_out_and_back_is_byte_exact(dtype):
    device, host = torch.randn(6, 2, 4).to(dtype), torch.zeros(4, 2, 4, dtype=dtype)
    device[2, 0, 0] = float("nan")
    before = device.clone().view(torch.uint8)
    swap = Swap(device, host)
    swap.out([(2, 0), (4, 3)])
    device[2].zero_()
    device[4].zero_()
    swap.into([(3, 4), (0, 2)])
    assert torch.equal(device.view(torch.uint8), before)


def test_what_computes_next_waits_only_for_blocks_that_it_writes(tensors):
    streams = PlayedStreams()
    swap = Swap(*tensors, streams)
    swap.out([(1, 0), (2, 1)])
    assert streams.log == ["copies wait for compute", "copy"]
    swap.before_writing({3, 4})
    assert streams.log[2:] == []  # the step overlaps the copy
    swap.before_writing({2, 5})
    assert streams.log[2:] == ["compute waits for 1"]
    swap.before_writing({2})
    assert streams.log[3:] == []  # once is enough


def test_a_copy_that_ended_is_not_waited_for(tensors):
    streams = PlayedStreams()
    swap = Swap(*tensors, streams)
    swap.out([(1, 0)])
    streams.done.add(1)
    swap.before_writing({1})
    assert streams.log == ["copies wait for compute", "copy"]


def test_what_comes_back_is_there_before_it_is_read(tensors):
    streams = PlayedStreams()
    Swap(*tensors, streams).into([(0, 5)])
    assert streams.log == ["copies wait for compute", "copy", "compute waits for copies"]


def test_nothing_to_move_costs_nothing(tensors):
    streams = PlayedStreams()
    swap = Swap(*tensors, streams)
    swap.out([])
    swap.into([])
    swap.before_writing({1})
    assert streams.log == []
