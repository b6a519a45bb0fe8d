"""The samplers as the engine launches them, to compile ahead of time."""

from __future__ import annotations

from collections.abc import Iterator

from cb_kernels.compiled import Variant
from cb_kernels.sampling.kernel import adjust_logits_kernel, gumbel_kernel, sample_kernel
from cb_kernels.sampling.launch import ADJUST_CHUNK, SAMPLE_CHUNK, SAMPLE_STAGES, SAMPLE_WARPS


def variants(target: str) -> Iterator[Variant]:
    yield Variant(
        kernel="sample",
        config="any vocabulary",
        target=target,
        function=sample_kernel,
        types={
            "out_ptr": "*i64",
            "logits_ptr": "*fp32",
            "row_stride": "i32",
            "vocab": "i32",
            "temperature_ptr": "*fp32",
            "top_k_ptr": "*i32",
            "top_p_ptr": "*fp32",
            "min_p_ptr": "*fp32",
            "seed_ptr": "*i64",
            "position_ptr": "*i64",
        },
        constants={"CHUNK": SAMPLE_CHUNK},
        aligned=frozenset({"logits_ptr", "row_stride", "vocab"}),
        num_warps=SAMPLE_WARPS,
        num_stages=SAMPLE_STAGES,
        fp_fusion=False,
    )
    yield Variant(
        kernel="adjust_logits",
        config="any vocabulary",
        target=target,
        function=adjust_logits_kernel,
        types={
            "logits_ptr": "*fp32",
            "row_stride": "i32",
            "ids_ptr": "*i32",
            "bias_ptr": "*fp32",
            "counts_ptr": "*i32",
            "seen_ptr": "*u8",
            "repetition_ptr": "*fp32",
            "presence_ptr": "*fp32",
            "frequency_ptr": "*fp32",
            "num_listed": "i32",
            "vocab": "i32",
        },
        constants={"CHUNK": ADJUST_CHUNK},
        aligned=frozenset({"logits_ptr", "row_stride", "vocab"}),
        num_warps=4,
        num_stages=2,
        fp_fusion=False,
    )
    yield Variant(
        kernel="gumbel",
        config="noise alone",
        target=target,
        function=gumbel_kernel,
        types={
            "out_ptr": "*fp32",
            "seed_ptr": "*i64",
            "position_ptr": "*i64",
            "ids_ptr": "*i32",
            "width": "i32",
        },
        constants={"CHUNK": 1024},
        aligned=frozenset({"out_ptr", "ids_ptr"}),
        num_warps=4,
        num_stages=2,
        fp_fusion=False,
    )
