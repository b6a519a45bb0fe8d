"""CUDA graphs of the decode step: a batch of one token per sequence, padded to the next of a few sizes and replayed.

One launch then stands for the hundreds of kernels of a forward pass. What makes that possible is a contract:

- every tensor that a replay reads or writes keeps its address: inputs are copied into buffers made once;
- nothing that is launched depends on data, only on shapes, and these are fixed for a size;
- padding changes nothing: a padding row sees no key, and its K/V go to the trash block, which is never read.

The rest of a step (projection of the rows, sampling, copies of blocks) stays outside. No GPU has run this yet: it is
tested with a recorder that calls the same Python again over the same buffers, and is off unless asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..attention.batch import RaggedBatch
from ..kv.storage import KVStorage

Forward = Callable[[RaggedBatch], torch.Tensor]


class Recorder(Protocol):
    """Turns a function over fixed buffers into a replay of what it launched."""

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """(replay, the tensor that every replay writes its result to)."""


class CudaRecorder:
    """Captures on a stream of its own; all graphs share one memory pool, so the largest should come first."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None  # torch's handle of it, once there is a graph

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()  # libraries set up their workspaces and kernels compile outside the capture
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            out = run()
        self._pool = graph.pool()
        return graph.replay, out


@dataclass(frozen=True, slots=True)
class _Graph:
    replay: Callable[[], None]
    hidden: torch.Tensor  # [size, hidden_size]


def bucket_sizes(most: int) -> tuple[int, ...]:
    """Batch sizes to capture, ascending: 1, 2, 4, then steps of 8 up to 64, of 32 above; the last one is `most`."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, most + 1, 32)]
    return (*(size for size in sizes if size < most), most)


class DecodeGraphs:
    """Args:
    forward: hidden states [T, hidden_size] of a batch; launches the same whatever the batch's tensors hold.
    storage: the KV pool.
    sizes: batch sizes to capture, ascending.
    max_blocks: most blocks of one sequence.
    """

    def __init__(
        self, forward: Forward, storage: KVStorage, sizes: tuple[int, ...], max_blocks: int, recorder: Recorder
    ) -> None:
        self._forward = forward
        self._storage = storage
        self._recorder = recorder
        self.sizes = sizes
        self._graphs: dict[int, _Graph] = {}
        device, most = storage.device.device, sizes[-1]
        self._ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)
        self._slots = torch.full((most,), storage.trash_block * storage.block_size, dtype=torch.int64, device=device)
        self._tables = torch.full((most, max_blocks), storage.trash_block, dtype=torch.int32, device=device)
        self._seq_lens = torch.zeros(most, dtype=torch.int32, device=device)
        self._firsts = torch.arange(most + 1, dtype=torch.int32, device=device)

    def capture(self) -> Iterator[int]:
        """Records every size, the largest first; yields each when it is done."""
        for size in reversed(self.sizes):
            batch = self.static_batch(size)

            def run(batch: RaggedBatch = batch) -> torch.Tensor:
                batch.scratch.clear()  # what a backend makes once a step is made, and so captured, again
                return self._forward(batch)

            self._graphs[size] = _Graph(*self._recorder.record(run))
            yield size

    def static_batch(self, size: int) -> RaggedBatch:
        """The batch over the buffers' first `size` rows: what a graph of that size reads."""
        return RaggedBatch(
            self._ids[:size],
            self._positions[:size],
            self._slots[:size],
            self._tables[:size],
            self._seq_lens[:size],
            self._firsts[: size + 1],
            [1] * size,
            [self._tables.shape[1] * self._storage.block_size] * size,
            self._storage,
        )

    def size_for(self, num_seqs: int) -> int:
        """The captured size that holds `num_seqs` decodes; 0: none does."""
        return next((size for size in self.sizes if size >= num_seqs and size in self._graphs), 0)

    def run(self, batch: RaggedBatch) -> torch.Tensor:
        """Hidden states of a decode batch padded to a captured size; valid until the next run of that size."""
        size = len(batch.q_lens)
        self._ids[:size].copy_(batch.input_ids)
        self._positions[:size].copy_(batch.positions)
        self._slots[:size].copy_(batch.slots)
        self._tables[:size, : batch.block_tables.shape[1]].copy_(batch.block_tables)
        self._seq_lens[:size].copy_(batch.seq_lens)
        graph = self._graphs[size]
        graph.replay()
        return graph.hidden
