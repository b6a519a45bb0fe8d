"""How a step grows with the batch: `python -m integration.benchmarks.scaling --model DIR [--plot FILE.svg]`.

Times decode steps of the whole engine (planning, forward pass, sampling, settling) at 1, 2, 4 ... sequences and several
contexts. All sequences of a point share one prompt through the prefix cache, so that 256 of 8k tokens fit anywhere:
every sequence still reads its whole context in every layer, but from the same blocks.

Prints a table, the fit  step = a + b * sequences + c * sequences * context  (c is attention's part, b that of
everything else, a what a step costs at all), and every doubling of the sequences that more than doubled the step:
that would be a super-linear part.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np

from cb_backend import Engine, EngineConfig
from cb_backend.scheduling.plan import StepPlan

from .offline import run
from .plot import chart

CONTEXTS = (128, 512, 2048, 8064)
SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_TOLERANCE = 1.1  # a doubling may take so much more than twice the time: noise


@dataclass(frozen=True)
class Point:
    sequences: int
    context: int
    step_ms: float  # median


@dataclass(frozen=True)
class Fit:
    """Milliseconds. `worst`: largest measured / fitted over all points, or fitted / measured where that is larger."""

    per_step: float
    per_sequence: float
    per_kilotoken: float
    worst: float


class DecodeSteps:
    """An observer that keeps the durations of the steps in which `sequences` of them made one token each."""

    def __init__(self) -> None:
        self.sequences = 0
        self.seconds: list[float] = []

    def on_step(self, plan: StepPlan, began: float, ended: float, error: str | None = None) -> None:
        if len(plan.seq_ids) == plan.num_tokens == self.sequences:
            self.seconds.append(ended - began)

    def on_added(self, request: object) -> None:
        pass

    def on_finished(self, request: object, delta: object) -> None:
        pass


def generate(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
    run(engine, [{"prompt_token_ids": prompt, "max_tokens": max_tokens} for prompt in prompts], in_one_step=True)


def steps_until_all_run(sequences: int, tokens_each: int, budget: int) -> int:
    """Steps in which prompts of `tokens_each` get what the decodes before them leave of the budget."""
    running = steps = 0
    while running < sequences:
        running += max(1, (budget - running) // tokens_each)
        steps += 1
    return steps


def measure(engine: Engine, sequences: int, context: int, steps: int, observer: DecodeSteps) -> Point:
    """The prompt's blocks are computed once, before; its last token differs, so that the outputs do."""
    vocabulary = engine.vocab_size
    shared = [3 + (7 * i + context) % (vocabulary - 3) for i in range(context - 1)]
    prompts = [[*shared, 3 + i % (vocabulary - 3)] for i in range(sequences)]
    generate(engine, prompts[:1], 1)
    observer.sequences, observer.seconds = sequences, []
    config = engine.config
    first_ones_wait = steps_until_all_run(sequences, config.block_size + 1, config.max_num_batched_tokens)
    generate(engine, prompts, steps + first_ones_wait + 2)
    if len(observer.seconds) < steps:
        raise RuntimeError(
            f"{sequences} sequences of {context} tokens never ran together: give the engine more KV blocks"
        )
    return Point(sequences, context, 1e3 * median(observer.seconds))


def fit(points: Sequence[Point]) -> Fit:
    """Least squares on relative errors."""
    times = np.array([point.step_ms for point in points])
    columns = [[1.0, p.sequences, p.sequences * p.context / 1000] for p in points]
    weighted = np.array(columns) / times[:, None]
    found, *_ = np.linalg.lstsq(weighted, np.ones(len(points)), rcond=None)
    ratios = 1 / (weighted @ found)
    per_step, per_sequence, per_kilotoken = map(float, found)
    return Fit(per_step, per_sequence, per_kilotoken, float(max(*ratios, *(1 / ratios))))


def superlinear(points: Sequence[Point]) -> list[tuple[Point, Point]]:
    """Doublings of the sequences at one context that took more than twice the time."""
    at = {(point.sequences, point.context): point for point in points}
    pairs = [(point, at.get((2 * point.sequences, point.context))) for point in points]
    return [(a, b) for a, b in pairs if b is not None and b.step_ms > 2 * _TOLERANCE * a.step_ms]


def report(points: Sequence[Point]) -> str:
    contexts = sorted({point.context for point in points})
    at: Mapping[tuple[int, int], float] = {(p.sequences, p.context): p.step_ms for p in points}
    lines = ["| sequences | " + " | ".join(f"context {c}, ms" for c in contexts) + " |"]
    lines.append("|---" * (len(contexts) + 1) + "|")
    for sequences in sorted({point.sequences for point in points}):
        cells = [f"{at[sequences, c]:.1f}" if (sequences, c) in at else "-" for c in contexts]
        lines.append(f"| {sequences} | " + " | ".join(cells) + " |")
    found = fit(points)
    lines += [
        "",
        f"step = {found.per_step:.2f} + {found.per_sequence:.3f} * sequences + {found.per_kilotoken:.4f} * sequences *"
        f" context / 1000 ms, at most {found.worst:.2f} times off",
    ]
    grown = superlinear(points)
    lines += [
        f"super-linear: {a.sequences} to {b.sequences} sequences at context {a.context}: "
        f"{a.step_ms:.1f} to {b.step_ms:.1f} ms"
        for a, b in grown
    ]
    if not grown:
        lines.append(f"no doubling of the sequences takes more than {2 * _TOLERANCE:.1f} times the time")
    return "\n".join(lines)


def picture(points: Sequence[Point], title: str) -> str:
    contexts = sorted({point.context for point in points})
    lines = {f"context {c}": [(float(p.sequences), p.step_ms) for p in points if p.context == c] for c in contexts}
    return chart(title, "sequences in the step", "ms per step", lines, log_x=True, log_y=True)


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m integration.benchmarks.scaling", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--sequences", type=numbers, default=SEQUENCES, metavar="N,N,...")
    parser.add_argument("--contexts", type=numbers, default=CONTEXTS, metavar="N,N,...")
    parser.add_argument("--steps", type=int, default=8, help="measured per point")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--save", type=Path, help="write the points as JSON")
    parser.add_argument("--plot", type=Path, help="write the picture as SVG")
    args = parser.parse_args(argv)
    block_size, most = 32, max(args.sequences)
    budget = EngineConfig.model_fields["max_num_batched_tokens"].default
    alone = args.steps + steps_until_all_run(most, block_size + 1, budget) + 4 + block_size  # tokens of each sequence
    tail = -(-alone // block_size) + 1
    config = EngineConfig(
        model=args.model,
        dtype=args.dtype,
        block_size=block_size,
        num_kv_blocks=sum(-(-context // block_size) + 1 for context in args.contexts) + most * tail,
        max_num_seqs=most,
        num_threads=args.threads,
        swap_space=0,
    )
    observer = DecodeSteps()
    points: list[Point] = []
    with Engine(config) as engine:
        engine.core.observers.append(observer)
        for context in args.contexts:
            for sequences in args.sequences:
                points.append(measure(engine, sequences, context, args.steps, observer))
                print(points[-1], file=sys.stderr, flush=True)
                if args.save is not None:
                    args.save.write_text(json.dumps([asdict(point) for point in points], indent=1) + "\n", "utf-8")
        name = engine.model_name
    print(report(points))
    if args.plot is not None:
        args.plot.write_text(picture(points, f"{name}: time of one decode step"), encoding="utf-8")


if __name__ == "__main__":
    main()
