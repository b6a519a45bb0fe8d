"""The Triton kernels on one GPU, in under 8 minutes: `python -m integration.benchmarks.kernels [--out rows.jsonl]`.

In this order, so that a run cut short has said the most important things: correctness against float64 (exit status 1
when it fails), the device's ceilings, decode and prefill sweeps with the share of those ceilings and with what else is
installed, K/V writes and swap copies. Each row is one line of JSON, flushed at once. Times come from CUDA-graph replay
over rotating data larger than the L2 cache. `--dry` runs a few cells of each stage on the CPU under the interpreter
(start it with TRITON_INTERPRET=1) to show that the command works; its times mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import torch
import triton
from cb_kernels.kv_copy.launch import copy_blocks, write_kv
from cb_kernels.kv_copy.reference import reference_write_kv
from cb_kernels.paged_attention.configs import LaunchConfig
from cb_kernels.paged_attention.launch import paged_attention, workspace_size
from cb_kernels.paged_attention.reference import reference_attention
from cb_kernels.paged_attention.varlen import varlen_attention, varlen_attn
from cb_kernels.sampling.kernel import gumbel_kernel
from cb_kernels.sampling.launch import sample
from cb_kernels.sampling.noise import gumbel
from cb_kernels.sampling.reference import reference_sample
from cb_kernels.targets import TARGETS, target_of

from integration.benchmarks.kernel_work import (
    Comparator,
    Heads,
    Paged,
    comparators,
    decode_bytes,
    paged_batch,
    prefill_flops,
)

LLAMA = Heads("llama-8b", 32, 8, 128)
SMOLLM = Heads("smollm2-135m", 9, 3, 64)
LLAMA_70B = Heads("llama-70b", 64, 8, 128)
ROTATED_BYTES = 400_000_000  # past any L2 cache
# Beside the shipped configuration, on llama-8b only: what tuning would try next.
DECODE_TRIALS = (LaunchConfig(16, 64, 4, 7), LaunchConfig(16, 32, 4, 7), LaunchConfig(16, 128, 4, 5))
PREFILL_TRIALS = (LaunchConfig(128, 64, 8, 7), LaunchConfig(64, 64, 4, 5), LaunchConfig(128, 128, 8, 5))


class Run:
    """Where rows go, how long there is, and the device's ceilings once known."""

    def __init__(self, out: TextIO | None, budget: float, dry: bool) -> None:
        self.out, self.budget, self.dry = out, budget, dry
        self.began = time.perf_counter()
        self.device = torch.device("cpu" if dry else "cuda")
        self.dtype = torch.float32 if dry else torch.bfloat16
        self.copy_bytes = self.matmul_flops = float("nan")
        self.wrong = 0

    def row(self, stage: str, **values: Any) -> None:
        line = json.dumps({"stage": stage, "at_s": round(time.perf_counter() - self.began, 1), **values})
        for stream in filter(None, (sys.stdout, self.out)):
            print(line, file=stream, flush=True)

    def left(self, reserve: float) -> bool:
        """Whether `reserve` seconds of the budget would remain."""
        return self.budget - (time.perf_counter() - self.began) > reserve

    def batch(self, rows: list[int], contexts: list[int], heads: Heads, **changes: Any) -> Paged:
        settings: dict[str, Any] = {"block_size": 32, "dtype": self.dtype, "device": self.device, **changes}
        return paged_batch(rows, contexts, heads, **settings)


def microseconds(run: Run, calls: Sequence[Callable[[], object]], target_ms: float = 8.0) -> float:
    """Median time of one call; `calls` do the same work on different data and take turns."""
    if run.dry:
        began = time.perf_counter()
        calls[0]()
        return (time.perf_counter() - began) * 1e6
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    calls[0]()
    torch.cuda.synchronize()
    start.record()
    for call in calls:
        call()
    end.record()
    torch.cuda.synchronize()
    guess_ms = max(start.elapsed_time(end) / len(calls), 1e-3)
    count = max(len(calls), min(400, int(target_ms / guess_ms) + 1))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(count):
            calls[index % len(calls)]()
    graph.replay()
    times = []
    for _ in range(5):
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / count)
    return statistics.median(times)


def attention_correctness(run: Run) -> None:
    """Random ragged batches over shapes, dtypes and features, against float64."""
    chance = random.Random(0)
    shapes = [SMOLLM] if run.dry else [LLAMA, SMOLLM, Heads("mqa", 8, 1, 256), Heads("head dim 80", 16, 16, 80)]
    dtypes = [torch.float32] if run.dry else [torch.bfloat16, torch.float16, torch.float32]
    fp8 = TARGETS[target_of(run.device)].fp8
    varlen = None if run.dry else varlen_attn()
    for case in range(2 if run.dry else 24):
        if not run.dry and not run.left(run.budget - 110.0):  # most of the time goes to compiling
            run.row("correctness", cut=f"out of time after {case} of 24 cases")
            break
        heads, dtype = chance.choice(shapes), dtypes[case % len(dtypes)]
        decodes = chance.randint(0, 4)
        rows = [1] * decodes + [chance.randint(2, 20 if run.dry else 300) for _ in range(chance.randint(1, 3))]
        contexts = [chance.randint(0, 40 if run.dry else 1500) for _ in rows]
        features: dict[str, Any] = {
            "window": chance.choice([0, 0, 37]),
            "softcap": chance.choice([0.0, 0.0, 30.0]),
            "sinks": chance.choice([None, torch.randn(heads.num_heads, device=run.device)]),
        }
        kv_dtype = torch.float8_e4m3fn if fp8 and case % 4 == 3 else dtype
        if kv_dtype != dtype:
            for name in ("k_scale", "v_scale"):
                features[name] = torch.rand(heads.num_kv_heads, device=run.device) + 0.5
        made = run.batch(rows, contexts, heads, dtype=dtype, kv_dtype=kv_dtype, block_size=chance.choice([16, 32, 64]))
        scale = heads.head_dim**-0.5
        got = paged_attention(
            made.q, made.k_cache, made.v_cache, torch.empty_like(made.q), *made.tail,
            scale=scale, num_decodes=decodes, num_splits=chance.choice([None, 4]), **features,
        )  # fmt: skip
        due = reference_attention(made.q.double(), made.k_cache, made.v_cache, *made.tail, scale=scale, **features)
        error = (got.double() - due).abs().max().item()
        check(run, f"attention {case}", error <= (2e-5 if dtype == torch.float32 else 2e-2), error=error,
              heads=heads.name, dtype=str(dtype), kv=str(kv_dtype), rows=rows, contexts=contexts)  # fmt: skip
        plain = kv_dtype == dtype != torch.float32 and not features["softcap"] and features["sinks"] is None
        if varlen is not None and plain:
            theirs = varlen_attention(
                varlen, made.q, made.k_cache, made.v_cache, *made.tail, scale=scale, window=features["window"]
            )
            error = (got.float() - theirs.float()).abs().max().item()
            check(run, f"attention {case} against torch varlen", error <= 2e-2, error=error)


def other_correctness(run: Run) -> None:
    """The K/V write and the noise to the bit, the sampler to the token."""
    slots = torch.randperm(5 * 32, device=run.device)[:100]
    slots[::7] = -1
    k, v = (torch.randn(100, 8, 128, device=run.device, dtype=run.dtype) for _ in range(2))
    fast = torch.zeros(5, 2, 8, 32, 128, device=run.device, dtype=run.dtype)
    slow = fast.clone()
    write_kv(k, v, fast[:, 0], fast[:, 1], slots)
    reference_write_kv(k, v, slow[:, 0], slow[:, 1], slots)
    check(run, "write_kv", torch.equal(fast, slow))
    rows = 2 if run.dry else 16
    seeds = torch.randint(-(2**62), 2**62, (rows,), device=run.device)
    places = torch.arange(rows, device=run.device) * 77
    ids = torch.arange(4096 if run.dry else 151_936, device=run.device, dtype=torch.int32)
    noise = torch.empty(rows, len(ids), device=run.device)
    gumbel_kernel[(rows, triton.cdiv(len(ids), 1024))](
        noise, seeds, places, ids, len(ids), CHUNK=1024, enable_fp_fusion=False
    )
    on_cpu = gumbel(seeds.cpu(), places.cpu(), ids.cpu())
    check(run, "noise bits equal the CPU's", torch.equal(noise.cpu().view(torch.int32), on_cpu.view(torch.int32)))
    settings = (
        torch.randn(rows, len(ids), device=run.device) * 4,
        torch.linspace(0.0, 2.0, rows, device=run.device),
        torch.arange(rows, device=run.device, dtype=torch.int32) * 9,
        torch.linspace(0.5, 1.0, rows, device=run.device),
        torch.linspace(0.0, 0.05, rows, device=run.device),
        seeds,
        places,
    )
    check(run, "sample", torch.equal(sample(*settings), reference_sample(*settings)))


def check(run: Run, what: str, right: bool, **values: Any) -> None:
    run.wrong += not right
    run.row("correctness", what=what, right=bool(right), **values)


def ceilings(run: Run) -> None:
    """Copy bandwidth (bytes read and written) and dense matmul rate: what shares below are shares of."""
    size, side = (1 << 20, 128) if run.dry else (1 << 30, 8192)
    source = torch.empty(size, dtype=torch.uint8, device=run.device).random_()
    target = torch.empty_like(source)
    run.copy_bytes = 2 * size / microseconds(run, [lambda: target.copy_(source)]) * 1e6
    left = torch.randn(side, side, device=run.device, dtype=run.dtype)
    right = torch.randn(side, side, device=run.device, dtype=run.dtype)
    run.matmul_flops = 2 * side**3 / microseconds(run, [lambda: left @ right], 20.0) * 1e6
    name = "interpreter" if run.dry else torch.cuda.get_device_name()
    run.row("ceilings", copy_TBs=round(run.copy_bytes / 1e12, 3), matmul_TFLOPs=round(run.matmul_flops / 1e12, 1),
            device=name, torch=torch.__version__, triton=triton.__version__)  # fmt: skip


def decode(run: Run, others: dict[str, Comparator], reserve: float) -> None:
    """Share of copy bandwidth that reading K and V once reaches."""
    work = [(64, 4096), (32, 4096), (8, 4096), (1, 4096), (64, 1024), (1, 32768), (256, 512)]
    shapes = [LLAMA, SMOLLM, LLAMA_70B]
    if run.dry:
        work, shapes = [(2, 40)], [SMOLLM]
    for size, context in work:
        for heads in shapes:
            for kv_dtype in (run.dtype, torch.float8_e4m3fn):
                fp8 = kv_dtype != run.dtype
                if fp8 and (heads is not LLAMA or not TARGETS[target_of(run.device)].fp8):
                    continue
                if not run.left(reserve):
                    run.row("decode", cut="out of time")
                    return
                moved = decode_bytes(size, context, heads, kv_dtype.itemsize)
                copies = 1 if run.dry else max(1, min(8, -(-ROTATED_BYTES // moved)))
                made = [
                    run.batch([1] * size, [context - 1] * size, heads, kv_dtype=kv_dtype, seed=seed)
                    for seed in range(copies)
                ]
                trials: list[LaunchConfig | None] = [None]
                if heads is LLAMA and not fp8 and not run.dry and context == 4096:
                    trials += DECODE_TRIALS
                for config in trials:
                    measure(run, "decode", attend_all(run, made, size, config), moved, run.copy_bytes,
                            heads=heads.name, batch=size, context=context, kv=str(kv_dtype),
                            config=str(config or "shipped"))  # fmt: skip
                if not fp8 and heads is not LLAMA_70B:
                    compare(run, "decode", others, size, 1, context, heads, moved, run.copy_bytes)


def prefill(run: Run, others: dict[str, Comparator], reserve: float) -> None:
    """Share of the matmul rate over the visible keys."""
    work = [
        ("8192@0", [8192], [0]),
        ("2048@6144", [2048], [6144]),
        ("2048@0", [2048], [0]),
        ("63 decodes@4096 + 1985@0", [1] * 63 + [1985], [4095] * 63 + [0]),
        ("8x256@1024", [256] * 8, [1024] * 8),
    ]
    shapes = [LLAMA, SMOLLM]
    if run.dry:
        work, shapes = [("1@30 + 20@0", [1, 20], [30, 0])], [SMOLLM]
    for name, rows, contexts in work:
        for heads in shapes:
            if not run.left(reserve):
                run.row("prefill", cut="out of time")
                return
            made = [run.batch(rows, contexts, heads)]
            flops = prefill_flops(rows, contexts, heads)
            decodes = sum(row == 1 for row in rows)
            trials: list[LaunchConfig | None] = [None]
            if heads is LLAMA and not run.dry and decodes == 0:
                trials += PREFILL_TRIALS
            for config in trials:
                measure(run, "prefill", attend_all(run, made, decodes, config), flops, run.matmul_flops,
                        heads=heads.name, work=name, config=str(config or "shipped"))  # fmt: skip
            if len(rows) == 1 and contexts == [0]:
                compare(run, "prefill", others, 1, rows[0], rows[0], heads, flops, run.matmul_flops)


def attend_all(
    run: Run, made: Sequence[Paged], decodes: int, config: LaunchConfig | None
) -> list[Callable[[], object]]:
    """One call per batch, into preallocated output and workspace as a captured graph needs."""
    _, num_heads, head_dim = made[0].q.shape
    out = torch.empty_like(made[0].q)
    num_kv_heads = made[0].k_cache.shape[1]
    size = workspace_size(decodes, num_heads, num_kv_heads, head_dim, run.device)
    workspace = torch.empty(size, device=run.device)

    def call(one: Paged) -> Callable[[], object]:
        return lambda: paged_attention(
            one.q, one.k_cache, one.v_cache, out, *one.tail,
            scale=head_dim**-0.5, num_decodes=decodes, workspace=workspace, config=config,
        )  # fmt: skip

    return [call(one) for one in made]


def compare(
    run: Run, stage: str, others: dict[str, Comparator], batch: int, rows: int, keys: int, heads: Heads,
    work: int, ceiling: float,
) -> None:  # fmt: skip
    q = torch.randn(batch, rows, heads.num_heads, heads.head_dim, device=run.device, dtype=run.dtype)
    k, v = (
        torch.randn(batch, keys, heads.num_kv_heads, heads.head_dim, device=run.device, dtype=run.dtype)
        for _ in range(2)
    )
    for name, attend in others.items():
        calls = [lambda attend=attend: attend(q, k, v, rows > 1)]
        measure(run, stage, calls, work, ceiling, heads=heads.name, batch=batch, context=keys, comparator=name)


def measure(
    run: Run, stage: str, calls: Sequence[Callable[[], object]], amount: float, ceiling: float, **values: Any
) -> None:
    """One row: microseconds, `amount` (bytes or operations) per second in tera, share of the ceiling."""
    try:
        spent = microseconds(run, calls)
    except Exception as error:  # a comparator or trial that this device cannot run is a row, not the end of the run
        run.row(stage, **values, error=f"{type(error).__name__}: {str(error)[:160]}")
        return
    rate = amount / spent * 1e6
    run.row(stage, **values, us=round(spent, 2), tera_per_s=round(rate / 1e12, 3), share=round(rate / ceiling, 3))


def copies(run: Run) -> None:
    """K/V writes against copy bandwidth; block swaps against one pinned transfer of the same bytes."""
    tokens, pool_blocks = (16, 4) if run.dry else (4096, 512)
    pool = torch.zeros(pool_blocks, 2, 8, 32, 128, device=run.device, dtype=run.dtype)
    k, v = (torch.randn(tokens, 8, 128, device=run.device, dtype=run.dtype) for _ in range(2))
    slots = torch.randperm(pool_blocks * 32, device=run.device)[:tokens]
    moved = 4 * k.numel() * k.element_size()
    measure(
        run, "write_kv", [lambda: write_kv(k, v, pool[:, 0], pool[:, 1], slots)], moved, run.copy_bytes, tokens=tokens
    )
    if run.dry:
        return
    for kib in (32, 2048):
        blocks = 256
        device_pool = torch.zeros(4 * blocks, kib * 256, dtype=torch.int32, device=run.device)
        host_pool = torch.zeros(blocks, kib * 256, dtype=torch.int32, pin_memory=True)
        staging = torch.empty(blocks, kib * 256, dtype=torch.int32, device=run.device)
        ids = torch.randperm(4 * blocks, device=run.device)[:blocks]
        order = torch.arange(blocks, device=run.device)
        chosen = ids.tolist()

        def one_by_one(host: Any = host_pool, pool: Any = device_pool, chosen: Any = chosen) -> None:
            for index, block in enumerate(chosen):
                host[index].copy_(pool[block], non_blocking=True)

        def gathered(host: Any = host_pool, pool: Any = device_pool, staging: Any = staging, ids: Any = ids,
                     order: Any = order) -> None:  # fmt: skip
            copy_blocks(pool, staging, ids, order)
            host.copy_(staging, non_blocking=True)

        def scattered(host: Any = host_pool, pool: Any = device_pool, staging: Any = staging, ids: Any = ids,
                      order: Any = order) -> None:  # fmt: skip
            staging.copy_(host, non_blocking=True)
            copy_blocks(staging, pool, order, ids)

        ways: dict[str, Callable[[], object]] = {
            "one transfer (ceiling)": functools.partial(host_pool.copy_, staging, non_blocking=True),
            "out, block by block": one_by_one,
            "out, gather + one transfer": gathered,
            "in, one transfer + scatter": scattered,
        }
        for way, call in ways.items():
            call()
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(3):
                call()
            torch.cuda.synchronize()
            rate = 3 * blocks * kib * 1024 / (time.perf_counter() - began)
            run.row("swap", block_KiB=kib, way=way, GBs=round(rate / 1e9, 1))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", help="append the rows to this file too")
    parser.add_argument("--budget", type=float, default=450.0, help="seconds for everything")
    parser.add_argument("--dry", action="store_true", help="a few cells on the CPU under the interpreter")
    options = parser.parse_args(arguments)
    if not options.dry and not torch.cuda.is_available():
        parser.error("no GPU here; TRITON_INTERPRET=1 and --dry show the command on a CPU")
    if options.dry and not triton.knobs.runtime.interpret:
        parser.error("--dry needs TRITON_INTERPRET=1 in the environment")
    with open(options.out, "a") if options.out else contextlib.nullcontext() as out:
        run = Run(out, options.budget, options.dry)
        attention_correctness(run)
        other_correctness(run)
        ceilings(run)
        others = {} if run.dry else comparators()
        decode(run, others, reserve=0.0 if run.dry else 180.0)
        prefill(run, others, reserve=0.0 if run.dry else 40.0)
        copies(run)
        run.row("done", wrong=run.wrong)
    return 1 if run.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
