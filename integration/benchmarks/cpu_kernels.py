"""Native CPU kernels against the ways to do it in torch: `python -m integration.benchmarks.cpu_kernels`.

Attention and the final projection on the best instruction set; with `--products`, the float32 product on all of them.

Every way attends to the same paged cache (head-major blocks) and its output is compared with float64 first. Times are
minima and medians over a budget of seconds per cell, and the process's CPU time per call, which stays true on a shared
machine. Ways that only decode are absent from chunk rows.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from cb_kernels import cpu
from cb_kernels.cpu.panels import PackedMatrix
from cb_kernels.paged_attention.reference import reference_attention
from torch.nn.functional import linear, scaled_dot_product_attention

from .cpu_products import LEVELS, table

HEADS = {"smollm2 9/3/64": (9, 3, 64), "llama 32/8/128": (32, 8, 128)}
WORK = {  # query rows, context of each sequence
    "decode 32 @ 511": ([1] * 32, [511] * 32),
    "decode 1 @ 511": ([1], [511]),
    "chunk 256 @ 0": ([256], [0]),
    "chunk 256 @ 512": ([256], [512]),
}


class Case(NamedTuple):
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens: torch.Tensor


@dataclass(frozen=True)
class Timing:
    """One cell of the table; times in milliseconds per call, error against float64."""

    heads: str
    work: str
    dtype: str
    way: str
    min_ms: float
    median_ms: float
    cpu_ms: float
    max_error: float


def make_case(
    query_lens: list[int], contexts: list[int], heads: tuple[int, int, int], block_size: int, dtype: torch.dtype
) -> Case:
    generator = torch.Generator().manual_seed(0)
    num_heads, num_kv_heads, head_dim = heads
    lengths = [query + context for query, context in zip(query_lens, contexts, strict=True)]
    per_seq = -(-max(lengths) // block_size)
    num_blocks = per_seq * len(lengths)
    kv = torch.randn(num_blocks, 2, num_kv_heads, block_size, head_dim, generator=generator).to(dtype)
    tables = torch.randperm(num_blocks, generator=generator).int().view(len(lengths), per_seq)
    q = torch.randn(sum(query_lens), num_heads, head_dim, generator=generator).to(dtype)
    cu_seqlens = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return Case(q, kv[:, 0], kv[:, 1], tables, torch.tensor(lengths, dtype=torch.int32), cu_seqlens)


def gather(cache: torch.Tensor, blocks: torch.Tensor, length: int) -> torch.Tensor:
    """One sequence's rows [num_kv_heads, length, head_dim]."""
    return cache.index_select(0, blocks).transpose(0, 1).flatten(1, 2)[:, :length]


def native(library: cpu.Library, case: Case) -> Callable[[], torch.Tensor]:
    batch = library.batch(*case[3:])
    out = torch.empty_like(case.q)

    def call() -> torch.Tensor:
        batch.attend(case.q, case.k_cache, case.v_cache, out, scale=case.q.shape[2] ** -0.5)
        return out

    return call


def sdpa_per_sequence(case: Case) -> Callable[[], torch.Tensor]:
    """Gather each sequence and call SDPA; a decode's query heads are rows of their KV head, which spares the repeat."""
    firsts, lengths = case.cu_seqlens.tolist(), case.seq_lens.tolist()
    num_kv_heads = case.k_cache.shape[1]
    group = case.q.shape[1] // num_kv_heads

    def call() -> torch.Tensor:
        out = torch.empty_like(case.q)
        for seq, length in enumerate(lengths):
            first, last = firsts[seq], firsts[seq + 1]
            k, v = (gather(cache, case.block_tables[seq], length)[None] for cache in (case.k_cache, case.v_cache))
            if last - first == 1:
                rows = case.q[first].view(1, num_kv_heads, group, -1)
                out[first] = scaled_dot_product_attention(rows, k, v).view(case.q.shape[1:])
                continue
            rows = case.q[first:last].transpose(0, 1)[None]
            if last - first == length:
                attended = scaled_dot_product_attention(rows, k, v, is_causal=True, enable_gqa=True)
            else:
                mask = torch.ones(last - first, length, dtype=torch.bool).tril(length - (last - first))
                attended = scaled_dot_product_attention(rows, k, v, attn_mask=mask, enable_gqa=True)
            out[first:last] = attended[0].transpose(0, 1)
        return out

    return call


def padded_decode(case: Case) -> Callable[[], torch.Tensor]:
    """Gather all sequences to one length and call SDPA once, query heads as rows, with a mask."""
    num_kv_heads, _, head_dim = case.k_cache.shape[1:]
    num_seqs = case.seq_lens.shape[0]

    def call() -> torch.Tensor:
        k, v = (
            cache.index_select(0, case.block_tables.flatten())
            .view(num_seqs, -1, *cache.shape[1:])
            .transpose(1, 2)
            .flatten(2, 3)
            for cache in (case.k_cache, case.v_cache)
        )
        mask = (torch.arange(k.shape[2])[None] < case.seq_lens[:, None])[:, None, None]
        rows = case.q.view(num_seqs, num_kv_heads, -1, head_dim)
        return scaled_dot_product_attention(rows, k, v, attn_mask=mask).reshape(case.q.shape)

    return call


def matmul_chunk(case: Case) -> Callable[[], torch.Tensor]:
    """One sequence: scores as one bmm per KV head, softmax in float32, one bmm."""
    length, (num_tokens, num_heads, head_dim) = int(case.seq_lens[0]), case.q.shape
    num_kv_heads = case.k_cache.shape[1]
    hidden = ~torch.ones(num_tokens, length, dtype=torch.bool).tril(length - num_tokens)

    def call() -> torch.Tensor:
        k, v = (gather(cache, case.block_tables[0], length) for cache in (case.k_cache, case.v_cache))
        rows = (
            case.q.view(num_tokens, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim)
        )
        scores = torch.bmm(rows, k.transpose(1, 2)).float().mul_(head_dim**-0.5)
        scores = scores.view(num_kv_heads, -1, num_tokens, length).masked_fill_(hidden, float("-inf"))
        weights = scores.softmax(-1).to(v.dtype).view(num_kv_heads, -1, length)
        attended = torch.bmm(weights, v).view(num_kv_heads, -1, num_tokens, head_dim)
        return attended.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, head_dim)

    return call


def measure(call: Callable[[], object], budget: float) -> tuple[float, float, float]:
    """Minimum and median wall time and median CPU time of one call, in ms, of at least 5 calls in `budget` seconds."""
    call()
    call()
    walls: list[float] = []
    cpus: list[float] = []
    end = time.perf_counter() + budget
    while len(walls) < 5 or time.perf_counter() < end:
        cpu_start, start = time.process_time(), time.perf_counter()
        call()
        walls.append(time.perf_counter() - start)
        cpus.append(time.process_time() - cpu_start)
    middle = len(walls) // 2
    return min(walls) * 1e3, sorted(walls)[middle] * 1e3, sorted(cpus)[middle] * 1e3


def attention_table(library: cpu.Library, block_size: int, budget: float) -> list[Timing]:
    timings = []
    for heads, shape in HEADS.items():
        for work, (query_lens, contexts) in WORK.items():
            for dtype in (torch.float32, torch.bfloat16):
                case = make_case(query_lens, contexts, shape, block_size, dtype)
                exact = reference_attention(case.q.double(), *case[1:], scale=shape[2] ** -0.5)
                ways = {"native": native(library, case), "per-sequence SDPA": sdpa_per_sequence(case)}
                if len(query_lens) == len(case.q):
                    ways["padded SDPA"] = padded_decode(case)
                else:
                    ways["matmul"] = matmul_chunk(case)
                for way, call in ways.items():
                    error = (call().double() - exact).abs().max().item()
                    timing = Timing(heads, work, str(dtype)[6:], way, *measure(call, budget), error)
                    timings.append(timing)
                    show(timing)
    return timings


def projection_table(library: cpu.Library, budget: float) -> list[Timing]:
    """The last projection, bf16 [rows, 576] x [49152, 576]: torch needs a float32 copy of the weights."""
    weight = torch.randn(49152, 576).bfloat16()
    wide = weight.float()
    packed = PackedMatrix(library, weight)
    native = library.linear_f32 if library.multiplies_bf16(weight) else lambda x, _: packed(x.float())
    timings = []
    for rows in (1, 4, 16, 32, 64, 512):
        x = torch.randn(rows, 576).bfloat16()
        exact = x.double() @ weight[:4096].double().T
        ways: dict[str, Callable[[], torch.Tensor]] = {
            "native f32 logits": lambda x=x: native(x, weight),  # type: ignore[misc]
            "torch bf16 logits": lambda x=x: linear(x, weight),  # type: ignore[misc]
            "torch f32 copy": lambda x=x: linear(x.float(), wide),  # type: ignore[misc]
        }
        for way, call in ways.items():
            error = (call()[:, :4096].double() - exact).abs().max().item()
            timing = Timing("576 x 49152", f"{rows} rows", "bfloat16", way, *measure(call, budget), error)
            timings.append(timing)
            show(timing)
    return timings


def show(timing: Timing) -> None:
    print(
        f"{timing.heads:15s} {timing.work:16s} {timing.dtype:9s} {timing.way:18s} min {timing.min_ms:8.3f}  "
        f"median {timing.median_ms:8.3f}  cpu {timing.cpu_ms:8.3f} ms  error {timing.max_error:.1e}",
        file=sys.stderr,
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--budget", type=float, default=0.5, help="seconds per cell")
    parser.add_argument("--skip-projection", action="store_true")
    parser.add_argument(
        "--products",
        nargs="?",
        const=",".join(LEVELS),
        help="only the float32 product, on these instruction sets (default: all that are measured)",
    )
    parser.add_argument("--json", action="store_true", help="print the whole table as JSON on standard output")
    args = parser.parse_args()
    if args.products:
        products = table(args.products.split(","), args.budget)
        if args.json:
            print(json.dumps([asdict(product) for product in products], indent=1))
        return
    torch.set_num_threads(args.threads)
    library = cpu.load()
    if library is None:
        sys.exit("the native kernels are not built: python -m cb_kernels.cpu.build")
    with torch.inference_mode():
        timings = attention_table(library, args.block_size, args.budget)
        if not args.skip_projection:
            timings += projection_table(library, args.budget)
    if args.json:
        machine = {"processor": platform.processor(), "torch": torch.__version__, "load": os.getloadavg(), **cpu.info()}
        print(json.dumps({"machine": machine, "timings": [asdict(timing) for timing in timings]}, indent=1))


if __name__ == "__main__":
    main()
