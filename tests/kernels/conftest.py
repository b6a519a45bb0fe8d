"""The native CPU library, switched to one instruction set after another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cb_kernels.cpu import Library
from cb_kernels.cpu.binding import ISA_VARIABLE, LoadError, Native

ALL = ("portable", "avx2", "avx512", "avx512_bf16", "amx")
WITH_PRODUCTS = ("avx512_bf16", "amx")  # of bfloat16: these run whole layers in it


def switched(isa: str, monkeypatch: pytest.MonkeyPatch, native_kernels: Library) -> Iterator[Library]:
    torch_library = torch.__path__[0] + "/lib/libtorch_cpu.so"
    monkeypatch.setenv(ISA_VARIABLE, isa)
    try:
        library = Library(Native(torch_library))
    except LoadError:
        pytest.skip(f"this CPU or compiler lacks {isa}")
    yield library
    monkeypatch.setenv(ISA_VARIABLE, native_kernels.isa)
    Native(torch_library)


@pytest.fixture(params=ALL)
def library(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, native_kernels: Library
) -> Iterator[Library]:
    """Skips the instruction sets that this CPU lacks."""
    yield from switched(request.param, monkeypatch, native_kernels)


@pytest.fixture(params=WITH_PRODUCTS)
def bf16_library(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, native_kernels: Library
) -> Iterator[Library]:
    """Skips the instruction sets that this CPU lacks."""
    yield from switched(request.param, monkeypatch, native_kernels)


@pytest.fixture
def amx_library(monkeypatch: pytest.MonkeyPatch, native_kernels: Library) -> Iterator[Library]:
    """Skips where this CPU has no tiles."""
    yield from switched("amx", monkeypatch, native_kernels)
