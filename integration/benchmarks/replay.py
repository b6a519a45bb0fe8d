"""Replays workloads through the real scheduler with a scripted model, to see whether `risk` means what it says.

    python -m integration.benchmarks.replay [--requests 10000] [--workloads "azure chat,drift"] [--blocks 300]

A step is one time unit; the model says anything and ends each output at its length in the workload. The queue never
runs dry: that is where admission decides. Curves start blind. Prints a Markdown table:

    overflow    share of the admissions after which the pool would overflow if no other request were admitted: the use
                that the true lengths lead to, one token a step each, exceeds the pool at some later step
    preempted   share of the admissions after which, before the next admission, memory did run short
    +-          95 % sampling error of `overflow`, from the means of 25 consecutive batches (admissions are dependent)
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from cb_backend.config import AdmissionConfig
from cb_backend.kv.blocks import BlockPool, HostPool
from cb_backend.params import SamplingParams
from cb_backend.request import Request, Timings
from cb_backend.scheduling.admission import Admission, AdmissionPolicy
from cb_backend.scheduling.lengths import LengthCurves
from cb_backend.scheduling.plan import StepPlan, StepResult
from cb_backend.scheduling.preemption import CostModel, Preemption
from cb_backend.scheduling.scheduler import Scheduler

from .past_future import PastFuture
from .workloads import WORKLOADS, Arrival, requests

END, OTHER = 1, 2
QUEUE = 32  # requests kept waiting
BATCHES = 25


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one replay. `mean_use`: share of the pool in use, averaged over steps."""

    admissions: int
    overflow: float
    sampling_error: float
    preempted: float
    mean_use: float
    preemptions: int
    recomputed: float
    requests_per_1000_steps: float
    steps: int
    seconds: float


class Judged:
    """An admission policy whose every answer is held against the lengths that only the replay knows."""

    def __init__(self, policy: AdmissionPolicy, num_blocks: int, block_size: int) -> None:
        self._policy = policy
        self._num_blocks = num_blocks
        self._block_size = block_size
        self.outputs: dict[str, int] = {}  # tokens of each request's output
        self.ends: dict[int, int] = {}  # position of its last token, by seq_id
        self.overflows: list[bool] = []  # per admission
        self.shortages: list[bool] = []
        self._set: list[tuple[int, int]] = []  # (known tokens, tokens to come)

    def begin(self, running: Sequence[Request]) -> None:
        self._set = [self._truth(request) for request in running]
        self._policy.begin(running)

    def admits(self, candidate: Request, new_blocks: int, shared_blocks: int) -> bool:
        return self._policy.admits(candidate, new_blocks, shared_blocks)

    def add(self, candidate: Request, new_blocks: int) -> None:
        self._policy.add(candidate, new_blocks)
        self._set.append(self._truth(candidate))
        known, left = np.array(self._set).T
        at = left - 1  # the last step at which each still holds blocks
        held = -(-(known[:, None] + at) // self._block_size) * (left[:, None] > at)
        self.overflows.append(bool(held.sum(axis=0).max() > self._num_blocks))
        self.shortages.append(False)

    def finished(self, request: Request) -> None:
        self._policy.finished(request)

    def _truth(self, request: Request) -> tuple[int, int]:
        return request.num_known, self.outputs[request.request_id] - request.num_output


def make_policy(name: str, num_blocks: int, block_size: int, risk: float = 0.01) -> AdmissionPolicy:
    if name == "past-future":
        return PastFuture(num_blocks, block_size, first_guess=128)
    config = AdmissionConfig.model_validate({"policy": name, "risk": risk})
    return Admission(config, num_blocks, block_size, LengthCurves())


def replay(
    arrivals: Sequence[Arrival], policy: AdmissionPolicy, *, num_blocks: int, block_size: int, budget: int = 2048
) -> Outcome:
    """Runs all `arrivals` to their ends."""
    pool = BlockPool(num_blocks, block_size, enable_prefix_caching=False)
    judged = Judged(policy, num_blocks, block_size)
    preemption = Preemption(pool, HostPool(0), "recompute", CostModel())
    scheduler = Scheduler(
        pool, HostPool(0), judged, preemption, max_num_batched_tokens=budget, max_num_seqs=min(budget, 256)
    )
    coming = iter(enumerate(arrivals))
    used = 0
    saturated_steps = saturated_ends = ended = steps = 0
    started = time.perf_counter()
    while True:
        for number, arrival in islice(coming, max(0, QUEUE - scheduler.num_waiting)):
            request = _request(number, arrival)
            judged.outputs[str(number)] = arrival.output
            judged.ends[request.seq_id] = arrival.prompt + arrival.output - 1
            scheduler.add(request)
        if not scheduler.has_work:
            break
        plan = scheduler.plan()
        if plan.preempted and judged.shortages:
            judged.shortages[-1] = True
        used += pool.num_used
        steps += 1
        ended += sum(1 for _r, delta in scheduler.settle(plan, _answer(plan, judged), 0.0) if delta.finish_reason)
        if scheduler.num_waiting:
            saturated_steps, saturated_ends = steps, ended
            saturated_use = used
    overflows = np.array(judged.overflows, dtype=float)
    counts = scheduler.counters
    return Outcome(
        len(overflows),
        float(overflows.mean()),
        sampling_error(overflows),
        float(np.mean(judged.shortages)),
        saturated_use / saturated_steps / num_blocks,
        counts["preemptions_recompute"] + counts["preemptions_swap"],
        counts["recomputed_tokens"] / counts["computed_tokens"],
        1000 * saturated_ends / saturated_steps,
        steps,
        time.perf_counter() - started,
    )


def sampling_error(indicators: np.ndarray) -> float:
    """Half of the 95 % confidence interval of their mean, consecutive ones being dependent."""
    means = [batch.mean() for batch in np.array_split(indicators, BATCHES)]
    return 1.96 * float(np.std(means, ddof=1)) / math.sqrt(BATCHES)


def _request(number: int, arrival: Arrival) -> Request:
    return Request(
        str(number),
        arrival.prompt,
        [OTHER] * arrival.prompt,
        SamplingParams(max_tokens=arrival.max_tokens),
        arrival.max_tokens,
        frozenset({END}),
        seed=0,
        timings=Timings(0.0),
        sink=lambda delta: None,
        order=number,
        request_class=arrival.request_class,
    )


def _answer(plan: StepPlan, judged: Judged) -> StepResult:
    rows = zip(plan.sampled, plan.sampling.positions.tolist(), strict=True)
    return StepResult([(END if judged.ends[seq_id] == position else OTHER,) for seq_id, position in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--workloads", default=",".join(w.replace(",", ";") for w in WORKLOADS))
    parser.add_argument("--blocks", type=int, default=300)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--policies", default="0.01,0.05,0.2,worst_case,prompt,past-future")
    args = parser.parse_args()
    columns = (
        "workload",
        "policy",
        "overflow",
        "+-",
        "preempted",
        "pool use",
        "preemptions",
        "recomputed",
        "requests/1000 steps",
    )
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    for workload in args.workloads.split(","):
        workload = workload.replace(";", ",")
        arrivals = requests(workload, args.requests)
        for name in args.policies.split(","):
            forecast = name[0].isdigit()
            policy = make_policy(
                "forecast" if forecast else name, args.blocks, args.block_size, float(name) if forecast else 0.5
            )
            out = replay(arrivals, policy, num_blocks=args.blocks, block_size=args.block_size)
            print(
                f"| {workload} | {'forecast, risk ' + name if forecast else name} | {100 * out.overflow:.2f} % "
                f"| {100 * out.sampling_error:.2f} % | {100 * out.preempted:.2f} % | {100 * out.mean_use:.1f} % "
                f"| {out.preemptions} | {100 * out.recomputed:.2f} % | {out.requests_per_1000_steps:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
