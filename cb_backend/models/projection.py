"""From hidden states to float32 logits: the final projection of a causal language model, for chosen rows only.

Half-precision logits are coarse (two tokens often tie), so the projection accumulates and returns float32. What the
model's own forward does after its output embedding (scale, softcap) is read off its configuration; the executor
compares the outcome with the model's own forward once, at the start (`Executor.check_projection`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from .packed_embeddings import PackedHead

_Product = Callable[[torch.Tensor], torch.Tensor]


class Projection:
    """`hidden [rows, hidden_size]` -> logits `[rows, vocab_size]`, float32."""

    def __init__(self, model: PreTrainedModel) -> None:
        head = model.get_output_embeddings()
        if head is None:
            raise ValueError(f"{type(model).__name__} has no output embedding, so it cannot generate")
        config = model.config.get_text_config()
        self.bias = None if getattr(head, "bias", None) is None else head.bias.detach().float()
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self.scale = float(getattr(config, "logit_scale", None) or 1.0)  # Cohere
        self.scale /= float(getattr(config, "logits_scaling", None) or 1.0)  # Granite
        packed = isinstance(head, PackedHead)
        self.vocab_size: int = head.matrix.n if packed else head.weight.shape[0]
        self._multiply: _Product = head.product if packed else _float32_product(head.weight.detach())

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._multiply(hidden)
        if self.bias is not None:
            logits += self.bias
        if self.scale != 1.0:
            logits *= self.scale
        if self.softcap:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits


def _float32_product(weight: torch.Tensor) -> _Product:
    """`hidden -> hidden @ weight.T` with float32 results; without a float32 copy of `weight` where the device can."""
    if weight.dtype == torch.float32:
        return lambda hidden: torch.nn.functional.linear(hidden.float(), weight)
    if weight.device.type == "cuda":
        transposed = weight.t()
        return lambda hidden: torch.mm(hidden.to(weight.dtype), transposed, out_dtype=torch.float32)
    from cb_kernels.cpu import load

    native = load()
    if native is not None and native.multiplies_bf16(weight):
        return lambda hidden: native.linear_f32(hidden, weight)
    wide = weight.float()
    return lambda hidden: torch.nn.functional.linear(hidden.float(), wide)
