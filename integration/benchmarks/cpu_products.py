"""The native float32 product against torch's on each instruction set: `cpu_kernels --products`.

Each level runs in a process of its own, where both are limited to it: ours by `CB_CPU_ISA`, torch by the switches of
the libraries that it may call (MKL, oneDNN, its own kernels). Native and torch calls take turns; a figure is the
fastest of all of a cell's calls in CPU time on one thread, so that other processes disturb little. Products of one row
go round copies of the weights that no L2 cache holds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from cb_kernels import cpu
from cb_kernels.cpu.panels import PackedMatrix

LEVELS = {  # ours -> torch's
    "portable": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "avx512": {
        "ATEN_CPU_CAPABILITY": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
    },
}
SHAPES = {  # depth, outputs
    "gate and up 576 x 3072": (576, 3072),
    "down 1536 x 576": (1536, 576),
    "projection 576 x 49152": (576, 49152),
}
ROWS = (1, 4, 16, 64, 512)
STORAGES = (torch.float32, torch.bfloat16, torch.float16)
_COLUMNS = (
    "level",
    "product",
    "storage",
    "rows",
    "native ms",
    "torch ms",
    "ratio",
    "GB/s",
    "GFLOP/s",
    "torch's",
    "error",
)
_BEYOND_CACHE = 64 << 20  # bytes of weights that the copies of a product of one row take


@dataclass(frozen=True, slots=True)
class Product:
    """One cell. Times in milliseconds per call; error relative to the sum of the terms' sizes."""

    level: str
    shape: str
    storage: str
    rows: int
    native_ms: float
    torch_ms: float  # float32 weights
    read_gb_s: float  # the native product's weights, where every call reads them from memory
    native_gflop_s: float
    torch_gflop_s: float
    error: float


def _fastest(ways: Sequence[Sequence[Callable[[], object]]], budget: float) -> list[float]:
    """CPU milliseconds per call of each way, all in turn: the fastest round over a way's calls."""
    best = [float("inf")] * len(ways)
    end = time.perf_counter() + budget
    rounds = 0
    while rounds < 5 or time.perf_counter() < end:
        for i, calls in enumerate(ways):
            start = time.thread_time()
            for call in calls:
                call()
            best[i] = min(best[i], (time.thread_time() - start) / len(calls))
        rounds += 1
    return [1e3 * seconds for seconds in best]


def _cell(library: cpu.Library, name: str, storage: torch.dtype, rows: int, budget: float) -> Product:
    depth, n = SHAPES[name]
    generator = torch.Generator().manual_seed(rows)
    wide = torch.randn(n, depth, generator=generator).to(storage).float()
    x = torch.randn(rows, depth, generator=generator)
    size = n * depth * storage.itemsize
    copies = max(1, _BEYOND_CACHE // size) if rows == 1 else 1
    native = [PackedMatrix(library, wide) for _ in range(copies)]
    torchs = [wide.clone() for _ in range(copies)]
    exact = x.double() @ wide.double().T
    terms = x.double().abs() @ wide.double().abs().T
    error = float(((native[0](x) - exact).abs() / terms).max())
    ours, theirs = _fastest(
        [
            [lambda matrix=matrix: matrix(x) for matrix in native],  # type: ignore[misc]
            [lambda weight=weight: torch.nn.functional.linear(x, weight) for weight in torchs],  # type: ignore[misc]
        ],
        budget,
    )
    flops = 2e-6 * rows * n * depth
    return Product(
        library.isa,
        name,
        str(storage).removeprefix("torch."),
        rows,
        ours,
        theirs,
        1e-6 * size / ours,
        flops / ours,
        flops / theirs,
        error,
    )


def measure(budget: float) -> None:
    """Prints this process's level, a cell a line as JSON."""
    torch.set_num_threads(1)
    library = cpu.load()
    if library is None:
        sys.exit("the native kernels are not built: python -m cb_kernels.cpu.build")
    with torch.inference_mode():
        for name in SHAPES:
            for storage in STORAGES:
                for rows in ROWS:
                    print(json.dumps(asdict(_cell(library, name, storage, rows, budget))), flush=True)


def table(levels: Sequence[str], budget: float) -> list[Product]:
    """Measures each level in a process of its own and prints rows of a Markdown table as they come.

    Raises:
        SystemExit: a level is unknown, or this CPU lacks it.
    """
    print("|", " | ".join(_COLUMNS), "|")
    print("|" + "---|" * len(_COLUMNS))
    found: list[Product] = []
    for level in levels:
        if level not in LEVELS:
            sys.exit(f"level '{level}' is none of {', '.join(LEVELS)}")
        environment = {**os.environ, **LEVELS[level], "CB_CPU_ISA": level, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "integration.benchmarks.cpu_products", str(budget)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                product = Product(**json.loads(line))
                found.append(product)
                print(_row(product), flush=True)
        if process.returncode:
            sys.exit(f"level '{level}' could not be measured")
    return found


def _row(p: Product) -> str:
    read = f"{p.read_gb_s:.1f}" if p.rows == 1 else ""
    return (
        f"| {p.level} | {p.shape} | {p.storage} | {p.rows} | {p.native_ms:.3f} | {p.torch_ms:.3f} "
        f"| {p.torch_ms / p.native_ms:.2f} | {read} | {p.native_gflop_s:.1f} | {p.torch_gflop_s:.1f} | {p.error:.0e} |"
    )


if __name__ == "__main__":
    measure(float(sys.argv[1]))
