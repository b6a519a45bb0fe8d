"""Moves blocks between the device and host memory: swapping, and nothing else.

On a CPU it is a copy within memory. On CUDA the copies run on a stream of their own, beside the step's computation:

    out   waits for what computed the blocks; the step that follows waits for it only if it writes one of them
    in    waits for what last read the blocks; the step that follows waits for it, since it reads them

Both directions share one stream, so a block that leaves and comes back does so in that order. Neighbouring blocks that
go to neighbouring places travel as one copy; where blocks are small, a kernel gathers or scatters all of them instead,
reading or writing the pinned host memory itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch

from ..device.transfer import to_device

# (source pool, target pool, source ids, target ids): whole blocks, as `cb_kernels.kv_copy.launch.copy_blocks`.
CopyBlocks = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]

# Below this a transfer costs more to start than to make; published figures of swapping on an H100 cross near 28 KiB.
_SMALL_BLOCK = 32 * 1024


class Streams(Protocol):
    """The two queues of a device; `torch.cuda` has them, tests play them."""

    def on_copies(self) -> AbstractContextManager[Any]:
        """Work started inside runs on the copy stream."""

    def copies_wait_for_compute(self) -> None: ...

    def compute_waits_for_copies(self) -> None: ...

    def mark_copies(self) -> Any:
        """An event after all copies so far."""

    def compute_waits_for(self, event: Any) -> None: ...

    def is_done(self, event: Any) -> bool: ...


class CudaStreams:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device)

    def on_copies(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._copies)

    def copies_wait_for_compute(self) -> None:
        self._copies.wait_stream(torch.cuda.current_stream(self._device))

    def compute_waits_for_copies(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._copies)

    def mark_copies(self) -> torch.cuda.Event:
        event: torch.cuda.Event = self._copies.record_event()
        return event

    def compute_waits_for(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def is_done(self, event: torch.cuda.Event) -> bool:
        return bool(event.query())


class Swap:
    """Args:
    device, host: [blocks, ...] tensors with equal blocks; `host` is pinned where `streams` are given.
    streams: None copies at once on the calling thread.
    copy_blocks: a kernel for small blocks; None: there is none.
    """

    def __init__(
        self,
        device: torch.Tensor,
        host: torch.Tensor,
        streams: Streams | None = None,
        copy_blocks: CopyBlocks | None = None,
    ) -> None:
        self._device = device
        self._host = host
        self._streams = streams
        small = device[0].numel() * device.element_size() <= _SMALL_BLOCK
        self._copy_blocks = copy_blocks if small else None
        self._leaving: list[tuple[Any, frozenset[int]]] = []  # (event, device blocks still being read)

    def out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies (device block, host block) pairs to the host."""
        if not pairs:
            return
        if self._streams is not None:
            self._streams.copies_wait_for_compute()
        with self._on_copies():
            self._move(self._device, self._host, pairs)
        if self._streams is not None:
            self._leaving.append((self._streams.mark_copies(), frozenset(block for block, _ in pairs)))

    def into(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies (host block, device block) pairs back; what computes next sees them."""
        if not pairs:
            return
        if self._streams is not None:
            self._streams.copies_wait_for_compute()
        with self._on_copies():
            self._move(self._host, self._device, pairs)
        if self._streams is not None:
            self._streams.compute_waits_for_copies()

    def _move(self, source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        if self._copy_blocks is not None:
            self._copy_blocks(source, target, *as_ids(pairs, self._device.device))
            return
        for read, written, count in runs(pairs):
            target[written : written + count].copy_(source[read : read + count], non_blocking=True)

    @property
    def is_leaving(self) -> bool:
        """Blocks may be on their way out still: tell `before_writing` of what is written."""
        return bool(self._leaving)

    def before_writing(self, blocks: Collection[int]) -> None:
        """The computation is about to write these device blocks: it waits for those still on their way out."""
        if self._streams is None or not self._leaving:
            return
        waiting = []
        for event, leaving in self._leaving:
            if self._streams.is_done(event):
                continue
            if leaving.isdisjoint(blocks):
                waiting.append((event, leaving))
            else:
                self._streams.compute_waits_for(event)
        self._leaving = waiting

    def _on_copies(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._streams is None else self._streams.on_copies()


def as_ids(pairs: Sequence[tuple[int, int]], device: torch.device) -> list[torch.Tensor]:
    """(sources, targets) as int64 tensors on `device`."""
    ids = np.array(pairs, dtype=np.int64)
    return to_device([np.ascontiguousarray(ids[:, 0]), np.ascontiguousarray(ids[:, 1])], device)


def runs(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """(first source, first target, count) of pairs that follow one another on both sides, in order."""
    first = 0
    for end in range(1, len(pairs) + 1):
        if end < len(pairs) and pairs[end] == (pairs[end - 1][0] + 1, pairs[end - 1][1] + 1):
            continue
        yield (*pairs[first], end - first)
        first = end
