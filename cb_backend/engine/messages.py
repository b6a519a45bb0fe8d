"""What other threads send to the engine thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ..request import FinishReason, Request


@dataclass(frozen=True, slots=True)
class AddMessage:
    """Queues one request, with all its choices."""

    choices: Sequence[Request]


@dataclass(frozen=True, slots=True)
class AbortMessage:
    """Ends a request, or one of its choices, before it ends by itself. Unknown ids do nothing."""

    request_id: str
    reason: FinishReason
    index: int | None = None


@dataclass(frozen=True, slots=True)
class CallMessage:
    """Runs `function` on the engine thread between two steps."""

    function: Callable[[], Any]
    future: Future[Any]


class StopMessage:
    """Ends the thread; unfinished requests are aborted."""
