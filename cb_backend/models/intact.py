"""Refuses weights that load without an error and answer nonsense, each with the tensor at fault."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ..errors import ModelError

_FLOATS = {"F64", "F32", "F16", "BF16"}
_LAYER = re.compile(r"^(.*?\.)(\d+)\.")


def check_weights(model: Any, unexpected: Iterable[str], path: Path, name: str) -> None:
    """Looks at what was loaded, and at what was in the files and was not.

    Raises:
        ModelError: a layer that the configuration does not have, weights that are no floats, NaN or infinity.
    """
    held = {found.groups() for key in model.state_dict() if (found := _LAYER.match(key))}  # (prefix, number)
    prefixes = {prefix for prefix, _ in held}
    for key in sorted(unexpected):
        found = _LAYER.match(key)
        # What else is unexpected is left out on purpose: another part (a vision tower), a buffer of older versions.
        if found and found[1] in prefixes and found.groups() not in held:
            raise ModelError(
                f"the checkpoint of '{name}' in {path} has more layers than its config.json says, e.g. {key}"
            )
    for file in sorted(path.glob("*.safetensors")):
        _check_floats(file, name)
    for key, weight in model.named_parameters():
        if weight.numel() and not all(bool(torch.isfinite(end)) for end in weight.detach().aminmax()):
            raise ModelError(f"the weights of '{name}' in {path} are damaged: {key} holds NaN or infinity")


def _check_floats(file: Path, name: str) -> None:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        for key in opened.keys():  # noqa: SIM118
            dtype = opened.get_slice(key).get_dtype()
            if key.endswith(".weight") and dtype not in _FLOATS:
                raise ModelError(f"'{name}': {key} in {file} is {dtype}; quantized weights are not supported")
