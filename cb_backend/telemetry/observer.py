"""What the engine tells of itself while it runs: the interface of tracing, metrics, log lines and the flight recorder.

It stands below the engine, so that observers know nothing of the thread that calls them. They may read requests only
inside a call: what another thread is to see, they copy out. One that raises is logged and taken off; serving goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ..request import Request, TokenDelta

if TYPE_CHECKING:
    from ..scheduling.plan import StepPlan


class Observer(Protocol):
    """Called on the engine thread, between two steps: must not block, and takes microseconds."""

    def on_added(self, request: Request) -> None:
        """The engine thread has `request`; its choices are announced one by one, before their first step."""

    def on_step(self, plan: StepPlan, started: float, ended: float, error: str | None = None) -> None:
        """A step settled, or failed with `error`; `started` and `ended` are `time.monotonic()` seconds.

        Where steps overlap, a step counts from the end of the one before it. Comes before `on_finished` of the requests
        that ended in it.
        """

    def on_finished(self, request: Request, delta: TokenDelta) -> None:
        """`request` ended; `delta` is its last one and has the reason."""
