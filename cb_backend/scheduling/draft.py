"""A step in the making, and how a request's end is decided and told: the small types of the scheduler."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..request import FinishReason, Logprob, Request, TokenDelta
from ..sampling.batch import CONSTRAINT_FAILED, Ints, SlotSettings
from .plan import ON_DEVICE, PromptTargets, StepPlan, StepResult, TableDelta

logger = logging.getLogger("cb_backend")

Outcome = tuple[Request, TokenDelta]
Logprobs = tuple[Logprob, ...]


class Draft:
    """Collects what the stages of `plan` decide; `freeze` makes the plan of it."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.starts: list[int] = []
        self.lengths: list[int] = []
        self.samples: list[bool] = []
        self.token_ids: list[int] = []
        self.tables: list[TableDelta] = []
        self.prompt_targets: list[PromptTargets] = []
        self.swap_out: list[tuple[int, int]] = []
        self.swap_in: list[tuple[int, int]] = []
        self.admitted: list[int] = []
        self.resumed: list[int] = []
        self.preempted: list[tuple[int, str]] = []
        self.completed: list[int] = []
        self.indexed: list[int] = []

    def assign(self, request: Request, start: int, num_tokens: int, samples: bool) -> None:
        """`request` computes `num_tokens` tokens from position `start`, in the slot that it has."""
        ids = request.token_ids
        if request.scores_prompt and not request.num_settled:
            self._score_prompt(request, start, num_tokens)
        self.requests.append(request)
        self.starts.append(start)
        self.lengths.append(num_tokens)
        self.samples.append(samples)
        if num_tokens == 1:
            self.token_ids.append(ids[start] if start < len(ids) else ON_DEVICE)
        else:
            known = ids[start : start + num_tokens]
            self.token_ids += known
            self.token_ids += [ON_DEVICE] * (num_tokens - len(known))

    def _score_prompt(self, request: Request, start: int, num_tokens: int) -> None:
        """Those of its prompt's log-probabilities that this chunk can give and the host does not have."""
        first = max(start, len(request.prompt_logprobs))
        targets = request.token_ids[first + 1 : min(start + num_tokens + 1, request.prompt_len)]
        if targets:
            row = len(self.token_ids) + first - start
            top = request.params.prompt_logprobs or 0
            self.prompt_targets.append(PromptTargets(request.seq_id, row, first, tuple(targets), top))

    def freeze(self, step: int, settings: SlotSettings) -> StepPlan:
        slots = _ints([request.slot for request in self.requests])
        starts, lengths = _ints(self.starts), _ints(self.lengths)
        samples = np.array(self.samples, dtype=np.bool_)
        sampled = [request for request, wanted in zip(self.requests, self.samples, strict=True) if wanted]
        sampling, errors = settings.batch(slots[samples], (starts + lengths)[samples], sampled)
        return StepPlan(
            step,
            tuple([request.seq_id for request in self.requests]),
            slots,
            starts,
            lengths,
            samples,
            _ints(self.token_ids),
            sampling,
            tuple(self.tables),
            tuple(self.prompt_targets),
            tuple(self.swap_out),
            tuple(self.swap_in),
            tuple(self.admitted),
            tuple(self.resumed),
            tuple(self.preempted),
            tuple(self.completed),
            tuple(self.indexed),
            errors,
        )


def _ints(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class End:
    """Why a request ends. `by_stop_token`: its last id is an end id or one of `stop_token_ids`."""

    reason: FinishReason
    stop_reason: int | None = None
    by_stop_token: bool = False
    error: str | None = None


def end_after(request: Request, token_id: int) -> End | None:
    """Whether `request` ends with `token_id`, its newest one. Its grammar is told of the token."""
    by_grammar = None if request.constraint is None else _accept(request, token_id)
    if by_grammar is not None and by_grammar.reason is FinishReason.ERROR:
        return by_grammar
    if token_id in request.stop_ids and request.num_settled > request.params.min_tokens:
        own = token_id in request.params.stop_token_ids
        return End(FinishReason.STOP, token_id if own else None, by_stop_token=True)
    if by_grammar is not None:
        return by_grammar
    if request.num_settled >= request.max_tokens:
        return End(FinishReason.LENGTH)
    return None


def _accept(request: Request, token_id: int) -> End | None:
    """Its grammar is told of the token. One that raises ends its request, and nothing else."""
    constraint = request.constraint
    assert constraint is not None
    try:
        constraint.accept(token_id)
        if not constraint.finished:
            return None
        error = constraint.error
    except Exception:
        logger.exception("request %s: its grammar failed", request.request_id)
        error = CONSTRAINT_FAILED
    return End(FinishReason.STOP if error is None else FinishReason.ERROR, error=error)


def delta_of(
    request: Request,
    token_ids: tuple[int, ...] = (),
    logprobs: Logprobs | None = None,
    end: End | None = None,
) -> TokenDelta:
    """What the reader of `request` is told; takes the prompt's log-probabilities along once they are complete."""
    prompt_logprobs = None
    # Of a prompt of one token there is nothing to compute: it is complete at once.
    if request.scores_prompt and len(request.prompt_logprobs) == request.prompt_len - 1:
        prompt_logprobs = (None, *request.prompt_logprobs)
        request.prompt_logprobs = []
    tells_timings = end is not None or request.num_settled <= len(token_ids) or request.timings.preemptions > 0
    return TokenDelta(
        request.request_id,
        request.index,
        token_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        finish_reason=None if end is None else end.reason,
        stop_reason=None if end is None else end.stop_reason,
        ends_with_stop_token=end is not None and end.by_stop_token,
        cached_tokens=request.num_cached,
        timings=request.timings.freeze() if tells_timings else None,
        error=None if end is None else end.error,
    )


def book_prompt_logprobs(plan: StepPlan, result: StepResult, requests: Mapping[int, Request]) -> None:
    """Appends what is new. Values do not depend on when they are computed, so a preemption between the step's launch
    and now loses none, and what it lets compute again comes again."""
    for part in plan.prompt_targets:
        request = requests.get(part.seq_id)
        if request is not None and part.start <= len(request.prompt_logprobs):
            known = request.prompt_logprobs
            known.extend(result.prompt_logprobs[part.seq_id][len(known) - part.start :])
