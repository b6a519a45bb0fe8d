"""What transformers itself does with a workload: the peer that needs no other environment.

    python -m integration.benchmarks.peer_transformers MODE --model DIR --workload FILE [--dtype bfloat16]

MODE: `single` (one request at a time), `static` (batches of 16 in file order, padded on the left, until the longest
ends) or `continuous` (transformers' own `generate_batch` machinery). Prints one JSON object; only requested tokens
count, greedy, end ids ignored.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from .meter import Meter, load_workload, wait_for_turn

Outputs = list[list[int]]
_STATIC_BATCH = 16
_PAD = 0


@torch.inference_mode()
def padded(model: Any, batch: list[dict[str, Any]]) -> Outputs:
    longest = max(len(r["prompt_token_ids"]) for r in batch)
    steps = max(r["max_tokens"] for r in batch)
    ids = torch.full((len(batch), longest), _PAD)
    mask = torch.zeros_like(ids)
    for i, request in enumerate(batch):
        prompt = torch.tensor(request["prompt_token_ids"])
        ids[i, longest - len(prompt) :] = prompt
        mask[i, longest - len(prompt) :] = 1
    result = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=steps,
        min_new_tokens=steps,
        do_sample=False,
        pad_token_id=_PAD,
        eos_token_id=None,
    )
    return [result[i, longest : longest + r["max_tokens"]].tolist() for i, r in enumerate(batch)]


def single(model: Any, requests: list[dict[str, Any]]) -> Outputs:
    return [padded(model, [request])[0] for request in requests]


def static(model: Any, requests: list[dict[str, Any]]) -> Outputs:
    return [
        o for at in range(0, len(requests), _STATIC_BATCH) for o in padded(model, requests[at : at + _STATIC_BATCH])
    ]


def continuous(model: Any, requests: list[dict[str, Any]]) -> Outputs:
    longest = max(len(r["prompt_token_ids"]) + r["max_tokens"] for r in requests)
    blocks = len(requests) * (-(-longest // 256) + 1)  # of 256 tokens; else it takes all the memory and zeroes it
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(max_new_tokens=512, do_sample=False, eos_token_id=-1, pad_token_id=_PAD),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=512),
    )
    manager.start()
    order = {
        manager.add_request(r["prompt_token_ids"], max_new_tokens=r["max_tokens"]): i for i, r in enumerate(requests)
    }
    outputs: Outputs = [[] for _ in requests]
    left = len(requests)
    while left:
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            outputs[order[result.request_id]] = list(result.generated_tokens)
            left -= 1
        elif result is None and not manager.is_running():
            raise RuntimeError("transformers' continuous batching stopped")
    manager.stop(block=True)
    return outputs


MODES: dict[str, Callable[[Any, list[dict[str, Any]]], Outputs]] = {
    "single": single,
    "static": static,
    "continuous": continuous,
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m integration.benchmarks.peer_transformers")
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--model", required=True)
    parser.add_argument("--workload", required=True, type=Path)
    parser.add_argument("--first", type=int, help="only that many requests")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeat", type=int, default=1, help="measured runs; one JSON line each")
    parser.add_argument("--gated", action="store_true", help="before each, print `ready` and wait for a line")
    args = parser.parse_args(argv)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
    model.generation_config.eos_token_id = None
    requests = load_workload(args.workload, args.first)
    MODES[args.mode](model, [{**r, "max_tokens": 4} for r in requests[:4]])  # warm-up
    for _ in range(args.repeat):
        wait_for_turn(args.gated)
        with Meter() as meter:
            outputs = MODES[args.mode](model, requests)
        print(json.dumps({"mode": args.mode} | meter.figures(sum(map(len, outputs)))), flush=True)


if __name__ == "__main__":
    main()
