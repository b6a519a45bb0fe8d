"""Large tensors lie in memory that the system gives huge pages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cb_kernels.cpu.memory import return_freed, zeros


def mapping(address: int) -> list[str]:
    """The lines of /proc/self/smaps about the mapping that holds `address`."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    heads = [i for i, line in enumerate(lines) if "-" in line.split()[0] and not line.split()[0].endswith(":")]
    for begin, end in zip(heads, [*heads[1:], len(lines)], strict=True):
        low, high = (int(part, 16) for part in lines[begin].split()[0].split("-"))
        if low <= address < high:
            return lines[begin:end]
    raise AssertionError("no mapping holds the address")


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux only")
def test_it_is_private_and_asks_for_huge_pages() -> None:
    tensor = zeros((3, 1 << 20), torch.float32)
    lines = mapping(tensor.data_ptr())
    assert lines[0].split()[1] == "rw-p"
    assert " hg" in next((line for line in lines if line.startswith("VmFlags")), " hg")


def test_it_is_zero_and_may_be_empty() -> None:
    tensor = zeros((5, 7), torch.bfloat16)
    assert tensor.shape == (5, 7) and tensor.dtype == torch.bfloat16 and not tensor.any()
    tensor.fill_(1)
    assert tensor.sum() == 35
    assert zeros((0, 4), torch.float32).shape == (0, 4)


def test_returning_memory_leaves_tensors_as_they_are() -> None:
    kept = torch.arange(1000)
    del_me = [torch.zeros(1 << 18) for _ in range(8)]
    del del_me
    return_freed()
    assert torch.equal(kept, torch.arange(1000))
