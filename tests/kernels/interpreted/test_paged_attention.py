"""The Triton attention kernel equals the float64 reference: every feature, at its edges, on hostile batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cb_kernels.paged_attention.configs import LaunchConfig
from cb_kernels.paged_attention.launch import paged_attention
from cb_kernels.paged_attention.reference import reference_attention
from cb_kernels.paged_attention.warmup import warm_up

TOLERANCE = 2e-6
BATCHES = {
    "decode": ([1, 1, 1], [0, 37, 95]),
    "prefill": ([40], [0]),
    "chunk": ([21], [43]),
    "mixed": ([1, 1, 17, 5], [33, 64, 30, 0]),
}
SHAPES = [(3, 1, 64), (2, 1, 128), (4, 2, 32), (2, 2, 80), (1, 1, 96), (2, 1, 256), (6, 2, 48), (5, 1, 112)]
SMALL = (2, 1, 32)


def run(batch: Any, config: LaunchConfig | None = None, num_splits: int | None = None, **features: Any) -> torch.Tensor:
    out = torch.full_like(batch.q, float("nan"))
    return paged_attention(
        *batch.tensors[:3],
        out,
        *batch.tensors[3:],
        scale=batch.q.shape[2] ** -0.5,
        num_decodes=batch.num_decodes,
        config=config,
        num_splits=num_splits,
        **features,
    )


def error(batch: Any, config: LaunchConfig | None = None, num_splits: int | None = None, **features: Any) -> float:
    """Largest difference from the reference on the same stored values."""
    q, k, v, *rest = batch.tensors
    due = reference_attention(q.double(), k.double(), v.double(), *rest, scale=q.shape[2] ** -0.5, **features)
    return (run(batch, config, num_splits, **features).double() - due).abs().max().item()


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("rows", BATCHES)
@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_shapes(ragged: Any, heads: tuple[int, int, int], rows: str, block_size: int) -> None:
    assert error(ragged(*BATCHES[rows], heads, block_size)) < TOLERANCE


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("rows", BATCHES)
@pytest.mark.parametrize("window", [1, 7, 16, 33, 1000])
def test_window(ragged: Any, window: int, rows: str, block_size: int) -> None:
    config = LaunchConfig(16, 16, 4, 5)
    assert error(ragged(*BATCHES[rows], SMALL, block_size), config, window=window) < TOLERANCE


@pytest.mark.parametrize("rows", BATCHES)
@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0])
def test_softcap(ragged: Any, softcap: float, rows: str) -> None:
    assert error(ragged(*BATCHES[rows], SMALL), softcap=softcap) < TOLERANCE


@pytest.mark.parametrize("rows", BATCHES)
@pytest.mark.parametrize("features", [{}, {"window": 16}, {"softcap": 5.0}], ids=str)
def test_sinks(ragged: Any, features: dict[str, Any], rows: str) -> None:
    sinks = torch.tensor([3.0, -2.0])
    assert error(ragged(*BATCHES[rows], SMALL), sinks=sinks, **features) < TOLERANCE


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize(
    "features", [{}, {"window": 40}, {"sinks": torch.tensor([1.0, -1.0])}], ids=lambda f: ",".join(f)
)
@pytest.mark.parametrize("splits", [1, 2, 4, 8, 16, 32])
def test_splits(ragged: Any, splits: int, features: dict[str, Any], block_size: int) -> None:
    batch = ragged([1, 1], [9, 299], SMALL, block_size)
    assert error(batch, LaunchConfig(16, 32, 4, 5), splits, **features) < TOLERANCE


@pytest.mark.parametrize("splits", [3, 5])
def test_splits_need_not_be_a_power_of_two(ragged: Any, splits: int) -> None:
    assert error(ragged([1], [200], SMALL), LaunchConfig(16, 16, 4, 5), splits) < TOLERANCE


@pytest.mark.parametrize("block_size", [1, 16, 24, 32, 64, 128])
@pytest.mark.parametrize("block_m, tile", [(16, 16), (16, 64), (32, 32), (64, 64), (128, 128)])
def test_tiles_against_block_sizes(ragged: Any, block_m: int, tile: int, block_size: int) -> None:
    assert error(ragged(*BATCHES["mixed"], SMALL, block_size), LaunchConfig(block_m, tile, 4, 5)) < TOLERANCE


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("rows", BATCHES)
def test_fp8_cache_with_a_scale_per_head(ragged: Any, rows: str, block_size: int) -> None:
    batch = ragged(*BATCHES[rows], (4, 2, 64), block_size, torch.float8_e4m3fn)
    scales = {"k_scale": torch.tensor([0.5, 1.75]), "v_scale": torch.tensor([3.0, 0.125])}
    assert error(batch, **scales) < TOLERANCE


@pytest.mark.parametrize("rows", BATCHES)
@pytest.mark.parametrize("dtype, ulp", [(torch.float16, 2.0**-10), (torch.bfloat16, 2.0**-7)])
def test_half_precision_is_right_to_its_last_bit(ragged: Any, dtype: torch.dtype, ulp: float, rows: str) -> None:
    """The interpreter truncates to bf16 where a GPU rounds, hence one unit in the last place instead of a half."""
    batch = ragged(*BATCHES[rows], (3, 1, 64), 16, dtype)
    batch = type(batch)(batch.q.to(dtype), *batch.tensors[1:], batch.num_decodes)
    q, k, v, *rest = batch.tensors
    due = reference_attention(q.double(), k.double(), v.double(), *rest, scale=0.125)
    assert ((run(batch).double() - due).abs() <= ulp * due.abs() + TOLERANCE).all()


def test_group_larger_than_the_tile(ragged: Any) -> None:
    assert error(ragged(*BATCHES["mixed"], (20, 1, 32))) < TOLERANCE


def test_a_sequence_may_pass_as_a_decode_or_not(ragged: Any) -> None:
    batch = ragged(*BATCHES["decode"], SMALL)
    as_chunks = type(batch)(*batch.tensors, num_decodes=0)
    assert error(batch) < TOLERANCE
    assert error(as_chunks) < TOLERANCE


def test_warm_up_runs_on_a_pool_of_garbage_and_leaves_it_alone(ragged: Any) -> None:
    batch = ragged([1, 1], [3, 3], SMALL)
    before = batch.k_cache.clone()
    assert len(list(warm_up(batch.q, batch.k_cache, batch.v_cache, window=8, sinks=torch.zeros(2)))) == 3
    assert torch.equal(batch.k_cache.nan_to_num(7.0), before.nan_to_num(7.0))


def test_large_scores_do_not_overflow(ragged: Any) -> None:
    batch = ragged(*BATCHES["mixed"], SMALL)
    batch.q.mul_(1000.0)
    assert torch.isfinite(run(batch)).all()


def test_rows_of_a_fused_projection_are_read_in_place(ragged: Any) -> None:
    batch = ragged(*BATCHES["mixed"], SMALL)
    fused = torch.full((batch.q.shape[0], 4, 32), float("nan"))
    fused[:, 1:3] = batch.q
    view = type(batch)(fused[:, 1:3], *batch.tensors[1:], batch.num_decodes)
    assert torch.equal(run(view), run(batch))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"seq_lens": torch.tensor([1, 2])}, "must be int32"),
        ({"num_decodes": 5}, "num_decodes must be between 0 and the 2"),
        ({"cu_seqlens": torch.zeros(2, dtype=torch.int32)}, r"must be \[n, max_blocks\]"),
        ({"q": torch.zeros(2, 3, 32)}, "3 query heads are not a multiple of 2"),
        ({"q": torch.zeros(2, 2, 64)}, r"\[blocks, kv heads, block size, 64\]"),
        ({"workspace": torch.zeros(3), "num_splits": 2}, "workspace must be float32 with at least"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_arguments_that_do_not_fit_are_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "q": torch.zeros(2, 2, 32),
        "k_cache": torch.zeros(4, 2, 16, 32),
        "v_cache": torch.zeros(4, 2, 16, 32),
        "block_tables": torch.zeros(2, 1, dtype=torch.int32),
        "seq_lens": torch.ones(2, dtype=torch.int32),
        "cu_seqlens": torch.arange(3, dtype=torch.int32),
        "num_decodes": 2,
    } | change
    with pytest.raises(ValueError, match=message):
        paged_attention(out=torch.zeros_like(arguments["q"]), scale=1.0, **arguments)
