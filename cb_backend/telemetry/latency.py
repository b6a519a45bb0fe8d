"""The durations of one request, as traces, metrics and logs all report them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..request import Request


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds. `first_token` and the model's phases are None where no token was made.

    prepare: arrival to the engine thread (tokenizing, compiling a grammar); queue: from then to admission (to the end,
    if never admitted); prefill: admission to the first token; decode: first token to the end; inference: admission to
    the end. vLLM's definitions, time spent preempted included.
    """

    e2e: float
    prepare: float
    queue: float
    first_token: float | None = None
    prefill: float | None = None
    decode: float | None = None
    inference: float | None = None

    @classmethod
    def of(cls, choices: Sequence[Request], finished: float) -> Latency:
        """Of a request with these choices, the last of which ended at `finished` (`time.monotonic()` seconds)."""
        timings = [choice.timings for choice in choices]
        arrival = timings[0].arrival
        enqueued = timings[0].enqueued or arrival
        admitted = min((t.admitted for t in timings if t.admitted is not None), default=finished)
        first = min((t.first_token for t in timings if t.first_token is not None), default=None)
        known = (finished - arrival, enqueued - arrival, admitted - enqueued)
        if first is None:
            return cls(*known)
        return cls(*known, first - arrival, first - admitted, finished - first, finished - admitted)
