"""Embeddings and the final projection on one packed copy of their weights, for the native CPU kernels.

The native product reads packed weights, in 16 bits where that loses nothing, and an embedding's row can be read from
them too: a tied model needs no other copy. The values are those of the modules replaced; the projection's terms are
summed in the product's order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from cb_kernels.cpu.panels import PackedMatrix
from torch import nn

from .narrow import NarrowEmbedding, NarrowLinear

if TYPE_CHECKING:
    from cb_kernels.cpu import Library
    from transformers import PreTrainedModel


class PackedEmbedding(nn.Module):
    """Token ids to rows of a packed matrix, in `dtype`."""

    def __init__(self, matrix: PackedMatrix, dtype: torch.dtype) -> None:
        super().__init__()
        self.matrix = matrix
        self.dtype = dtype

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.matrix.rows(ids).to(self.dtype)


class PackedHead(nn.Module):
    """An output embedding: [..., hidden_size] -> [..., vocab_size], in the dtype of its argument."""

    def __init__(self, matrix: PackedMatrix, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.matrix = matrix
        self.bias = bias

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.product(hidden.flatten(0, -2)).view(*hidden.shape[:-1], self.matrix.n)
        return (logits if self.bias is None else logits + self.bias).to(hidden.dtype)

    def product(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden_size] -> float32 [rows, vocab_size], without the bias."""
        return self.matrix(hidden.float())


def pack_embeddings(model: PreTrainedModel, library: Library) -> bool:
    """Replaces the model's embeddings where the packed product is the fastest and they do nothing else than usual.

    Afterwards their weights are gone: the model cannot be saved. Returns whether it was done.
    """
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    if type(head) not in (nn.Linear, NarrowLinear) or type(embedding) not in (nn.Embedding, NarrowEmbedding):
        return False
    if embedding.max_norm is not None or (model.dtype == torch.bfloat16 and library.multiplies_bf16(head.weight)):
        return False
    dtype, weight = model.dtype, head.weight.detach()
    tied = embedding.weight.data_ptr() == weight.data_ptr()
    matrix = PackedMatrix(library, weight)
    model.set_output_embeddings(PackedHead(matrix, head.bias))
    rows = matrix if tied else PackedMatrix(library, embedding.weight.detach())
    model.set_input_embeddings(PackedEmbedding(rows, dtype))
    return True
