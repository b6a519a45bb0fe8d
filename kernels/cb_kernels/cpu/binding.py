"""ctypes mirror of `src/abi.h`: structures, the library's functions, and the search for torch's OpenMP runtime.

Knows no tensors. A library is refused when it was built from other sources than those beside this file.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from ctypes import c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

ISA_VARIABLE = "CB_CPU_ISA"  # portable, avx2, avx512, avx512_bf16 or amx: for tests and for doubts


class LoadError(RuntimeError):
    """The native library is absent, stale or unusable on this CPU; the message says which and what to do."""


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class Attention(ctypes.Structure):
    _fields_ = [
        *_fields(c_void_p, "q k v out sinks block_tables seq_lens cu_seqlens"),
        *_fields(c_int64, "q_token q_head out_token out_head kv_block kv_head kv_token"),
        *_fields(c_int32, "num_seqs num_heads num_kv_heads head_dim block_size max_blocks window dtype"),
        *_fields(c_float, "scale softcap"),
    ]


class KvWrite(ctypes.Structure):
    _fields_ = [
        *_fields(c_void_p, "q k v cos sin k_cache v_cache slots"),
        *_fields(c_int64, "q_token q_head k_token k_head v_token v_head cos_token kv_block kv_head kv_token"),
        *_fields(c_int32, "num_tokens num_heads num_kv_heads head_dim block_size dtype"),
    ]


class RmsNorm(ctypes.Structure):
    _fields_ = [
        *_fields(c_void_p, "x residual weight out"),
        *_fields(c_int64, "x_row residual_row out_row"),
        *_fields(c_int32, "rows size dtype"),
        ("eps", c_float),
    ]


class SiluMul(ctypes.Structure):
    _fields_ = [
        *_fields(c_void_p, "x out"),
        *_fields(c_int64, "x_row out_row"),
        *_fields(c_int32, "rows size dtype"),
    ]


class Linear(ctypes.Structure):
    _fields_ = [
        *_fields(c_void_p, "x weight out packed"),
        *_fields(c_int64, "x_row weight_row out_row"),
        *_fields(c_int32, "rows n depth"),
    ]


class Panels(ctypes.Structure):
    _fields_ = [("data", c_void_p), *_fields(c_int32, "n depth format")]


class Multiply(ctypes.Structure):
    _fields_ = [
        ("x", c_void_p),
        ("weight", Panels),
        *_fields(c_void_p, "bias out"),
        *_fields(c_int64, "x_row out_row"),
        ("gated", c_int32),
    ]


class DecoderLayer(ctypes.Structure):
    _fields_ = [
        *_fields(c_void_p, "input_norm middle_norm q_norm k_norm"),
        *_fields(Panels, "qkv out gate_up down"),
        *_fields(c_void_p, "qkv_bias out_bias k_cache v_cache"),
        *_fields(c_int32, "attention"),
        *_fields(c_float, "input_eps middle_eps head_eps"),
    ]


class Decoder(ctypes.Structure):
    _fields_ = [
        *_fields(c_void_p, "layers attentions plans hidden cos sin slots normed qkv attended gated projected"),
        *_fields(c_int64, "hidden_row cos_row normed_row qkv_row attended_row gated_row projected_row"),
        *_fields(
            c_int32, "num_layers rows hidden_size intermediate_size num_heads num_kv_heads head_dim block_size dtype"
        ),
    ]


def openmp_entry(torch_library: str, name: str) -> int | None:
    """Address of a function such as `GOMP_parallel` in the runtime that torch loaded, or None.

    `dlsym` on libtorch_cpu's handle searches its own dependencies, so this finds torch's copy under whatever file name
    the wheel gave it, and no other.
    """
    try:
        return ctypes.cast(getattr(ctypes.CDLL(torch_library), name), c_void_p).value
    except (OSError, AttributeError):
        return None


class Native:
    """The loaded library. Functions release the GIL.

    Attributes:
        path: file it came from.
        isa: instruction set in use.
        has_threads: whether torch's OpenMP runtime was found; without it everything runs on the calling thread.

    Raises:
        LoadError: see there.
    """

    def __init__(self, torch_library: str) -> None:
        self.path, library = _load()
        entry, team_size = (openmp_entry(torch_library, name) for name in ("GOMP_parallel", "omp_get_num_threads"))
        wanted = os.environ.get(ISA_VARIABLE) or None
        library.cb_init.argtypes = [c_void_p, c_void_p, c_char_p]
        library.cb_init.restype = c_char_p
        chosen = library.cb_init(entry, team_size, wanted.encode() if wanted else None)
        if chosen is None:
            raise LoadError(f"{ISA_VARIABLE}={wanted!r} is not built or this CPU lacks it")
        self.isa: str = chosen.decode()
        self.has_threads = entry is not None
        self.plan = library.cb_plan
        self.plan.argtypes, self.plan.restype = [c_void_p, c_int], c_void_p
        self.plan_free = library.cb_plan_free
        self.plan_free.argtypes, self.plan_free.restype = [c_void_p], None
        self.attend = library.cb_attend
        self.attend.argtypes, self.attend.restype = [c_void_p] * 6 + [c_int], None
        self.kv_write = _by_reference(library.cb_kv_write, None)
        self.rms_norm = _by_reference(library.cb_rms_norm, None)
        self.silu_mul = _by_reference(library.cb_silu_mul, None)
        self.linear = _by_reference(library.cb_linear, c_int)
        self.decode = library.cb_decode
        self.decode.argtypes, self.decode.restype = [c_void_p, c_int, c_void_p], c_int
        self.has_product = bool(library.cb_has_product())
        self.pack_weight = library.cb_pack_weight
        self.pack_weight.argtypes, self.pack_weight.restype = [c_void_p, c_int64, c_int, c_int, c_void_p], None
        self.panel: int = library.cb_panel()
        self.pack_panels = library.cb_pack_panels
        self.pack_panels.argtypes = [c_void_p, c_int64, c_int, c_int, c_int, c_void_p]
        self.pack_panels.restype = None
        self.multiply = library.cb_multiply
        self.multiply.argtypes, self.multiply.restype = [c_void_p, c_int, c_int], None
        self.unpack_outputs = library.cb_unpack_outputs
        self.unpack_outputs.argtypes, self.unpack_outputs.restype = [c_void_p, c_void_p, c_int, c_void_p], c_int


def _by_reference(function: Any, result: type | None) -> Callable[[int, int], Any]:
    function.argtypes, function.restype = [c_void_p, c_int], result
    typed: Callable[[int, int], Any] = function
    return typed


def _load() -> tuple[Path, ctypes.CDLL]:
    """The library in the package's own folder, or the one in the cache where the former is absent or stale."""
    from cb_kernels.cpu import build  # imported late: `python -m cb_kernels.cpu.build` runs it as a program

    problem = "not built; with a C++ compiler installed run python -m cb_kernels.cpu.build"
    for folder in (Path(__file__).resolve().parent, build.cache_directory()):
        path = folder / build.LIBRARY
        if not path.is_file():
            continue
        try:
            library = ctypes.CDLL(str(path))
            library.cb_source_hash.restype = c_char_p
            if library.cb_source_hash().decode() == build.source_hash():
                return path, library
            problem = f"{path} was built from other sources; run python -m cb_kernels.cpu.build"
        except OSError as error:
            problem = f"cannot load {path}: {error}"
    raise LoadError(problem)
