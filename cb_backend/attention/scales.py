"""Scales of a float8 K/V cache: one for K and one for V per layer and head, measured before the first request.

float8 e4m3 holds 2^-6 to 448 with the same relative precision and clamps what is larger. The largest value that a probe
of varied tokens produces is put at a quarter of 448, so that a sequence may go four times beyond it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .batch import RaggedBatch
from .capabilities import Capabilities
from .hook import AttentionBackend, AttentionCall

E4M3_MAX = 448.0
_HEADROOM = 4.0


@dataclass(frozen=True, slots=True)
class KVScales:
    """float32 [num_layers, num_kv_heads] each: stored value times scale is the value."""

    k: torch.Tensor
    v: torch.Tensor


class Extremes:
    """An attention backend that passes everything on to another and remembers each head's largest |K| and |V|."""

    name = "extremes"

    def __init__(self, backend: AttentionBackend, num_layers: int, num_kv_heads: int, device: torch.device) -> None:
        self._backend = backend
        self.capabilities: Capabilities = backend.capabilities
        self._k = torch.zeros(num_layers, num_kv_heads, device=device)
        self._v = torch.zeros(num_layers, num_kv_heads, device=device)

    def write(self, k: torch.Tensor, v: torch.Tensor, batch: RaggedBatch, layer: int) -> None:
        for values, largest in ((k, self._k), (v, self._v)):
            torch.maximum(largest[layer], values.abs().amax(dim=(0, 2)).float(), out=largest[layer])
        self._backend.write(k, v, batch, layer)

    def attend(self, q: torch.Tensor, batch: RaggedBatch, call: AttentionCall) -> torch.Tensor:
        return self._backend.attend(q, batch, call)

    def scales(self) -> KVScales:
        """Scales for what was seen; 1 where a head gave nothing but zeros or something that is no number."""

        def scale(largest: torch.Tensor) -> torch.Tensor:
            found = largest * (_HEADROOM / E4M3_MAX)
            return torch.where(found.isfinite() & (found > 0), found, torch.ones_like(found))

        return KVScales(scale(self._k), scale(self._v))
