"""Memory and time of a start: `python -m integration.benchmarks.startup --model DIR [--workload FILE]`.

Prints one JSON object. `over_mb` is the process's peak of resident memory, after the workload if one is given, less
that of a process that only imports torch and transformers, less the model's weights and the KV pool. `ready_s` is from
the first import to an engine that can serve; `ready_cpu_s`, the process's CPU seconds up to there, is the figure that
stays true on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

_PEAK = "import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"


def bare_mb() -> float:
    """Peak of a process that imports torch and transformers and does nothing else."""
    program = f"import torch, transformers; {_PEAK}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return int(done.stdout) / 1024


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m integration.benchmarks.startup")
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--workload", type=Path, help="run it before the peak is read")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="any EngineConfig field")
    args = parser.parse_args(argv)
    bare = bare_mb()

    begin = time.perf_counter()
    import resource

    from cb_backend import Engine, EngineConfig

    imported = time.perf_counter()
    config = EngineConfig(model=args.model, dtype=args.dtype)
    with Engine(config.replace(dict(item.split("=", 1) for item in args.set))) as engine:
        ready, ready_cpu = time.perf_counter(), time.process_time()
        if args.workload is not None:
            from .meter import load_workload
            from .offline import run

            run(engine, load_workload(args.workload))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        loaded, stats = engine.parts.loaded, engine.stats()
        weights = sum(path.stat().st_size for path in Path(loaded.model.name_or_path).glob("*.safetensors")) / 2**20
        pool = stats["kv_blocks"] * stats["bytes_per_block"] / 2**20
    figures = {
        "import_s": round(imported - begin, 2),
        "ready_s": round(ready - begin, 2),
        "ready_cpu_s": round(ready_cpu, 2),
        "bare_mb": round(bare),
        "weights_mb": round(weights),
        "kv_pool_mb": round(pool),
        "peak_mb": round(peak),
        "over_mb": round(peak - bare - weights - pool),
    }
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
