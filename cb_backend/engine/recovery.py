"""Which requests of a step that raised are to blame: the step is tried again, then in halves.

    the step raises          all its requests are tried once more, in a step without any other
    it raises again          each half of them is tried, and halves of the half that raises
    one request alone raises it is to blame, and ends with an error; the others go on where they were

A group has passed once each of its requests has computed the tokens that it should have computed in the step that
raised. Every other request waits meanwhile. Tries are bounded: one culprit among n requests raises about log2(n)
times, and after `MOST_FAILURES` whatever still raises ends as a whole.
"""

from __future__ import annotations

from ..request import Status
from ..scheduling.plan import StepPlan
from ..scheduling.scheduler import Scheduler

MOST_FAILURES = 64  # of steps without one in between that succeeds outside of a search


class Recovery:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._groups: list[list[int]] = []  # seq_ids; the first is tried next
        self._targets: dict[int, int] = {}  # by seq_id: tokens that it should have computed
        self._failures = 0
        self._trial = 0  # number of the step that tries the first group

    @property
    def is_active(self) -> bool:
        return bool(self._groups)

    def plan(self) -> StepPlan:
        """The next step: a trial of the next group, or any step where nothing is to be found out."""
        while self._groups and not (group := self._left(self._groups[0])):
            self._groups.pop(0)
        if not self._groups:
            self._targets.clear()
            return self._scheduler.plan()
        plan = self._scheduler.plan(only=frozenset(group))
        self._trial = plan.step
        return plan

    def succeeded(self) -> None:
        """A step succeeded."""
        self._scheduler.limits.grow()
        if not self._groups:
            self._failures = 0

    def failed(self, plan: StepPlan, error: Exception) -> list[int]:
        """`plan` raised, and its effects were taken back: the seq_ids of the requests that end for it."""
        running = self._scheduler.requests
        members = [s for s in plan.seq_ids if s in running and running[s].status is Status.RUNNING]
        tried = bool(self._groups) and plan.step == self._trial
        if isinstance(error, MemoryError) and self._scheduler.shrink(plan):
            return []  # the same again, smaller
        self._failures += 1
        if self._failures > MOST_FAILURES:
            self._groups = self._groups[1:] if tried else []
            return members
        if not tried:
            ends = (plan.starts + plan.lengths).tolist()
            self._targets = dict(zip(plan.seq_ids, ends, strict=True))
            self._groups = [members]
            return []
        members = self._left(self._groups.pop(0))
        if len(members) < 2:
            return members
        half = len(members) // 2
        self._groups[:0] = [members[:half], members[half:]]
        return []

    def _left(self, group: list[int]) -> list[int]:
        """Those of the group that have not passed. One that lost its memory, or ended, is not tried."""
        requests = self._scheduler.requests
        known = [requests[seq_id] for seq_id in group if seq_id in requests]
        return [r.seq_id for r in known if r.status is Status.RUNNING and r.num_computed < self._targets[r.seq_id]]
