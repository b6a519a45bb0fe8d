"""The native elementwise kernels and the float32 projection against torch, on every instruction set."""

from __future__ import annotations

import pytest
import torch
from cb_kernels.cpu import Library, UnsupportedShape
from cb_kernels.cpu.reference import reference_rms_norm, reference_rotary, reference_silu_and_mul

BOTH = (torch.float32, torch.bfloat16)


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_same(got: torch.Tensor, expected: torch.Tensor, ulps: int = 1) -> None:
    """Within 1e-6 relative in float32; in bf16 within `ulps`, each at most 2^-7 relative."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    if got.dtype == torch.float32:
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)
    else:
        torch.testing.assert_close(got, expected, rtol=ulps * 2**-7, atol=0)
        assert (got != expected).double().mean() < 0.01  # and nearly all are the same number


@pytest.mark.parametrize("dtype", BOTH, ids=str)
@pytest.mark.parametrize("rows", [1, 37])
@pytest.mark.parametrize("size", [8, 576, 1000])
def test_rms_norm(library: Library, rows: int, size: int, dtype: torch.dtype) -> None:
    x, weight = randn(rows, size, dtype=dtype), randn(size, dtype=dtype, seed=1)
    assert_same(library.rms_norm(x, weight, 1e-5), reference_rms_norm(x, weight, 1e-5)[0])


@pytest.mark.parametrize("dtype", BOTH, ids=str)
def test_rms_norm_adds_the_residual_and_leaves_the_sum_there(library: Library, dtype: torch.dtype) -> None:
    x, residual, weight = randn(5, 64, dtype=dtype), randn(5, 64, dtype=dtype, seed=1), randn(64, dtype=dtype, seed=2)
    expected, total = reference_rms_norm(x, weight, 1e-6, residual)
    assert_same(library.rms_norm(x, weight, 1e-6, residual), expected)
    assert torch.equal(residual, total)


@pytest.mark.parametrize("dtype", BOTH, ids=str)
@pytest.mark.parametrize("size", [8, 1536])
def test_silu_and_mul(library: Library, size: int, dtype: torch.dtype) -> None:
    x = randn(9, 2 * size, dtype=dtype) * 4
    assert_same(library.silu_and_mul(x), reference_silu_and_mul(x), ulps=2)  # silu is rounded, then the product


@pytest.mark.parametrize("value", [-200.0, -100.0, 0.0, 100.0, 1e30])
def test_silu_of_large_numbers_is_finite(library: Library, value: float) -> None:
    x = torch.full((1, 16), value)
    x[:, 8:] = 1.0
    torch.testing.assert_close(library.silu_and_mul(x), reference_silu_and_mul(x), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("dtype", BOTH, ids=str)
@pytest.mark.parametrize("head_dim", [8, 40, 64, 128])
def test_rotary_turns_in_place_and_writes_what_it_turned(library: Library, head_dim: int, dtype: torch.dtype) -> None:
    merged = randn(7, 6, head_dim, dtype=dtype)  # 3 query heads, 1 key head, 1 value head, one of padding
    q, k, v = merged[:, :3], merged[:, 3:4], merged[:, 4:5]
    angles = torch.arange(7)[:, None] * torch.logspace(0, -3, head_dim // 2)
    cos, sin = (torch.cat((part, part), -1).to(dtype) for part in (angles.cos(), angles.sin()))
    expected_q, expected_k = reference_rotary(q, cos, sin), reference_rotary(k, cos, sin)
    before = merged.clone()
    kv = torch.zeros(4, 1, 2, 1, 2, head_dim, dtype=dtype)
    slots = torch.tensor([7, -1, 0, 1, 2, 3, 6])
    library.rotary_write_kv(q, k, v, cos, sin, kv[:, 0, 0], kv[:, 0, 1], slots)
    if dtype == torch.float32:
        torch.testing.assert_close(q, expected_q, rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(q, expected_q) and torch.equal(k, expected_k)
    assert torch.equal(merged[:, 4:], before[:, 4:])
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(kv[slot // 2, 0, 0, :, slot % 2], k[token])
            assert torch.equal(kv[slot // 2, 0, 1, :, slot % 2], v[token])
    assert kv[2, :, :, :].abs().max() == 0  # no slot names block 2


@pytest.mark.parametrize("rows", [1, 16, 17, 40])
@pytest.mark.parametrize(("depth", "n"), [(576, 1040), (40, 64), (32, 16)])
def test_linear_gives_float32_of_bf16_exactly_summed(library: Library, rows: int, depth: int, n: int) -> None:
    x, weight = randn(rows, depth, dtype=torch.bfloat16), randn(n, depth, dtype=torch.bfloat16, seed=1)
    got = library.linear_f32(x, weight)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), x.double() @ weight.double().T, rtol=1e-6, atol=1e-4)


def test_linear_of_one_row_is_that_row_of_many(amx_library: Library) -> None:
    x, weight = randn(33, 64, dtype=torch.bfloat16), randn(160, 64, dtype=torch.bfloat16, seed=1)
    together = amx_library.linear_f32(x, weight)
    for row in (0, 15, 16, 32):
        assert torch.equal(amx_library.linear_f32(x[row : row + 1], weight)[0], together[row])


def test_other_dtypes_and_shapes_are_refused(library: Library) -> None:
    with pytest.raises(UnsupportedShape, match="float16"):
        library.rms_norm(torch.zeros(1, 8, dtype=torch.float16), torch.ones(8, dtype=torch.float16), 1e-6)
    with pytest.raises(UnsupportedShape, match="weight"):
        library.rms_norm(torch.zeros(1, 8), torch.ones(16), 1e-6)
    with pytest.raises(UnsupportedShape, match="halves"):
        library.silu_and_mul(torch.zeros(1, 8))
