"""The K/V copies as the engine launches them, to compile ahead of time."""

from __future__ import annotations

from collections.abc import Iterator

from cb_kernels.compiled import Variant
from cb_kernels.kv_copy.kernel import copy_blocks_kernel, write_kv_kernel
from cb_kernels.kv_copy.launch import COPY_CHUNK, COPY_WARPS, WRITE_WARPS

_STRIDES = (
    *("k_stride_token", "k_stride_head", "v_stride_token", "v_stride_head"),
    *("k_stride_block", "k_cache_stride_head", "k_stride_row"),
    *("v_stride_block", "v_cache_stride_head", "v_stride_row"),
)


def variants(target: str) -> Iterator[Variant]:
    for name, num_heads, head_dim, fp8 in (
        ("llama-8b", 8, 128, False),
        ("smollm2-135m", 3, 64, False),
        ("llama-8b fp8 kv", 8, 128, True),
    ):
        cache = "*u8" if fp8 else "*bf16"
        yield Variant(
            kernel="write_kv",
            config=name,
            target=target,
            function=write_kv_kernel,
            types={
                "k_ptr": "*bf16",
                "v_ptr": "*bf16",
                "k_cache_ptr": cache,
                "v_cache_ptr": cache,
                "slots_ptr": "*i64",
                "k_scale_ptr": "*fp32" if fp8 else "*i64",
                "v_scale_ptr": "*fp32" if fp8 else "*i64",
                **dict.fromkeys(_STRIDES, "i32"),
            },
            constants={
                "BLOCK_SIZE": 32,
                "NUM_HEADS": num_heads,
                "PADDED_HEADS": 1 << (num_heads - 1).bit_length(),
                "HEAD_DIM": head_dim,
                "PADDED_DIM": head_dim,
                "TO_FP8": fp8,
                "SCALED": fp8,
            },
            aligned=frozenset({"k_ptr", "v_ptr", "k_cache_ptr", "v_cache_ptr", *_STRIDES}),
            num_warps=WRITE_WARPS,
            num_stages=2,
            fp_fusion=False,
        )
    yield Variant(
        kernel="copy_blocks",
        config="any block",
        target=target,
        function=copy_blocks_kernel,
        types={
            "source_ptr": "*i32",
            "target_ptr": "*i32",
            "source_ids_ptr": "*i64",
            "target_ids_ptr": "*i64",
            "block_words": "i32",
        },
        constants={"CHUNK": COPY_CHUNK},
        aligned=frozenset({"source_ptr", "target_ptr", "block_words"}),
        num_warps=COPY_WARPS,
        num_stages=2,
    )
