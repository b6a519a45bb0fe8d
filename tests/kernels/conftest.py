"""The native CPU library, switched to one instruction set after another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cb_kernels.cpu import Library, load
from cb_kernels.cpu.binding import ISA_VARIABLE, LoadError, Native


@pytest.fixture(params=("portable", "avx2", "avx512", "avx512_bf16", "amx"))
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    """Skips what this CPU lacks; without a build it fails, for the project's own checks have a compiler."""
    native = load()
    assert native is not None, "run python -m cb_kernels.cpu.build"
    torch_library = torch.__path__[0] + "/lib/libtorch_cpu.so"
    monkeypatch.setenv(ISA_VARIABLE, request.param)
    try:
        switched = Library(Native(torch_library))
    except LoadError:
        pytest.skip(f"this CPU or compiler lacks {request.param}")
    yield switched
    monkeypatch.setenv(ISA_VARIABLE, native.isa)
    Native(torch_library)
