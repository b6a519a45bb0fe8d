"""The hook into transformers: `attn_implementation="cb_paged"` sends every attention layer through a paged backend.

The model's forward gets a batch of shape (1, tokens) with the ragged batch and the backend as keyword arguments; no
mask tensor is made. Each layer first writes the K/V of all tokens of the step into their blocks and only then attends,
so a request may read blocks that another request of the same step writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers import AttentionInterface

from ..kv.storage import KVStorage
from .batch import RaggedBatch
from .capabilities import Capabilities

if TYPE_CHECKING:
    from .scales import KVScales

IMPLEMENTATION = "cb_paged"


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one layer asks besides its tensors.

    `window`: keys a row sees, itself included (0: all). `softcap`: 0 is off. `sinks`: float [num_heads], a logit that
    takes part in each row's softmax without a value, or None.
    """

    layer: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


class AttentionBackend(Protocol):
    """q [T, num_heads, head_dim]; k, v [T, num_kv_heads, head_dim]; rows may be strided, their last dimension not."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can do; of a backend that passes everything on to another, what that one can do."""

    @property
    def name(self) -> str:
        """For log lines."""

    def write(self, k: torch.Tensor, v: torch.Tensor, batch: RaggedBatch, layer: int) -> None:
        """Puts the K/V of every token of the step into `batch.slots` of that layer's cache."""

    def attend(self, q: torch.Tensor, batch: RaggedBatch, call: AttentionCall) -> torch.Tensor:
        """Causal attention of every row over its own sequence's keys: [T, num_heads, head_dim], dtype of q."""


class CompilingBackend(AttentionBackend, Protocol):
    """A backend whose capabilities say `compiles`."""

    def warm_up(self, q: torch.Tensor, storage: KVStorage, call: AttentionCall) -> Iterator[str]:
        """Compiles what layers like this one launch, and yields the name of each piece."""


class NarrowingBackend(AttentionBackend, Protocol):
    """A backend whose capabilities name `narrow_kv_dtypes`."""

    def with_scales(self, scales: KVScales) -> NarrowingBackend:
        """The same backend, which multiplies what is stored by these scales."""


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    cb_batch: RaggedBatch | None = None,
    cb_backend: AttentionBackend | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: q, k, v [1, heads, T, head_dim] -> ([1, T, heads, head_dim], None)."""
    if cb_batch is None or cb_backend is None:
        raise RuntimeError("a model loaded for cb_backend runs only inside its engine")
    layer: int = module.layer_idx  # type: ignore[assignment]
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    cb_backend.write(k, v, cb_batch, layer)
    call = AttentionCall(
        layer,
        q.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window or 0,
        softcap or 0.0,
        s_aux,
    )
    return cb_backend.attend(q, cb_batch, call)[None], None


def register() -> None:
    """Makes `attn_implementation="cb_paged"` known to transformers. May be called more than once.

    No mask function is registered with it: transformers then makes no mask at all, where for one that returns None it
    would first look at the positions on the host, and a GPU would be waited for in every step.
    """
    AttentionInterface.register(IMPLEMENTATION, paged_attention_forward)
