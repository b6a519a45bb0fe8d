"""All layers as one native call: right, and every row's bits its own."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from cb_kernels.cpu import Library, UnsupportedShape
from cb_kernels.cpu.decoder import Decoder, DecoderShape, LayerWeights, runs_decoder

from integration.benchmarks.neighbour import neighbour

from .conftest import ALL, WITH_PRODUCTS, switched

# Sizes that are no multiples of the product's panels of 32: 48 = 32 + 16.
SHAPE = DecoderShape(hidden_size=48, intermediate_size=80, num_heads=3, num_kv_heads=1, head_dim=16)
# What float32 allows beside: no size is a multiple of 16.
ODD = DecoderShape(hidden_size=40, intermediate_size=75, num_heads=3, num_kv_heads=1, head_dim=8)
BLOCK = 16
Segment = tuple[int, int]  # query rows, keys
CASES = [*[(isa, torch.bfloat16) for isa in WITH_PRODUCTS], *[(isa, torch.float32) for isa in ALL]]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{str(case[1])[6:]}")
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, native_kernels: Library) -> Iterator[Any]:
    """(library of one instruction set, dtype of the activations)."""
    isa, dtype = request.param
    for library in switched(isa, monkeypatch, native_kernels):
        yield library, dtype


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def weights(
    seed: int,
    window: int = 0,
    extras: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    shape: DecoderShape = SHAPE,
) -> LayerWeights:
    """`extras`: biases and norms of the heads."""
    generator = torch.Generator().manual_seed(seed)

    def make(*size: int) -> torch.Tensor:
        return (torch.randn(*size, generator=generator) * size[-1] ** -0.5).to(dtype)

    def norm(size: int) -> tuple[torch.Tensor, float]:
        return (torch.rand(size, generator=generator) + 0.5).to(dtype), 1e-5

    s = shape
    return LayerWeights(
        input_norm=norm(s.hidden_size),
        middle_norm=norm(s.hidden_size),
        head_norms=(norm(s.head_dim), norm(s.head_dim)) if extras else None,
        qkv=make(s.qkv_size, s.hidden_size),
        qkv_bias=make(s.qkv_size) if extras else None,
        out=make(s.hidden_size, s.q_size),
        out_bias=make(s.hidden_size) if extras else None,
        gate=make(s.intermediate_size, s.hidden_size),
        up=make(s.intermediate_size, s.hidden_size),
        down=make(s.hidden_size, s.intermediate_size),
        scale=s.head_dim**-0.5,
        window=window,
    )


class World:
    """Caches for two layers and the inputs of sequences, each a function of (sequence, position) only."""

    def __init__(self, kernels: Any, layers: list[LayerWeights], shape: DecoderShape = SHAPE) -> None:
        self.library, self.dtype = kernels
        self.layers = layers
        self.shape = shape
        self.decoder = Decoder(self.library, shape, iter(layers), self.dtype)

    def run(self, segments: list[Segment], prompt: int = 40) -> torch.Tensor:
        """Rows of all segments after the layers; the earlier keys of a sequence are computed by an own call first."""
        generator = torch.Generator().manual_seed(7)
        kv = torch.zeros(
            8 * len(segments), len(self.layers), 2, self.shape.num_kv_heads, BLOCK, self.shape.head_dim
        ).to(self.dtype)
        caches = [(kv[:, i, 0], kv[:, i, 1]) for i in range(len(self.layers))]
        states = torch.randn(len(segments), 128, self.shape.hidden_size, generator=generator).to(self.dtype)
        for i, (rows, keys) in enumerate(segments):
            if keys > rows:
                self.step(states, caches, [(i, 0, keys - rows)])
        return self.step(states, caches, [(i, keys - rows, keys) for i, (rows, keys) in enumerate(segments)])[0]

    def step(
        self, states: torch.Tensor, caches: list[Any], parts: list[tuple[int, int, int]]
    ) -> tuple[torch.Tensor, float]:
        positions = torch.tensor([p for _, begin, end in parts for p in range(begin, end)])
        angles = positions[:, None] / 100 ** (torch.arange(self.shape.head_dim) % (self.shape.head_dim // 2) / 8)
        hidden = torch.cat([states[i, begin:end] for i, begin, end in parts])
        tables = torch.tensor([range(8 * i, 8 * i + 8) for i, _, _ in parts], dtype=torch.int32)
        rows = [end - begin for _, begin, end in parts]
        batch = self.library.batch(
            tables,
            torch.tensor([end for _, _, end in parts], dtype=torch.int32),
            torch.tensor([0, *itertools.accumulate(rows)], dtype=torch.int32),
        )
        slots = torch.tensor([8 * i * BLOCK + p for i, begin, end in parts for p in range(begin, end)])
        kept_back = self.decoder(hidden, angles.cos().to(self.dtype), angles.sin().to(self.dtype), slots, batch, caches)
        return hidden, kept_back


@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_row_has_the_same_bits_alone_and_among_others(
    kernels: Any, threads: None, num_threads: int, extras: bool
) -> None:
    layers = [weights(0, extras=extras), weights(1, window=9, extras=extras)]
    torch.set_num_threads(1)
    alone = World(kernels, layers).run([(1, 50)])
    torch.set_num_threads(num_threads)
    others: list[Segment] = [(1, 50), (1, 3), (37, 37), (9, 70), *[(1, 20 + i) for i in range(30)]]
    assert torch.equal(World(kernels, layers).run(others)[:1], alone)


def test_a_chunk_has_the_bits_of_its_tokens_one_by_one(kernels: Any) -> None:
    world = World(kernels, [weights(0), weights(1, window=9)])
    whole = world.run([(40, 40)])
    for rows in (1, 7, 33):
        assert torch.equal(world.run([(rows, 40)]), whole[-rows:])


def test_pads_of_the_scratch_never_reach_a_result(kernels: Any) -> None:
    world = World(kernels, [weights(0)])
    expected = world.run([(5, 5)])
    world.run([(64, 64), (64, 64)])  # leaves its rows in the scratch
    for name in ("_normed", "_qkv", "_attended", "_gated", "_projected"):
        scratch = getattr(world.decoder, name)
        scratch[5:] = torch.where(scratch[5:] == 0, scratch[5:], torch.nan)  # rows, not the columns that must stay 0
    assert torch.equal(world.run([(5, 5)]), expected)


@pytest.mark.parametrize("extras", [False, True])
def test_layers_equal_their_definition(kernels: Any, extras: bool) -> None:
    layers = [weights(0, extras=extras), weights(1, window=9, extras=extras)]
    error = _error(World(kernels, layers))
    assert error < (0.01 if kernels[1] == torch.bfloat16 else 2e-6)  # two layers of bf16 roundings of 2^-9 each


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_float32_takes_any_size_and_storage(library: Library, dtype: torch.dtype) -> None:
    world = World((library, torch.float32), [weights(0, 0, True, dtype, ODD), weights(1, 9, False, dtype, ODD)], ODD)
    assert _error(world) < 2e-6
    whole = world.run([(40, 40)])
    for rows in (1, 7, 33):
        assert torch.equal(world.run([(rows, 40)]), whole[-rows:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bit_weights_have_the_results_of_float32(
    library: Library, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cb_kernels.cpu.panels.narrowest", lambda weight: weight)
    narrow = weights(0, 9, True, dtype)
    fields = {name: _wide(getattr(narrow, name)) for name in LayerWeights.__dataclass_fields__}
    cases = [[(1, 50)], [(40, 40), (1, 3)]]
    both = [World((library, torch.float32), [layer]) for layer in (narrow, LayerWeights(**fields))]
    for case in cases:
        assert torch.equal(both[0].run(case), both[1].run(case))


def _wide(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_wide(part) for part in value)
    return value.float() if isinstance(value, torch.Tensor) else value


def _error(world: World) -> torch.Tensor:
    """Of 70 rows, relative to the same in float64."""
    shape, dtype = world.shape, world.dtype
    got = world.run([(70, 70)]).double()
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(1, 128, shape.hidden_size, generator=generator).to(dtype)[0, :70].double()
    angles = torch.arange(70)[:, None] / 100 ** (torch.arange(shape.head_dim) % (shape.head_dim // 2) / 8)
    cos, sin = (f.to(dtype).double()[:, None] for f in (angles.cos(), angles.sin()))
    for layer in world.layers:
        x = _layer(x, layer, cos, sin, shape)
    return (got - x).norm() / x.norm()


def _norm(x: torch.Tensor, norm: tuple[torch.Tensor, float]) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + norm[1]).rsqrt() * norm[0].double()


def _layer(x: torch.Tensor, w: LayerWeights, cos: torch.Tensor, sin: torch.Tensor, shape: DecoderShape) -> torch.Tensor:
    """One layer in float64."""

    def product(y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return y @ weight.double().T + (0 if bias is None else bias.double())

    def rotate(y: torch.Tensor) -> torch.Tensor:
        low, high = y.chunk(2, -1)
        return y * cos + torch.cat([-high, low], -1) * sin

    heads = product(_norm(x, w.input_norm), w.qkv, w.qkv_bias).unflatten(1, (-1, shape.head_dim))
    q, k, v = heads.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], 1)
    if w.head_norms is not None:
        q, k = _norm(q, w.head_norms[0]), _norm(k, w.head_norms[1])
    scores = torch.einsum("qhd,kd->hqk", rotate(q), rotate(k)[:, 0]) * w.scale
    distance = torch.arange(len(x))[:, None] - torch.arange(len(x))
    hidden = (distance < 0) | (distance >= w.window if w.window else False)
    attended = torch.einsum("hqk,kd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v[:, 0])
    x = x + product(attended.flatten(1), w.out, w.out_bias)
    y = _norm(x, w.middle_norm)
    return x + product(torch.nn.functional.silu(product(y, w.gate)) * product(y, w.up), w.down)


def test_other_sizes_and_dtypes_are_refused(kernels: Any) -> None:
    library, dtype = kernels
    odd = DecoderShape(hidden_size=44, intermediate_size=80, num_heads=3, num_kv_heads=1, head_dim=16)
    assert runs_decoder(library, SHAPE, dtype)
    assert not runs_decoder(library, odd, dtype)
    assert not runs_decoder(library, SHAPE, torch.float16)
    with pytest.raises(UnsupportedShape, match="hidden_size=44"):
        Decoder(library, odd, [weights(0)], dtype)
    world = World(kernels, [weights(0)])
    states, slots = torch.zeros(1, SHAPE.hidden_size, dtype=dtype), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(UnsupportedShape, match=f"hidden must be {dtype}"):
        world.decoder(states.double(), states, states, slots, None, [])  # type: ignore[arg-type]
    with pytest.raises(UnsupportedShape, match="slots must be contiguous int64"):
        cos = torch.zeros(1, SHAPE.head_dim, dtype=dtype)
        world.decoder(states, cos, cos, slots.int(), None, [])  # type: ignore[arg-type]


def test_bf16_wants_bf16_weights(bf16_library: Library) -> None:
    with pytest.raises(UnsupportedShape, match="bfloat16 must be so too, not torch.float32"):
        Decoder(bf16_library, SHAPE, [weights(0, dtype=torch.float32)], torch.bfloat16)


def test_time_that_other_processes_took_is_told(kernels: Any, threads: None) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    torch.set_num_threads(2)
    world = World(kernels, [weights(0)])
    states = torch.randn(1, 128, SHAPE.hidden_size).to(kernels[1])
    kv = torch.zeros(8, 1, 2, SHAPE.num_kv_heads, BLOCK, SHAPE.head_dim).to(kernels[1])
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        with ExitStack() as stack:
            for core in cores:
                stack.enter_context(neighbour(core, 60))
            kept_back, end = 0.0, time.monotonic() + 30
            while kept_back < 0.001 and time.monotonic() < end:
                kept_back = world.step(states, [(kv[:, 0, 0], kv[:, 0, 1])], [(0, 0, 100)])[1]
    finally:
        os.sched_setaffinity(0, before)
    assert 0.001 <= kept_back < 1
