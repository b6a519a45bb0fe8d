"""Which attention backend an engine uses, and why another one cannot be had."""

from __future__ import annotations

from ..config import EngineConfig
from .attention import AttentionBackend, ReferenceAttention, TorchAttention
from .loader import LoadedModel, ModelError


def choose_backend(config: EngineConfig, loaded: LoadedModel) -> AttentionBackend:
    """The backend that `config.attention_backend` names.

    Raises:
        ModelError: the named backend does not run on this device, or not with this model.
    """
    name = config.attention_backend
    if name == "reference":
        return ReferenceAttention()
    if name in ("auto", "torch"):
        return TorchAttention()
    raise ModelError(f"attention_backend {name!r} does not run on {loaded.device}; use 'torch'")
