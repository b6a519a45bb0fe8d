"""Large tensors on the CPU, in pages that fit their size."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import sys
from collections.abc import Sequence

import torch


def zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose pages are taken from the system only when they are first written.

    Huge pages, where the system has them, spare a step that streams hundreds of megabytes most of its address look-ups.
    """
    size = max(1, math.prod(shape)) * dtype.itemsize
    if sys.platform == "win32":
        memory = mmap.mmap(-1, size)
    else:  # private: Linux has other rules, off by default, for huge pages of shared memory
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # page-aligned, zero, not yet there
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)[: math.prod(shape)].view(tuple(shape))


def return_freed() -> None:
    """Gives memory that was freed back to the system: glibc keeps that of unpacked weights for allocations to come."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
