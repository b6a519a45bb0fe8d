"""The tracer provider that BentoML builds, and the bounded flush at the end of a process.

BentoML exports every five seconds and ends its workers by a signal, so the last spans are lost unless somebody flushes.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

logger = logging.getLogger("cb_backend")

FLUSH_SECONDS = 3.0


def bentoml_provider() -> Any:
    """The provider that BentoML builds from `tracing=`; it never becomes OpenTelemetry's global one."""
    from bentoml._internal.configuration.containers import BentoMLContainer

    return BentoMLContainer.tracer_provider.get()


def flush(provider: Any, seconds: float) -> bool:
    """Exports what waits. Returns within `seconds`, also where the SDK ignores its own timeout; True if it was done."""
    force = getattr(provider, "force_flush", None)
    if force is None:
        return True
    done = threading.Event()

    def work() -> None:
        try:
            force(int(seconds * 1000))
        except Exception:
            logger.exception("the last spans cannot be exported")
        done.set()

    threading.Thread(target=work, name="cb-flush", daemon=True).start()
    return done.wait(seconds)
