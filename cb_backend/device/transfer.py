"""Small arrays between host and device without either waiting for the other.

Up: all arrays of a step travel as one pinned transfer. Down: copies start at once and are read after `Arrival.wait`.
An index list given to torch as a Python list would be copied from pageable memory, for which the host waits until the
device has done everything before it; hence everything that indexes a device tensor goes through `to_device`.
On a CPU nothing is copied at all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_ALIGNMENT = 16


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """The arrays as tensors on `device`, of equal shapes and dtypes; on a CPU they share the arrays' memory."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return unpack(pack(arrays, pin=True).to(device, non_blocking=True), arrays)


def pack(arrays: Sequence[np.ndarray], *, pin: bool) -> torch.Tensor:
    """The arrays' bytes one after another, each at a multiple of 16: uint8 `[bytes]`, pinned if asked for."""
    starts, total = _layout(arrays)
    packed = torch.empty(total, dtype=torch.uint8, pin_memory=pin)
    flat = packed.numpy()
    for array, start in zip(arrays, starts, strict=True):
        flat[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return packed


def unpack(packed: torch.Tensor, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """Views of `packed` with the shapes and dtypes of the arrays that it was packed from."""
    starts, _total = _layout(arrays)
    return [
        packed[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for array, start in zip(arrays, starts, strict=True)
    ]


def _layout(arrays: Sequence[np.ndarray]) -> tuple[list[int], int]:
    starts, total = [], 0
    for array in arrays:
        starts.append(total)
        total += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    return starts, total


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in pinned host memory: its values are there once an `Arrival` made after this has been waited for."""
    return tensor if tensor.device.type == "cpu" else tensor.to("cpu", non_blocking=True)


class Arrival:
    """The moment when everything started so far on the current stream of `device` is done."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.current_stream(device).record_event()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()
