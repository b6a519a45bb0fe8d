"""The scheduler: who runs in the next step, and with how many tokens. Pure: no torch, no clock, no threads.

    plan()    capacity first (preempt, admit, resume), then tokens: every decode gets one, the rest of the budget m
              goes to prefill chunks, best rank first
    settle()  books what the device sampled: tokens, ends, freed blocks

Rank is (priority, arrival). A running request holds blocks for all its known tokens, so only a decode ever needs a
new one. Admission follows rank strictly: nobody overtakes a waiting request of the same or a better priority, so a
large request is not starved by small ones behind it. A preempted request comes back before anyone new of its priority.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Sequence
from operator import attrgetter
from typing import Protocol

from ..kv.blocks import BlockPool, HostPool
from ..request import (
    Assignment,
    FinishReason,
    Logprob,
    Request,
    Status,
    StepPlan,
    StepResult,
)
from .draft import Draft, End, Outcome, delta_of, end_after
from .preemption import Preemption, Victim
from .waiting import Deadlines, WaitingQueue


class AdmissionPolicy(Protocol):
    """What the scheduler asks before somebody takes memory (scheduling/admission.py)."""

    def begin(self, running: Sequence[Request]) -> None:
        """Starts a round of questions about this running set."""

    def admits(self, candidate: Request, new_blocks: int, shared_blocks: int) -> bool:
        """May `candidate` join? It would take `new_blocks` and share `shared_blocks` that others already hold."""

    def add(self, candidate: Request, new_blocks: int) -> None:
        """`candidate` joined: later questions of this round count it."""

    def finished(self, request: Request) -> None:
        """`request` ended: its length is an observation."""


class Scheduler:
    def __init__(
        self,
        pool: BlockPool,
        host: HostPool,
        admission: AdmissionPolicy,
        preemption: Preemption,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
    ) -> None:
        self.pool = pool
        self.host = host
        self.admission = admission
        self.preemption = preemption
        self.budget = max_num_batched_tokens
        # Every running request may be a decode, and every decode gets its token in every step.
        self.max_running = min(max_num_seqs, max_num_batched_tokens)
        self.running: list[Request] = []  # in rank order
        self.requests: dict[int, Request] = {}  # every unfinished one by its seq_id
        self.waiting = WaitingQueue()
        self._deadlines = Deadlines()
        self.num_swapped = 0
        self.step = 0
        self.counters: Counter[str] = Counter()

    # -- arrivals and departures ------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues one request. Several choices of a prompt are several requests (engine/choices.py)."""
        self.requests[request.seq_id] = request
        self.waiting.push(request)
        self._deadlines.add(request)

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> Outcome:
        """Ends an unfinished request from outside: abort, stop string, timeout. It may be one that was never added."""
        return self._finish(request, End(reason, error=error))

    def expire(self, now: float) -> list[Outcome]:
        """Ends every request whose deadline is at or before `now`."""
        late = (self.requests.get(seq_id) for seq_id in self._deadlines.passed(now))
        return [self.finish(request, FinishReason.TIMEOUT) for request in late if request is not None]

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    # -- planning ---------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """The next step. Empty (false) where nothing can run, which only happens when nothing is unfinished."""
        draft = Draft()
        self._make_room_for_better(draft)
        self._make_room_for_decodes(draft)
        budget = self.budget
        for request in self.running:
            if request.num_missing == 1 and self._may_advance(request):
                if self._needs_block(request):
                    request.blocks += self.pool.allocate(1)
                self._assign(request, 1, draft)
                budget -= 1
        for request in self.running:
            if budget > 0 and request.num_missing > 1:
                budget -= self._assign(request, min(budget, request.num_missing), draft)
        self._admit(budget, draft)
        self.step += 1
        return draft.freeze(self.step)

    def _may_advance(self, request: Request) -> bool:
        """False while its next token is on the device, if that is its last or must be seen on the host first."""
        return not request.num_in_flight or (request.num_output < request.max_tokens and not request.needs_host_tokens)

    def _needs_block(self, request: Request) -> bool:
        """Its next token begins a block. Only full blocks are shared, so nobody else writes to the one it is in."""
        return self.pool.blocks_for(request.num_known) > len(request.blocks)

    def _assign(self, request: Request, num_tokens: int, draft: Draft) -> int:
        """Gives `request` its next tokens; planning advances `num_computed`, so the next plan may be made at once."""
        start = request.num_computed
        completes = start + num_tokens == request.num_known
        samples = completes and request.max_tokens > 0
        draft.assignments.append(Assignment(request, start, num_tokens, samples))
        recomputed = max(0, min(request.computed_high, start + num_tokens) - start)
        self.counters["recomputed_tokens"] += recomputed
        request.timings.recomputed_tokens += recomputed
        self.counters["computed_tokens"] += num_tokens
        request.num_computed += num_tokens
        request.computed_high = max(request.computed_high, request.num_computed)
        shared = len(request.token_ids) if self.pool.enable_prefix_caching else request.prompt_len
        known_ids = min(request.num_computed, shared)
        self.pool.index(request.token_ids, request.blocks, request.block_nodes, known_ids, request.salt)
        if samples:
            draft.samplers.append(request)
            request.num_in_flight += 1
        return num_tokens

    # -- capacity: admit and resume ---------------------------------------------------------------------------------

    def _admit(self, budget: int, draft: Draft) -> None:
        """Lets waiting requests in, best rank first, while tokens, places and memory are left."""
        asked = False
        while budget > 0 and (head := self.waiting.head()) is not None and not head.num_in_flight:
            if len(self.running) >= self.max_running:
                return
            if not asked:
                self.admission.begin(self.running)
                asked = True
            if not self._take_memory(head, draft):
                return
            self.waiting.pop()
            (draft.resumed if head.preempted else draft.admitted).append(head)
            head.preempted = False
            insort(self.running, head, key=_rank)
            if head.num_missing:
                budget -= self._assign(head, min(budget, head.num_missing), draft)

    def _take_memory(self, head: Request, draft: Draft) -> bool:
        """Takes blocks for all known tokens of `head`, if they fit and admission agrees."""
        total = self.pool.blocks_for(head.num_known)
        cached: list[int] = []
        nodes: list[int] = []
        if head.status is Status.WAITING:
            # The last token is always computed: somebody has to produce its logits.
            limit = 0 if head.scores_prompt else head.num_known - 1
            cached, nodes = self.pool.lookup(head.token_ids, head.salt, limit)
        new = total - len(cached)
        revived = sum(1 for block in cached if self.pool.refs(block) == 0)
        if new + revived > self.pool.available - self._growth_until_progress(head, new):
            return False
        if self.running and not self.admission.admits(head, new + revived, len(cached) - revived):
            return False
        self.admission.add(head, new + revived)
        self.pool.share(cached)
        head.blocks = cached + self.pool.allocate(new)
        if head.status is Status.SWAPPED:
            draft.swap_in += zip(head.host_blocks, head.blocks, strict=False)
            self.host.release(head.host_blocks)
            head.host_blocks = []
            self.num_swapped -= 1
        else:
            head.block_nodes = nodes
            head.num_computed = len(cached) * self.pool.block_size
            head.computed_high = max(head.computed_high, head.num_computed)
            if not head.preempted and head.index == 0:  # what other choices find was computed for the first one
                head.num_cached = head.num_computed
                self.pool.count_query(head.prompt_len, head.num_cached)
        head.status = Status.RUNNING
        return True

    def _growth_until_progress(self, head: Request, new_blocks: int) -> int:
        """Blocks that the running decodes may take before a returning request has made its next token.

        Keeping these free when a preempted request comes back means that it is not preempted again before it made
        progress, unless somebody of a better priority arrives.
        """
        if not head.preempted or not self.running:
            return 0
        missing = sum(r.num_missing for r in self.running if r.num_missing > 1)
        missing += new_blocks * self.pool.block_size if head.status is Status.WAITING else 0
        decodes = len(self.running)
        steps = 1 + -(-missing // max(1, self.budget - decodes))
        return decodes * -(-steps // self.pool.block_size) + 1

    # -- capacity: preempt ------------------------------------------------------------------------------------------

    def _make_room_for_decodes(self, draft: Draft) -> None:
        """Preempts until every decode can have the block it needs. The first in rank is never preempted."""
        needs = {
            request
            for request in self.running
            if request.num_missing == 1 and self._may_advance(request) and self._needs_block(request)
        }
        while len(needs) > self.pool.available:
            victim = self.preemption.choose(self.running[1:])
            if victim is None:
                raise RuntimeError(
                    f"the only running request needs a block and none of {self.pool.num_blocks} is available"
                )
            needs.discard(victim.request)
            self._preempt(victim, draft)

    def _make_room_for_better(self, draft: Draft) -> None:
        """A waiting request of better priority preempts running ones when it cannot get in otherwise."""
        head = self.waiting.head()
        if head is None or head.num_in_flight or not self.running or self.running[-1].priority <= head.priority:
            return
        worse = [r for r in self.running if r.priority > head.priority]
        stay = self.running[: len(self.running) - len(worse)]
        need = self.pool.blocks_for(head.num_known)
        freeable = sum(1 for r in worse for block in r.blocks if self.pool.refs(block) == 1)
        if need > self.pool.available + freeable:
            return
        if len(stay) >= self.max_running:
            return
        self.admission.begin(stay)
        if stay and not self.admission.admits(head, need, 0):
            return
        while worse:
            self.admission.begin(self.running)
            fits = need <= self.pool.available and self.admission.admits(head, need, 0)
            if fits and len(self.running) < self.max_running:
                return
            victim = self.preemption.choose(worse)
            if victim is None:
                return
            worse.remove(victim.request)
            self._preempt(victim, draft)

    def _preempt(self, victim: Victim, draft: Draft) -> None:
        request = victim.request
        self.running.remove(request)
        used = request.blocks[: self.pool.blocks_for(request.num_computed)]
        if victim.mode == "swap":
            request.host_blocks = self.host.allocate(len(used))
            draft.swap_out += zip(used, request.host_blocks, strict=True)
            request.status = Status.SWAPPED
            self.num_swapped += 1
            self.counters["swapped_blocks"] += len(used)
            request.timings.swapped_blocks += len(used)
        else:
            self._forget_computed(request)
        self.pool.release(request.blocks)
        request.blocks = []
        request.preempted = True
        request.progressed = False
        request.timings.preemptions += 1
        self.counters[f"preemptions_{victim.mode}"] += 1
        draft.preempted.append((request, victim.mode))
        self.waiting.push(request)

    def _forget_computed(self, request: Request) -> None:
        """Its K/V are gone: everything known is to be computed again."""
        request.status = Status.WAITING
        request.num_computed = 0
        request.block_nodes = []
        request.prompt_logprobs = []

    # -- settling ---------------------------------------------------------------------------------------------------

    def settle(self, plan: StepPlan, result: StepResult, now: float) -> list[Outcome]:
        """Books a step that the device has done: one delta per request that has something to say."""
        outcomes: list[Outcome] = []
        if result.prompt_logprobs:
            self._book_prompt_logprobs(plan, result)
        for i, request in enumerate(plan.samplers):
            request.num_in_flight -= 1
            if request.status is Status.FINISHED:
                continue  # ended while its token was on the device
            if i in result.errors:
                self.pool.forget(request.blocks)
                outcomes.append(self._finish(request, End(FinishReason.ERROR, error=result.errors[i])))
                continue
            outcomes.append(
                self._append(request, result.token_ids[i], result.logprobs[i] if result.logprobs else None, now)
            )
        for item in plan.assignments:
            request = item.request
            if request.max_tokens == 0 and request.status is Status.RUNNING and request.num_missing == 0:
                outcomes.append(self._finish(request, End(FinishReason.LENGTH)))
        return outcomes

    def _book_prompt_logprobs(self, plan: StepPlan, result: StepResult) -> None:
        """Appends what is new. A request preempted while the step ran has begun anew: its values come again."""
        for item in plan.assignments:
            values = result.prompt_logprobs.get(item.request.request_id, ())
            known = item.request.prompt_logprobs
            if item.request.status is not Status.FINISHED and item.start <= len(known):
                known.extend(values[len(known) - item.start :])

    def fail(self, plan: StepPlan, error: str) -> list[Outcome]:
        """The step raised on the device: all its requests end, and nothing it wrote is ever hit again."""
        outcomes: list[Outcome] = []
        for request in plan.samplers:
            request.num_in_flight -= 1
        for request, mode in plan.preempted:
            if mode == "swap" and request.status is Status.SWAPPED:  # its copy to the host may not have happened
                self.host.release(request.host_blocks)
                request.host_blocks = []
                self.num_swapped -= 1
                self._forget_computed(request)
        for item in plan.assignments:
            if item.request.status is not Status.FINISHED:
                self.pool.forget(item.request.blocks)
        for item in plan.assignments:
            if item.request.status is not Status.FINISHED:
                outcomes.append(self._finish(item.request, End(FinishReason.ERROR, error=error)))
        return outcomes

    def _append(self, request: Request, token_id: int, logprob: Logprob | None, now: float) -> Outcome:
        request.token_ids.append(token_id)
        request.progressed = True
        if request.timings.first_token is None:
            request.timings.first_token = now
        if request.constraint is not None:
            request.constraint.accept(token_id)
        self.counters["generated_tokens"] += 1
        end = end_after(request, token_id)
        if end is None:
            return request, delta_of(request, (token_id,), logprob)
        request.timings.finished = now
        return self._finish(request, end, (token_id,), logprob)

    def _finish(
        self, request: Request, end: End, token_ids: tuple[int, ...] = (), logprob: Logprob | None = None
    ) -> Outcome:
        """Frees everything that `request` holds and takes it out of every map."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self.pool.release(request.blocks)
        elif request.status is Status.SWAPPED:
            self.host.release(request.host_blocks)
            self.num_swapped -= 1
        self.waiting.leave(request)
        request.blocks, request.host_blocks, request.block_nodes = [], [], []
        request.status = Status.FINISHED
        request.finish_reason = end.reason
        self.requests.pop(request.seq_id, None)
        self.counters[f"finished_{end.reason.value}"] += 1
        self.admission.finished(request)
        return request, delta_of(request, token_ids, logprob, end)

    def check(self) -> None:
        """Verifies the invariants that hold between steps.

        Raises:
            RuntimeError: memory leaked, or a map holds something that ended.
        """
        self.pool.check(r.blocks for r in self.running)
        if any(r.num_computed > r.num_known for r in self.running):
            raise RuntimeError("a request has more computed than known tokens")
        if not self.requests and (self.running or self.host.num_used or len(self.waiting)):
            raise RuntimeError(
                f"idle, but {len(self.running)} running, {len(self.waiting)} waiting, {self.host.num_used} host blocks"
            )


_rank = attrgetter("rank")
