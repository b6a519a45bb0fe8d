"""An engine thread without a device: the scripted model answers each step; the test says what happens when."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cb_backend.engine.core import AbortMessage, AddMessage, EngineCore
from cb_backend.request import FinishReason, Request, TokenDelta
from cb_backend.scheduling.lengths import LengthCurves
from cb_backend.scheduling.plan import StepPlan, StepResult
from tests.scheduling.scripted import answer, make_request, make_scheduler

BYTES_PER_BLOCK = 1000


@dataclass
class _Pending:
    plan: StepPlan
    fail: bool

    def result(self) -> StepResult:
        if self.fail:
            raise RuntimeError("the device is gone")
        return answer(self.plan)


@dataclass
class ScriptedEngine:
    """`before`: step number -> what the test does just before that step's device work, on the engine thread."""

    options: dict[str, Any] = field(default_factory=dict)
    before: dict[int, Callable[[], None]] = field(default_factory=dict)
    failing: set[int] = field(default_factory=set)
    overlap: bool = False

    def __post_init__(self) -> None:
        self.scheduler = make_scheduler(**self.options)
        self.core = EngineCore(self.scheduler, self, overlap=self.overlap, bytes_per_block=BYTES_PER_BLOCK)
        self.deltas: queue.SimpleQueue[TokenDelta] = queue.SimpleQueue()
        self.model_name = "tiny"
        self.tokenizer: Any = None
        self.curves = LengthCurves()

    def launch(self, plan: StepPlan) -> _Pending:
        if plan.step in self.before:
            self.before[plan.step]()
        return _Pending(plan, plan.step in self.failing)

    def request(self, name: str, *args: Any, **options: Any) -> list[Request]:
        context = options.pop("context", None)
        request_class = options.pop("request_class", "")
        choices = make_request(name, *args, sink=self.deltas.put, **options)
        for choice in choices:
            choice.trace_context = context
            choice.request_class = request_class
        return choices

    def send(self, choices: list[Request]) -> None:
        for choice in choices:
            choice.timings.arrival = time.monotonic()
        self.core.send(AddMessage(choices))

    def abort(self, name: str) -> None:
        self.core.send(AbortMessage(name, FinishReason.ABORT))

    def run(self, *requests: list[Request]) -> dict[tuple[str, int], FinishReason]:
        """Serves the requests that were sent before the first step, and what `before` adds; returns all ends."""
        expected = {(c.request_id, c.index) for choices in requests for c in choices}
        for choices in requests:
            self.send(choices)
        self.core.start()
        ends: dict[tuple[str, int], FinishReason] = {}
        while not expected <= ends.keys():
            delta = self.deltas.get(timeout=10)
            if delta.finish_reason is not None:
                ends[delta.request_id, delta.index] = delta.finish_reason
        self.core.stop(10)
        return ends
