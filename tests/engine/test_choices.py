"""Several choices of one prompt: computed once, told once each, and each the same as a request of its own."""

from __future__ import annotations

import json
import shutil

import pytest

from cb_backend import Engine, EngineConfig, SamplingParams
from cb_backend.engine.choices import Choices
from cb_backend.request import FinishReason
from cb_backend.scheduling.plan import StepResult
from tests.scheduling.scripted import MADE, make_request, make_scheduler, step, table

from .oracle import random_prompts

PROMPTS = random_prompts(6, (3, 60), 512, seed=21)
SAMPLED = {"temperature": 1.0, "top_p": 0.95}


def make(**options):
    scheduler = make_scheduler(**{"num_blocks": 64, "block_size": 4, "budget": 64} | options)
    return scheduler, Choices(scheduler)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_the_others_follow_once_the_prompt_is_computed_and_compute_less_than_a_block_of_it(prefix_caching):
    scheduler, choices = make(prefix_caching=prefix_caching)
    choices.add(make_request("r", 14, 4, n=3))
    choices.add(make_request("later", 3, 4))
    assert choices.num_waiting == 4
    assert table(step(scheduler, choices=choices)[0]) == {"r": 14, "later": 3}
    assert choices.num_waiting == 2
    assert table(step(scheduler, choices=choices)[0]) == {"r": 1, "later": 1, "r/1": 2, "r/2": 2}
    while scheduler.has_work:
        step(scheduler, choices=choices)
    assert scheduler.pool.num_used == 0
    assert prefix_caching or scheduler.pool.num_cached == 0


def test_followers_come_before_later_arrivals():
    scheduler, choices = make(max_num_seqs=1)
    choices.add(make_request("r", 6, 1, n=3))
    choices.add(make_request("later", 6, 1))
    order = []
    while scheduler.has_work:
        order += [(MADE[s].request_id, MADE[s].index) for s in step(scheduler, choices=choices)[0].admitted]
    assert order == [("r", 0), ("r", 1), ("r", 2), ("later", 0)]


def test_more_choices_than_sequences_run_one_after_the_other():
    scheduler, choices = make(max_num_seqs=2)
    choices.add(make_request("r", 6, 3, n=5))
    while scheduler.has_work:
        step(scheduler, choices=choices)
        assert len(scheduler.running) <= 2
    assert scheduler.counters["finished_length"] == 5


def test_without_prefix_caching_nobody_else_hits_the_prompt():
    scheduler, choices = make(prefix_caching=False)
    ids = list(range(10, 30))
    choices.add(make_request("r", ids, 4, n=2))
    step(scheduler, choices=choices)
    choices.add(make_request("stranger", ids, 4))
    choices.add(make_request("again", ids, 4, n=2))
    assert table(step(scheduler, choices=choices)[0]) == {"r": 1, "r/1": 4, "stranger": 20, "again": 20}


def test_where_nothing_is_generated_the_others_follow_the_end():
    scheduler, choices = make()
    choices.add(make_request("r", 9, 0, n=3))
    ends = []
    while scheduler.has_work:
        ends += [(r.index, d.finish_reason) for r, d in step(scheduler, choices=choices)[1]]
    assert ends == [(i, FinishReason.LENGTH) for i in range(3)]
    assert scheduler.counters["computed_tokens"] == 9 + 2 * 1


@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.TIMEOUT])
def test_an_end_from_outside_ends_every_choice_once(steps, reason):
    scheduler, choices = make(budget=8)
    choices.add(make_request("r", 12, 9, n=3, deadline=5.0))
    for _ in range(steps):
        step(scheduler, choices=choices)
    ended = choices.expire(5.0) if reason is FinishReason.TIMEOUT else choices.finish("r", reason)
    assert sorted((r.index, d.finish_reason) for r, d in ended) == [(i, reason) for i in range(3)]
    choices.check()
    assert not scheduler.has_work and scheduler.pool.num_used == choices.num_waiting == 0
    assert choices.finish("r", reason) == []


def test_one_choice_may_end_alone_also_before_it_was_added():
    scheduler, choices = make()
    choices.add(make_request("r", 12, 9, n=3))
    assert [(r.index, d.finish_reason) for r, d in choices.finish("r", FinishReason.ABORT, 1)] == [
        (1, FinishReason.ABORT)
    ]
    ends = []
    while scheduler.has_work:
        ends += [r.index for r, d in step(scheduler, choices=choices)[1] if d.finish_reason]
    assert ends == [0, 2]


def test_a_first_choice_whose_row_fails_ends_them_all():
    scheduler, choices = make()
    choices.add(make_request("r", 12, 9, n=3))
    choices.add(make_request("other", 5, 9))
    plan = scheduler.plan()
    outcomes = choices.settled(scheduler.settle(plan, StepResult([(5,), (6,)], errors={0: "not a number"}), 0.0))
    ended = [(r.request_id, r.index, d.error) for r, d in outcomes if d.finish_reason]
    assert ended == [("r", i, "not a number") for i in range(3)]
    choices.check()


def test_a_choice_at_fault_ends_all_choices_of_its_request():
    scheduler, choices = make(max_num_seqs=2)
    choices.add(make_request("r", 6, 9, n=4))
    step(scheduler, choices=choices)
    plan = scheduler.plan()
    scheduler.undo(plan)
    outcomes = choices.settled(scheduler.fail(plan.seq_ids[:1], "out of memory"), failed=True)
    assert sorted((r.index, d.error) for r, d in outcomes) == [(i, "out of memory") for i in range(4)]
    choices.check()
    assert not scheduler.has_work


def test_a_used_id_is_refused():
    _scheduler, choices = make()
    choices.add(make_request("r", 2, 2, n=3))
    with pytest.raises(ValueError, match="already in use"):
        choices.add(make_request("r", 2, 2))


def run(path, prompts, params, **fields):
    config = {"model": str(path), "dtype": "float32", "block_size": 8, "num_kv_blocks": 400, "swap_space": "64MiB"}
    with Engine(EngineConfig(**config | fields)) as engine:
        outputs = engine.generate(prompts, params)
        stats = engine.stats()
        engine.core.call(lambda: engine.core.choices.check())
    assert stats["kv_blocks_used"] == stats["host_blocks_used"] == stats["waiting"] == stats["running"] == 0
    return outputs, stats


@pytest.fixture(scope="module")
def alone(tiny_llama):
    """Four requests of one choice for each prompt, with the seeds that four choices derive."""
    each = [SamplingParams(max_tokens=12, seed=100 + i, **SAMPLED) for _ in PROMPTS for i in range(4)]
    outputs, _ = run(tiny_llama, [p for p in PROMPTS for _ in range(4)], each)
    return [[o.token_ids for o in outputs[at : at + 4]] for at in range(0, len(outputs), 4)]


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlap"])
@pytest.mark.parametrize("prefix_caching", [False, True], ids=["uncached", "cached"])
@pytest.mark.parametrize("memory", ["enough", "swap", "recompute"])
def test_four_choices_are_four_requests_with_the_derived_seeds(tiny_llama, alone, memory, prefix_caching, overlap):
    short = {} if memory == "enough" else {"num_kv_blocks": 14, "preemption": memory, "admission": {"policy": "prompt"}}
    four = SamplingParams(max_tokens=12, n=4, seed=100, **SAMPLED)
    outputs, stats = run(
        tiny_llama, PROMPTS, four, enable_prefix_caching=prefix_caching, overlap=overlap, max_num_seqs=12, **short
    )
    assert [[choice.token_ids for choice in output.choices] for output in outputs] == alone
    assert memory == "enough" or stats[f"preemptions_{memory}"] > 2


@pytest.mark.parametrize("prefix_caching", [False, True], ids=["uncached", "cached"])
def test_a_long_prompt_with_eight_choices_is_computed_once(tiny_llama, tmp_path, prefix_caching):
    path = shutil.copytree(tiny_llama, tmp_path / "long")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    prompt = random_prompts(1, (2000, 2000), 512, seed=5)[0]
    eight = SamplingParams(max_tokens=5, n=8, seed=1, ignore_eos=True, **SAMPLED)
    (output,), stats = run(path, [prompt], eight, enable_prefix_caching=prefix_caching, num_kv_blocks=300)
    assert len(output.choices) == 8
    assert 2000 < stats["computed_tokens"] <= 2000 + 8 * 8 + 8 * 5
