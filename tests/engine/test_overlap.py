"""With the real executor, planning a step while the one before it computes changes no output, whatever is in flight."""

from __future__ import annotations

import pytest

from cb_backend import Engine, EngineConfig, SamplingParams
from cb_backend.execution.executor import Executor
from cb_backend.request import FinishReason, Logprob
from cb_backend.scheduling.draft import Draft
from cb_backend.scheduling.plan import ON_DEVICE, StepResult
from cb_backend.scheduling.preemption import Victim
from tests.scheduling.scripted import make_request, make_scheduler

from .oracle import random_prompts

PROMPTS = random_prompts(20, (1, 60), 512, seed=3)


def params(i: int) -> SamplingParams:
    """Greedy and seeded draws, filters, penalties, choices, log-probabilities of output and prompt, stop strings."""
    return SamplingParams(
        max_tokens=6 + i % 9,
        seed=i,
        temperature=float(i % 3 > 0),
        top_k=40 * (i % 2),
        min_tokens=i % 4,
        presence_penalty=0.5 * (i % 5 == 0),
        n=1 + 2 * (i % 7 == 3),
        logprobs=2 if i % 4 == 1 else None,
        prompt_logprobs=1 if i % 6 == 2 else None,
        stop=("e", "an") if i % 3 == 2 else (),
        stop_token_ids=tuple(range(100, 180)) if i % 4 == 3 else (),
    )


PARAMS = [params(i) for i in range(20)]


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For every step launched: how many of its tokens the host did not know yet."""
    seen: list[int] = []
    launch = Executor.launch

    def counting(self, plan):
        seen.append(int((plan.token_ids == ON_DEVICE).sum()))
        return launch(self, plan)

    monkeypatch.setattr(Executor, "launch", counting)
    return seen


def run(path, **fields):
    config = {"model": str(path), "dtype": "float32", "num_kv_blocks": 400, "block_size": 8, "swap_space": "64MiB"}
    with Engine(EngineConfig(**config | fields)) as engine:
        outputs = engine.generate(PROMPTS, PARAMS)
        stats = engine.stats()
        engine.core.call(lambda: engine.core.scheduler.check())
    return outputs, stats


def told(output):
    """Everything a client sees of a request but its timings; log-probabilities apart, the last digit is the batch's."""
    logprobs, prompt = output.logprobs or (), output.prompt_logprobs or ()
    choices = [told(choice) for choice in output.choices[1:]]
    tokens = [p.token_id for p in logprobs], [p and p.token_id for p in prompt]
    values = [p.logprob for p in (*logprobs, *prompt) if p] + [value for _, values in choices for value in values]
    exact = output.token_ids, output.text, output.finish_reason, output.stop_reason, *tokens
    return (*exact, [rest for rest, _ in choices]), values


def assert_same(outputs, wanted):
    for output, (exact, values) in zip(outputs, wanted, strict=True):
        answer, logprobs = told(output)
        assert answer == exact
        assert logprobs == pytest.approx(values, abs=5e-5)


@pytest.fixture(scope="module")
def serial(tiny_llama):
    return [told(output) for output in run(tiny_llama, overlap=False)[0]]


def test_the_sample_has_every_kind_of_end_and_detail(serial):
    reasons = {(finish, type(stop).__name__) for (_, _, finish, stop, *_), _ in serial}
    assert {("length", "NoneType"), ("stop", "str"), ("stop", "int")} <= reasons
    assert any(prompt for (*_, prompt, _), _ in serial)
    assert any(rest for (*_, rest), _ in serial)


@pytest.mark.parametrize("budget", [16, 512])
def test_overlap_changes_no_output(tiny_llama, serial, unseen, budget):
    outputs, _ = run(tiny_llama, overlap=True, max_num_batched_tokens=budget)
    assert_same(outputs, serial)
    assert sum(unseen) > 50, "no token was fed to a step before the host had seen it"


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_overlap_changes_no_output_when_memory_is_short(tiny_llama, serial, mode):
    outputs, stats = run(
        tiny_llama,
        overlap=True,
        num_kv_blocks=26,
        block_size=4,
        preemption=mode,
        admission={"policy": "prompt"},
        max_num_seqs=12,
    )
    assert_same(outputs, serial)
    assert stats[f"preemptions_{mode}"] > 3


def test_without_overlap_the_host_knows_every_token(tiny_llama, unseen):
    with Engine(model=str(tiny_llama), dtype="float32", num_kv_blocks=60, overlap=False) as engine:
        engine.generate([PROMPTS[2]], SamplingParams(max_tokens=8, ignore_eos=True))
    assert sum(unseen) == 0


def test_it_is_off_on_a_cpu_unless_asked_for(tiny_llama):
    for wanted, used in ((None, False), (False, False), (True, True)):
        with Engine(model=str(tiny_llama), dtype="float32", num_kv_blocks=60, overlap=wanted) as engine:
            assert engine.core.overlap is used


async def test_an_abort_in_flight_frees_everything(tiny_llama):
    with Engine(model=str(tiny_llama), dtype="float32", num_kv_blocks=300, block_size=8, overlap=True) as engine:
        outputs = []
        async for output in engine.stream(
            PROMPTS[1], SamplingParams(max_tokens=900, ignore_eos=True), request_id="long"
        ):
            outputs.append(output)
            if len(outputs) == 4:
                engine.abort("long")
        assert outputs[-1].finish_reason == FinishReason.ABORT.value
        assert 4 <= len(outputs[-1].token_ids) < 900
        after = engine.generate([PROMPTS[3]], PARAMS[3])[0]
        assert idle(engine)
    with Engine(model=str(tiny_llama), dtype="float32", num_kv_blocks=300, block_size=8) as fresh:
        assert told(after) == told(fresh.generate([PROMPTS[3]], PARAMS[3])[0])


async def test_a_deadline_in_flight_ends_with_what_was_generated(tiny_llama):
    with Engine(
        model=str(tiny_llama),
        dtype="float32",
        num_kv_blocks=300,
        block_size=8,
        overlap=True,
        admission={"refuse_late": False},
    ) as engine:
        endless = SamplingParams(max_tokens=900, ignore_eos=True)
        outputs = [output async for output in engine.stream(PROMPTS[1], endless, timeout=0.2)]
        assert outputs[-1].finish_reason == FinishReason.TIMEOUT.value
        assert 0 < len(outputs[-1].token_ids) < 900
        assert idle(engine)


def prompt_scored(plan):
    """Every log-probability asked for, with the token's own number as its id; every sampled token is 5."""
    values = {part.seq_id: [Logprob(token, 0.0) for token in part.targets] for part in plan.prompt_targets}
    return StepResult([(5,)] * len(plan.sampled), prompt_logprobs=values)


@pytest.mark.parametrize("computed", [1, 2], ids=["first chunk in flight", "second chunk in flight"])
def test_a_prompt_preempted_in_flight_reports_each_of_its_tokens_once(computed):
    """Its chunk settles after its memory is gone, and is computed again, in chunks of another size."""
    scheduler = make_scheduler(budget=4)
    (request,) = make_request("r", range(11), 1, params=SamplingParams(max_tokens=1, prompt_logprobs=0))
    scheduler.add(request)

    for _ in range(computed - 1):
        plan = scheduler.plan()
        scheduler.settle(plan, prompt_scored(plan), 0.0)
    in_flight = scheduler.plan()
    scheduler._preempt(Victim(request, "recompute"), Draft())
    scheduler.settle(in_flight, prompt_scored(in_flight), 0.0)
    scheduler.budget = 6
    outcomes = []
    while scheduler.has_work:
        plan = scheduler.plan()
        outcomes = scheduler.settle(plan, prompt_scored(plan), 0.0)
    ((_, delta),) = outcomes
    assert [p and p.token_id for p in delta.prompt_logprobs] == [None, *range(1, 11)]


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_preemption_while_the_first_token_is_in_flight_loses_no_log_probability_of_the_prompt(mode):
    """Its last chunk settles after its memory is gone; the token that comes with it is the last time to tell."""
    scheduler = make_scheduler(num_blocks=6, block_size=4, budget=16, host_blocks=8, mode=mode)
    (request,) = make_request("r", range(20), 3, priority=1, params=SamplingParams(max_tokens=3, prompt_logprobs=0))
    scheduler.add(request)
    first = scheduler.plan()
    scheduler.settle(first, prompt_scored(first), 0.0)
    last = scheduler.plan()
    scheduler.add(*make_request("better", 12, 2))
    plans = [scheduler.plan()]
    assert plans[0].preempted == ((request.seq_id, mode),)
    told = scheduler.settle(last, prompt_scored(last), 0.0)
    while plans or scheduler.has_work:
        plan = plans.pop() if plans else scheduler.plan()
        told += scheduler.settle(plan, prompt_scored(plan), 0.0)
    scores = [d.prompt_logprobs for r, d in told if r is request and d.prompt_logprobs]
    assert [[p and p.token_id for p in each] for each in scores] == [[None, *range(1, 20)]]


def idle(engine):
    engine.core.call(lambda: engine.core.scheduler.check())
    stats = engine.stats()
    return not (stats["running"] or stats["waiting"] or stats["kv_blocks_used"] or stats["host_blocks_used"])
