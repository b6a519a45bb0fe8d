"""The attention kernels as the engine launches them, to compile ahead of time: model shapes over a target's table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cb_kernels.compiled import Variant
from cb_kernels.paged_attention.configs import MAX_SPLITS, MIN_TILES_PER_SPLIT, LaunchConfig, Phase, select_config
from cb_kernels.paged_attention.kernel import combine_splits_kernel, paged_attention_kernel
from cb_kernels.targets import TARGETS

POINTER = {"bf16": "*bf16", "f32": "*fp32", "fp8": "*fp8e4nv"}
ELEMENT_SIZE = {"bf16": 2, "f32": 4}


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's attention and the features that compile differently."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 32
    dtype: str = "bf16"
    kv_dtype: str = ""
    window: bool = False
    softcap: bool = False
    sinks: bool = False

    @property
    def padded_dim(self) -> int:
        return max(16, 1 << (self.head_dim - 1).bit_length())


SHAPES = (
    Shape("llama-8b", 32, 8, 128),
    Shape("llama-8b fp8 kv", 32, 8, 128, kv_dtype="fp8"),
    Shape("llama-8b f32", 32, 8, 128, dtype="f32"),
    Shape("smollm2-135m", 9, 3, 64),
    Shape("smollm2-135m f32", 9, 3, 64, dtype="f32"),
    Shape("gpt-oss", 64, 8, 64, window=True, sinks=True),
    Shape("gemma-2", 16, 8, 256, window=True, softcap=True),
    Shape("gemma-3 f32", 8, 4, 256, dtype="f32"),
    Shape("phi-2 block 16", 32, 32, 80, block_size=16),
    Shape("head dim 32", 16, 4, 32),
    Shape("head dim 32 f32", 16, 4, 32, dtype="f32"),
)
# Large decode batches do not split their keys; the loops are the same, so a few shapes stand for all.
WHOLE_DECODES = ("llama-8b", "gemma-2")


def variants(target: str) -> Iterator[Variant]:
    """Every shape in both phases, and the combine kernel, as launched on `target`: decode with split keys."""
    for shape in SHAPES:
        if shape.kv_dtype == "fp8" and not TARGETS[target].fp8:
            continue
        group = shape.num_heads // shape.num_kv_heads
        for phase in ("decode", "prefill"):
            config = select_config(target, phase, ELEMENT_SIZE[shape.dtype], shape.padded_dim, group)
            yield attention_variant(shape, phase, config, target, split=phase == "decode")
            if phase == "decode" and shape.name in WHOLE_DECODES:
                yield attention_variant(shape, phase, config, target, split=False)
    yield combine_variant(SHAPES[0], target)


def attention_variant(shape: Shape, phase: Phase, config: LaunchConfig, target: str, *, split: bool) -> Variant:
    group = shape.num_heads // shape.num_kv_heads
    name = f"decode whole {shape.name}" if phase == "decode" and not split else f"{phase} {shape.name}"
    out = POINTER[shape.dtype]
    cache = POINTER[shape.kv_dtype or shape.dtype]
    types = {
        "out_ptr": out,
        "partial_ptr": "*fp32" if split else out,
        "lse_ptr": "*fp32" if split else out,
        "q_ptr": out,
        "k_ptr": cache,
        "v_ptr": cache,
        "table_ptr": "*i32",
        "seq_lens_ptr": "*i32",
        "cu_seqlens_ptr": "*i32",
        "sinks_ptr": "*fp32" if shape.sinks else "*i32",
        "k_scale_ptr": "*fp32" if shape.kv_dtype else "*i32",
        "v_scale_ptr": "*fp32" if shape.kv_dtype else "*i32",
        "qk_scale": "fp32",
        "softcap": "fp32",
        "window": "i32",
        "num_seqs": "i32",
        "num_splits": "i32",
        "table_stride": "i32",
    }
    strides = [f"{name}_stride_{axis}" for name in ("q", "out") for axis in ("row", "head")]
    strides += [f"{name}_stride_{axis}" for name in ("k", "v") for axis in ("block", "head", "row")]
    types |= dict.fromkeys(strides, "i32")
    # The slices of block tables and lengths that a mixed batch launches with are not aligned.
    aligned = {"out_ptr", "partial_ptr", "lse_ptr", "q_ptr", "k_ptr", "v_ptr", *strides}
    return Variant(
        kernel="paged_attention",
        config=f"{name} m{config.block_m} t{config.tile} w{config.num_warps} s{config.num_stages}",
        target=target,
        function=paged_attention_kernel,
        types=types,
        constants={
            "NUM_HEADS": shape.num_heads,
            "GROUP": group,
            "HEAD_DIM": shape.head_dim,
            "PADDED_DIM": shape.padded_dim,
            "BLOCK_SIZE": shape.block_size,
            "BLOCK_M": config.block_m,
            "BLOCK_Q": config.block_m // group,
            "TILE": config.tile,
            "DECODE": phase == "decode",
            "SPLIT": split,
            "MIN_TILES": MIN_TILES_PER_SPLIT,
            "WINDOWED": shape.window,
            "SOFTCAP": shape.softcap,
            "SINKS": shape.sinks,
            "SCALED_KV": bool(shape.kv_dtype),
            "UPCAST": False,
            "PRECISION": "ieee" if shape.dtype == "f32" else "tf32",
        },
        aligned=frozenset(aligned),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        traits={
            "phase": phase,
            "dtype": shape.dtype,
            "kv_dtype": shape.kv_dtype or shape.dtype,
            "padded_dim": shape.padded_dim,
            "tile": config.tile,
        },
    )


def combine_variant(shape: Shape, target: str) -> Variant:
    return Variant(
        kernel="combine_splits",
        config=shape.name,
        target=target,
        function=combine_splits_kernel,
        types={
            "out_ptr": POINTER[shape.dtype],
            "partial_ptr": "*fp32",
            "lse_ptr": "*fp32",
            "cu_seqlens_ptr": "*i32",
            "num_splits": "i32",
            "out_stride_row": "i32",
            "out_stride_head": "i32",
        },
        constants={
            "NUM_HEADS": shape.num_heads,
            "HEAD_DIM": shape.head_dim,
            "PADDED_DIM": shape.padded_dim,
            "MAX_SPLITS": MAX_SPLITS,
        },
        aligned=frozenset({"out_ptr", "partial_ptr", "lse_ptr", "out_stride_row", "out_stride_head"}),
        num_warps=2,
        num_stages=2,
    )
