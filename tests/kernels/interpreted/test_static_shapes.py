"""What a captured CUDA graph relies on: padding changes nothing, launches follow from shapes and addresses alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cb_kernels.paged_attention import launch as launch_module
from cb_kernels.paged_attention.launch import paged_attention, workspace_size

SCALE = 0.125
HEADS = (2, 1, 64)


def padded(batch: Any, bucket: int, length: int) -> tuple[torch.Tensor, ...]:
    """The batch in a bucket of `bucket` sequences; padding has `length` keys in a trash block (0: no query row)."""
    q, k, v, tables, lens, firsts = batch.tensors
    extra = bucket - len(lens)
    trash = k.shape[0] - 1
    assert not (tables == trash).any()
    step = 1 if length else 0
    return (
        torch.cat([q, torch.randn(extra, *q.shape[1:])]),
        k,
        v,
        torch.cat([tables, torch.full((extra, tables.shape[1]), trash, dtype=torch.int32)]),
        torch.cat([lens, torch.full((extra,), length, dtype=torch.int32)]),
        torch.cat([firsts, firsts[-1] + step * torch.arange(1, extra + 1, dtype=torch.int32)]),
    )


@pytest.fixture
def batch(ragged: Any) -> Any:
    """Three decodes whose tables leave the pool's last block free."""
    for seed in range(20):
        made = ragged([1, 1, 1], [5, 70, 120], HEADS, 32, seed=seed)
        if not (made.block_tables == made.k_cache.shape[0] - 1).any():
            return made
    raise LookupError("no seed leaves the last block free")


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("length", [0, 1])
def test_padded_equals_unpadded(batch: Any, length: int, splits: int) -> None:
    q, *rest = batch.tensors
    alone = paged_attention(q, *rest[:2], torch.empty_like(q), *rest[2:], scale=SCALE, num_decodes=3, num_splits=splits)
    q, *rest = padded(batch, 8, length)
    out = torch.full_like(q, 7.0)
    paged_attention(q, *rest[:2], out, *rest[2:], scale=SCALE, num_decodes=8, num_splits=splits)
    assert torch.equal(out[:3], alone)
    if length == 0:
        assert (out[3:] == 7.0).all(), "rows of empty sequences were written"


@pytest.mark.parametrize("splits", [1, 4])
def test_a_row_that_sees_no_key_is_zero(batch: Any, splits: int) -> None:
    q, *rest = padded(batch, 4, 1)
    rest[3][3] = 0
    out = torch.full_like(q, 7.0)
    paged_attention(q, *rest[:2], out, *rest[2:], scale=SCALE, num_decodes=4, num_splits=splits)
    assert (out[3] == 0.0).all()


def test_prefill_rows_past_the_last_sequence_stay_as_they_were(ragged: Any) -> None:
    made = ragged([9, 4], [20, 0], HEADS)
    q = torch.cat([made.q, torch.full((6, *made.q.shape[1:]), float("nan"))])
    out = torch.full_like(q, 7.0)
    paged_attention(q, *made.tensors[1:3], out, *made.tensors[3:], scale=SCALE)
    alone = paged_attention(*made.tensors[:3], torch.empty_like(made.q), *made.tensors[3:], scale=SCALE)
    assert torch.equal(out[:13], alone)
    assert (out[13:] == 7.0).all()


class Launches:
    """Stands in for a kernel: notes grid, addresses and numbers of every launch instead of running it."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        def note(*args: Any, **options: Any) -> None:
            plain = [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args]
            self.seen.append((grid, plain, options))

        return note


def test_launches_do_not_depend_on_data(batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    q, *rest = padded(batch, 8, 1)
    out = torch.empty_like(q)
    workspace = torch.empty(workspace_size(8, 2, 1, 64, q.device))
    traces = []
    for lengths in ([6, 71, 121, 1, 1, 1, 1, 1], [90, 1, 1, 0, 0, 0, 0, 0]):
        rest[3].copy_(torch.tensor(lengths))
        rest[2].random_(0, 3)
        launches = Launches()
        monkeypatch.setattr(launch_module, "paged_attention_kernel", launches)
        monkeypatch.setattr(launch_module, "combine_splits_kernel", launches)
        paged_attention(
            q, *rest[:2], out, *rest[2:], scale=SCALE, num_decodes=8, workspace=workspace, num_splits=4
        )  # fmt: skip
        traces.append(launches.seen)
    assert len(traces[0]) == 2
    assert traces[0] == traces[1]


def test_a_replayed_workspace_needs_no_clearing(batch: Any) -> None:
    """Splits without keys must not let what an earlier step left in the workspace through."""
    q, *rest = batch.tensors
    workspace = torch.full((workspace_size(3, 2, 1, 64, q.device),), float("nan"))
    arguments = {"scale": SCALE, "num_decodes": 3, "num_splits": 8}
    dirty = paged_attention(q, *rest[:2], torch.empty_like(q), *rest[2:], workspace=workspace, **arguments)
    clean = paged_attention(q, *rest[:2], torch.empty_like(q), *rest[2:], **arguments)
    assert torch.isfinite(dirty).all()
    assert torch.equal(dirty, clean)


@pytest.mark.parametrize("heads, kv_heads", [(32, 8), (9, 3), (64, 8), (16, 1)])
def test_the_workspace_holds_the_partials_of_every_batch(
    heads: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 600 decodes of up to 4,096 keys; the launcher itself refuses a workspace that is too small."""
    launches = Launches()
    monkeypatch.setattr(launch_module, "paged_attention_kernel", launches)
    monkeypatch.setattr(launch_module, "combine_splits_kernel", launches)
    cache = torch.empty(1, kv_heads, 32, 64)
    workspace = torch.empty(workspace_size(600, heads, kv_heads, 64, cache.device))
    assert workspace.nbytes < 16 * 2**20
    for size in [*range(1, 140), 200, 300, 528, 529, 600]:
        q = torch.empty(size, heads, 64)
        tables = torch.zeros(size, 128, dtype=torch.int32)
        counts = torch.zeros(size + 1, dtype=torch.int32)
        paged_attention(
            q, cache, cache, q, tables, counts[:-1], counts, scale=1.0, num_decodes=size, workspace=workspace
        )
    grids = [grid for grid, *_ in launches.seen]
    assert (1, kv_heads, 32) in grids
    assert (600, kv_heads, 1) in grids
