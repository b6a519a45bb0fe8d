"""The float32 product on packed weights: right on every instruction set, and every row's bits its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cb_kernels.cpu import Library, UnsupportedShape
from cb_kernels.cpu.panels import PackedMatrix, PackedMemory, narrowest

SHAPES = [(1, 1), (7, 5), (32, 128), (33, 129), (96, 577), (200, 300)]  # n, depth; panels are of 16 or 32 outputs
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def make(rows: int, n: int, depth: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n * depth)
    x = torch.randn(rows, depth, generator=generator)
    return x, torch.randn(n, depth, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_the_product(library: Library, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = make(67, *shape, dtype)
    exact = x.double() @ weight.double().T
    terms = x.double().abs() @ weight.double().abs().T
    got = PackedMatrix(library, weight)(x)
    assert ((got - exact).abs() <= 4e-6 * terms).all()


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_alone_and_among_others(
    library: Library, threads: None, dtype: torch.dtype, num_threads: int
) -> None:
    x, weight = make(600, 333, 611, dtype)
    matrix = PackedMatrix(library, weight)
    torch.set_num_threads(1)
    alone = torch.cat([matrix(row[None]) for row in x])
    torch.set_num_threads(num_threads)
    for rows in (*range(2, 14), 16, 64, 129, 600):
        assert torch.equal(matrix(x[:rows]), alone[:rows]), rows


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_sixteen_bits_give_the_bits_of_float32(
    library: Library, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = make(20, 100, 300, dtype)
    weight[:5] *= 1e-38 if dtype == torch.bfloat16 else 1e-5  # subnormal numbers
    monkeypatch.setattr("cb_kernels.cpu.panels.narrowest", lambda weight: weight)
    narrow, wide = PackedMatrix(library, weight), PackedMatrix(library, weight.float())
    assert (narrow.storage, wide.storage) == (dtype, torch.float32)
    for rows in (1, 20):
        assert torch.equal(narrow(x[:rows]), wide(x[:rows]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinities_and_nan_and_subnormal_numbers_are_torchs(library: Library, dtype: torch.dtype) -> None:
    x, weight = make(15, 40, 64, dtype)
    x[0, 0], x[1, 1], x[2] = torch.inf, torch.nan, 1e-42
    weight[3, 5], weight[4, 6], weight[5, 7] = torch.inf, -torch.inf, torch.nan
    weight[6] = torch.finfo(dtype).smallest_normal / 4
    weight[7, :] = -0.0
    expected = x @ weight.float().T
    for rows in (1, 15):
        got = PackedMatrix(library, weight)(x[:rows])
        torch.testing.assert_close(got, expected[:rows], rtol=1e-5, atol=1e-5, equal_nan=True)
        torch.testing.assert_close(got[:, 6], expected[:rows, 6], rtol=1e-5, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_an_embeddings(library: Library, dtype: torch.dtype) -> None:
    _, weight = make(1, 70, 24, dtype)
    weight[3, 0], weight[4, 0] = torch.nan, torch.finfo(dtype).smallest_normal / 2
    matrix = PackedMatrix(library, weight)
    ids = torch.tensor([[0, 69, 3], [33, 4, 0]])
    assert torch.equal(matrix.rows(ids).view(torch.int32), weight.float()[ids].view(torch.int32))
    for bad in (-1, 70):
        with pytest.raises(IndexError, match=r"not in \[0, 70\)"):
            matrix.rows(torch.tensor([0, bad]))


def test_rows_may_lie_apart_and_none_is_none(library: Library) -> None:
    x, weight = make(9, 50, 40, torch.float32)
    matrix = PackedMatrix(library, weight)
    apart = torch.zeros(9, 100)[:, 10:50]
    apart[:] = x
    assert torch.equal(matrix(apart), matrix(x))
    assert torch.equal(matrix(apart.T.contiguous().T), matrix(x))
    assert matrix(x[:0]).shape == (0, 50)


def test_values_that_fit_are_kept_in_sixteen_bits() -> None:
    weight = torch.randn(8, 8)
    assert narrowest(weight) is weight
    for dtype in DTYPES[1:]:
        narrow = narrowest(weight.to(dtype).float())
        assert torch.equal(narrow, weight.to(dtype)) and narrow.dtype == dtype
    late = weight.bfloat16().float()
    late[7, 7] = 1 + 2**-20
    assert narrowest(late) is late
    assert narrowest(torch.full((2, 2), torch.nan)).isnan().all()


def test_other_tensors_are_refused(library: Library) -> None:
    with pytest.raises(UnsupportedShape, match="a weight must be"):
        PackedMatrix(library, torch.zeros(4, 4, dtype=torch.float64))
    with pytest.raises(UnsupportedShape, match="a weight must be"):
        PackedMatrix(library, torch.zeros(4))
    matrix = PackedMatrix(library, torch.zeros(4, 4))
    for x in (torch.zeros(1, 5), torch.zeros(1, 4).bfloat16(), torch.zeros(4)):
        with pytest.raises(UnsupportedShape, match="x must be float32"):
            matrix(x)


def test_matrices_share_memory_and_do_not_overlap(library: Library) -> None:
    memory = PackedMemory()
    weights = [make(1, n, depth, torch.float32)[1] for n, depth in SHAPES]
    matrices = [PackedMatrix(library, weight, memory) for weight in weights]
    for weight, matrix in zip(weights, matrices, strict=True):
        assert torch.equal(matrix.rows(torch.arange(len(weight))), weight)
