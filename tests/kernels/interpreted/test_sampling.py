"""The Triton samplers: noise equal to torch's to the bit, and draws equal to the sorting reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cb_kernels.sampling.kernel import gumbel_kernel
from cb_kernels.sampling.launch import adjust_logits, sample
from cb_kernels.sampling.noise import gumbel
from cb_kernels.sampling.reference import reference_adjust_logits, reference_sample

VOCAB = 500


def test_noise_has_the_same_bits_as_the_cpu_path() -> None:
    random = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (6,), generator=random)
    seeds[0], seeds[1] = 2**63 - 1, -(2**63)
    positions = torch.tensor([0, 1, 2**31 - 1, 77, 4096, 5])
    ids = torch.cat([torch.arange(30_000), torch.tensor([2**31 - 1])]).int()
    out = torch.empty(6, len(ids))
    gumbel_kernel[(6, -(-len(ids) // 4096))](out, seeds, positions, ids, len(ids), CHUNK=4096)
    assert torch.equal(out.view(torch.int32), gumbel(seeds, positions, ids).view(torch.int32))


def rows(count: int, **changes: Any) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(count)
    values: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | changes
    dtypes = {"temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32}
    return {
        "logits": torch.randn(count, VOCAB, generator=random) * 4,
        **{name: torch.full((count,), value, dtype=dtypes[name]) for name, value in values.items()},
        "seeds": torch.randint(-(2**62), 2**62, (count,), generator=random),
        "positions": torch.arange(count),
    }


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"temperature": 3.0},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": VOCAB - 1},
        {"top_k": VOCAB},
        {"top_k": -1},
        {"top_p": 0.05},
        {"top_p": 0.9},
        {"top_p": 0.999},
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"temperature": 2.0, "top_k": 50, "top_p": 0.8, "min_p": 0.02},
    ],
    ids=str,
)
def test_draws_equal_the_reference(changes: dict[str, Any]) -> None:
    batch = rows(3, **changes)
    assert sample(**batch).tolist() == reference_sample(**batch).tolist()


def test_each_row_has_its_own_settings() -> None:
    batch = rows(4)
    batch["temperature"] = torch.tensor([0.0, 1.0, 0.5, 2.0])
    batch["top_k"] = torch.tensor([0, 3, 0, 40], dtype=torch.int32)
    batch["top_p"] = torch.tensor([0.1, 1.0, 0.5, 0.9])
    whole = sample(**batch)
    assert whole.tolist() == reference_sample(**batch).tolist()
    alone = {name: tensor[2:3] for name, tensor in batch.items()}
    assert sample(**alone).tolist() == whole[2:3].tolist()


@pytest.mark.parametrize("changes", [{"top_k": 2}, {"top_p": 0.01}], ids=str)
def test_ties_are_kept_together(changes: dict[str, Any]) -> None:
    """Five tokens share the largest logit: a filter that could do with two, or one, keeps all five."""
    batch = rows(8, **changes)
    batch["logits"].fill_(-3.0)[:, 100:105] = 2.0
    drawn = sample(**batch).tolist()
    assert set(drawn) <= {100, 101, 102, 103, 104}
    assert len(set(drawn)) > 2
    assert drawn == reference_sample(**batch).tolist()


def test_forbidden_tokens_are_never_drawn() -> None:
    batch = rows(8, temperature=50.0)
    batch["logits"][:, 10:] = float("-inf")
    drawn = sample(**batch)
    assert (drawn < 10).all()
    assert drawn.tolist() == reference_sample(**batch).tolist()


def test_negative_and_huge_logits() -> None:
    batch = rows(4, top_k=5, top_p=0.9)
    batch["logits"] = batch["logits"] * 1e30
    batch["logits"][1] = -batch["logits"][1].abs()
    assert sample(**batch).tolist() == reference_sample(**batch).tolist()


def test_bias_and_penalties_equal_the_reference() -> None:
    random = torch.Generator().manual_seed(3)
    logits = torch.randn(3, VOCAB, generator=random)
    ids = torch.stack([torch.randperm(VOCAB, generator=random)[:300] for _ in range(3)]).int()
    ids[:, 280:] = -1
    arguments = (
        ids,
        torch.where(torch.rand(3, 300, generator=random) < 0.1, float("-inf"), torch.randn(3, 300, generator=random)),
        torch.randint(0, 3, (3, 300), generator=random, dtype=torch.int32),
        torch.rand(3, 300, generator=random) < 0.3,
        torch.tensor([1.0, 1.3, 0.8]),
        torch.tensor([0.0, 0.5, -1.0]),
        torch.tensor([0.0, -0.25, 2.0]),
    )
    due = logits.clone()
    adjust_logits(logits, *arguments)
    reference_adjust_logits(due, *arguments)
    assert torch.equal(logits, due)


def test_arguments_that_do_not_fit_are_named() -> None:
    batch = rows(2)
    with pytest.raises(ValueError, match=r"top_k must be torch.int32 \[2\]"):
        sample(**{**batch, "top_k": torch.zeros(2)})
    with pytest.raises(ValueError, match="logits must be torch.float32"):
        sample(**{**batch, "logits": batch["logits"].bfloat16()})
