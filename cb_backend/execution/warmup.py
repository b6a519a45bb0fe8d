"""Compiles every kernel that serving will launch, before the first request, and says how far it is.

What a model's layers ask of attention is seen by running a few tokens through it; each kind of layer is then compiled
in the variants that a step may choose from. After this no request waits for a compiler.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch

from ..attention.batch import RaggedBatch
from ..attention.hook import AttentionBackend, AttentionCall, CompilingBackend
from .executor import Executor
from .probe import probe_sampling


class _Kinds:
    """An attention backend that passes everything on and keeps one call of each kind that compiles differently."""

    name = "kinds"

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend
        self.capabilities = backend.capabilities
        self.found: dict[tuple[object, ...], tuple[torch.Tensor, AttentionCall]] = {}

    def write(self, k: torch.Tensor, v: torch.Tensor, batch: RaggedBatch, layer: int) -> None:
        self._backend.write(k, v, batch, layer)

    def attend(self, q: torch.Tensor, batch: RaggedBatch, call: AttentionCall) -> torch.Tensor:
        kind = (call.window > 0, call.softcap > 0, call.sinks is not None, q.stride())
        self.found.setdefault(kind, (q, call))
        return self._backend.attend(q, batch, call)


@torch.inference_mode()
def warm_up(executor: Executor) -> Iterator[str]:
    """Compiles; yields what was compiled after each piece. The pool must be free.

    A backend that does not declare `compiles` has nothing to compile. A pool of a single token is not warmed up.
    """
    backend, storage = executor.backend, executor.storage
    if not backend.capabilities.compiles or storage.num_blocks * storage.block_size < 2:
        return
    kinds = _Kinds(backend)
    executor.backend = kinds
    try:
        executor.run_probe(2)
    finally:
        executor.backend = backend
    yield "writing K/V"
    for number, (q, call) in enumerate(kinds.found.values(), 1):
        for piece in cast(CompilingBackend, backend).warm_up(q, storage, call):
            yield piece if len(kinds.found) == 1 else f"{piece} (kind of layer {number} of {len(kinds.found)})"
    vocab_size = executor.projection.vocab_size
    logits = torch.zeros(1, vocab_size, dtype=torch.float32, device=executor.device)
    executor.sampler(logits, probe_sampling(1, logit_bias={0: 1.0}))
    yield "sampling"
