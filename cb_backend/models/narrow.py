"""A model that computes in float32 while its weights lie in the checkpoint's 16 bits.

What packs weights for the native kernels reads them as they are stored, so the float32 copy of a checkpoint never
exists. Until then, and where nothing packs them, the modules widen a weight for each call, which is exact.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear


class NarrowLinear(nn.Linear):
    """A projection in float32 with a weight of 16 bits: a buffer, as a model's dtype is that of its parameters."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.weight.to(input.dtype), self.bias)


class NarrowEmbedding(nn.Embedding):
    """The same of an embedding."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).float()


_NARROW: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: NarrowLinear, nn.Embedding: NarrowEmbedding}
_PLAIN = {narrow: plain for plain, narrow in _NARROW.items()}


def compute_in_float32(model: nn.Module) -> None:
    """Keeps the weights of linear layers and embeddings in their 16 bits and widens everything else, in place."""
    users: dict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                users[parameter].append((module, name))
    for parameter, places in users.items():
        if all(type(module) in _NARROW and name == "weight" for module, name in places):
            for module, _ in places:
                _set_weight(module, parameter.detach())
        elif parameter.is_floating_point():
            parameter.data = parameter.data.float()
    for module in model.modules():
        if type(module) in _NARROW and "weight" in module._buffers:
            module.__class__ = _NARROW[type(module)]
        for name, buffer in module._buffers.items():
            if buffer is not None and name != "weight" and buffer.is_floating_point():
                module._buffers[name] = buffer.float()


def widen(model: nn.Module) -> None:
    """Makes plain float32 modules of those that still have a weight of 16 bits; tied ones stay tied."""
    wide: dict[int, nn.Parameter] = {}
    for module in model.modules():
        if type(module) not in _PLAIN:
            continue
        weight: Any = module.weight
        module.__class__ = _PLAIN[type(module)]
        if "weight" not in module._buffers:  # something has dropped it
            continue
        if weight.data_ptr() not in wide:
            wide[weight.data_ptr()] = nn.Parameter(weight.float(), requires_grad=False)
        module.weight = wide[weight.data_ptr()]


def _set_weight(module: nn.Module, weight: torch.Tensor) -> None:
    del module._parameters["weight"]
    module.register_buffer("weight", weight, persistent=False)
