"""What the host does for a decode step: planning it, launching it on a model of one small layer, settling it.

    python -m integration.benchmarks.planning [--running 1000] [--rows 64,256] [--steps 100] [--rounds 5]

Prints one JSON object of microseconds per step, of which every sequence decodes: of the scheduler alone with
`--running` sequences, and of the whole with each of `--rows` on a random-weight model (1 layer, hidden size 32,
vocabulary of 256), greedy, where launching is nearly only making the batch and sampling. Each is the least of the
rounds' means. To compare two versions, run them alternately with one thread (OMP_NUM_THREADS=1) and take the least.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM

from cb_backend import EngineConfig
from cb_backend.config import AdmissionConfig
from cb_backend.execution.executor import Executor
from cb_backend.execution.startup import prepare
from cb_backend.kv.blocks import BlockPool, HostPool
from cb_backend.models.loader import load_model
from cb_backend.params import SamplingParams
from cb_backend.request import Request, Sink, Timings
from cb_backend.scheduling.admission import Admission
from cb_backend.scheduling.lengths import LengthCurves
from cb_backend.scheduling.plan import StepPlan, StepResult
from cb_backend.scheduling.preemption import Preemption
from cb_backend.scheduling.scheduler import Scheduler

BLOCK = 32

Launch = Callable[[StepPlan], StepResult]


def decoding(running: int, steps: int, launch: Launch) -> Scheduler:
    """A scheduler whose `running` requests all decode, with room for so many steps."""
    pool, host = BlockPool(running * (steps // BLOCK + 4), BLOCK), HostPool(0)
    admission = Admission(AdmissionConfig(policy="prompt"), pool.num_blocks, BLOCK, LengthCurves(), pool)
    preemption = Preemption(pool, host, "recompute")
    limits = {"max_num_batched_tokens": 2 * running, "max_num_seqs": running}
    scheduler = Scheduler(pool, host, admission, preemption, **limits)
    for number in range(running):
        scheduler.add(request_of(number))
    while len(scheduler.running) < running or any(request.num_missing != 1 for request in scheduler.running):
        plan = scheduler.plan()
        scheduler.settle(plan, launch(plan), 0.0)
    return scheduler


def request_of(number: int) -> Request:
    prompt = [(number * 31 + i) % 256 for i in range(8)]
    params, endless = SamplingParams(max_tokens=10**6, temperature=0.0), 10**6
    told: Sink = lambda delta: None  # noqa: E731
    return Request(str(number), 8, prompt, params, endless, frozenset(), 0, Timings(0.0), told, order=number)


def nothing(plan: StepPlan) -> StepResult:
    """The same token for every row."""
    return StepResult([(5,)] * len(plan.sampling))


def microseconds(scheduler: Scheduler, steps: int, rounds: int, launch: Launch) -> dict[str, float]:
    """The least mean of planning, launching and settling a step."""
    found: list[list[float]] = []
    for _ in range(rounds):
        moments = []
        for _ in range(steps):
            began = time.perf_counter()
            plan = scheduler.plan()
            planned = time.perf_counter()
            result = launch(plan)
            launched = time.perf_counter()
            scheduler.settle(plan, result, 0.0)
            moments.append((planned - began, launched - planned, time.perf_counter() - launched))
        found.append([1e6 * sum(column) / steps for column in zip(*moments, strict=True)])
    return dict(zip(("plan", "launch", "settle"), [round(min(c), 1) for c in zip(*found, strict=True)], strict=True))


def write_model(path: Path) -> Path:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=256, num_hidden_layers=1, max_position_embeddings=1 << 16, **shape)
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=1000)
    parser.add_argument("--rows", default="64,256")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    count = args.steps * args.rounds
    scheduler = decoding(args.running, count, nothing)
    found = {f"{args.running} without a model": microseconds(scheduler, args.steps, args.rounds, nothing)}
    with tempfile.TemporaryDirectory() as directory:
        path = write_model(Path(directory))
        for rows in map(int, args.rows.split(",")):
            blocks = rows * (count // BLOCK + 4)
            config = EngineConfig(model=str(path), dtype="float32", num_kv_blocks=blocks, attention_backend="cpu")
            executor = prepare(config, load_model(config)).executor

            def launch(plan: StepPlan, executor: Executor = executor) -> StepResult:
                return executor.launch(plan).result()

            found[f"{rows} rows"] = microseconds(decoding(rows, count, launch), args.steps, args.rounds, launch)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
