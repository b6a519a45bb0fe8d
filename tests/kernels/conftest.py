"""The native CPU library, switched to one instruction set after another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cb_kernels.cpu import Library
from cb_kernels.cpu.binding import ISA_VARIABLE, LoadError, Native


@pytest.fixture(params=("portable", "avx2", "avx512", "avx512_bf16", "amx"))
def library(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, native_kernels: Library
) -> Iterator[Library]:
    """Skips the instruction sets that this CPU lacks."""
    torch_library = torch.__path__[0] + "/lib/libtorch_cpu.so"
    monkeypatch.setenv(ISA_VARIABLE, request.param)
    try:
        switched = Library(Native(torch_library))
    except LoadError:
        pytest.skip(f"this CPU or compiler lacks {request.param}")
    yield switched
    monkeypatch.setenv(ISA_VARIABLE, native_kernels.isa)
    Native(torch_library)
