"""The engine thread: receive -> plan -> execute -> settle, the only owner of mutable state.

Everybody else sends messages (add, end, call) and gets `TokenDelta`s through the sink of each request. There are no
locks: requests, blocks and tensors are touched by this thread alone.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import RequestError, first_line
from ..request import FinishReason, Request, StepPlan, StepResult, TokenDelta
from ..scheduling.draft import Outcome
from ..scheduling.scheduler import Scheduler
from ..telemetry.observer import Observer
from .choices import Choices

logger = logging.getLogger("cb_backend")


class InFlight(Protocol):
    plan: StepPlan

    def result(self) -> StepResult: ...


class StepExecutor(Protocol):
    """execution/executor.py, or a scripted model in tests."""

    def launch(self, plan: StepPlan) -> InFlight: ...


@dataclass(frozen=True, slots=True)
class Add:
    choices: Sequence[Request]


@dataclass(frozen=True, slots=True)
class End:
    request_id: str
    reason: FinishReason
    index: int | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """Runs `function` on the engine thread between two steps."""

    function: Callable[[], Any]
    future: Future[Any]


class Stop:
    """Ends the thread; unfinished requests are aborted."""


@dataclass(slots=True)
class HostTime:
    """Where the engine thread's time went, seconds since the start. `device` includes waiting for the device."""

    plan: float = 0.0
    device: float = 0.0
    settle: float = 0.0


class EngineCore:
    def __init__(
        self,
        scheduler: Scheduler,
        executor: StepExecutor,
        *,
        overlap: bool = False,
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        self.scheduler = scheduler
        self.choices = Choices(scheduler)
        self.executor = executor
        self.overlap = overlap  # plan and launch a step before the one before it has settled
        self.on_start = on_start  # called first of all on the engine thread
        self.observers: list[Observer] = []
        self.time = HostTime()
        self.seconds_per_step = 0.0  # moving average
        self.fault: BaseException | None = None  # why the thread died
        self._inbox: queue.SimpleQueue[Add | End | Call | Stop] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="cb-engine", daemon=True)
        self._started = False
        self._stopping = False
        self._settled = 0.0  # when the last step settled

    # -- called from any thread -------------------------------------------------------------------------------------

    def start(self) -> None:
        self._started = True
        self._thread.start()

    @property
    def num_unread(self) -> int:
        """Messages that the engine thread has not seen yet."""
        return self._inbox.qsize()

    @property
    def num_waiting(self) -> int:
        """Requests and choices that wait, those on their way to the engine thread included."""
        return self.choices.num_waiting + self.num_unread

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and self.fault is None

    def send(self, message: Add | End | Call) -> None:
        self._inbox.put(message)
        if self._started and not self._thread.is_alive():
            self._reject_inbox()

    def call(self, function: Callable[[], Any], timeout: float | None = 30.0) -> Any:
        """Runs `function` between two steps and returns what it returns."""
        future: Future[Any] = Future()
        self.send(Call(function, future))
        return future.result(timeout)

    def stop(self, timeout: float | None = 30.0) -> None:
        """Aborts what is unfinished and ends the thread."""
        if self._started:
            self._inbox.put(Stop())
            self._thread.join(timeout)

    # -- the engine thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        in_flight: _Step | None = None
        try:
            self.on_start()
            while True:
                idle = not self.scheduler.has_work and in_flight is None
                if idle:
                    self.choices.check()
                self._receive(wait=idle)
                if self._stopping:
                    break
                self._hand_out(self.choices.expire(time.monotonic()))
                in_flight = self._advance(in_flight)
        except BaseException as error:
            self.fault = error
            logger.exception("the engine thread died")
        finally:
            self._end_all()

    def _advance(self, in_flight: _Step | None) -> _Step | None:
        """Plans and launches the next step and settles the one before; returns the one now on the device."""
        began = time.monotonic()
        plan = self.scheduler.plan()
        _mark_admitted(plan, began)
        planned = time.monotonic()
        self.time.plan += planned - began
        launched = self._launch(plan, began) if plan else None
        if self.overlap:
            settled, in_flight = in_flight, launched
        else:
            settled, in_flight = launched, None
        if settled is not None:
            self._settle(settled)
        elif not plan and self.scheduler.has_work:
            raise RuntimeError(f"nothing can run, yet {len(self.scheduler.requests)} requests are unfinished")
        return in_flight

    def _launch(self, plan: StepPlan, began: float) -> _Step | None:
        start = time.monotonic()
        try:
            return _Step(self.executor.launch(plan), began)
        except Exception as error:
            self._fail(plan, began, error)
            return None
        finally:
            self.time.device += time.monotonic() - start

    def _settle(self, step: _Step) -> None:
        plan, start = step.pending.plan, time.monotonic()
        try:
            result = step.pending.result()
        except Exception as error:
            self._fail(plan, step.began, error)
            return
        ended = time.monotonic()
        self.time.device += ended - start
        outcomes = self.choices.settled(self.scheduler.settle(plan, result, ended))
        self._deliver(outcomes)
        done = time.monotonic()
        self.time.settle += done - ended
        began = max(step.began, self._settled)  # steps that overlap count from one end to the next
        self._settled = done
        duration = done - began
        self.seconds_per_step += 0.1 * (duration - self.seconds_per_step) if self.seconds_per_step else duration
        for observer in self.observers:
            observer.on_step(plan, began, done)
        self._report_ends(outcomes)

    def _fail(self, plan: StepPlan, began: float, error: Exception) -> None:
        logger.exception("step %d failed; its requests end with an error", plan.step)
        reason = first_line(f"{type(error).__name__}: {error}")
        outcomes = self.choices.settled(self.scheduler.fail(plan, reason), failed=True)
        self._deliver(outcomes)
        for observer in self.observers:
            observer.on_step(plan, began, time.monotonic(), reason)
        self._report_ends(outcomes)

    def _receive(self, wait: bool) -> None:
        """Handles all messages; with `wait`, sleeps until there is one."""
        while True:
            try:
                message = self._inbox.get(block=wait)
            except queue.Empty:
                return
            wait = False
            match message:
                case Add(choices):
                    self._add(choices)
                case End(request_id, reason, index):
                    self._hand_out(self.choices.finish(request_id, reason, index))
                case Call(function, future):
                    try:
                        future.set_result(function())
                    except BaseException as error:
                        future.set_exception(error)
                case Stop():
                    self._stopping = True

    def _add(self, choices: Sequence[Request]) -> None:
        try:
            self.choices.add(choices)
        except (RequestError, ValueError) as error:
            _refuse(choices, str(error))
            return
        for observer in self.observers:
            for choice in choices:
                observer.on_added(choice)

    def _hand_out(self, outcomes: Sequence[Outcome]) -> None:
        self._deliver(outcomes)
        self._report_ends(outcomes)

    def _deliver(self, outcomes: Sequence[Outcome]) -> None:
        for request, delta in outcomes:
            if delta.finish_reason is not None and request.timings.finished is None:
                request.timings.finished = time.monotonic()
            request.sink(delta)

    def _report_ends(self, outcomes: Sequence[Outcome]) -> None:
        for request, delta in outcomes:
            if delta.finish_reason is not None:
                for observer in self.observers:
                    observer.on_finished(request, delta)

    def _end_all(self) -> None:
        reason = FinishReason.ABORT if self.fault is None else FinishReason.ERROR
        self._hand_out(self.choices.finish_all(reason))
        self._reject_inbox()

    def _reject_inbox(self) -> None:
        """The thread is gone: whoever still asks gets an answer."""
        while True:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(message, Add):
                _refuse(message.choices, "the engine has stopped")
            elif isinstance(message, Call):
                message.future.set_exception(RuntimeError("the engine has stopped"))


@dataclass(frozen=True, slots=True)
class _Step:
    pending: InFlight
    began: float


def _mark_admitted(plan: StepPlan, now: float) -> None:
    """Queueing ends when the step that lets a request in is planned, not when it settles."""
    for request in plan.admitted:
        request.timings.admitted = now


def _refuse(choices: Sequence[Request], error: str) -> None:
    """Ends requests that never reached the scheduler."""
    for choice in choices:
        choice.sink(TokenDelta(choice.request_id, choice.index, (), finish_reason=FinishReason.ERROR, error=error))
