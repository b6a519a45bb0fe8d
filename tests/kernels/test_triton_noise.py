"""Stateless Gumbel noise: what it equals, what it does not depend on, and that it is Gumbel noise."""

from __future__ import annotations

import math

import pytest
import torch
from cb_kernels.sampling.noise import gumbel, reference_gumbel

EULER_GAMMA = 0.5772156649
IDS = torch.arange(4096)
PINNED = [[1070220241, 1066074151, 1058852470], [-1102289636, 1051991147, 1075639094]]


def int64(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 1234567890123456789])
@pytest.mark.parametrize("position", [0, 1, 2**31 - 1])
def test_equals_the_reference(seed: int, position: int) -> None:
    ids = int64(0, 1, 2, 151_642, 2**31 - 1)
    got = gumbel(int64(seed), int64(position), ids)[0].tolist()
    assert got == pytest.approx([reference_gumbel(seed, position, i) for i in ids.tolist()], abs=4e-6)


def test_bits_are_pinned() -> None:
    """A change of these values changes every seeded answer that users have kept."""
    got = gumbel(int64(42, -7), int64(0, 1000), int64(0, 1, 50_000))
    assert got.view(torch.int32).tolist() == PINNED


def test_a_row_does_not_depend_on_its_neighbours_or_on_the_order_of_ids() -> None:
    seeds, positions = int64(5, 6, 7), int64(10, 20, 30)
    rows = gumbel(seeds, positions, IDS)
    shuffled = torch.randperm(len(IDS), generator=torch.Generator().manual_seed(0))
    alone = gumbel(seeds[1:2], positions[1:2], IDS[shuffled].to(torch.int32))
    assert torch.equal(alone[0], rows[1, shuffled])
    assert torch.equal(gumbel(seeds, positions, IDS.expand(3, -1)), rows)


def test_ranges_longer_than_a_chunk_are_seamless() -> None:
    ids = torch.arange(70_000)
    whole = gumbel(int64(1, 2), int64(3, 4), ids)
    assert torch.equal(whole[:, 65_000:], gumbel(int64(1, 2), int64(3, 4), ids[65_000:]))


@pytest.mark.parametrize("rows, width", [(0, 5), (3, 0)])
def test_empty(rows: int, width: int) -> None:
    zeros = torch.zeros(rows, dtype=torch.int64)
    assert gumbel(zeros, zeros, torch.arange(width)).shape == (rows, width)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"token_ids must be \[n\] or \[2, n\]"):
        gumbel(int64(1, 2), int64(1, 2), torch.zeros(3, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="must both be"):
        gumbel(int64(1, 2), int64(1), IDS)


@pytest.mark.parametrize("axis", ["seed", "position", "id"])
def test_moments_and_distribution(axis: str) -> None:
    """Mean, variance, and the largest gap to the Gumbel distribution function (Kolmogorov-Smirnov, p > 1e-4)."""
    n = 1 << 18
    count, fixed = torch.arange(n), torch.full((n,), 3)
    if axis == "id":
        noise = gumbel(int64(3), int64(3), count)[0]
    else:
        noise = gumbel(count if axis == "seed" else fixed, count if axis == "position" else fixed, int64(3))[:, 0]
    noise = noise.double()
    assert noise.mean().item() == pytest.approx(EULER_GAMMA, abs=4 * 1.2825 / math.sqrt(n))
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.03)
    cdf = torch.exp(-torch.exp(-noise.sort().values))
    gap = (cdf - (torch.arange(n) + 0.5) / n).abs().max().item()
    assert gap * math.sqrt(n) < 2.23


def test_draws_follow_the_probabilities() -> None:
    """Chi-square of 40,000 draws over 32 tokens; the bound is exceeded with probability 1e-4."""
    logits = torch.linspace(-4.0, 2.0, 32)
    draws = 40_000
    noise = gumbel(torch.arange(draws) * 7919, torch.arange(draws) % 513, torch.arange(32))
    seen = torch.bincount((logits + noise).argmax(-1), minlength=32).double()
    due = logits.double().softmax(-1) * draws
    assert ((seen - due) ** 2 / due).sum().item() < 70.6


def test_a_rare_token_is_drawn_at_its_rate() -> None:
    """Largest of 2^22 values: exp(-max) * n is Exp(1); noise cut at 24 bits could not reach beyond 16.6."""
    noise = gumbel(torch.arange(64), torch.zeros(64, dtype=torch.int64), torch.arange(1 << 16))
    assert 0.001 < (1 << 22) * math.exp(-noise.max().item()) < 9.2


@pytest.mark.parametrize("shift", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, -1, 0), (0, 1, -1), (1, 0, -1), (2**32, 0, 0)])
def test_neighbouring_keys_are_independent(shift: tuple[int, int, int]) -> None:
    """Correlation of noise with the noise one step away, over 2^16 pairs: within 4.5 standard errors of 0."""
    n = 1 << 16
    seeds, positions = torch.arange(64).repeat_interleave(16), torch.arange(1, 17).repeat(64)
    ids = torch.arange(1, 65)
    here = gumbel(seeds, positions, ids).flatten()
    there = gumbel(seeds + shift[0], positions + shift[1], ids + shift[2]).flatten()
    assert abs(torch.corrcoef(torch.stack([here, there]))[0, 1].item()) < 4.5 / math.sqrt(n)
    assert (here == there).float().mean().item() < 1e-4
