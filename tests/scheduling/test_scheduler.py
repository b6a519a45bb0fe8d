"""The scheduler's rules, each on its smallest case."""

from __future__ import annotations

import time

import pytest

from cb_backend.params import SamplingParams
from cb_backend.request import FinishReason, Status
from cb_backend.sampling.batch import CONSTRAINT_FAILED
from cb_backend.scheduling.draft import Draft
from cb_backend.scheduling.plan import StepResult
from cb_backend.scheduling.preemption import CostModel, Victim

from .scripted import EOS, MADE, answer, make_request, make_scheduler, names, step, table


def test_decodes_come_first_then_chunks_fill_the_budget_and_a_finished_place_is_taken_next_step():
    scheduler = make_scheduler(budget=8, max_num_seqs=3)
    for name, prompt, max_tokens in [("a", 3, 3), ("b", 9, 2), ("c", 6, 2), ("d", 2, 1)]:
        scheduler.add(*make_request(name, prompt, max_tokens))
    steps = []
    while scheduler.has_work:
        steps.append(table(step(scheduler)[0]))
    assert steps == [
        {"a": 3, "b": 5},  # two prompts share the budget of 8
        {"a": 1, "b": 4, "c": 3},  # a decodes first; b's rest and the beginning of c fill what is left
        {"a": 1, "b": 1, "c": 3},  # a and b end here; d waits for a place
        {"c": 1, "d": 2},  # the place is taken in the very next step
    ]


def test_every_running_request_that_can_decode_gets_its_token_before_any_chunk():
    scheduler = make_scheduler(num_blocks=200, budget=4, max_num_seqs=8)
    for i in range(6):
        scheduler.add(*make_request(str(i), 7, 5))
    while scheduler.has_work:
        decoding = {r.request_id for r in scheduler.running if r.num_missing == 1}
        plan, _ = step(scheduler)
        given = table(plan)
        assert sum(given.values()) <= 4
        first = list(given)[: len(decoding)]
        assert set(first) == decoding
        assert all(given[name] == 1 for name in first)


def test_a_request_behind_never_overtakes_a_large_one_that_waits():
    scheduler = make_scheduler(num_blocks=8, block_size=4, budget=64)
    scheduler.add(*make_request("running", 20, 8))
    step(scheduler)
    scheduler.add(*make_request("large", 16, 4))
    scheduler.add(*make_request("small", 1, 1))
    plan, _ = step(scheduler)
    assert table(plan) == {"running": 1}
    order = []
    while scheduler.has_work:
        order += names(step(scheduler)[0].admitted)
    assert order == ["large", "small"]


def test_better_priority_is_admitted_first_and_equal_priority_by_arrival():
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(*make_request("first", 2, 1))
    scheduler.add(*make_request("late", 2, 1, priority=1))
    scheduler.add(*make_request("second", 2, 1))
    scheduler.add(*make_request("urgent", 2, 1, priority=-1))
    order = []
    while scheduler.has_work:
        order += names(step(scheduler)[0].admitted)
    assert order == ["urgent", "first", "second", "late"]


def test_a_waiting_request_of_better_priority_preempts_when_it_cannot_fit_otherwise():
    scheduler = make_scheduler(num_blocks=6, block_size=4, budget=64)
    scheduler.add(*make_request("low", 16, 6, priority=5))
    step(scheduler)
    scheduler.add(*make_request("high", 12, 2, priority=1))
    plan, _ = step(scheduler)
    assert [(MADE[r].request_id, mode) for r, mode in plan.preempted] == [("low", "recompute")]
    assert table(plan) == {"high": 12}


def test_better_priority_does_not_preempt_what_it_does_not_need():
    scheduler = make_scheduler(num_blocks=12, block_size=4, budget=64)
    scheduler.add(*make_request("low", 16, 6, priority=5))
    step(scheduler)
    scheduler.add(*make_request("high", 12, 2, priority=1))
    plan, _ = step(scheduler)
    assert plan.preempted == ()
    assert table(plan) == {"low": 1, "high": 12}


def test_preempting_is_not_tried_where_it_would_not_help():
    scheduler = make_scheduler(num_blocks=8, block_size=4, budget=64)
    scheduler.add(*make_request("same", 20, 8, priority=1))
    scheduler.add(*make_request("low", 4, 8, priority=5))
    step(scheduler)
    scheduler.add(*make_request("high", 20, 2, priority=1))
    plan, _ = step(scheduler)
    assert plan.preempted == ()


def test_shortage_preempts_the_worst_and_the_first_in_rank_keeps_its_memory():
    scheduler = make_scheduler(num_blocks=4, block_size=4, budget=64)
    scheduler.add(*make_request("old", 7, 9))
    scheduler.add(*make_request("new", 7, 9))
    preempted = []
    while scheduler.has_work:
        preempted += names(r for r, _ in step(scheduler)[0].preempted)
    assert preempted == ["new"]
    assert scheduler.counters["finished_length"] == 2


@pytest.mark.parametrize("cost, mode", [(CostModel(1e-6, 1.0), "swap"), (CostModel(1.0, 1e-6), "recompute")])
def test_auto_preempts_by_the_cheaper_way(cost, mode):
    scheduler = make_scheduler(num_blocks=4, block_size=4, budget=64, host_blocks=8, cost=cost)
    scheduler.add(*make_request("old", 7, 9))
    scheduler.add(*make_request("new", 7, 9))
    modes = []
    while scheduler.has_work:
        modes += [m for _, m in step(scheduler)[0].preempted]
    assert modes == [mode]


def test_a_full_host_pool_falls_back_to_recompute():
    scheduler = make_scheduler(num_blocks=4, block_size=4, budget=64, host_blocks=1, mode="swap")
    scheduler.add(*make_request("old", 7, 9))
    scheduler.add(*make_request("new", 7, 9))
    modes = []
    while scheduler.has_work:
        modes += [m for _, m in step(scheduler)[0].preempted]
    assert modes == ["recompute"]


def test_a_swapped_request_continues_where_it_was():
    scheduler = make_scheduler(num_blocks=4, block_size=4, budget=64, host_blocks=8, mode="swap")
    scheduler.add(*make_request("old", 7, 9))
    (new,) = make_request("new", 7, 9)
    scheduler.add(new)
    resumed = None
    while scheduler.has_work:
        before = new.num_computed
        plan, _ = step(scheduler)
        if new.seq_id in plan.resumed:
            resumed = (before, table(plan)["new"], len(plan.swap_in))
    assert resumed == (8, 1, 2)  # two blocks come back and only the next token is computed
    assert scheduler.counters["recomputed_tokens"] == 0
    assert scheduler.host.num_used == 0


def test_victim_is_the_cheapest_to_bring_back_per_block():
    scheduler = make_scheduler(num_blocks=11, block_size=4, budget=64, mode="recompute")
    scheduler.add(*make_request("leader", 14, 20))
    scheduler.add(*make_request("short", 5, 20))
    scheduler.add(*make_request("long", 20, 20))
    step(scheduler)
    plan, _ = step(scheduler)  # "long" needs a sixth block
    # "short" frees 2 blocks for 5 tokens to compute again, "long" 5 for 20: 2.5 tokens a block against 4.
    assert names(r for r, _ in plan.preempted) == ["short"]


def test_an_equal_prefix_is_computed_once_also_when_all_arrive_together():
    scheduler = make_scheduler(num_blocks=300, block_size=16, budget=512, max_num_seqs=32)
    shared = list(range(10, 10 + 2000))
    for i in range(32):
        scheduler.add(*make_request(str(i), [*shared, 5000 + i], 1))
    computed = 0
    while scheduler.has_work:
        plan, _ = step(scheduler)
        computed += plan.num_tokens
    assert computed == 2000 + 32  # the prefix once, one own token each
    assert scheduler.pool.hit_tokens == 31 * 2000


def test_salts_do_not_share():
    scheduler = make_scheduler(budget=64)
    for salt in ("a", "b", "a"):
        scheduler.add(*make_request(salt + str(scheduler.num_waiting), list(range(10, 19)), 1, salt=salt))
    plan, _ = step(scheduler)
    assert [a.num_tokens for a in plan.assignments] == [9, 9, 1]


def test_a_wholly_cached_prompt_still_computes_its_last_token():
    scheduler = make_scheduler(block_size=1, budget=64)
    scheduler.add(*make_request("a", list(range(10, 18)), 1))
    step(scheduler)
    (again,) = make_request("b", list(range(10, 18)), 1)
    scheduler.add(again)
    plan, _ = step(scheduler)
    assert table(plan) == {"b": 1}
    assert again.num_cached == 7


def test_abort_frees_everything_in_every_state():
    scheduler = make_scheduler(num_blocks=4, block_size=4, budget=64, host_blocks=8, mode="swap")
    scheduler.add(*make_request("old", 7, 9))
    (new,) = make_request("new", 7, 9)
    scheduler.add(new)
    scheduler.add(*make_request("waiting", 12, 2))
    while new.status is not Status.SWAPPED:
        step(scheduler)
    for name in ("waiting", "new", "old"):
        (request,) = [r for r in scheduler.requests.values() if r.request_id == name]
        assert scheduler.finish(request, FinishReason.ABORT)[1].finish_reason is FinishReason.ABORT
        scheduler.check()
    assert not scheduler.has_work
    assert scheduler.pool.num_used == scheduler.host.num_used == scheduler.num_waiting == scheduler.num_swapped == 0
    assert not scheduler.plan()


def test_deadline_ends_running_and_waiting_requests():
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(*make_request("runs", 2, 50, deadline=10.0))
    scheduler.add(*make_request("waits", 2, 50, deadline=5.0))
    step(scheduler)
    assert scheduler.expire(4.9) == []
    assert [(r.request_id, d.finish_reason) for r, d in scheduler.expire(5.0)] == [("waits", FinishReason.TIMEOUT)]
    assert [r.request_id for r, _ in scheduler.expire(99.0)] == ["runs"]
    scheduler.check()
    assert not scheduler.has_work


def test_end_ids_stop_except_before_min_tokens_and_the_limit_is_a_length():
    def always_eos(request, position):
        return EOS

    scheduler = make_scheduler()
    scheduler.add(*make_request("a", 2, 5))
    assert [d.finish_reason for _, d in step(scheduler, model=always_eos)[1]] == [FinishReason.STOP]
    scheduler.add(*make_request("b", 2, 3, params=SamplingParams(min_tokens=3, max_tokens=3)))
    reasons = []
    while scheduler.has_work:
        reasons += [d.finish_reason for _, d in step(scheduler, model=always_eos)[1]]
    assert reasons == [None, None, FinishReason.LENGTH]


def test_zero_max_tokens_computes_the_prompt_and_samples_nothing():
    scheduler = make_scheduler()
    scheduler.add(*make_request("score", 5, 0))
    plan, outcomes = step(scheduler)
    assert plan.sampled == ()
    assert [(d.token_ids, d.finish_reason) for _, d in outcomes] == [((), FinishReason.LENGTH)]


def test_a_row_that_fails_ends_alone_and_its_blocks_are_never_hit():
    scheduler = make_scheduler(budget=64)
    scheduler.add(*make_request("bad", list(range(10, 19)), 3))
    scheduler.add(*make_request("good", 5, 3))
    plan = scheduler.plan()
    outcomes = scheduler.settle(plan, StepResult([(5,), (6,)], errors={0: "not a number"}), 0.0)
    assert [(r.request_id, d.finish_reason, d.error) for r, d in outcomes] == [
        ("bad", FinishReason.ERROR, "not a number"),
        ("good", None, None),
    ]
    scheduler.check()
    (again,) = make_request("again", list(range(10, 19)), 1)
    scheduler.add(again)
    step(scheduler)
    assert again.num_cached == 0


def test_requests_at_fault_end_and_only_those():
    scheduler = make_scheduler(budget=64, max_num_seqs=1)
    scheduler.add(*make_request("a", 5, 3))
    scheduler.add(*make_request("b", 5, 3))
    plan = scheduler.plan()
    scheduler.undo(plan)
    outcomes = scheduler.fail(plan.seq_ids, "out of memory")
    assert [(r.request_id, d.error) for r, d in outcomes] == [("a", "out of memory")]
    scheduler.check()
    plan, _ = step(scheduler)
    assert table(plan) == {"b": 5}


def test_outputs_do_not_depend_on_schedule_or_preemption():
    def run(**options):
        scheduler = make_scheduler(prefix_caching=False, **options)
        outputs: dict[str, list[int]] = {}
        for i in range(6):
            scheduler.add(*make_request(f"r{i}", [7 + i] * (3 + 2 * i), 10))
        while scheduler.has_work:
            for request, delta in step(scheduler)[1]:
                outputs.setdefault(request.request_id, []).extend(delta.token_ids)
        return outputs, scheduler.counters

    alone, _ = run(num_blocks=100)
    tight, counts = run(num_blocks=6, host_blocks=4, budget=5)
    assert alone == tight
    assert counts["preemptions_recompute"] + counts["preemptions_swap"] > 3


def test_planning_costs_microseconds_and_does_not_grow_with_the_queue():
    """1,000 running; the goal is 5 microseconds each, the bound leaves room for a busy machine."""

    def cost(waiting: int) -> float:
        scheduler = make_scheduler(
            num_blocks=40_000, block_size=32, budget=2000, max_num_seqs=1000, prefix_caching=False
        )
        for i in range(1000 + waiting):
            scheduler.add(*make_request(str(i), 1, 500))
        while len(scheduler.running) < 1000:
            step(scheduler)
        times = []
        for _ in range(5):
            start = time.perf_counter()
            plan = scheduler.plan()
            times.append(time.perf_counter() - start)
            scheduler.settle(plan, StepResult([(5,)] * len(plan.sampled)), 0.0)
        assert len(plan.assignments) == 1000
        return min(times) / 1000

    few, many = cost(0), cost(10_000)
    assert few < 15e-6
    assert many < 2 * few + 1e-6


class Grammar:
    """Allows everything, and raises where it is told to."""

    error = None

    def __init__(self, failing: str) -> None:
        self.failing = failing

    def raise_in(self, name: str) -> None:
        if self.failing == name:
            raise OSError("/home/somebody/secret.txt: no such file")

    def allowed(self):
        self.raise_in("allowed")

    def accept(self, token_id):
        self.raise_in("accept")

    @property
    def finished(self):
        self.raise_in("finished")
        return False

    def fork(self):
        return self


@pytest.mark.parametrize("failing", ["allowed", "accept", "finished"])
def test_a_grammar_that_raises_ends_its_request_alone_with_a_neutral_message(failing):
    scheduler = make_scheduler()
    (bad,), (good,) = make_request("bad", 4, 3), make_request("good", 4, 3)
    bad.constraint = Grammar(failing)
    scheduler.add(bad)
    scheduler.add(good)
    ends = {}
    while scheduler.has_work:
        for request, delta in step(scheduler)[1]:
            if delta.finish_reason is not None:
                ends[request.request_id] = (delta.finish_reason, delta.error)
    assert ends == {"bad": (FinishReason.ERROR, CONSTRAINT_FAILED), "good": (FinishReason.LENGTH, None)}
    assert scheduler.pool.num_used == 0


def test_a_token_in_flight_at_the_preemption_is_no_progress_since_the_return():
    scheduler = make_scheduler(num_blocks=8, block_size=4, budget=64)
    (request,) = make_request("r", 4, 9)
    scheduler.add(request)
    in_flight = scheduler.plan()
    scheduler._preempt(Victim(request, "recompute"), Draft())
    scheduler.settle(in_flight, answer(in_flight), 0.0)
    scheduler.plan()
    assert request.status is Status.RUNNING and not request.progressed


@pytest.mark.parametrize("gone", ["preempted", "aborted"])
def test_what_a_failed_step_wrote_is_never_hit_by_whoever_lost_its_memory_meanwhile(gone):
    scheduler = make_scheduler(budget=64)
    (request,) = make_request("r", list(range(10, 23)), 3)
    scheduler.add(request)
    in_flight = scheduler.plan()
    if gone == "preempted":
        scheduler._preempt(Victim(request, "recompute"), Draft())
    else:
        scheduler.finish(request, FinishReason.ABORT)
    scheduler.undo(in_flight)
    scheduler.fail([request.seq_id], "out of memory")
    scheduler.check()
    assert not scheduler.has_work
    (again,) = make_request("again", list(range(10, 23)), 1)
    scheduler.add(again)
    step(scheduler)
    assert again.num_cached == 0


@pytest.mark.parametrize("gone", ["preempted", "aborted"])
def test_what_a_failed_row_wrote_is_never_hit_although_its_request_has_gone(gone):
    scheduler = make_scheduler(budget=64)
    (request,) = make_request("r", list(range(10, 23)), 3)
    scheduler.add(request)
    in_flight = scheduler.plan()
    if gone == "preempted":
        scheduler._preempt(Victim(request, "recompute"), Draft())
    else:
        scheduler.finish(request, FinishReason.ABORT)
    scheduler.settle(in_flight, StepResult([(5,)], errors={0: "not a number"}), 0.0)
    (again,) = make_request("again", list(range(10, 23)), 1)
    scheduler.add(again)
    step(scheduler)
    assert again.num_cached == 0


def test_a_request_that_hit_what_a_failed_step_should_have_written_computes_it_itself():
    scheduler = make_scheduler(budget=64)
    scheduler.add(*make_request("first", list(range(10, 23)), 3))
    failing = scheduler.plan()
    scheduler.add(*make_request("second", list(range(10, 23)), 3))
    scheduler.add(*make_request("other", 5, 3))
    scheduler.undo(scheduler.plan())
    scheduler.undo(failing)
    scheduler.check()
    scheduler.fail(failing.seq_ids, "out of memory")
    plan, _ = step(scheduler)
    assert table(plan) == {"other": 5, "second": 13}


def test_a_step_that_is_taken_back_is_planned_again():
    scheduler = make_scheduler(budget=64)
    scheduler.add(*make_request("chunk", 9, 3))
    scheduler.add(*make_request("decode", 4, 3, priority=-1))
    step(scheduler)
    plan = scheduler.plan()
    scheduler.undo(plan)
    scheduler.check()
    again = scheduler.plan()
    assert (table(again), again.starts.tolist()) == (table(plan), plan.starts.tolist())
    assert again.token_ids.tolist() == plan.token_ids.tolist()


def test_a_copy_to_the_host_that_may_not_have_happened_does_not_count():
    scheduler = make_scheduler(num_blocks=4, host_blocks=4, mode="swap", budget=64, prefix_caching=False)
    scheduler.add(*make_request("a", 7, 9))
    scheduler.add(*make_request("b", 7, 9))
    while not (plan := scheduler.plan()).swap_out:
        scheduler.settle(plan, answer(plan), 0.0)
    scheduler.undo(plan)
    scheduler.check()
    assert (scheduler.num_swapped, scheduler.host.num_used) == (0, 0)


def test_a_row_may_give_several_tokens_as_far_as_the_one_that_ends():
    scheduler = make_scheduler()
    scheduler.add(*make_request("a", 4, 9))
    scheduler.add(*make_request("b", 4, 3))
    plan = scheduler.plan()
    told = scheduler.settle(plan, StepResult([(5, 6, EOS, 7), (5, 6, 7, 8)]), 0.0)
    assert [(d.token_ids, d.finish_reason) for _, d in told] == [
        ((5, 6, EOS), FinishReason.STOP),
        ((5, 6, 7), FinishReason.LENGTH),
    ]
    assert scheduler.counters["generated_tokens"] == 6


def test_computed_tokens_can_be_taken_back_and_are_computed_again():
    scheduler = make_scheduler(block_size=4)
    (request,) = make_request("r", list(range(10, 20)), 9)
    scheduler.add(request)
    step(scheduler)  # 10 computed, 11 known
    scheduler.take_back(request.seq_id, 3)
    assert (request.num_computed, len(request.block_nodes)) == (7, 1)
    assert scheduler.pool.lookup(list(range(10, 20)))[0] == request.blocks[:1], "the second block is not to be hit"
    scheduler.check()
    plan, _ = step(scheduler)
    (item,) = plan.assignments
    assert (item.start, item.num_tokens) == (7, 4)
    assert scheduler.counters["recomputed_tokens"] == 0
    for wrong in (-1, 99):
        with pytest.raises(ValueError, match="cannot be taken back"):
            scheduler.take_back(request.seq_id, wrong)
    with pytest.raises(ValueError, match="not unfinished"):
        scheduler.take_back(-5, 1)


def test_slots_are_given_at_admission_and_given_back_at_the_end():
    scheduler = make_scheduler(max_num_seqs=2)
    for name, max_tokens in (("a", 1), ("b", 3), ("c", 2)):
        scheduler.add(*make_request(name, 2, max_tokens))
    slots = []
    while scheduler.has_work:
        slots.append({MADE[a.seq_id].request_id: a.slot for a in step(scheduler)[0].assignments})
    assert slots == [{"a": 0, "b": 1}, {"b": 1, "c": 0}, {"b": 1, "c": 0}]
