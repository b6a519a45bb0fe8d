"""The bounded flush of a tracer provider at the end of a process.

BentoML exports every five seconds and ends its workers by a signal, so without a flush the last spans are lost.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

logger = logging.getLogger("cb_backend")

FLUSH_SECONDS = 3.0


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
