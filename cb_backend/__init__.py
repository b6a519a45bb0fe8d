"""Continuous batching for Hugging Face causal language models, inside BentoML.

    EngineConfig, AdmissionConfig   what an operator sets
    SamplingParams                  what a client asks of one request's tokens
    Engine                          generate, stream, abort, stats; runs without bentoml
    RequestOutput, RequestError     what comes back
    ContinuousBatching              mixin for a BentoML service class
    llm_service                     a whole service, for `bentoml.depends`
    to_runner                       a legacy runner
    openai_app                      the OpenAI routes as an ASGI app for /v1; with an engine it needs no bentoml
    timeline                        the timeline page above a service class

Importing this package loads neither torch nor bentoml: `Engine` and the names below it do when first asked for.

Raises:
    VersionError (an ImportError): `Engine` was asked for and torch or transformers is absent or too old.
"""

from __future__ import annotations

import sys

# A Bento and a checkout hold sources, which pip did not match with this Python.
if sys.version_info < (3, 10):  # noqa: UP036
    raise RuntimeError(f"cb_backend needs Python 3.10 or later, {sys.executable} is {sys.version.split()[0]}")

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._version import __version__
from .config import AdmissionConfig, EngineConfig
from .errors import RequestError
from .models.source import ModelStore, register_bentoml_store
from .params import SamplingParams
from .request import RequestOutput

if TYPE_CHECKING:
    from .bento.mount import openai_app
    from .bento.runner import to_runner
    from .bento.service import ContinuousBatching, llm_service
    from .bento.timeline import timeline
    from .engine.engine import Engine

# Imported when first asked for: the engine loads torch, the names of bento/ load bentoml.
_LAZY = {
    "Engine": "engine.engine",
    "ContinuousBatching": "bento.service",
    "llm_service": "bento.service",
    "to_runner": "bento.runner",
    "openai_app": "bento.mount",
    "timeline": "bento.timeline",
}

# A Bento and a checkout hold sources, with cb_kernels in a folder beside this package (docs/design.md, "The house"). An
# environment that serves them may not have the project installed.
_KERNELS = Path(__file__).resolve().parent.parent / "kernels"
if _KERNELS.is_dir() and find_spec("cb_kernels") is None:
    sys.path.append(str(_KERNELS))


def _bentoml_store() -> ModelStore:
    from .bento import store

    return store


register_bentoml_store(_bentoml_store)

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
    "timeline",
    "to_runner",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    if name == "Engine":
        from .versions import check_versions

        check_versions()
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
