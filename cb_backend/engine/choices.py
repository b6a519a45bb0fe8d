"""Several choices of one prompt: `n` sequences, of which the scheduler first gets one.

    add()      the first choice goes to the scheduler, the others are pending
    settled()  once the first one's prompt is computed the others follow; they find it in the prefix index, so each
               computes at most one block of it again

The scheduler knows sequences only; what belongs together is known here. Called on the engine thread.

Where prefix caching is off, the choices share under a root of their own that no other request can hit. Its blocks are
forgotten when the last choice has been admitted or has ended. Until then they may be taken where memory is short, as
any cached block may: the choices then compute the prompt again instead of waiting for memory that their own prompt has.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from ..request import FinishReason, PrivateRoot, Request, Status, TokenDelta
from ..scheduling.draft import Outcome
from ..scheduling.scheduler import Scheduler

logger = logging.getLogger("cb_backend")

_FAILURES = (FinishReason.ABORT, FinishReason.TIMEOUT, FinishReason.ERROR)


@dataclass(slots=True)
class _Group:
    """One client's request. `pending` is empty as soon as one of the choices has its prompt computed."""

    choices: list[Request]  # in order of their index
    pending: list[Request]  # unfinished ones that the scheduler does not have yet
    unfinished: int


class Choices:
    def __init__(self, scheduler: Scheduler) -> None:
        self.num_pending = 0
        self._scheduler = scheduler
        self._groups: dict[str, _Group] = {}  # by request id
        self._sharing: list[_Group] = []  # those that keep a prompt under a root of their own

    def add(self, choices: Sequence[Request]) -> None:
        """Takes one request.

        Args:
            choices: in order of their index, of the same prompt, priority, arrival number and deadline.

        Raises:
            ValueError: the request id is in use.
        """
        first, *others = choices
        if first.request_id in self._groups:
            raise ValueError(f"request id {first.request_id!r} is already in use")
        group = self._groups[first.request_id] = _Group(list(choices), others, len(choices))
        self.num_pending += len(others)
        if others and not self._scheduler.pool.enable_prefix_caching:
            self._sharing.append(group)
            for choice in choices:
                choice.salt = PrivateRoot(choice.order)
        self._scheduler.add(first)

    def finish(self, request_id: str, reason: FinishReason, index: int | None = None) -> list[Outcome]:
        """Ends a request (or one of its choices) from outside: abort, stop string. Unknown ids do nothing."""
        group = self._groups.get(request_id)
        if group is None:
            return []
        wanted = [c for c in group.choices if c.status is not Status.FINISHED and index in (None, c.index)]
        return self.settled([self._scheduler.finish(choice, reason) for choice in wanted])

    def finish_all(self, reason: FinishReason) -> list[Outcome]:
        """Ends every request. One that cannot be ended cleanly keeps its memory, but has its end among the outcomes.

        So has a choice that ended in a step whose settling raised: its end was not told. One that was told hears it
        twice, which readers ignore.
        """
        outcomes: list[Outcome] = []
        for request_id, group in list(self._groups.items()):
            unfinished = [choice for choice in group.choices if choice.status is not Status.FINISHED]
            untold = [choice for choice in group.choices if choice.status is Status.FINISHED]
            outcomes += [(choice, TokenDelta(request_id, choice.index, (), finish_reason=reason)) for choice in untold]
            try:
                outcomes += self.finish(request_id, reason)
            except Exception:
                logger.exception("request %s cannot be ended cleanly", request_id)
                outcomes += [
                    (choice, TokenDelta(request_id, choice.index, (), finish_reason=reason)) for choice in unfinished
                ]
        return outcomes

    def expire(self, now: float) -> list[Outcome]:
        """Ends every request whose deadline is at or before `now`."""
        return self.settled(self._scheduler.expire(now))

    def settled(self, outcomes: list[Outcome], *, failed: bool = False) -> list[Outcome]:
        """What the scheduler reported, and the ends that follow from it. Adds the choices that waited for a prompt.

        Args:
            failed: the step failed: a request ends with all its choices, also those that were not in the step.
        """
        following: list[Outcome] = []
        for request, delta in outcomes:
            group = self._groups.get(request.request_id)
            if group is None:
                continue
            reason = delta.finish_reason
            if group.pending and request is group.choices[0]:
                following += self._release(group, delta)
            elif request in group.pending:
                group.pending.remove(request)
                self.num_pending -= 1
            if failed and reason is FinishReason.ERROR:
                others = [choice for choice in group.choices if choice.status is not Status.FINISHED]
                following += [self._scheduler.finish(choice, reason, delta.error) for choice in others]
        ended = [request for request, delta in (*outcomes, *following) if delta.finish_reason is not None]
        for request in ended:
            group = self._groups[request.request_id]
            group.unfinished -= 1
            if group.unfinished == 0:
                del self._groups[request.request_id]
        if self._sharing:
            self._sharing = [group for group in self._sharing if not self._stops_sharing(group)]
        return [*outcomes, *following] if following else outcomes

    def _release(self, group: _Group, told: TokenDelta) -> list[Outcome]:
        """The first choice got its first token or ended: the others follow, or end with it if it failed."""
        others = [choice for choice in group.pending if choice.status is not Status.FINISHED]
        self.num_pending -= len(group.pending)
        group.pending = []
        if told.finish_reason in _FAILURES:
            return [self._scheduler.finish(choice, told.finish_reason, told.error) for choice in others]
        for choice in others:
            choice.num_cached = group.choices[0].num_cached
            self._scheduler.add(choice)
        return []

    def _stops_sharing(self, group: _Group) -> bool:
        """Forgets the prompt of a group whose choices have all been admitted or have ended."""
        if any(c.timings.admitted is None and c.status is not Status.FINISHED for c in group.choices):
            return False
        first = group.choices[0]
        pool = self._scheduler.pool
        pool.forget(pool.lookup(first.token_ids[: first.prompt_len], first.salt)[0])
        for choice in group.choices:
            choice.salt = ""
        return True

    @property
    def num_waiting(self) -> int:
        """Choices that are pending wait too."""
        return self._scheduler.num_waiting + self.num_pending

    def check(self) -> None:
        """Verifies the invariants that hold between steps, the scheduler's too.

        Raises:
            RuntimeError: memory leaked, or a map holds something that ended.
        """
        self._scheduler.check()
        pending = sum(len(group.pending) for group in self._groups.values())
        unfinished = sum(group.unfinished for group in self._groups.values())
        if pending != self.num_pending or unfinished - pending != len(self._scheduler.requests):
            raise RuntimeError(
                f"{unfinished} choices are unfinished, {pending} of them pending ({self.num_pending} counted), "
                f"and the scheduler has {len(self._scheduler.requests)}"
            )
        if self._sharing and not self._groups:
            raise RuntimeError("idle, but prompts are kept for choices")
