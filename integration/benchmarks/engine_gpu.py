"""The whole engine on one GPU, beside transformers' own continuous batching in the same run.

    python -m integration.benchmarks.engine_gpu [--model qwen3-0.6b --model llama-8b] [--out rows.jsonl]
    python -m integration.benchmarks.engine_gpu --tiny --device cpu       # shows that the command works

Models have the named shapes and random weights, written to a temporary directory; requests are random, greedy, and run
to their full length. One line of JSON per row, flushed at once: for each model the engine with every combination of
`overlap` and `cuda_graphs` that it has (a graph that cannot be captured is a row with `error`), then `generate_batch`,
then the ratio of the best of ours to it. `device_busy` is the share of the wall time in which some kernel ran, by
torch's profiler in a run of its own; on a CPU, where the step is the device's work, it is the share spent in steps.
`step_overhead_us` is what a step took beyond that.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from cb_backend import Engine, EngineConfig
from cb_backend.errors import ModelError

from .meter import Meter
from .offline import run

Requests = list[dict[str, Any]]

MODELS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3-0.6b": lambda: Qwen3Config(
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    "llama-8b": lambda: LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
    ),
    "tiny": lambda: LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    ),
}


@dataclass(frozen=True, slots=True)
class Load:
    """How much is asked for: requests, the range of prompt lengths, output length, and the token budget of a step."""

    requests: int
    prompts: tuple[int, int]
    output: int
    budget: int

    def make(self, vocab_size: int) -> Requests:
        chance = random.Random(0)
        lengths = [chance.randint(*self.prompts) for _ in range(self.requests)]
        return [
            {"prompt_token_ids": [chance.randrange(10, vocab_size) for _ in range(n)], "max_tokens": self.output}
            for n in lengths
        ]


FULL = Load(requests=64, prompts=(64, 1024), output=256, budget=2048)
TINY = Load(requests=4, prompts=(4, 20), output=8, budget=32)


def write_model(name: str, directory: Path, device: torch.device, dtype: torch.dtype) -> None:
    """A checkpoint of that shape with random weights."""
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(MODELS[name](), dtype=dtype)
    model.generation_config.eos_token_id = None
    model.save_pretrained(directory)


def measure_engine(directory: Path, requests: Requests, load: Load, dtype: str, device: str, **options: bool) -> dict:
    """Figures of one configuration of the engine."""
    config = EngineConfig(
        model=str(directory),
        dtype=dtype,
        device=device,
        max_num_batched_tokens=load.budget,
        max_num_seqs=load.requests,
        enable_prefix_caching=False,
        **options,
    )
    with Engine(config) as engine:
        run(engine, [{**request, "max_tokens": 4} for request in requests[:4]])  # warm-up
        before = engine.stats()
        with Meter() as meter:
            outputs = run(engine, requests)
        gained = {key: value - before[key] for key, value in engine.stats().items()}
        if torch.device(device).type == "cuda":
            busy = busy_share_by_profiler(engine, requests)
        else:
            busy = gained["device_seconds"] / meter.wall
    steps = int(gained["steps"])
    host = gained["plan_seconds"] + gained["settle_seconds"]
    return {
        "out_tok_s": round(sum(map(len, outputs)) / meter.wall, 1),
        "wall_s": round(meter.wall, 3),
        "steps": steps,
        "device_busy": round(busy, 3),
        "step_overhead_us": round((1.0 - busy) * meter.wall / steps * 1e6, 1),
        "host_us_per_step": round(host / steps * 1e6, 1),
    }


def busy_share_by_profiler(engine: Engine, requests: Requests) -> float:
    """Share of a run's wall time in which at least one kernel or copy ran on the GPU."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled, Meter() as meter:
        run(engine, requests)
        torch.cuda.synchronize()
    spans = ((e.time_range.start, e.time_range.end) for e in profiled.events() if e.device_type == DeviceType.CUDA)
    return covered(spans) / (meter.wall * 1e6)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def measure_transformers(directory: Path, requests: Requests, load: Load, dtype: str, device: str) -> dict:
    """`generate_batch` on the same requests, budget and dtype; its attention is chosen by transformers."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).to(device).eval()
    settings = GenerationConfig(max_new_tokens=load.output, do_sample=False, eos_token_id=-1, pad_token_id=0)
    blocks = None
    if torch.device(device).type == "cpu":  # else it takes all of the memory
        blocks = load.requests * (-(-(load.prompts[1] + load.output) // 256) + 1)
    batching = ContinuousBatchingConfig(max_batch_tokens=load.budget, num_blocks=blocks)
    prompts = [request["prompt_token_ids"] for request in requests]
    model.generate_batch(prompts[:4], settings, batching, max_new_tokens=4)  # warm-up
    with Meter() as meter:
        results = model.generate_batch(prompts, settings, batching)
    made = sum(len(result.generated_tokens) for result in results.values())
    if made != load.requests * load.output:
        raise RuntimeError(f"generate_batch made {made} tokens of {load.requests * load.output}")
    return {"out_tok_s": round(made / meter.wall, 1), "wall_s": round(meter.wall, 3)}


def measure(name: str, load: Load, device: str, row: Callable[..., None]) -> None:
    dtype = "float32" if device == "cpu" else "bfloat16"
    on_gpu = torch.device(device).type == "cuda"
    with tempfile.TemporaryDirectory(prefix="cb-engine-gpu-") as folder:
        write_model(name, Path(folder), torch.device(device), getattr(torch, dtype))
        requests = load.make(MODELS[name]().vocab_size)
        best = 0.0
        for graphs in (False, True) if on_gpu else (False,):
            for overlap in (False, True):
                options = {"overlap": overlap, "cuda_graphs": graphs}
                try:
                    figures = measure_engine(Path(folder), requests, load, dtype, device, **options)
                except ModelError as error:
                    row("engine", model=name, **options, error=str(error))
                    continue
                finally:
                    release(on_gpu)
                best = max(best, figures["out_tok_s"])
                row("engine", model=name, **options, **figures)
        theirs = measure_transformers(Path(folder), requests, load, dtype, device)
        release(on_gpu)
        row("generate_batch", model=name, **theirs)
        row("ratio", model=name, ours_to_theirs=round(best / theirs["out_tok_s"], 2))


def release(on_gpu: bool) -> None:
    """What the last measurement held goes back to the card."""
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m integration.benchmarks.engine_gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", action="append", choices=[name for name in MODELS if name != "tiny"])
    parser.add_argument("--tiny", action="store_true", help="a model and a load of a few seconds, to try the command")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", help="append the rows to this file too")
    options = parser.parse_args(arguments)
    if torch.device(options.device).type == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU here; --tiny --device cpu shows the command on a CPU")
    if options.device == "cpu" and not options.tiny:
        parser.error("these models need a GPU; on a CPU use --tiny")
    names = ["tiny"] if options.tiny else options.model or ["qwen3-0.6b", "llama-8b"]
    with open(options.out, "a", encoding="utf-8") if options.out else contextlib.nullcontext() as out:
        streams: list[TextIO] = [sys.stdout, *([out] if out else [])]

        def row(stage: str, **values: Any) -> None:
            for stream in streams:
                print(json.dumps({"stage": stage, **values}), file=stream, flush=True)

        device = "cpu" if options.device == "cpu" else torch.cuda.get_device_name(options.device)
        row("start", device=device, torch=torch.__version__)
        for name in names:
            measure(name, TINY if options.tiny else FULL, options.device, row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
