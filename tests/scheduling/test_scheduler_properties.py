"""Whatever arrives, leaves, has several choices or runs short: the scheduler's invariants hold at every step."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from cb_backend.engine.choices import Choices
from cb_backend.params import SamplingParams
from cb_backend.request import FinishReason, Request, Status
from cb_backend.scheduling.preemption import CostModel

from .scripted import EOS, MADE, answer, make_request, make_scheduler, token_of

BLOCK, POOL, BUDGET, SEQS = 4, 12, 10, 6
STEPS = 0  # over all examples
PREEMPTIONS = 0


def ends_sometimes(request: Request, position: int) -> int:
    token = token_of(request, position)
    return EOS if token % 11 == 0 else token


REQUEST = st.tuples(
    st.integers(1, 30),  # prompt tokens
    st.booleans(),  # shares its prefix with others
    st.integers(0, 18),  # max_tokens
    st.sampled_from([1, 1, 1, 2, 3]),  # n
    st.integers(-1, 1),  # priority
    st.one_of(st.none(), st.none(), st.integers(1, 60)),  # seconds to its deadline
    st.sampled_from(["", "tenant"]),
)


class SchedulerMachine(RuleBasedStateMachine):
    prefix_caching = True

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = make_scheduler(
            POOL,
            BLOCK,
            host_blocks=5,
            budget=BUDGET,
            max_num_seqs=SEQS,
            cost=CostModel(3e-4, 1e-4),
            prefix_caching=self.prefix_caching,
        )
        self.choices = Choices(self.scheduler)
        self.tables: dict[int, list[int]] = {}  # by slot, as an executor keeps them
        self.now = 0.0
        self.names = 0
        self.alive: dict[str, list[Request]] = {}
        self.output: dict[tuple[str, int], list[int]] = {}
        self.barren: dict[Request, int] = {}  # preemptions since its last token, by none of a better priority

    @rule(requests=st.lists(REQUEST, min_size=1, max_size=6))
    def arrive(self, requests):
        for request in requests:
            self.add(*request)

    def add(self, prompt, shared, max_tokens, n, priority, patience, salt):
        max_tokens = min(max_tokens, POOL * BLOCK - prompt)
        ids = list(range(2, 2 + prompt)) if shared else prompt
        name = f"r{self.names}"
        self.names += 1
        choices = make_request(
            name,
            ids,
            max_tokens,
            n=n,
            priority=priority,
            deadline=None if patience is None else self.now + patience,
            salt=salt,
            order=self.names,
            params=SamplingParams(max_tokens=max_tokens, n=n, ignore_eos=False),
        )
        self.choices.add(choices)
        self.alive[name] = choices

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(sorted(self.alive)))
        self.book(self.choices.finish(name, FinishReason.ABORT))

    @rule(steps=st.integers(1, 40))
    def run(self, steps):
        global STEPS, PREEMPTIONS
        for _ in range(steps):
            if not self.scheduler.has_work:
                return
            self.now += 1.0
            self.book(self.choices.expire(self.now))
            if not self.scheduler.has_work:
                return
            STEPS += 1
            self.one_step()

    def one_step(self) -> None:
        global PREEMPTIONS
        scheduler = self.scheduler
        deciders = {r.seq_id for r in scheduler.running if r.num_missing == 1}
        best = min((r.rank for r in scheduler.running), default=None)
        waiting_best = min((c[0].priority for c in self.alive.values()), default=0)
        plan = scheduler.plan()
        assert plan, f"nothing runs although {sorted(self.alive)} are unfinished"
        # the budget, and decode first
        assert 0 < plan.num_tokens <= BUDGET
        lost = {r for r, _ in plan.preempted}
        assert {a.seq_id for a in plan.assignments[: len(deciders - lost)]} == deciders - lost
        assert len(scheduler.running) <= SEQS
        # who is first in rank keeps its memory, unless a better priority came
        for request in map(MADE.__getitem__, lost):
            PREEMPTIONS += 1
            assert request.rank != best or request.priority > waiting_best
            better_came = any(
                c[0].priority < request.priority and c[0].status is Status.RUNNING for c in self.alive.values()
            )
            self.barren[request] = 0 if better_came else self.barren.get(request, 0) + 1
            assert self.barren[request] <= 1, f"{request.request_id} was preempted twice without a token between"
        for a in plan.assignments:
            # computed catches up with known, never past it, and every computed token has a block
            request = MADE[a.seq_id]
            assert a.start + a.num_tokens == request.num_computed <= request.num_known
            assert len(request.blocks) * BLOCK >= request.num_computed
        # no block is written by two sequences in one step
        owners: dict[int, int] = {}
        for a in plan.assignments:
            for position in range(a.start, a.start + a.num_tokens):
                block = MADE[a.seq_id].blocks[position // BLOCK]
                assert owners.setdefault(block, a.seq_id) == a.seq_id, "two sequences write one block"
        self.check_tables(plan)
        self.book(self.choices.settled(scheduler.settle(plan, answer(plan, ends_sometimes), self.now)))
        for seq_id in plan.sampled:
            self.barren[MADE[seq_id]] = 0

    def check_tables(self, plan) -> None:
        """What plans said of the block tables so far is what those that run have."""
        for slot, at, blocks in plan.tables:
            self.tables[slot] = [*self.tables.get(slot, [])[:at], *blocks]
        for a in plan.assignments:
            request = MADE[a.seq_id]
            assert a.slot == request.slot
            assert self.tables[a.slot] == request.blocks

    def book(self, outcomes) -> None:
        for request, delta in outcomes:
            self.output.setdefault((request.request_id, request.index), []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                choices = self.alive[request.request_id]
                choices.remove(request)
                if not choices:
                    del self.alive[request.request_id]
                expected = [ends_sometimes(request, request.prompt_len + i) for i in range(request.num_settled)]
                assert self.output[request.request_id, request.index] == expected

    @invariant()
    def nothing_leaks(self):
        self.choices.check()
        assert {r.request_id for r in self.scheduler.requests.values()} == set(self.alive)

    def teardown(self):
        for _ in range(2000):
            if not self.scheduler.has_work:
                break
            self.now += 1.0
            self.book(self.choices.expire(self.now))
            if self.scheduler.has_work:
                self.one_step()
        assert not self.alive, "an accepted request never ended"
        self.choices.check()
        assert self.scheduler.pool.available == POOL


class WithoutPrefixCaching(SchedulerMachine):
    prefix_caching = False

    @invariant()
    def nothing_is_kept_for_requests_that_are_gone(self):
        if not self.alive:
            assert self.scheduler.pool.num_cached == 0


def run_machine(machine: type[SchedulerMachine], examples: int) -> None:
    global STEPS, PREEMPTIONS
    STEPS = PREEMPTIONS = 0
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            report_multiple_bugs=False,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
            derandomize=True,
        ),
    )


def test_invariants_hold_over_twenty_thousand_steps():
    run_machine(SchedulerMachine, 400)
    assert STEPS >= 20_000
    assert PREEMPTIONS >= 500


def test_invariants_hold_without_prefix_caching():
    run_machine(WithoutPrefixCaching, 140)
    assert STEPS >= 5_000
    assert PREEMPTIONS >= 100
