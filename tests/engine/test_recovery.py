"""A step that raises: the request at fault ends, and no other notices."""

from __future__ import annotations

import pytest
import torch

from cb_backend import Engine, EngineConfig, SamplingParams
from cb_backend.engine.core import EngineCore
from cb_backend.execution.executor import Executor
from cb_backend.request import FinishReason
from tests.engine.oracle import random_prompts
from tests.engine.test_core import Late, ScriptedExecutor, ask, expected, idle
from tests.scheduling.scripted import MADE, make_scheduler, names


class FaultyExecutor(ScriptedExecutor):
    """Raises what `fault(plan)` returns: `when` it is launched, or when its result is asked for."""

    def __init__(self, fault, when: str = "launch") -> None:
        super().__init__()
        self.fault = fault
        self.when = when
        self.failed = 0
        self.tried = []

    def launch(self, plan):
        self.tried.append(names(plan.seq_ids))
        error = self.fault(plan)
        self.failed += error is not None
        if error is not None and self.when == "launch":
            raise error
        late = super().launch(plan)
        return late if error is None else Broken(late, error)


class Broken(Late):
    def __init__(self, late, error) -> None:
        super().__init__(late.plan, late.answered)
        self.error = error

    def result(self):
        raise self.error


@pytest.fixture(params=["launch", "result"])
def when(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["serial", "overlap"])
def overlap(request):
    return request.param


@pytest.fixture
def serve():
    cores = []

    def make(executor, *, overlap=False, **options):
        options = {"num_blocks": 400, "block_size": 4, "budget": 64, "max_num_seqs": 16, **options}
        core = EngineCore(make_scheduler(**options), executor, overlap=overlap)
        cores.append(core)
        return core

    yield make
    for core in cores:
        core.stop()


def ask_eight(core, max_tokens=6):
    readers = [ask(core, f"r{i}", [10 + i] * (3 + i), max_tokens) for i in range(8)]
    core.start()
    return readers


def assert_right(reader, i, max_tokens=6):
    ids, last = reader.all()
    assert (ids, last.finish_reason, last.error) == (
        expected([10 + i] * (3 + i), max_tokens),
        FinishReason.LENGTH,
        None,
    )


def with_request(*culprits):
    return lambda plan: RuntimeError("bad kernel") if set(culprits) & set(names(plan.seq_ids)) else None


@pytest.mark.parametrize("culprit", range(8))
def test_only_the_request_at_fault_ends(serve, when, overlap, culprit):
    core = serve(FaultyExecutor(with_request(f"r{culprit}"), when), overlap=overlap)
    for i, reader in enumerate(ask_eight(core)):
        if i == culprit:
            ids, last = reader.all()
            assert (ids, last.finish_reason) == ([], FinishReason.ERROR)
            assert last.error == f"the engine failed while serving this request (id r{culprit})"
        else:
            assert_right(reader, i)
    assert idle(core)


def test_a_request_that_fails_at_its_third_token_keeps_the_tokens_before(serve, when, overlap):
    def fault(plan):
        found = zip(plan.seq_ids, (plan.starts + plan.lengths).tolist(), strict=True)
        at_fault = any(MADE[seq_id].request_id == "r5" and end >= 10 for seq_id, end in found)
        return RuntimeError("bad kernel") if at_fault else None

    core = serve(FaultyExecutor(fault, when), overlap=overlap)
    for i, reader in enumerate(ask_eight(core)):
        if i == 5:
            ids, last = reader.all()
            assert (ids, last.finish_reason) == (expected([15] * 8, 6)[:2], FinishReason.ERROR)
        else:
            assert_right(reader, i)
    assert idle(core)


@pytest.mark.parametrize("step", [1, 2, 4])
def test_nobody_notices_a_step_that_raises_once(serve, when, overlap, step):
    count = iter(range(1, 10**6))
    executor = FaultyExecutor(lambda plan: RuntimeError("once") if next(count) == step else None, when)
    core = serve(executor, overlap=overlap)
    for i, reader in enumerate(ask_eight(core)):
        assert_right(reader, i)
    assert executor.failed == 1
    assert idle(core)


def test_halves_are_tried_until_one_is_left(serve):
    executor = FaultyExecutor(with_request("r5"))
    core = serve(executor)
    for reader in ask_eight(core, max_tokens=1):
        reader.all()
    r = [f"r{i}" for i in range(8)]
    assert executor.tried == [r, r, r[:4], r[4:], r[4:6], r[4:5], r[5:6], r[6:]]


def test_everybody_is_told_when_every_step_fails_and_the_engine_goes_on(serve, when, overlap):
    broken = [True]
    core = serve(FaultyExecutor(lambda plan: RuntimeError("no device") if broken else None, when), overlap=overlap)
    for reader in ask_eight(core):
        assert reader.all()[1].finish_reason is FinishReason.ERROR
    core.call(broken.clear)
    later = ask(core, "later", [7] * 4, 4)
    assert later.all()[0] == expected([7] * 4, 4)
    assert idle(core)


def test_the_tries_are_bounded(serve):
    executor = FaultyExecutor(lambda plan: RuntimeError("no device"))
    core = serve(executor, budget=1000, max_num_seqs=200, num_blocks=1000)
    readers = [ask(core, f"r{i}", [10 + i] * 4, 4) for i in range(200)]
    core.start()
    for reader in readers:
        assert reader.all()[1].finish_reason is FinishReason.ERROR
    assert executor.failed < 100


def test_who_shares_a_prompt_with_the_request_at_fault_computes_it_itself(serve, when):
    core = serve(FaultyExecutor(with_request("r0"), when))
    prompt = [9] * 8
    readers = [ask(core, f"r{i}", [*prompt, i], 4) for i in range(3)]
    core.start()
    assert readers[0].all()[1].finish_reason is FinishReason.ERROR
    assert [readers[i].all()[0] for i in (1, 2)] == [expected([*prompt, i], 4) for i in (1, 2)]
    assert idle(core)


def test_failing_steps_that_swap_change_no_output(serve, when, overlap):
    count = iter(range(1, 10**6))
    executor = FaultyExecutor(lambda plan: RuntimeError("now and then") if next(count) % 3 == 0 else None, when)
    options = {"num_blocks": 6, "host_blocks": 8, "budget": 8, "mode": "swap"}
    core = serve(executor, overlap=overlap, **options)
    readers = [ask(core, f"r{i}", [10 + i] * (3 + i % 4), 10) for i in range(12)]
    core.start()
    for i, reader in enumerate(readers):
        assert reader.all()[0] == expected([10 + i] * (3 + i % 4), 10)
    assert core.stats()["preemptions_swap"] > 0
    assert idle(core)


def test_a_prompt_too_large_for_the_device_is_computed_in_smaller_chunks(serve, when, overlap):
    executor = FaultyExecutor(lambda plan: MemoryError("out of memory") if plan.num_tokens > 20 else None, when)
    core = serve(executor, overlap=overlap)
    for i, reader in enumerate(ask_eight(core)):
        assert_right(reader, i)
    assert idle(core)


def test_too_many_sequences_for_the_device_take_turns(serve, when, overlap):
    executor = FaultyExecutor(lambda plan: MemoryError("out of memory") if len(plan.seq_ids) > 3 else None, when)
    core = serve(executor, overlap=overlap)
    for i, reader in enumerate(ask_eight(core)):
        assert_right(reader, i)
    assert idle(core)


def test_a_request_for_which_no_step_is_small_enough_ends(serve):
    core = serve(FaultyExecutor(lambda plan: MemoryError("out of memory") if "r3" in names(plan.seq_ids) else None))
    for i, reader in enumerate(ask_eight(core)):
        if i == 3:
            assert reader.all()[1].finish_reason is FinishReason.ERROR
        else:
            assert_right(reader, i)
    assert idle(core)


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlap"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("bad kernel")])
def test_a_forward_that_raises_changes_no_token_of_a_real_model(tiny_llama, monkeypatch, overlap, error):
    config = EngineConfig(
        model=str(tiny_llama),
        dtype="float32",
        attention_backend="torch",
        block_size=8,
        num_kv_blocks=40,
        max_num_batched_tokens=48,
        admission={"policy": "prompt"},
        overlap=overlap,
    )
    prompts = random_prompts(12, (3, 40), 512, seed=3)
    params = SamplingParams(max_tokens=9, temperature=0.8, seed=5)
    forward = Executor._forward
    counting, calls = [], iter(range(10**6))

    def faulty(self, batch):
        hidden = forward(self, batch)  # what it wrote stays
        if counting and next(calls) % 5 == 2:
            raise error
        return hidden

    monkeypatch.setattr(Executor, "_forward", faulty)
    with Engine(config) as engine:
        right = engine.generate(prompts, params)
        counting.append(True)
        outputs = engine.generate(prompts, params)
        assert next(calls) > 10
    assert [output.token_ids for output in outputs] == [output.token_ids for output in right]
