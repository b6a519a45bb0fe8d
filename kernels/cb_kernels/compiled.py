"""What a Triton kernel became for a target: compiled here without a GPU, read from the machine code.

Registers, stack and spills come from the assembler's own account; matrix instructions, async copies and K/V buffers are
counted in the machine code and in Triton's last own form of the program.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cb_kernels.targets import TARGETS

# Machine instructions that multiply matrices, best first: tcgen05, warp-group, warp; AMD.
MATRIX_INSTRUCTIONS = {"UTCMMA": r"\bUTC\w*MMA", "HGMMA": r"\bHGMMA", "HMMA": r"\bHMMA", "MFMA": r"\bv_mfma"}


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel in one configuration: everything the compiler must be told.

    Attributes:
        kernel, config: names for the report.
        function: the `triton.jit` function.
        types: Triton type of every run-time argument, e.g. `{"q_ptr": "*bf16", "num_seqs": "i32"}`.
        constants: value of every compile-time argument.
        aligned: names of arguments that are multiples of 16 (pointers: of bytes) whenever the engine launches it.
        traits: what the gates in the tests go by, e.g. `{"phase": "prefill"}`; part of the report.
    """

    kernel: str
    config: str
    target: str
    function: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: frozenset[str]
    num_warps: int
    num_stages: int
    fp_fusion: bool = True
    traits: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Report:
    """What the compiler made of a variant.

    Attributes:
        registers: per thread (AMD: vector registers, accumulators included).
        spills: loads, stores or bytes of registers spilled to memory (AMD: vector registers; scalar ones go to lanes of
            vector registers, not to memory).
        stack: bytes of stack per thread.
        shared_bytes: shared memory of one program.
        matrix_instructions, matrix_kind: how many, and the best kind found ("none": ordinary arithmetic).
        async_copies: copies of 16 bytes from global to shared memory (AMD: 16-byte loads).
        kv_buffers: tiles of K and of V in flight in the main loop; 0 where Triton stages nothing.
        fused: multiply-adds rounded once, in float32.
    """

    kernel: str
    config: str
    target: str
    triton: str
    registers: int
    spills: int
    stack: int
    shared_bytes: int
    matrix_instructions: int
    matrix_kind: str
    async_copies: int
    kv_buffers: int
    fused: int
    num_warps: int
    traits: dict[str, Any]


def compile_variant(variant: Variant) -> Report:
    """Compiles and inspects.

    Raises:
        RuntimeError: the variant does not compile, with the compiler's last words.
    """
    names = variant.function.arg_names
    signature = {name: variant.types.get(name, "constexpr") for name in names}
    missing = [name for name in names if signature[name] == "constexpr" and name not in variant.constants]
    if missing:
        raise RuntimeError(f"{variant.kernel} {variant.config}: no type or value for {', '.join(missing)}")
    hints = {(names.index(name),): [["tt.divisibility", 16]] for name in variant.aligned}
    target = TARGETS[variant.target]
    options = {
        "num_warps": variant.num_warps,
        "num_stages": variant.num_stages,
        "enable_fp_fusion": variant.fp_fusion,
    }
    source = ASTSource(fn=variant.function, signature=signature, constexprs=dict(variant.constants), attrs=hints)
    try:
        made = triton.compile(source, target=GPUTarget(target.backend, target.arch, target.warp_size), options=options)
    except Exception as error:
        raise RuntimeError(f"{variant.kernel} {variant.config} on {variant.target}: {str(error)[-600:]}") from error
    found = _inspect_nvidia(made) if target.backend == "cuda" else _inspect_amd(made)
    return Report(
        kernel=variant.kernel,
        config=variant.config,
        target=variant.target,
        triton=triton.__version__,
        shared_bytes=made.metadata.shared,
        kv_buffers=_buffers(made.asm["ttgir"]),
        num_warps=variant.num_warps,
        traits=dict(variant.traits),
        **found,
    )


def _buffers(ttgir: str) -> int:
    """Fewest slots among the multi-slot tiles (slots x rows x columns) that Triton's pipeliner allocated."""
    slots = re.findall(r"ttg\.local_alloc\s*:\s*\(\)\s*->\s*!ttg\.memdesc<(\d+)x\d+x\d+x", ttgir)
    return min((int(count) for count in slots), default=0)


def _matrix(code: str) -> tuple[int, str]:
    for kind, pattern in MATRIX_INSTRUCTIONS.items():
        count = len(re.findall(pattern, code))
        if count:
            return count, kind
    return 0, "none"


def _inspect_nvidia(made: Any) -> dict[str, Any]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(made.asm["cubin"])
        cubin.flush()
        usage = _run(tool, "-res-usage", cubin.name)
        code = _run(tool, "-sass", cubin.name)
    account = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    if account is None:
        raise RuntimeError(f"cuobjdump gave no account of resources: {usage[-300:]!r}")
    registers, stack, local = (int(number) for number in account.groups())
    # Spills live on the stack or in local memory; their loads and stores are the sure sign.
    spilled = len(re.findall(r"\b(?:LDL|STL)\b", code))
    count, kind = _matrix(code)
    return {
        "registers": registers,
        "spills": max(local, spilled),
        "stack": stack,
        "matrix_instructions": count,
        "matrix_kind": kind,
        "async_copies": len(re.findall(r"\bLDGSTS\S*\.128\b", code)),
        "fused": len(re.findall(r"\bFFMA\b", code)),
    }


def _run(tool: Path, *arguments: str) -> str:
    return subprocess.run([tool, *arguments], capture_output=True, text=True, check=True).stdout


def _inspect_amd(made: Any) -> dict[str, Any]:
    code = made.asm["amdgcn"]

    def note(key: str) -> int:
        found = re.search(rf"\.{key}:?\s+(\d+)", code)
        return int(found[1]) if found else 0

    count, kind = _matrix(code)
    return {
        "registers": note("vgpr_count"),
        "spills": note("vgpr_spill_count"),
        "stack": note("private_segment_fixed_size"),
        "matrix_instructions": count,
        "matrix_kind": kind,
        "async_copies": len(re.findall(r"\b(?:global|buffer)_load_dwordx4\b", code)),
        "fused": len(re.findall(r"\bv_(?:pk_)?(?:fma|fmac|mad|mac)_f32", code)),
    }
