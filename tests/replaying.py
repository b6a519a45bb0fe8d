"""Stand-ins for what only a GPU has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Replaying:
    """A recorder of graphs that calls the same Python over the same buffers again, and writes to the same result."""

    def __init__(self) -> None:
        self.recorded = 0
        self.replays = 0

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        self.recorded += 1
        out = run().clone()

        def replay() -> None:
            self.replays += 1
            out.copy_(run())

        return replay, out


class PlayedMemory:
    """A card of `total` bytes, of which `used` are taken; every trial's step takes `step`, every graph `graph`."""

    def __init__(self, total: int, used: int, step: int = 0) -> None:
        self.total, self.used, self.step = total, used, step
        self.log: list[str] = []

    def free(self) -> int:
        self.log.append("free")
        return self.total - self.used

    def peak(self, run: Callable[[], Any]) -> int:
        self.log.append("peak")
        if self.used + self.step > self.total:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {self.step} bytes.\nMore.")
        run()
        return self.step
