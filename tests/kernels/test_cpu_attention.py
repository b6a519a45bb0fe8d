"""The native CPU attention against float64, and what its rows must not depend on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest
import torch
from cb_kernels.cpu import Library, UnsupportedShape, info, supports
from cb_kernels.paged_attention.reference import reference_attention

BOTH = (torch.float32, torch.bfloat16)


class Case(NamedTuple):
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens: torch.Tensor


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def make_case(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
) -> Case:
    """Two layers' cache, the second one's views; NaN where no key is, table entries out of range where no block is."""
    generator = torch.Generator().manual_seed(7)
    seq_lens = [query + context for query, context in zip(query_lens, context_lens, strict=True)]
    blocks = [-(-length // block_size) for length in seq_lens]
    kv = torch.full((sum(blocks) + 2, 2, 2, heads[1], block_size, head_dim), float("nan"), dtype=dtype)
    order = (torch.randperm(sum(blocks) + 1, generator=generator) + 1).tolist()
    tables = torch.full((len(seq_lens), max(blocks) + 2), 2**30, dtype=torch.int32)
    for row, (count, length) in enumerate(zip(blocks, seq_lens, strict=True)):
        for i in range(count):
            tables[row, i] = block = order.pop()
            filled = min(block_size, length - i * block_size)
            kv[block, :, :, :, :filled] = torch.randn(2, 2, heads[1], filled, head_dim, generator=generator).to(dtype)
    q = torch.randn(sum(query_lens), heads[0], head_dim, generator=generator).to(dtype)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32)
    return Case(q, kv[:, 1, 0], kv[:, 1, 1], tables, torch.tensor(seq_lens, dtype=torch.int32), cu_seqlens)


def attend(library: Library, case: Case, **options: object) -> torch.Tensor:
    out = torch.full_like(case.q, float("nan"))
    batch = library.batch(case.block_tables, case.seq_lens, case.cu_seqlens)
    batch.attend(case.q, case.k_cache, case.v_cache, out, **{"scale": case.q.shape[2] ** -0.5, **options})  # type: ignore[arg-type]
    return out


def assert_close(case: Case, out: torch.Tensor, **options: object) -> None:
    exact = reference_attention(case.q.double(), *case[1:], **{"scale": case.q.shape[2] ** -0.5, **options})  # type: ignore[arg-type]
    if out.dtype == torch.float32:
        assert (out.double() - exact).abs().max().item() <= 2e-6
        return
    rounded = exact.to(out.dtype).double()
    # An ulp of the result, but of no number below 2^-8: smaller ones are sums that cancelled.
    ulp = torch.ldexp(torch.ones_like(exact), torch.frexp(rounded.abs().clamp_min(2**-8)).exponent - 8)
    assert ((out.double() - rounded).abs() / ulp).max().item() <= 1.0


SHAPES = [  # heads, head_dim, block_size
    ((3, 3), 64, 16),
    ((9, 3), 64, 32),
    ((4, 1), 40, 1),
    ((7, 1), 80, 64),
    ((8, 1), 128, 16),
    ((4, 2), 32, 32),
    ((2, 1), 96, 24),
    ((20, 1), 8, 32),
    ((4, 2), 256, 64),
]
RAGGED = {
    "decode": ([1, 1, 1], [0, 31, 300]),
    "chunk": ([45], [70]),
    "mixed": ([1, 33, 1, 3, 0], [64, 0, 257, 250, 5]),
}


@pytest.mark.parametrize("dtype", BOTH, ids=str)
@pytest.mark.parametrize(("heads", "head_dim", "block_size"), SHAPES)
@pytest.mark.parametrize("ragged", RAGGED)
def test_equals_float64(
    library: Library, ragged: str, heads: tuple[int, int], head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    case = make_case(*RAGGED[ragged], heads, head_dim, block_size, dtype)
    assert_close(case, attend(library, case))


@pytest.mark.parametrize("dtype", BOTH, ids=str)
@pytest.mark.parametrize("block_size", [1, 16, 32])
@pytest.mark.parametrize(
    "options",
    [{"window": 1}, {"window": 37}, {"softcap": 3.0}, {"softcap": 30.0, "window": 300}, {"sinks": True, "window": 20}],
    ids=str,
)
def test_window_softcap_and_sinks(
    library: Library, options: dict[str, object], block_size: int, dtype: torch.dtype
) -> None:
    case = make_case(*RAGGED["mixed"], (6, 2), 64, block_size, dtype)
    if "sinks" in options:
        options = {**options, "sinks": torch.tensor([-2.0, 0.0, 0.5, 1.0, 4.0, 30.0])}
    assert_close(case, attend(library, case, **options), **options)


@pytest.mark.parametrize("dtype", BOTH, ids=str)
@pytest.mark.parametrize("scale", [-0.125, 0.0])
def test_the_scale_may_have_any_sign(library: Library, scale: float, dtype: torch.dtype) -> None:
    case = make_case(*RAGGED["mixed"], (6, 2), 64, 32, dtype)
    assert_close(case, attend(library, case, scale=scale), scale=scale)


def test_blocks_that_left_the_window_are_never_read(library: Library) -> None:
    case = make_case([1, 20], [200, 200], (4, 2), 64, 16, torch.float32)
    expected = attend(library, case, window=32)
    case.block_tables[:, : (200 - 32) // 16] = 2**30
    assert torch.equal(attend(library, case, window=32), expected)


@pytest.mark.parametrize("dtype", BOTH, ids=str)
@pytest.mark.parametrize("ragged", [*RAGGED.values(), ([1], [1500]), ([50], [700])], ids=str)
def test_thread_count_changes_no_bit(library: Library, ragged: tuple[list[int], list[int]], dtype: torch.dtype) -> None:
    case = make_case(*ragged, (6, 2), 64, 32, dtype)
    outputs = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        outputs.append(attend(library, case))
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    assert_close(case, outputs[0])


@pytest.mark.parametrize("dtype", BOTH, ids=str)
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("head_dim", [40, 64])
@pytest.mark.parametrize("block_size", [16, 24])
def test_a_row_is_the_same_in_any_chunk_and_as_a_decode(
    library: Library, block_size: int, head_dim: int, window: int, dtype: torch.dtype
) -> None:
    length = 301
    whole = make_case([length], [0], (3, 1), head_dim, block_size, dtype)
    expected = attend(library, whole, window=window)
    for cuts in ([0, 1, 2, 150, 290, length], [0, 33, 64, 299, 300, length]):
        for first, last in itertools.pairwise(cuts):
            part = whole._replace(
                q=whole.q[first:last],
                seq_lens=torch.tensor([last], dtype=torch.int32),
                cu_seqlens=torch.tensor([0, last - first], dtype=torch.int32),
            )
            assert torch.equal(attend(library, part, window=window), expected[first:last])


@pytest.mark.parametrize("dtype", BOTH, ids=str)
def test_neighbours_change_no_bit(library: Library, dtype: torch.dtype) -> None:
    case = make_case([1, 40, 1, 7], [290, 60, 5, 300], (6, 2), 64, 32, dtype)
    together = attend(library, case)
    for seq in range(4):
        first, last = int(case.cu_seqlens[seq]), int(case.cu_seqlens[seq + 1])
        alone = case._replace(
            q=case.q[first:last],
            block_tables=case.block_tables[seq : seq + 1],
            seq_lens=case.seq_lens[seq : seq + 1],
            cu_seqlens=torch.tensor([0, last - first], dtype=torch.int32),
        )
        assert torch.equal(attend(library, alone), together[first:last])


def test_one_batch_serves_layers_of_different_windows(library: Library) -> None:
    case = make_case(*RAGGED["mixed"], (6, 2), 64, 32, torch.float32)
    batch = library.batch(case.block_tables, case.seq_lens, case.cu_seqlens)
    for window in (0, 16, 0):
        out = torch.empty_like(case.q)
        batch.attend(case.q, case.k_cache, case.v_cache, out, scale=0.125, window=window)
        assert_close(case, out, window=window)


def test_strided_queries_and_outputs(library: Library) -> None:
    case = make_case([5, 1], [3, 40], (4, 2), 64, 32, torch.float32)
    merged = torch.zeros(6, 8, 64)  # q beside k and v, as a merged projection leaves it
    merged[:, :4] = case.q
    target = torch.zeros(6, 4, 128)
    batch = library.batch(case.block_tables, case.seq_lens, case.cu_seqlens)
    batch.attend(merged[:, :4], case.k_cache, case.v_cache, target[:, :, :64], scale=0.125)
    assert torch.equal(target[:, :, :64], attend(library, case))
    assert target[:, :, 64:].abs().max() == 0


@pytest.mark.parametrize("dtype", BOTH, ids=str)
def test_write_kv_puts_rows_at_their_slots_and_skips_minus_one(library: Library, dtype: torch.dtype) -> None:
    kv = torch.zeros(3, 2, 2, 2, 4, 16, dtype=dtype)
    rows = torch.arange(5 * 6 * 16).reshape(5, 6, 16).to(dtype)
    slots = torch.tensor([9, -1, 0, 4, 7])
    library.write_kv(rows[:, 2:4], rows[:, 4:], kv[:, 1, 0], kv[:, 1, 1], slots)
    expected = torch.zeros_like(kv)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot // 4, 1, 0, :, slot % 4] = rows[token, 2:4]
            expected[slot // 4, 1, 1, :, slot % 4] = rows[token, 4:]
    assert torch.equal(kv, expected)


@pytest.mark.parametrize(("head_dim", "dtype"), [(36, torch.float32), (264, torch.float32), (64, torch.float16)])
def test_shapes_for_the_torch_backend_are_refused(native_kernels: Library, head_dim: int, dtype: torch.dtype) -> None:
    case = make_case([1], [3], (2, 1), head_dim, 16, dtype)
    assert not supports(head_dim, dtype)
    with pytest.raises(UnsupportedShape, match=f"head_dim {head_dim}"):
        attend(native_kernels, case)


def test_info_names_the_instruction_set(native_kernels: Library) -> None:
    assert info()["isa"] == native_kernels.isa
    assert str(info()["path"]).endswith("libcb_cpu.so")
