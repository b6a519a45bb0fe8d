"""A step in the making, and how a request's end is decided and told: the small types of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from ..request import Assignment, FinishReason, Logprob, Request, StepPlan, TokenDelta

Outcome = tuple[Request, TokenDelta]


class Draft:
    """Collects what the stages of `plan` decide; `freeze` makes the plan of it."""

    def __init__(self) -> None:
        self.assignments: list[Assignment] = []
        self.samplers: list[Request] = []
        self.swap_out: list[tuple[int, int]] = []
        self.swap_in: list[tuple[int, int]] = []
        self.admitted: list[Request] = []
        self.resumed: list[Request] = []
        self.preempted: list[tuple[Request, str]] = []

    def freeze(self, step: int) -> StepPlan:
        return StepPlan(
            step,
            tuple(self.assignments),
            tuple(self.samplers),
            tuple(self.swap_out),
            tuple(self.swap_in),
            tuple(self.admitted),
            tuple(self.resumed),
            tuple(self.preempted),
        )


@dataclass(frozen=True, slots=True)
class End:
    """Why a request ends. `by_stop_token`: its last id is an end id or one of `stop_token_ids`."""

    reason: FinishReason
    stop_reason: int | None = None
    by_stop_token: bool = False
    error: str | None = None


def end_after(request: Request, token_id: int) -> End | None:
    """Whether `request` ends with `token_id`, its newest one."""
    if token_id in request.stop_ids and request.num_settled > request.params.min_tokens:
        own = token_id in request.params.stop_token_ids
        return End(FinishReason.STOP, token_id if own else None, by_stop_token=True)
    if request.constraint is not None and request.constraint.finished:
        error = request.constraint.error
        return End(FinishReason.STOP if error is None else FinishReason.ERROR, error=error)
    if request.num_settled >= request.max_tokens:
        return End(FinishReason.LENGTH)
    return None


def delta_of(
    request: Request, token_ids: tuple[int, ...] = (), logprob: Logprob | None = None, end: End | None = None
) -> TokenDelta:
    """What the reader of `request` is told; takes the prompt's log-probabilities along once they are complete."""
    prompt_logprobs = None
    # Of a prompt of one token there is nothing to compute: it is complete at once.
    if request.scores_prompt and len(request.prompt_logprobs) == request.prompt_len - 1:
        prompt_logprobs = (None, *request.prompt_logprobs)
        request.prompt_logprobs = []
    tells_timings = end is not None or request.num_settled <= 1 or request.timings.preemptions > 0
    return TokenDelta(
        request.request_id,
        request.index,
        token_ids,
        logprobs=None if logprob is None else (logprob,),
        prompt_logprobs=prompt_logprobs,
        finish_reason=None if end is None else end.reason,
        stop_reason=None if end is None else end.stop_reason,
        ends_with_stop_token=end is not None and end.by_stop_token,
        cached_tokens=request.num_cached,
        timings=request.timings.freeze() if tells_timings else None,
        error=None if end is None else end.error,
    )
