"""What fails for one request, or for one observer, stays with it; and what clients are told of a failure."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from cb_backend.engine.core import AddMessage, CallMessage, EngineCore
from cb_backend.request import FinishReason
from tests.engine.test_core import ScriptedExecutor, ask, expected
from tests.scheduling.scripted import make_request, make_scheduler


@pytest.fixture
def held():
    """A core that stands still in its first step until the test opens the gate."""
    gate = threading.Semaphore(0)
    core = EngineCore(make_scheduler(num_blocks=400, block_size=32), ScriptedExecutor(gate=gate))
    yield core, gate
    gate.release(10**6)
    core.stop()


def test_a_sink_that_raises_stops_neither_the_others_nor_the_engine(held, caplog):
    core, gate = held
    told = []

    def broken(delta):
        told.append(delta)
        raise RuntimeError("a full disk")

    core.send(AddMessage(make_request("broken", 4, 1000, sink=broken)))
    other = ask(core, "other", [7] * 4, 4)
    gate.release(10**6)
    core.start()
    assert other.all()[0] == expected([7] * 4, 4)
    assert ask(core, "later", [8] * 4, 4).all()[0] == expected([8] * 4, 4)
    assert core.is_alive
    # Tokens that cannot be read are not computed to the end.
    assert told[-1].finish_reason is FinishReason.ABORT and len(told) < 10
    assert "broken" in caplog.text and "a full disk" in caplog.text
    assert core.stats()["kv_blocks_used"] == 0


@pytest.mark.parametrize("method", ["on_added", "on_step", "on_finished"])
def test_an_observer_that_raises_is_taken_off_and_the_next_one_is_told(held, method):
    core, gate = held

    class Counting:
        def __init__(self) -> None:
            self.calls = []

        def on_added(self, request):
            self.calls.append("on_added")

        def on_step(self, plan, started, ended, error=None):
            self.calls.append("on_step")

        def on_finished(self, request, delta):
            self.calls.append("on_finished")

    def fail(*args):
        raise RuntimeError("a bug")

    broken, counting = Counting(), Counting()
    setattr(broken, method, fail)
    core.observers += [broken, counting]
    gate.release(10**6)
    core.start()
    assert ask(core, "r", [7] * 4, 2).all()[0] == expected([7] * 4, 2)
    assert ask(core, "s", [8] * 4, 1).all()[0] == expected([8] * 4, 1)
    core.stop()
    assert counting.calls == ["on_added", "on_step", "on_step", "on_finished", "on_added", "on_step", "on_finished"]
    assert core.observers == [counting]
    assert core.fault is None


def test_every_request_is_told_of_the_end_although_ending_one_fails(held):
    core, gate = held
    readers = [ask(core, name, 4, 10_000) for name in ("first", "second", "third")]
    gate.release(3)
    core.start()
    for reader in readers:
        reader.next()

    def free_twice():
        (second,) = [r for r in core.scheduler.running if r.request_id == "second"]
        core.scheduler.pool.release(second.blocks)

    gate.release(10**6)
    core.call(free_twice)
    core.stop()
    ends = [reader.all()[1] for reader in readers]
    assert [end.request_id for end in ends] == ["first", "second", "third"]
    assert {end.finish_reason for end in ends} <= {FinishReason.ABORT, FinishReason.ERROR}


def test_an_end_in_the_step_whose_settling_raised_is_told(held):
    core, gate = held
    readers = [ask(core, name, 4, 3) for name in ("first", "second", "third")]
    gate.release(1)
    core.start()
    for reader in readers:
        reader.next()

    def free_twice():
        (second,) = [r for r in core.scheduler.running if r.request_id == "second"]
        core.scheduler.pool.release(second.blocks)

    # Called between the second and the third step. All end in that one, and the second end raises after the first.
    core.send(CallMessage(free_twice, Future()))
    gate.release(10**6)
    ends = [reader.all()[1] for reader in readers]
    assert [(end.request_id, end.finish_reason) for end in ends] == [
        (name, FinishReason.ERROR) for name in ("first", "second", "third")
    ]
    assert not core.is_alive


def test_a_dying_engine_names_no_exception_to_clients(held):
    core, gate = held
    reader = ask(core, "r", 4, 1000)
    gate.release(1)
    core.start()
    reader.next()

    def secret():
        raise OSError("/a/path/of/this/machine is gone")

    gate.release(1)
    core.call(lambda: setattr(core.scheduler, "plan", secret))
    gate.release(10**6)
    assert reader.all()[1].error == "the engine failed while serving this request (id r)"


def test_timings_that_a_reader_holds_do_not_change(held):
    core, gate = held
    reader = ask(core, "r", [7] * 4, 3)
    gate.release(10**6)
    core.start()
    first = reader.next()
    last = reader.all()[1]
    assert first.timings is not last.timings
    assert first.timings.finished is None and last.timings.finished is not None
    with pytest.raises(AttributeError):
        first.timings.finished = 0.0
