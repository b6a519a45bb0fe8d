"""What a model's own layers do with a few tokens: the measure for everything that replaces them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...attention.batch import RaggedBatch
from ...attention.hook import AttentionBackend, AttentionCall
from ...kv.storage import KVGeometry, KVStorage

_LENGTHS = (7, 3)  # tokens of the two sequences
_FIRST_POSITION = 61  # far enough for every rotary frequency to turn
_BLOCK_SIZE = 16


@dataclass(slots=True)
class Observed:
    """One layer: its input [1, T, hidden_size], the rotary factors it was given, its output, its attention calls."""

    hidden: torch.Tensor
    rotary: tuple[torch.Tensor, torch.Tensor] | None
    output: torch.Tensor | None = None
    calls: list[AttentionCall] = field(default_factory=list)


class _Recording:
    """An attention backend that passes everything on and keeps what each layer asked."""

    name = "recording"

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend
        self.capabilities = backend.capabilities
        self.calls: list[AttentionCall] = []

    def write(self, k: torch.Tensor, v: torch.Tensor, batch: RaggedBatch, layer: int) -> None:
        self._backend.write(k, v, batch, layer)

    def attend(self, q: torch.Tensor, batch: RaggedBatch, call: AttentionCall) -> torch.Tensor:
        self.calls.append(call)
        return self._backend.attend(q, batch, call)


def probe_batch(geometry: KVGeometry, dtype: torch.dtype, vocab_size: int, max_positions: int) -> RaggedBatch:
    """Two short sequences over a pool of two blocks."""
    first = min(_FIRST_POSITION, max(0, max_positions - max(_LENGTHS)))
    positions = [first + i for length in _LENGTHS for i in range(length)]
    return RaggedBatch(
        input_ids=torch.tensor([(7919 * i + 11) % vocab_size for i in range(sum(_LENGTHS))]),
        positions=torch.tensor(positions),
        slots=torch.tensor([_BLOCK_SIZE * i + j for i, length in enumerate(_LENGTHS) for j in range(length)]),
        block_tables=torch.tensor([[i] for i in range(len(_LENGTHS))], dtype=torch.int32),
        seq_lens=torch.tensor(_LENGTHS, dtype=torch.int32),
        cu_seqlens=torch.tensor([0, *itertools.accumulate(_LENGTHS)], dtype=torch.int32),
        q_lens=list(_LENGTHS),
        kv_lens=list(_LENGTHS),
        storage=KVStorage(geometry, len(_LENGTHS), _BLOCK_SIZE, 0, dtype, torch.device("cpu")),
    )


@torch.inference_mode()
def observe(body: Any, layers: list[nn.Module], batch: RaggedBatch, backend: AttentionBackend) -> list[Observed]:
    """Runs the body once on `batch`; what each of `layers` got, asked and gave."""
    recording = _Recording(backend)
    found: list[Observed] = []

    def before(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        recording.calls = []
        found.append(Observed(hidden.clone(), kwargs.get("position_embeddings")))

    def after(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        found[-1].output = output.clone() if isinstance(output, torch.Tensor) else None
        found[-1].calls = recording.calls

    hooks = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in layers]
    hooks += [layer.register_forward_hook(after, with_kwargs=True) for layer in layers]
    try:
        body(
            input_ids=batch.input_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            cb_batch=batch,
            cb_backend=recording,
        )
    finally:
        for hook in hooks:
            hook.remove()
    return found


def difference(got: torch.Tensor, seen: Observed) -> float:
    """How far a replacement's output is from the layer's own, in units of what roundings explain: above 1 is wrong.

    Judged row by row, against what the layer adds to its input, so that a large residual hides nothing.
    """
    assert seen.output is not None
    theirs, ours, before = (x.reshape(-1, x.shape[-1]).double() for x in (seen.output, got, seen.hidden))
    epsilon = torch.finfo(seen.output.dtype).eps
    relative = 1e-3 if seen.output.dtype == torch.float32 else 0.02
    allowed = relative * (theirs - before).norm(dim=-1) + epsilon / 2 * theirs.norm(dim=-1) + 1e-30
    worst = ((ours - theirs).norm(dim=-1) / allowed).max()
    return float(worst) if bool(worst.isfinite()) else float("inf")
