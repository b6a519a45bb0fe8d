"""Compiles every shipped kernel configuration for every target, without a GPU: `python -m cb_kernels.aot [--json]`.

Prints a table, or with `--json` a list of objects (the fields of `compiled.Report`). Exits 1 when something does not
compile or breaks a gate, naming it. The gates are what an engine on that target relies on:

- nothing spills, and no thread needs a stack;
- shared memory fits;
- attention in 16 bits multiplies on the target's best matrix unit: HGMMA (sm_90) and tcgen05 (sm_100) in prefill tiles,
  HMMA in the 16-row tiles of decode, MFMA on AMD;
- K and V arrive by 16-byte copies, on NVIDIA asynchronous ones, with two tiles of each in flight;
- the noise's arithmetic has no fused multiply-add.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from cb_kernels.compiled import Report, Variant, compile_variant
from cb_kernels.kv_copy.variants import variants as kv_copy_variants
from cb_kernels.paged_attention.variants import variants as attention_variants
from cb_kernels.sampling.variants import variants as sampling_variants
from cb_kernels.targets import TARGETS

PREFILL_MATRIX = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCMMA", "gfx942": "MFMA"}
DECODE_MATRIX = {"sm_80": "HMMA", "sm_90": "HMMA", "sm_100": "HMMA", "gfx942": "MFMA"}
COLUMNS = {
    "target": "target",
    "kernel": "kernel",
    "config": "configuration",
    "registers": "regs",
    "spills": "spill",
    "stack": "stack",
    "shared_bytes": "shared",
    "matrix_kind": "matrix",
    "matrix_instructions": "count",
    "async_copies": "16B copies",
    "kv_buffers": "K/V bufs",
}


def shipped(targets: Sequence[str]) -> Iterator[Variant]:
    """Every variant of every kernel, target by target."""
    for target in targets:
        yield from attention_variants(target)
        yield from kv_copy_variants(target)
        yield from sampling_variants(target)


def one_of_each(variants: Iterable[Variant]) -> Iterator[Variant]:
    """The first variant of each kernel on each target; of attention, of each phase, K/V type, sinks and soft cap."""
    seen = set()
    for variant in variants:
        features = (variant.constants.get(name) for name in ("SINKS", "SOFTCAP"))
        key = (variant.target, variant.kernel, variant.traits.get("phase"), variant.traits.get("kv_dtype"), *features)
        if key not in seen:
            seen.add(key)
            yield variant


def broken_gates(report: Report) -> list[str]:
    """What `report` breaks, in words; empty when all is well."""
    target = TARGETS[report.target]
    broken = []
    if report.spills:
        broken.append(f"spills {report.spills}")
    if report.stack:
        broken.append(f"needs {report.stack} bytes of stack")
    if report.shared_bytes > target.shared_bytes:
        broken.append(f"uses {report.shared_bytes} bytes of shared memory of {target.shared_bytes}")
    if report.kernel == "gumbel" and report.fused:
        broken.append(f"has {report.fused} fused multiply-adds, which change the noise's bits")
    if report.kernel == "paged_attention":
        wanted = (PREFILL_MATRIX if report.traits["phase"] == "prefill" else DECODE_MATRIX)[report.target]
        if report.traits["dtype"] != "f32" and report.matrix_kind != wanted:
            broken.append(f"multiplies with {report.matrix_kind} instead of {wanted}")
        if report.async_copies == 0:
            broken.append("has no 16-byte copies")
        if report.kv_buffers < 2 and _two_buffers_fit(report):
            broken.append(f"keeps {report.kv_buffers} K/V tile in flight instead of 2")
    return broken


def _two_buffers_fit(report: Report) -> bool:
    """False for f32 with head dim 256 on gfx942: K and V of two tiles of 16 keys would be all of its 64 KiB."""
    element_size = 4 if report.traits["dtype"] == "f32" else 2
    return 2 * 2 * 16 * int(report.traits["padded_dim"]) * element_size < TARGETS[report.target].shared_bytes


def compile_all(variants: Sequence[Variant], jobs: int) -> Iterator[Report | RuntimeError]:
    """Each variant's report, or the error that names the variant, in order, compiled by `jobs` processes."""
    # Triton's functions do not pickle: workers inherit the variants and are told which one to take.
    global _inherited
    _inherited = variants
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
        yield from pool.map(_attempt, range(len(variants)))


_inherited: Sequence[Variant] = ()


def _attempt(index: int) -> Report | RuntimeError:
    try:
        return compile_variant(_inherited[index])
    except RuntimeError as error:
        return error


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cb_kernels.aot", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="only this target (repeatable)")
    parser.add_argument("--one-of-each", action="store_true", help="only one configuration per kernel and feature")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="compiling processes (default: one a core)"
    )
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 makes Triton interpret instead of compile: unset it")
    variants = list(shipped(options.target or list(TARGETS)))
    if options.one_of_each:
        variants = list(one_of_each(variants))
    width = max(len(variant.config) for variant in variants)
    reports: list[Report] = []
    failures: list[str] = []
    for index, result in enumerate(compile_all(variants, options.jobs)):
        if isinstance(result, RuntimeError):
            failures.append(str(result))
            continue
        reports.append(result)
        failures += [f"{result.target} {result.kernel} {result.config}: {why}" for why in broken_gates(result)]
        if not options.json:
            if index == 0:
                print(f"Triton {result.triton}")
                print(_line(list(COLUMNS.values()), width))
            print(_line([getattr(result, name) for name in COLUMNS], width), flush=True)
    if options.json:
        print(json.dumps([dataclasses.asdict(report) for report in reports], indent=1))
    else:
        print(f"{len(reports)} compiled, {len(failures)} failures")
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return 1 if failures else 0


def _line(cells: Sequence[object], width: int) -> str:
    target, kernel, config, *numbers = (str(cell) for cell in cells)
    return f"{target:7} {kernel:15} {config:{width}} " + " ".join(f"{number:>10}" for number in numbers)


if __name__ == "__main__":
    sys.exit(main())
