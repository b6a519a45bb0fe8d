"""The engine thread: receive -> plan -> execute -> settle, the only owner of mutable state.

Requests, blocks and tensors are touched by this thread alone. Other threads send messages (add, abort, call), get
`TokenDelta`s through the sink of each request, and read the newest `EngineSnapshot`. `CB_DEBUG_THREADS=1` makes every
other access raise (thread_guard.py).

What fails for one request stays with it: an exception in its sink aborts that request, one in an observer switches
that observer off.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from ..errors import RequestError, engine_failure, first_line
from ..request import FinishReason, Request, TokenDelta
from ..scheduling.admission import Admission
from ..scheduling.draft import Outcome
from ..scheduling.plan import StepPlan, StepResult
from ..scheduling.scheduler import Scheduler
from ..telemetry.observer import Observer
from .choices import Choices
from .messages import AbortMessage, AddMessage, CallMessage, StopMessage
from .recovery import Recovery
from .snapshot import EngineSnapshot, HostTime, SnapshotSource
from .thread_guard import ThreadGuard, guards_threads

Result = TypeVar("Result")

logger = logging.getLogger("cb_backend")


class InFlight(Protocol):
    plan: StepPlan

    def result(self) -> StepResult: ...


class StepExecutor(Protocol):
    """execution/executor.py, or a scripted model in tests."""

    def launch(self, plan: StepPlan) -> InFlight: ...


class EngineCore:
    def __init__(
        self,
        scheduler: Scheduler,
        executor: StepExecutor,
        *,
        overlap: bool = False,
        on_start: Callable[[], None] = lambda: None,
        admission: Admission | None = None,
        bytes_per_block: int = 0,
    ) -> None:
        self.scheduler = scheduler
        self.choices = Choices(scheduler)
        self.recovery = Recovery(scheduler)
        self.executor = executor
        self.overlap = overlap  # plan and launch a step before the one before it has settled
        self.on_start = on_start  # called first of all on the engine thread
        self.observers: list[Observer] = []
        self.time = HostTime()
        self.seconds_per_step = 0.0  # moving average
        self.fault: BaseException | None = None  # why the thread died
        self._inbox: queue.SimpleQueue[AddMessage | AbortMessage | CallMessage | StopMessage] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="cb-engine", daemon=True)
        self._started = False
        self._stopping = False
        self._settled = 0.0  # when the last step settled
        self._send_lock = threading.Lock()
        self._num_sent = 0  # requests sent by any thread
        self._num_received = 0  # requests of which the engine thread knows
        self._source = SnapshotSource(scheduler, self.choices, admission, bytes_per_block)
        self._guard = ThreadGuard() if guards_threads() else None
        if self._guard is not None:
            self._watch(self._guard, admission)
        self.snapshot: EngineSnapshot = self._source.take(0, self.time, 0.0)

    # -- called from any thread -------------------------------------------------------------------------------------

    def start(self) -> None:
        self._started = True
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Requests and choices that wait, those requests included of which the newest snapshot does not know yet."""
        snapshot = self.snapshot  # read first: what is sent meanwhile counts as waiting
        return snapshot.waiting + self._num_sent - snapshot.received

    def stats(self) -> dict[str, float]:
        """Plain numbers of this moment and counts since the start."""
        snapshot = self.snapshot
        return snapshot.stats(self._num_sent - snapshot.received)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and self.fault is None

    def send(self, message: AddMessage | AbortMessage | CallMessage) -> None:
        if isinstance(message, AddMessage):
            if self._guard is not None:
                for choice in message.choices:
                    self._guard.watch(choice)
            with self._send_lock:
                self._num_sent += 1
        self._inbox.put(message)
        if self._started and not self._thread.is_alive():
            self._reject_inbox()

    def call(self, function: Callable[[], Result], timeout: float | None = 30.0) -> Result:
        """Runs `function` between two steps and returns what it returns; the snapshot is then newer than that."""
        future: Future[Result] = Future()
        self.send(CallMessage(function, future))
        return future.result(timeout)

    def stop(self, timeout: float | None = 30.0) -> bool:
        """Aborts what is unfinished and ends the thread. False if it did not end within `timeout` seconds."""
        if self._started:
            self._inbox.put(StopMessage())
            self._thread.join(timeout)
        return not self._thread.is_alive()

    # -- the engine thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        in_flight: _Step | None = None
        if self._guard is not None:
            self._guard.begin()
        try:
            self.on_start()
            while True:
                idle = not self.scheduler.has_work and in_flight is None
                if idle:
                    self.choices.check()
                    self._publish()
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
            if self._guard is not None:
                self._guard.end()

    def _publish(self) -> None:
        """Replaces the snapshot. Before requests are told of their ends: what they know is then in it."""
        self.snapshot = self._source.take(self._num_received, self.time, self.seconds_per_step)

    def _watch(self, guard: ThreadGuard, admission: Admission | None) -> None:
        scheduler = self.scheduler
        watched: list[object] = [scheduler.pool, scheduler.host, scheduler.waiting, scheduler.preemption]
        if admission is not None:
            watched += [admission.curves, admission.reserve]
        for each in (*watched, scheduler.admission, scheduler, self.choices):
            guard.watch(each)

    def _advance(self, in_flight: _Step | None) -> _Step | None:
        """Plans and launches the next step and settles the one before; returns the one now on the device."""
        began = time.monotonic()
        plan = self.recovery.plan()
        for seq_id in plan.admitted:  # queueing ends when the step is planned, not when it settles
            self.scheduler.requests[seq_id].timings.admitted = began
        planned = time.monotonic()
        self.time.plan += planned - began
        if plan.admitted or plan.resumed or plan.preempted or self._num_received != self.snapshot.received:
            self._publish()  # the queue changed, and the step may take long
        launched = self._launch(plan, began) if plan else None
        if self.overlap and not self.recovery.is_active:
            settled, in_flight = in_flight, launched
        else:
            settled, in_flight = in_flight or launched, None
        if settled is not None:
            if not self._settle(settled, in_flight):
                in_flight = None
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

    def _settle(self, step: _Step, later: _Step | None) -> bool:
        """Books what `step` computed. False: it raised, and `later`, launched on top of it, counts no more either."""
        plan, start = step.pending.plan, time.monotonic()
        try:
            result = step.pending.result()
        except Exception as error:
            self._fail(plan, step.began, error, later)
            return False
        ended = time.monotonic()
        self.time.device += ended - start
        outcomes = self._ended(self.choices.settled(self.scheduler.settle(plan, result, ended)))
        # Ends are told after the snapshot that has them; tokens alone do not wait for one.
        ends = any(delta.finish_reason is not None for _request, delta in outcomes)
        if ends:
            self._publish()
        self._deliver(outcomes)
        if not ends:
            self._publish()
        done = time.monotonic()
        self.time.settle += done - ended
        began = max(step.began, self._settled)  # steps that overlap count from one end to the next
        self._settled = done
        duration = done - began
        self.seconds_per_step += 0.1 * (duration - self.seconds_per_step) if self.seconds_per_step else duration
        self._tell_observers(lambda observer: observer.on_step(plan, began, done))
        self._report_ends(outcomes)
        self.recovery.succeeded()
        return True

    def _fail(self, plan: StepPlan, began: float, error: Exception, later: _Step | None = None) -> None:
        """Takes the step back, to be tried again, and ends the requests that are known to be at fault."""
        reason = first_line(f"{type(error).__name__}: {error}")
        if later is not None:
            with suppress(Exception):
                later.pending.result()  # what it wrote is on the device before anything else is
            self.scheduler.undo(later.pending.plan)
        self.scheduler.undo(plan)
        ending = self.scheduler.fail(self.recovery.failed(plan, error), reason)
        outcomes = self._ended(self.choices.settled(ending, failed=True))
        names = ", ".join(dict.fromkeys(request.request_id for request, _delta in outcomes))
        what = f"these requests end with an error: {names}" if names else "it is tried again"
        logger.error("step %d failed; %s", plan.step, what, exc_info=error)
        outcomes = [(request, replace(d, error=engine_failure(d.request_id))) for request, d in outcomes]
        self._publish()
        self._deliver(outcomes)
        ended = time.monotonic()
        self._tell_observers(lambda observer: observer.on_step(plan, began, ended, reason))
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
                case AddMessage(choices):
                    self._add(choices)
                case AbortMessage(request_id, reason, index):
                    self._hand_out(self.choices.finish(request_id, reason, index))
                case CallMessage(function, future):
                    try:
                        result = function()
                    except BaseException as error:
                        future.set_exception(error)
                    else:
                        self._publish()
                        future.set_result(result)
                case StopMessage():
                    self._stopping = True

    def _add(self, choices: Sequence[Request]) -> None:
        self._num_received += 1
        try:
            self.choices.add(choices)
        except (RequestError, ValueError) as error:
            self._refuse(choices, str(error))
            return
        for choice in choices:
            self._report_added(choice)

    def _report_added(self, request: Request) -> None:
        self._tell_observers(lambda observer: observer.on_added(request))

    def _hand_out(self, outcomes: Sequence[Outcome]) -> None:
        if outcomes:
            outcomes = self._ended(outcomes)
            self._publish()
            self._deliver(outcomes)
            self._report_ends(outcomes)

    def _ended(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """`outcomes`, where requests that were ended from outside have the time of their end."""
        timed: list[Outcome] = []
        for request, delta in outcomes:
            if delta.finish_reason is not None and request.timings.finished is None:
                request.timings.finished = time.monotonic()
                delta = replace(delta, timings=request.timings.freeze())
            timed.append((request, delta))
        return timed

    def _deliver(self, outcomes: Sequence[Outcome]) -> None:
        for request, delta in outcomes:
            self._tell(request, delta)

    def _tell(self, request: Request, delta: TokenDelta) -> None:
        try:
            request.sink(delta)
        except Exception:
            logger.exception("what reads request %s failed: the request is aborted", request.request_id)
            if delta.finish_reason is None:
                self._inbox.put(AbortMessage(request.request_id, FinishReason.ABORT, request.index))

    def _report_ends(self, outcomes: Sequence[Outcome]) -> None:
        for request, delta in outcomes:
            if delta.finish_reason is not None:
                self._report_end(request, delta)

    def _report_end(self, request: Request, delta: TokenDelta) -> None:
        self._tell_observers(lambda observer: observer.on_finished(request, delta))
        if self._guard is not None:
            self._guard.release(request)

    def _tell_observers(self, tell: Callable[[Observer], None]) -> None:
        for observer in tuple(self.observers):
            try:
                tell(observer)
            except Exception:
                logger.exception("%s failed and is switched off; serving goes on", type(observer).__name__)
                with suppress(ValueError):  # another thread took it off meanwhile
                    self.observers.remove(observer)

    def _end_all(self) -> None:
        """Ends and tells every request, also where ending one fails."""
        reason = FinishReason.ABORT if self.fault is None else FinishReason.ERROR
        outcomes = self._ended(self.choices.finish_all(reason))
        if self.fault is not None:
            outcomes = [(request, replace(d, error=engine_failure(d.request_id))) for request, d in outcomes]
        try:
            self._publish()
        except Exception:
            logger.exception("the last snapshot cannot be taken")
        self._deliver(outcomes)
        self._report_ends(outcomes)
        self._reject_inbox()

    def _reject_inbox(self) -> None:
        """The thread is gone: each request and call that still comes is answered."""
        while True:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(message, AddMessage):
                self._refuse(message.choices, "the engine has stopped")
            elif isinstance(message, CallMessage):
                message.future.set_exception(RuntimeError("the engine has stopped"))

    def _refuse(self, choices: Sequence[Request], error: str) -> None:
        """Ends requests that never reached the scheduler."""
        for choice in choices:
            reason = FinishReason.ERROR
            self._tell(choice, TokenDelta(choice.request_id, choice.index, (), finish_reason=reason, error=error))
            if self._guard is not None:
                self._guard.release(choice)


@dataclass(frozen=True, slots=True)
class _Step:
    pending: InFlight
    began: float
