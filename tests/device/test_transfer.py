"""Arrays that travel together arrive as they were."""

from __future__ import annotations

import numpy as np
import torch

from cb_backend.device.transfer import Arrival, pack, to_device, to_host, unpack

ARRAYS = [
    np.arange(5, dtype=np.int64) - 2**40,
    np.array([[1, -2, 3]], dtype=np.int32),
    np.empty((3, 0), dtype=np.int32),
    np.array([True, False, True]),
    np.arange(6, dtype=np.float32).reshape(2, 3).T,
]


def test_packed_arrays_come_out_with_their_shapes_dtypes_and_values():
    packed = pack(ARRAYS, pin=False)
    assert packed.dtype == torch.uint8
    for array, tensor in zip(ARRAYS, unpack(packed, ARRAYS), strict=True):
        assert tensor.dtype == torch.from_numpy(array.copy()).dtype
        np.testing.assert_array_equal(tensor.numpy(), array)
        assert tensor.data_ptr() % 4 == 0


def test_every_array_begins_at_a_multiple_of_sixteen_bytes():
    packed = pack(ARRAYS, pin=False)
    offsets = [tensor.storage_offset() * tensor.element_size() for tensor in unpack(packed, ARRAYS)]
    assert [offset % 16 for offset in offsets] == [0] * len(ARRAYS)
    assert len(packed) == 48 + 16 + 0 + 16 + 32


def test_on_a_cpu_nothing_is_copied():
    array = np.zeros(3, dtype=np.int64)
    (tensor,) = to_device([array], torch.device("cpu"))
    array[1] = 7
    assert tensor.tolist() == [0, 7, 0]
    assert to_host(tensor) is tensor
    Arrival(torch.device("cpu")).wait()
