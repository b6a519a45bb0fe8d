"""Weights packed for the native float32 product, in 16 bits where that loses nothing.

A checkpoint in bfloat16 or float16 that was read as float32 keeps all its values in the 16 bits that it came in: half
the memory, and half of what a product of few rows has to read. The product widens them in registers, which is exact:
results have the bits that a float32 copy would give. A row's result does not depend on the other rows, their number, or
the number of threads.
"""

from __future__ import annotations

import ctypes

import torch

from cb_kernels.cpu import binding
from cb_kernels.cpu.library import Library, UnsupportedShape
from cb_kernels.cpu.memory import zeros

_FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_CHUNK_BYTES = 64 << 20
_LINE_BYTES = 64
_LINE_FLOATS = _LINE_BYTES // 4
# At an even number of cache lines from row to row, the rows that a product works on share half of the L1 cache or less.
_EVEN_LINES = 2 * _LINE_FLOATS
_FEW_ROWS = 12
_COMPARED_AT_ONCE = 1 << 20  # elements, so that copies for the comparison stay small


class PackedMemory:
    """Memory that packed matrices share, in pieces large enough for huge pages; taken from the system when written."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """`count` zeros at the begin of a cache line."""
        size = -(-count * dtype.itemsize // _LINE_BYTES) * _LINE_BYTES
        if size > self._free.numel():
            self._free = zeros((max(size, _CHUNK_BYTES),), torch.uint8)
        taken, self._free = self._free[:size], self._free[size:]
        return taken[: count * dtype.itemsize].view(dtype)


class PackedMatrix:
    """A weight [n, depth] in the native product's order.

    Args:
        weight: float32, bfloat16 or float16, as torch's modules hold it: [out features, in features].
        memory: where it goes; its own by default.

    Raises:
        UnsupportedShape: another dtype or number of dimensions.
    """

    def __init__(self, library: Library, weight: torch.Tensor, memory: PackedMemory | None = None) -> None:
        if weight.dim() != 2 or weight.dtype not in _FORMATS:
            raise UnsupportedShape(
                f"a weight must be [n, depth] in float32 or 16 bits, not {weight.dtype} {weight.shape}"
            )
        native = library.native
        weight = narrowest(weight).contiguous()
        self.n, self.depth = weight.shape
        self.storage = weight.dtype
        count = -(-self.n // native.panel) * native.panel * self.depth
        self._data = (memory or PackedMemory()).take(count, weight.dtype)
        self._native = native
        native.pack_panels(
            weight.data_ptr(), weight.stride(0), self.n, self.depth, _FORMATS[weight.dtype], self._data.data_ptr()
        )
        self.panels = binding.Panels(self._data.data_ptr(), self.n, self.depth, _FORMATS[weight.dtype])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x float32 [rows, depth] times the weight's transpose: float32 [rows, n]."""
        if x.dtype != torch.float32 or x.dim() != 2 or x.shape[1] != self.depth:
            raise UnsupportedShape(f"x must be float32 [rows, {self.depth}], not {x.dtype} {tuple(x.shape)}")
        if x.stride(1) != 1 or (x.shape[0] > _FEW_ROWS and x.stride(0) % _EVEN_LINES == 0):
            lines = -(-self.depth // _LINE_FLOATS) | 1
            x = x.new_empty(x.shape[0], lines * _LINE_FLOATS)[:, : self.depth].copy_(x)
        out = torch.empty(x.shape[0], self.n)
        call = binding.Multiply(x.data_ptr(), self.panels, None, out.data_ptr(), x.stride(0), out.stride(0), 0)
        self._native.multiply(ctypes.addressof(call), x.shape[0], torch.get_num_threads())
        return out

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """The weights of outputs `ids`, int64 of any shape, in float32: what an embedding looks up.

        Raises:
            IndexError: an id is none of the n.
        """
        ids = ids.contiguous()
        out = torch.empty(*ids.shape, self.depth)
        if self._native.unpack_outputs(ctypes.addressof(self.panels), ids.data_ptr(), ids.numel(), out.data_ptr()):
            raise IndexError(f"an index is not in [0, {self.n})")
        return out


def narrowest(weight: torch.Tensor) -> torch.Tensor:
    """The same values in 16 bits where they fit: bfloat16 or float16; else `weight` itself."""
    if weight.dtype != torch.float32:
        return weight
    for dtype in (torch.bfloat16, torch.float16):
        if _fits(weight[:1], dtype) and _fits(weight, dtype):  # one row tells of most matrices that do not
            return weight.to(dtype)
    return weight


def _fits(weight: torch.Tensor, dtype: torch.dtype) -> bool:
    rows = max(1, _COMPARED_AT_ONCE // max(1, weight.shape[1]))
    return all(
        torch.equal(part.to(dtype).float().view(torch.int32), part.view(torch.int32)) for part in weight.split(rows)
    )
