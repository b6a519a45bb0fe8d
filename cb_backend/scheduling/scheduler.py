"""The scheduler: who runs in the next step, and with how many tokens. Pure: no torch, no clock, no threads.

    plan()    capacity first (preempt, admit, resume), then tokens: every decode gets one, the rest of the budget m
              goes to prefill chunks, best rank first
    settle()  books what the device sampled: tokens, ends, freed blocks

Rank is (priority, arrival). A running request holds blocks for all its known tokens, so only a decode ever needs a
new one. Admission follows rank strictly: no request overtakes a waiting one of the same or a better priority, so a
large request is not starved by small ones behind it. A preempted request comes back before a new one of its priority.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Sequence
from operator import attrgetter

from ..kv.blocks import BlockPool, HostPool
from ..request import FinishReason, Request, Status
from .admission import AdmissionPolicy
from .draft import Draft, End, Logprobs, Outcome, book_prompt_logprobs, delta_of, end_after
from .limits import StepLimits
from .memory import Memory
from .plan import StepPlan, StepResult, TableDelta
from .preemption import Preemption, Victim
from .waiting import Deadlines, WaitingQueue


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
        self.memory = Memory(pool, host, self.max_running)
        self.running: list[Request] = []  # in rank order
        self.requests: dict[int, Request] = {}  # every unfinished one by its seq_id
        self.waiting = WaitingQueue()
        self._deadlines = Deadlines()
        self.limits = StepLimits()
        self._resent: list[TableDelta] = []  # a step that raised may not have brought them to the executor
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
    def num_swapped(self) -> int:
        return self.memory.num_swapped

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    # -- planning ---------------------------------------------------------------------------------------------------

    def plan(self, only: frozenset[int] | None = None) -> StepPlan:
        """The next step. Empty (false) where nothing can run, which only happens when nothing is unfinished.

        Args:
            only: seq_ids of running requests that were taken back (`undo`): a step of theirs alone.
        """
        draft = Draft()
        draft.tables, self._resent = self._resent, []
        if only is None:
            self._make_room_for_better(draft)
            decodes = self._make_room_for_decodes(draft)
        else:
            decodes = [r for r in self.running if r.seq_id in only and r.num_missing == 1]
        places = self.limits.sequences(self.max_running)
        decodes = decodes[:places]
        budget = self.limits.prefill(self.budget - len(decodes))
        for request in decodes:
            if self.memory.needs_block(request):
                self.memory.grow(request, draft)
            self._assign(request, 1, draft)
        for request in self.running:
            wanted = request.num_missing > 1 and (only is None or request.seq_id in only)
            if wanted and budget > 0 and len(draft.requests) < places:
                budget -= self._assign(request, min(budget, request.num_missing), draft)
        if only is None and len(draft.requests) < places:
            self._admit(budget, draft)
        self.step += 1
        return draft.freeze(self.step, self.memory.settings)

    def _may_advance(self, request: Request) -> bool:
        """False while its next token is on the device, if that is its last or must be seen on the host first."""
        return not request.num_in_flight or (request.num_output < request.max_tokens and not request.needs_host_tokens)

    def _assign(self, request: Request, num_tokens: int, draft: Draft) -> int:
        """Gives `request` its next tokens; planning advances `num_computed`, so the next plan may be made at once."""
        start = request.num_computed
        end = start + num_tokens
        completes = end == request.num_known
        samples = completes and request.max_tokens > 0
        draft.assign(request, start, num_tokens, samples)
        if start < request.computed_high:
            recomputed = min(request.computed_high, end) - start
            self.counters["recomputed_tokens"] += recomputed
            request.timings.recomputed_tokens += recomputed
        self.counters["computed_tokens"] += num_tokens
        request.num_computed = end
        request.computed_high = max(request.computed_high, end)
        if end // self.pool.block_size > len(request.block_nodes):
            shared = len(request.token_ids) if self.pool.enable_prefix_caching else request.prompt_len
            nodes, known = request.block_nodes, min(end, shared)
            draft.indexed += self.pool.index(request.token_ids, request.blocks, nodes, known, request.salt)
        if samples:
            request.num_in_flight += 1
        elif completes:
            draft.completed.append(request.seq_id)
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
            (draft.resumed if head.preempted else draft.admitted).append(head.seq_id)
            if head.preempted:
                head.preempted = head.progressed = False  # a token that was in flight when it lost its memory is none
            insort(self.running, head, key=_rank)
            if head.num_missing:
                budget -= self._assign(head, min(budget, head.num_missing), draft)

    def _take_memory(self, head: Request, draft: Draft) -> bool:
        """Takes a slot, and blocks for all known tokens of `head`, if they fit and admission agrees."""
        found = self.memory.find(head)
        taken = found.new + found.revived
        if taken > self.pool.available - self._growth_until_progress(head, found.new):
            return False
        if self.running and not self.admission.admits(head, taken, len(found.cached) - found.revived):
            return False
        self.admission.add(head, taken)
        self.memory.take(head, found, draft)
        return True

    def _growth_until_progress(self, head: Request, new_blocks: int) -> int:
        """Blocks that the running decodes may take before a returning request has made its next token.

        Keeping these free when a preempted request comes back means that it is not preempted again before it made
        progress, unless a request of a better priority arrives.
        """
        if not head.preempted or not self.running:
            return 0
        missing = sum(r.num_missing for r in self.running if r.num_missing > 1)
        missing += new_blocks * self.pool.block_size if head.status is Status.WAITING else 0
        decodes = len(self.running)
        steps = 1 + -(-missing // max(1, self.budget - decodes))
        return decodes * -(-steps // self.pool.block_size) + 1

    # -- capacity: preempt ------------------------------------------------------------------------------------------

    def _make_room_for_decodes(self, draft: Draft) -> list[Request]:
        """Those that decode in this step. Preempts until each can have the block it needs; never the first in rank."""
        decodes = [r for r in self.running if r.num_missing == 1 and self._may_advance(r)]
        needs = {request for request in decodes if self.memory.needs_block(request)}
        while len(needs) > self.pool.available:
            victim = self.preemption.choose(self.running[1:])
            if victim is None:
                raise RuntimeError(
                    f"the only running request needs a block and none of {self.pool.num_blocks} is available"
                )
            needs.discard(victim.request)
            self._preempt(victim, draft)
        return decodes if not draft.preempted else [r for r in decodes if r.status is Status.RUNNING]

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
        swapped = self.memory.preempt(request, victim.mode, draft)
        self.counters["swapped_blocks"] += swapped
        self.counters[f"preemptions_{victim.mode}"] += 1
        request.timings.swapped_blocks += swapped
        request.timings.preemptions += 1
        request.preempted = True
        draft.preempted.append((request.seq_id, victim.mode))
        self.waiting.push(request)

    # -- settling ---------------------------------------------------------------------------------------------------

    def settle(self, plan: StepPlan, result: StepResult, now: float) -> list[Outcome]:
        """Books a step that the device has done: one delta per request that has something to say. One that lost its
        memory since the step was planned gets its tokens all the same; one that ended does not."""
        outcomes: list[Outcome] = []
        requests = self.requests
        for seq_id in (*plan.admitted, *plan.resumed):
            request = requests.get(seq_id)
            if request is not None and request.timings.admitted is None:
                request.timings.admitted = now
        book_prompt_logprobs(plan, result, requests)
        errors = {**result.errors, **plan.errors}
        if errors:
            self.pool.forget(plan.indexed)  # some are of a request that may have ended since
        for row, seq_id in enumerate(plan.sampled):
            request = requests.get(seq_id)
            if request is None:
                continue  # ended while its token was on the device
            request.num_in_flight -= 1
            if row in errors:
                self.memory.distrust(request)
                outcomes.append(self._finish(request, End(FinishReason.ERROR, error=errors[row])))
                continue
            logprobs = result.logprobs[row] if result.logprobs else None
            outcomes.append(self._append(request, result.token_ids[row], logprobs, now))
        for seq_id in plan.completed:
            request = requests.get(seq_id)
            # Where it was preempted, its prompt is computed again.
            if request is not None and request.status is Status.RUNNING and request.num_missing == 0:
                outcomes.append(self._finish(request, End(FinishReason.LENGTH)))
        return outcomes

    def undo(self, plan: StepPlan) -> None:
        """The step raised: nothing that it should have computed or copied counts, and its requests are as before it.

        Those whose memory it should have filled, by a copy from the host or for another request that shares a prompt
        beginning, lose it and compute everything again.
        """
        requests = self.requests
        for seq_id in plan.sampled:
            if seq_id in requests:
                requests[seq_id].num_in_flight -= 1
        for seq_id, mode in plan.preempted:
            request = requests.get(seq_id)
            if request is not None and mode == "swap" and request.status is Status.SWAPPED:
                self.memory.forget_computed(request)  # its copy to the host may not have happened
        unwritten = {*plan.indexed, *(block for _host, block in plan.swap_in)}
        for seq_id, start in zip(plan.seq_ids, plan.starts.tolist(), strict=True):
            request = requests.get(seq_id)
            if request is not None and request.status is Status.RUNNING:
                self.memory.take_back(request, max(0, request.num_computed - start))
                self._resent.append(TableDelta(request.slot, 0, tuple(request.blocks)))
        self.pool.forget(unwritten)
        for request in list(self.running):
            full = request.num_computed // self.pool.block_size
            if not unwritten.isdisjoint(request.blocks[:full]):
                self._preempt(Victim(request, "recompute"), Draft())

    def shrink(self, plan: StepPlan) -> bool:
        """The step was too large for the device: later ones are smaller. False where it cannot be made smaller."""
        return self.limits.shrink(plan)

    def fail(self, seq_ids: Iterable[int], error: str) -> list[Outcome]:
        """Ends requests that are at fault; nothing they wrote is ever hit again."""
        ending = [self.requests[seq_id] for seq_id in seq_ids if seq_id in self.requests]
        for request in ending:
            self.memory.distrust(request)
        return [self._finish(request, End(FinishReason.ERROR, error=error)) for request in ending]

    def take_back(self, seq_id: int, num_tokens: int) -> None:
        """The last computed tokens of a running sequence were guesses, and rejected: they do not count.

        Raises:
            ValueError: it does not run, or has not computed as many.
        """
        if seq_id not in self.requests:
            raise ValueError(f"sequence {seq_id} is not unfinished")
        self.memory.take_back(self.requests[seq_id], num_tokens)

    def _append(self, request: Request, token_ids: Sequence[int], logprobs: Logprobs | None, now: float) -> Outcome:
        """Books its new tokens, as far as the first that ends it."""
        request.progressed = True
        if request.timings.first_token is None:
            request.timings.first_token = now
        end = None
        count = 0
        while end is None and count < len(token_ids):
            request.token_ids.append(token_ids[count])
            end = end_after(request, token_ids[count])
            count += 1
        self.counters["generated_tokens"] += count
        told = tuple(token_ids[:count])
        scores = None if logprobs is None else logprobs[:count]
        if end is None:
            return request, delta_of(request, told, scores)
        request.timings.finished = now
        return self._finish(request, end, told, scores)

    def _finish(
        self, request: Request, end: End, token_ids: tuple[int, ...] = (), logprobs: Logprobs | None = None
    ) -> Outcome:
        """Frees everything that `request` holds and takes it out of every map."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
        self.memory.release(request)
        self.waiting.leave(request)
        self._deadlines.leave(request)
        request.status = Status.FINISHED
        request.finish_reason = end.reason
        self.requests.pop(request.seq_id, None)
        self.counters[f"finished_{end.reason.value}"] += 1
        self.admission.finished(request)
        return request, delta_of(request, token_ids, logprobs, end)

    def check(self) -> None:
        """Verifies the invariants that hold between steps.

        Raises:
            RuntimeError: memory leaked, or a map holds something that ended.
        """
        self.memory.check(self.running)
        if any(r.num_computed > r.num_known for r in self.running):
            raise RuntimeError("a request has more computed than known tokens")
        held = {
            "running": len(self.running),
            "waiting": self.waiting.num_entries,
            "deadlines": self._deadlines.num_entries,
            "host blocks": self.host.num_used,
        }
        if not self.requests and any(held.values()):
            raise RuntimeError("idle, but " + ", ".join(f"{count} {name}" for name, count in held.items()))


_rank = attrgetter("rank")
