"""A scheduler with a scripted model: the device is a function from (request, position) to a token id."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from cb_backend.engine.choices import Choices
from cb_backend.kv.blocks import BlockPool, HostPool
from cb_backend.params import SamplingParams
from cb_backend.request import Request, Timings, TokenDelta
from cb_backend.scheduling.plan import StepPlan, StepResult
from cb_backend.scheduling.preemption import CostModel, Preemption
from cb_backend.scheduling.scheduler import Scheduler

EOS = 1


class FitsPrompt:
    """The simplest admission: whatever fits now may join."""

    def begin(self, running: Sequence[Request]) -> None: ...

    def admits(self, candidate: Request, new_blocks: int, shared_blocks: int) -> bool:
        return True

    def add(self, candidate: Request, new_blocks: int) -> None: ...

    def finished(self, request: Request) -> None: ...


def make_scheduler(
    num_blocks: int = 64,
    block_size: int = 4,
    *,
    host_blocks: int = 0,
    budget: int = 16,
    max_num_seqs: int = 8,
    mode: str = "auto",
    cost: CostModel | None = None,
    prefix_caching: bool = True,
    admission=None,
) -> Scheduler:
    pool, host = BlockPool(num_blocks, block_size, prefix_caching), HostPool(host_blocks)
    return Scheduler(
        pool,
        host,
        admission or FitsPrompt(),
        Preemption(pool, host, mode, cost or CostModel(1e-4, 1e-4)),
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
    )


_order = iter(range(10**9))
MADE: dict[int, Request] = {}  # every request made here, by the seq_id that plans have


def make_request(
    name: str,
    prompt: int | Sequence[int] = 4,
    max_tokens: int = 4,
    *,
    n: int = 1,
    priority: int = 0,
    deadline: float | None = None,
    salt: str = "",
    params: SamplingParams | None = None,
    sink: Callable[[TokenDelta], None] | None = None,
    order: int | None = None,
    stop_ids: frozenset[int] = frozenset({EOS}),
) -> list[Request]:
    """The choices of one request. A prompt given as a length has ids that no other request shares."""
    order = next(_order) if order is None else order
    ids = list(prompt) if not isinstance(prompt, int) else [1000 * (order + 1) + i for i in range(prompt)]
    params = params or SamplingParams(max_tokens=max_tokens, n=n)
    choices = [
        Request(
            name,
            len(ids),
            list(ids),
            params,
            max_tokens,
            stop_ids,
            seed=index,
            timings=Timings(0.0),
            sink=sink or (lambda delta: None),
            index=index,
            priority=priority,
            order=order,
            deadline=deadline,
            salt=salt,
        )
        for index in range(n)
    ]
    MADE.update({choice.seq_id: choice for choice in choices})
    return choices


def token_of(request: Request, position: int) -> int:
    """What the scripted model says: depends on the prompt, the choice and the position only."""
    return 2 + hash((tuple(request.token_ids[: request.prompt_len]), request.index, position)) % 97


def answer(plan: StepPlan, model: Callable[[Request, int], int] = token_of) -> StepResult:
    rows = zip(plan.sampled, plan.sampling.positions.tolist(), strict=True)
    return StepResult([(model(MADE[seq_id], position),) for seq_id, position in rows])


def names(seq_ids: Iterable[int]) -> list[str]:
    return [MADE[seq_id].request_id for seq_id in seq_ids]


def step(
    scheduler: Scheduler,
    now: float = 0.0,
    model: Callable[[Request, int], int] = token_of,
    choices: Choices | None = None,
):
    """One whole step: (plan, outcomes)."""
    plan = scheduler.plan()
    outcomes = scheduler.settle(plan, answer(plan, model), now)
    if choices is not None:
        outcomes = choices.settled(outcomes)
    (choices or scheduler).check()
    return plan, outcomes


def table(plan: StepPlan) -> dict[str, int]:
    """Tokens per request of one step, in the order of the batch."""
    return {
        MADE[a.seq_id].request_id + (f"/{MADE[a.seq_id].index}" if MADE[a.seq_id].index else ""): a.num_tokens
        for a in plan.assignments
    }
