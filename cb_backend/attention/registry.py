"""The attention backends, the choice of one, and the dtype that K and V are kept in.

A backend is a class that declares its capabilities and one line in `_SHIPPED`. Nothing else knows backends by name:
which one an engine gets, what start-up does for it and what it says where it cannot be had follow from what it
declares.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ..config import EngineConfig
from ..errors import ModelError
from .capabilities import AttentionNeeds, Capabilities
from .cpu import NativeAttention
from .hook import AttentionBackend
from .reference import ReferenceAttention
from .torch import TorchAttention
from .triton import TritonAttention


class BackendClass(Protocol):
    """The class of a backend."""

    capabilities: Capabilities

    @staticmethod
    def obstacle(needs: AttentionNeeds) -> str | None:
        """What of this machine prevents it, as a sentence that says what to do; None: nothing.

        Asked only where `capabilities` cover `needs`.
        """

    @classmethod
    def create(cls, needs: AttentionNeeds) -> AttentionBackend:
        """The backend, ready to run. Called only where nothing prevents it."""


# The fastest first: `auto` takes the first one that runs.
_SHIPPED: tuple[Any, ...] = (TritonAttention, NativeAttention, TorchAttention, ReferenceAttention)
BACKENDS: dict[str, BackendClass] = {backend.capabilities.name: backend for backend in _SHIPPED}

_KV_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn}


def kv_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """What K and V of a model of that dtype are kept in."""
    return _KV_DTYPES.get(config.kv_cache_dtype, dtype)


def choose_backend(name: str, needs: AttentionNeeds) -> AttentionBackend:
    """The backend called `name`; for `auto` the fastest one that runs here.

    Raises:
        ModelError: the named backend does not run on this device, or not with this model; says which ones do.
    """
    if name != "auto" and name not in BACKENDS:
        raise ModelError(f"attention_backend '{name}' is none of {', '.join(['auto', *BACKENDS])}")
    wanted = [name] if name != "auto" else _automatic(needs.device)
    if not wanted:
        raise ModelError(f"attention_backend 'auto' has none for {needs.device}; {_remedy(needs)}")
    for candidate in wanted:
        if _refusal(candidate, needs) is None:
            return BACKENDS[candidate].create(needs)
    raise ModelError(_explained(wanted[0], needs))


def _automatic(device: torch.device) -> list[str]:
    return [name for name, backend in BACKENDS.items() if device.type in backend.capabilities.auto_devices]


def _refusal(name: str, needs: AttentionNeeds) -> str | None:
    lack = BACKENDS[name].capabilities.lack(needs)
    return BACKENDS[name].obstacle(needs) if lack is None else f"attention_backend '{name}' {lack}"


def _explained(name: str, needs: AttentionNeeds) -> str:
    """Why `name` cannot be had, and what can."""
    if needs.kv_dtype != needs.dtype and needs.kv_dtype not in BACKENDS[name].capabilities.narrow_kv_dtypes:
        option = next(option for option, dtype in _KV_DTYPES.items() if dtype == needs.kv_dtype)
        able = [n for n, b in BACKENDS.items() if needs.kv_dtype in b.capabilities.narrow_kv_dtypes]
        return (
            f"kv_cache_dtype '{option}' needs attention_backend {_quoted(able)} on a GPU, this engine has '{name}' on "
            f"{needs.device}; use kv_cache_dtype 'auto'"
        )
    return f"{_refusal(name, needs)}; {_remedy(needs)}"


def _remedy(needs: AttentionNeeds) -> str:
    useful = [name for name, backend in BACKENDS.items() if not backend.capabilities.comparison_only]
    able = [name for name in useful if _refusal(name, needs) is None]
    if needs.kv_dtype != needs.dtype and not able:
        return "use kv_cache_dtype 'auto'"
    if not able:
        return "no other backend serves this model here either"
    return f"use attention_backend {_quoted(able)}"


def _quoted(names: list[str]) -> str:
    return " or ".join(f"'{name}'" for name in names)
