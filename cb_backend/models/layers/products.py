"""Matrix products of a fused layer: several projections of one input as one, weights packed for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from cb_kernels.cpu import Library
from cb_kernels.cpu.panels import PackedMatrix
from torch import nn
from torch.nn.functional import linear

from ...errors import first_line
from ..narrow import NarrowLinear

_log = logging.getLogger("cb_backend")
_ROWS_HINT = 64  # rows that oneDNN lays the packed weights out for; others work too

Product = Callable[[torch.Tensor], torch.Tensor]


def stacked(modules: Sequence[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias of one projection that gives the modules' results side by side; a missing bias counts as 0."""
    weight = torch.cat([module.weight.detach() for module in modules]) if len(modules) > 1 else modules[0].weight
    if all(module.bias is None for module in modules):
        return weight.detach(), None
    biases = [weight.new_zeros(m.out_features) if m.bias is None else m.bias.detach() for m in modules]
    return weight.detach(), torch.cat(biases)


def drop_weights(modules: Sequence[nn.Linear]) -> None:
    """Frees the weights of modules that something else stands in for."""
    for module in modules:
        module.weight = nn.Parameter(module.weight.new_empty(0), requires_grad=False)


def merged_linear(modules: Sequence[nn.Linear], library: Library) -> Product:
    """One product in place of several on the same input: x [rows, in] -> their results side by side."""
    return product(*stacked(modules), library, computes_in(modules[0]))


def computes_in(module: nn.Linear) -> torch.dtype:
    """The dtype of a projection's input and result."""
    return torch.float32 if isinstance(module, NarrowLinear) else module.weight.dtype


def product(weight: torch.Tensor, bias: torch.Tensor | None, library: Library, dtype: torch.dtype) -> Product:
    """x [rows, in] of `dtype` -> x @ weight^T + bias; natively in float32, with a weight of any storage."""
    if dtype == torch.float32:
        matrix = PackedMatrix(library, weight)
        return matrix if bias is None else lambda x: matrix(x) + bias
    return _packed(weight, bias) or (lambda x: linear(x, weight, bias))


def _packed(weight: torch.Tensor, bias: torch.Tensor | None) -> Product | None:
    """The product with weights in oneDNN's own order, or None where this torch or dtype has no such thing.

    The operators are internal to torch: they are probed by comparing with the public one.
    """
    if weight.dtype != torch.bfloat16:
        return None
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)

        def multiply(x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
            return result

        probe = torch.linspace(-1, 1, 3 * weight.shape[1], dtype=weight.dtype).view(3, -1)
        torch.testing.assert_close(multiply(probe), linear(probe, weight, bias), rtol=2e-2, atol=2e-2)
    except (AttributeError, RuntimeError, AssertionError) as error:
        _log.info("weights stay unpacked: %s", first_line(error))
        return None
    return multiply
