"""Runs a workload file through the engine, offline, and prints one JSON object.

    python -m integration.benchmarks.offline --model DIR --workload FILE --dtype bfloat16 \
        [--num-kv-blocks N] [--block-size N] [--set admission.policy=prompt ...] [--repeat N] [--save FILE] [--json]

A workload is `{"requests": [{"prompt_token_ids": [...], "max_tokens": n, "output_tokens": k}, ...]}`; it runs greedily
and ignores end ids. Where `output_tokens` is given the request ends there with reason `stop`, as if the model had
ended, and the scheduler knows nothing but `max_tokens` beforehand.

Figures: `wall_s` from the first request sent to the last one finished, loading and warm-up excluded;
`cpu_s` of this process in that time; `foreign_cpu` = cores that other processes kept busy (quote runs below 0.1).
"""

from __future__ import annotations

import argparse
import json
import queue
import resource
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from cb_backend import Engine, EngineConfig, SamplingParams
from cb_backend.engine.messages import CallMessage
from cb_backend.request import TokenDelta

from .meter import Meter, load_workload, wait_for_turn


class EndsAfter:
    """A constraint that allows every token and is satisfied after `count` of them: the model's end, played."""

    error = None

    def __init__(self, count: int) -> None:
        self.left = count

    def allowed(self) -> None:
        return None

    def accept(self, token_id: int) -> None:
        self.left -= 1

    @property
    def finished(self) -> bool:
        return self.left <= 0

    def fork(self) -> EndsAfter:
        return type(self)(self.left)


def run(engine: Engine, requests: list[dict[str, Any]], *, in_one_step: bool = False) -> list[list[int]]:
    """All requests at once; the generated ids in request order.

    `in_one_step`: the engine thread sees none of them before it sees all.
    """
    deltas: queue.SimpleQueue[TokenDelta] = queue.SimpleQueue()
    readers = []
    all_sent = threading.Event()
    if in_one_step:
        engine.core.send(CallMessage(all_sent.wait, Future()))
    try:
        for i, request in enumerate(requests):
            end = request.get("output_tokens")
            readers.append(
                engine.submit(
                    list(request["prompt_token_ids"]),
                    SamplingParams(max_tokens=request["max_tokens"], temperature=0.0, ignore_eos=True),
                    deltas.put,
                    request_id=str(i),
                    constraint=None if end is None else EndsAfter(end),
                )
            )
    finally:
        all_sent.set()
    outputs: list[list[int]] = [[] for _ in requests]
    left = len(requests)
    while left:
        delta = deltas.get()
        outputs[int(delta.request_id)] += delta.token_ids
        if delta.finish_reason is not None:
            left -= 1
            if delta.error:
                raise RuntimeError(f"request {delta.request_id} failed: {delta.error}")
    for reader in readers:
        reader.release()
    return outputs


def measure(engine: Engine, requests: list[dict[str, Any]]) -> tuple[dict[str, Any], list[list[int]]]:
    before = engine.stats()
    with Meter() as meter:
        outputs = run(engine, requests)
    after = engine.stats()
    gained = {key: after[key] - before[key] for key in after}
    host = gained["plan_seconds"] + gained["settle_seconds"]
    return {
        **meter.figures(sum(map(len, outputs))),
        "in_tok": sum(len(r["prompt_token_ids"]) for r in requests),
        "steps": int(gained["steps"]),
        "preemptions": int(gained["preemptions_swap"] + gained["preemptions_recompute"]),
        "preemptions_swap": int(gained["preemptions_swap"]),
        "swapped_bytes": int(gained["swapped_bytes"]),
        "computed_tokens": int(gained["computed_tokens"]),
        "recomputed_tokens": int(gained["recomputed_tokens"]),
        "prefix_hit_tokens": int(gained["prefix_hit_tokens"]),
        "host_share": round(host / meter.wall, 4),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }, outputs


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m integration.benchmarks.offline", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--workload", required=True, type=Path)
    parser.add_argument("--first", type=int, help="only that many requests")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--num-kv-blocks", type=int)
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="any EngineConfig field")
    parser.add_argument("--repeat", type=int, default=1, help="measured runs; one JSON line each")
    parser.add_argument("--gated", action="store_true", help="before each, print `ready` and wait for a line")
    parser.add_argument("--save", type=Path, help="write the generated ids of the last run")
    parser.add_argument("--json", action="store_true", help="print JSON only (the default prints it indented)")
    args = parser.parse_args(argv)

    config = EngineConfig(model=args.model, dtype=args.dtype, enable_prefix_caching=False)
    assignments = dict(item.split("=", 1) for item in args.set)
    if args.num_kv_blocks is not None:
        assignments["num_kv_blocks"] = str(args.num_kv_blocks)
    if args.block_size is not None:
        assignments["block_size"] = str(args.block_size)
    config = config.replace(assignments)
    requests = load_workload(args.workload, args.first)
    started = time.perf_counter()
    with Engine(config) as engine:
        ready = time.perf_counter() - started
        run(engine, [{"prompt_token_ids": list(range(3, 67)), "max_tokens": 4}] * 4)  # warm-up
        for _ in range(args.repeat):
            wait_for_turn(args.gated)
            figures, outputs = measure(engine, requests)
            figures["start_s"] = round(ready, 2)
            figures["attention_backend"] = engine.parts.backend_name
            print(json.dumps(figures, indent=None if args.json else 2), flush=True)
    if args.save is not None:
        args.save.write_text(json.dumps(outputs))


if __name__ == "__main__":
    main()
