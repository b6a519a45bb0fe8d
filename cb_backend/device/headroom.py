"""How much of a GPU's memory is left for K and V: measured, not guessed.

The largest step is run once on a small pool, projection and sampling of as many rows as may sample included, and what
it took beyond the weights is kept free. Graphs keep memory of their own: the largest and the smallest are captured once
and the rest is taken to be as large as the smallest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..errors import ModelError, first_line

logger = logging.getLogger("cb_backend")


class DeviceMemory(Protocol):
    """What a GPU says about its memory, in bytes; tests play it."""

    def free(self) -> int:
        """What new tensors could take on the card now."""

    def peak(self, run: Callable[[], Any]) -> int:
        """How much more than before was in use at some moment of `run`.

        Raises:
            torch.OutOfMemoryError: the card does not have it.
        """


class CudaMemory:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, _total = torch.cuda.mem_get_info(self._device)
        return free

    def peak(self, run: Callable[[], Any]) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        run()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - before


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes: `free` beside the weights, of which `step` and `graphs` are needed to compute."""

    free: int
    step: int
    graphs: int = 0

    @property
    def left(self) -> int:
        """What K and V could take; negative: the card is too small even without them."""
        return self.free - self.step - self.graphs

    def __str__(self) -> str:
        parts = f"{_gib(self.free)} free beside the weights, a step takes {_gib(self.step)}"
        return parts + (f", CUDA graphs {_gib(self.graphs)}" if self.graphs else "")


class Trial(Protocol):
    """An executor on a pool that is just large enough; dropping it frees that pool and its graphs."""

    def largest_step(self) -> Any: ...

    def capture(self, size: int) -> Any:
        """Captures a decode batch of that size and returns what keeps the graph alive."""


def measure_room(memory: DeviceMemory, trial: Callable[[], Trial], sizes: tuple[int, ...] = ()) -> Room:
    """Runs the largest step, and captures two graphs if there are to be any.

    Args:
        trial: makes one; there must be no other reference to it.
        sizes: of all graphs that will be captured, ascending.

    Raises:
        ModelError: the card cannot even hold one step.
    """
    with naming_shortage():
        tried = trial()
        step = memory.peak(tried.largest_step)
        graphs = 0
        if sizes:
            before = memory.free()
            kept = [tried.capture(sizes[-1])]
            large = memory.free()
            kept.append(tried.capture(sizes[0]))
            small = memory.free()
            graphs = max(0, before - large) + max(0, large - small) * (len(sizes) - 1)
            kept.clear()
        del tried
    # Last of all: libraries and compiled kernels have taken their share by now.
    room = Room(memory.free(), step, graphs)
    logger.info("GPU memory: %s", room)
    return room


@contextmanager
def naming_shortage() -> Iterator[None]:
    """Turns torch's error about memory into one that says what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"the GPU's memory does not hold one step beside the weights ({first_line(error)}); lower "
            "max_num_batched_tokens or max_num_seqs, or use a smaller model or a larger GPU"
        ) from None


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
