"""The engine thread on a scripted model: messages, ends, failures, and steps that overlap."""

from __future__ import annotations

import queue
import threading
import time

import pytest

from cb_backend.engine.core import AbortMessage, AddMessage, EngineCore
from cb_backend.params import SamplingParams
from cb_backend.request import FinishReason
from cb_backend.scheduling.preemption import CostModel
from tests.scheduling.scripted import EOS, answer, make_request, make_scheduler, token_of


class ScriptedExecutor:
    """Answers with `model(request, position)`; `gate`, if given, must be opened for every step."""

    def __init__(self, model=token_of, gate: threading.Semaphore | None = None) -> None:
        self.model = model
        self.gate = gate
        self.fail_at: dict[int, Exception] = {}
        self.steps = 0

    def launch(self, plan):
        self.steps += 1
        if self.gate is not None:
            self.gate.acquire()
        if error := self.fail_at.pop(self.steps, None):
            raise error
        return Late(plan, answer(plan, self.model))


class Late:
    def __init__(self, plan, answered) -> None:
        self.plan = plan
        self.answered = answered

    def result(self):
        return self.answered


class Reader:
    def __init__(self) -> None:
        self.deltas: queue.Queue = queue.Queue()

    def __call__(self, delta) -> None:
        self.deltas.put(delta)

    def next(self):
        return self.deltas.get(timeout=10)

    def all(self):
        """Ids and the last delta."""
        ids: list[int] = []
        while True:
            delta = self.next()
            ids += delta.token_ids
            if delta.finish_reason is not None:
                return ids, delta


@pytest.fixture(params=[False, True], ids=["serial", "overlap"])
def overlap(request):
    return request.param


@pytest.fixture
def start():
    cores = []

    def make(executor=None, *, overlap=False, **options):
        core = EngineCore(make_scheduler(**options), executor or ScriptedExecutor(), overlap=overlap)
        core.start()
        cores.append(core)
        return core

    yield make
    for core in cores:
        core.stop()
        assert not core._thread.is_alive()


def ask(core, name, prompt=4, max_tokens=4, **options):
    reader = Reader()
    core.send(AddMessage(make_request(name, prompt, max_tokens, sink=reader, **options)))
    return reader


def expected(prompt_ids, max_tokens):
    (request,) = make_request("oracle", prompt_ids, max_tokens)
    return [token_of(request, len(prompt_ids) + i) for i in range(max_tokens)]


def idle(core):
    core.call(lambda: core.scheduler.check())
    stats = core.stats()
    return not (stats["running"] or stats["waiting"] or stats["kv_blocks_used"] or stats["host_blocks_used"])


def test_requests_end_with_their_tokens_in_order(start, overlap):
    core = start(overlap=overlap)
    readers = [ask(core, f"r{i}", [10 + i] * (3 + i), 5) for i in range(6)]
    for i, reader in enumerate(readers):
        ids, last = reader.all()
        assert ids == expected([10 + i] * (3 + i), 5)
        assert last.finish_reason is FinishReason.LENGTH
    assert idle(core)


def test_shortage_changes_no_output_when_steps_overlap(start):
    core = start(overlap=True, num_blocks=6, block_size=4, host_blocks=4, budget=6, cost=CostModel(2e-4, 1e-4))
    readers = [ask(core, f"r{i}", [10 + i] * (3 + i), 10) for i in range(12)]
    for i, reader in enumerate(readers):
        assert reader.all()[0] == expected([10 + i] * (3 + i), 10)
    counts = core.stats()
    assert counts["preemptions_swap"] + counts["preemptions_recompute"] > 3
    assert idle(core)


def test_an_end_id_ends_although_the_next_step_is_already_launched(start, overlap):
    def ends_at_seven(request, position):
        return EOS if position == 7 else 50

    core = start(ScriptedExecutor(ends_at_seven), overlap=overlap)
    ids, last = ask(core, "r", 5, 20).all()
    assert ids == [50, 50, EOS]
    assert last.finish_reason is FinishReason.STOP
    assert idle(core)


def test_abort_frees_at_once_and_the_reader_hears_of_it(start, overlap):
    core = start(overlap=overlap, num_blocks=4000, block_size=32)
    reader = ask(core, "r", 4, 10**5)
    for _ in range(3):
        assert reader.next().finish_reason is None
    core.send(AbortMessage("r", FinishReason.ABORT))
    assert reader.all()[1].finish_reason is FinishReason.ABORT
    assert idle(core)


def test_a_deadline_ends_with_what_was_generated(start, overlap):
    core = start(overlap=overlap, num_blocks=4000, block_size=32)
    ids, last = ask(core, "r", 4, 10**5, deadline=time.monotonic() + 0.2).all()
    assert last.finish_reason is FinishReason.TIMEOUT
    assert len(ids) > 0
    assert last.timings.finished is not None
    assert idle(core)


def test_a_request_that_makes_steps_raise_ends_and_the_engine_goes_on(start, overlap, caplog):
    executor = ScriptedExecutor()
    executor.fail_at.update({2: RuntimeError("no device"), 3: RuntimeError("no device")})
    core = start(executor, overlap=overlap)
    last = ask(core, "unlucky", 4, 4).all()[1]
    assert last.finish_reason is FinishReason.ERROR
    assert last.error == "the engine failed while serving this request (id unlucky)"
    assert "RuntimeError: no device" in caplog.text and "unlucky" in caplog.text
    assert ask(core, "next", [7] * 4, 4).all()[0] == expected([7] * 4, 4)
    assert core.is_alive
    assert idle(core)


def test_grammar_and_penalties_see_every_token_before_the_next_is_sampled(start):
    """With overlap such a request waits for its token; the others do not wait for it."""
    core = start(overlap=True, num_blocks=64)
    seen = []

    class Watching:
        finished = False

        def allowed(self):
            return None

        def accept(self, token):
            seen.append(token)

        def fork(self):
            return self

    choices = make_request("r", [9] * 4, 5, params=SamplingParams(max_tokens=5, presence_penalty=0.5))
    reader = Reader()
    choices[0].sink = reader
    choices[0].constraint = Watching()
    core.send(AddMessage(choices))
    assert reader.all()[0] == expected([9] * 4, 5) == seen


def test_an_error_in_the_scheduler_ends_everybody_and_is_visible(start):
    core = start(num_blocks=4000, block_size=32)
    reader = ask(core, "r", 4, 10**5)
    reader.next()
    core.call(lambda: setattr(core.scheduler, "plan", None))  # the next call raises
    assert reader.all()[1].finish_reason is FinishReason.ERROR
    core._thread.join(10)
    assert not core.is_alive
    assert isinstance(core.fault, TypeError)
    # a later request is told at once
    assert ask(core, "late").all()[1].error == "the engine has stopped"


def test_stop_aborts_what_is_unfinished():
    core = EngineCore(make_scheduler(num_blocks=4000, block_size=32), ScriptedExecutor())
    core.start()
    reader = ask(core, "r", 4, 10**5)
    reader.next()
    core.stop()
    assert reader.all()[1].finish_reason is FinishReason.ABORT
    assert core.scheduler.pool.num_used == 0


def test_a_used_request_id_is_refused_and_the_first_goes_on(start):
    gate = threading.Semaphore(0)
    core = start(ScriptedExecutor(gate=gate))
    first = ask(core, "same", [8] * 4, 4)
    second = ask(core, "same", [8] * 4, 4)
    gate.release(100)
    assert "already in use" in second.all()[1].error
    assert first.all()[0] == expected([8] * 4, 4)


def test_random_ends_while_steps_overlap_leak_nothing(start):
    core = start(overlap=True, num_blocks=10, block_size=4, host_blocks=6, budget=12, cost=CostModel(2e-4, 1e-4))
    readers = []
    for i in range(120):
        readers.append(ask(core, f"r{i}", 1 + i % 17, 1 + i % 11, n=1 + i % 3, priority=i % 2))
        if i % 4 == 0:
            core.send(AbortMessage(f"r{i - 2}", FinishReason.ABORT))
    for i, reader in enumerate(readers):
        for _ in range(1 + i % 3):  # one end per choice
            assert reader.all()[1].finish_reason in (FinishReason.LENGTH, FinishReason.STOP, FinishReason.ABORT)
    assert idle(core)


def test_a_leak_is_found_as_soon_as_the_engine_is_idle(start):
    core = start(num_blocks=64)
    ask(core, "r").all()
    assert idle(core)
    core.call(lambda: core.scheduler.pool.allocate(1))  # no request owns it
    core._thread.join(10)
    assert not core.is_alive
    assert "reference counts differ" in str(core.fault)


def test_what_runs_first_runs_on_the_engine_thread():
    where = []
    core = EngineCore(make_scheduler(), ScriptedExecutor(), on_start=lambda: where.append(threading.current_thread()))
    core.start()
    core.call(lambda: None)
    core.stop()
    assert where == [core._thread]
