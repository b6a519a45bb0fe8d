"""Continuous batching for Hugging Face causal language models, inside BentoML.

`Engine` runs without bentoml; `ContinuousBatching`, `llm_service`, `to_runner` and `openai_app` import it when first
used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._version import __version__
from .config import AdmissionConfig, EngineConfig
from .request import RequestError, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from .bento.openai.app import openai_app
    from .bento.runner import to_runner
    from .bento.service import ContinuousBatching, llm_service
    from .engine import Engine

# Imported when first asked for: the engine loads torch, the others bentoml.
_LAZY = {
    "Engine": "engine",
    "ContinuousBatching": "bento.service",
    "llm_service": "bento.service",
    "to_runner": "bento.runner",
    "openai_app": "bento.openai.app",
}

__all__ = [
    "AdmissionConfig",
    "ContinuousBatching",
    "Engine",
    "EngineConfig",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "__version__",
    "llm_service",
    "openai_app",
    "to_runner",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
