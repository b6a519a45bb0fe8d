"""What operators see of the engine: traces, metrics, log lines and the flight recorder (docs/operations.md).

`offline` and `service` put the observers on an engine that is built but not started; `Telemetry.close` ends them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .logs import follow_bentoml
from .tracing.context import own_caller, phase, request_context

if TYPE_CHECKING:
    from .setup import Telemetry, offline, service

__all__ = ["Telemetry", "follow_bentoml", "offline", "own_caller", "phase", "request_context", "service"]


def __getattr__(name: str) -> Any:
    # Not imported with the package: `python -m cb_backend.telemetry.recorder` needs none of it.
    if name in ("Telemetry", "offline", "service"):
        return getattr(importlib.import_module(".setup", __package__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
