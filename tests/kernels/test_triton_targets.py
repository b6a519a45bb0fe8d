"""What an engine is told at start when its device, model or installation cannot use the Triton kernels."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import pytest
import torch
from cb_kernels import targets
from cb_kernels.targets import check_support, target_of

CUDA = torch.device("cuda")
GOOD: dict[str, Any] = {
    "head_dim": 128,
    "num_heads": 32,
    "num_kv_heads": 8,
    "dtype": torch.bfloat16,
    "kv_dtype": torch.bfloat16,
}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    on_capability(monkeypatch, 9, 0)
    monkeypatch.setattr(metadata, "version", lambda name: "3.9.0")


def on_capability(monkeypatch: pytest.MonkeyPatch, major: int, minor: int) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))


@pytest.mark.parametrize(
    "capability, target",
    [((8, 0), "sm_80"), ((8, 9), "sm_80"), ((9, 0), "sm_90"), ((10, 3), "sm_100"), ((12, 0), "sm_80")],
)
def test_each_gpu_has_a_table(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], target: str) -> None:
    on_capability(monkeypatch, *capability)
    assert target_of(CUDA) == target


def test_rocm_has_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert target_of(CUDA) == "gfx942"


def test_what_is_supported_passes() -> None:
    check_support(CUDA, **GOOD)
    check_support(CUDA, **{**GOOD, "kv_dtype": torch.float8_e4m3fn})
    check_support(torch.device("cpu"), **{**GOOD, "head_dim": 80, "dtype": torch.float32, "kv_dtype": torch.float32})


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"head_dim": 512},
            "head_dim must be between 1 and 256 for the Triton kernel, got 512; use attention_backend='torch'",
        ),
        ({"num_heads": 129, "num_kv_heads": 1}, "129 query heads over 1 K/V heads.*use attention_backend='torch'"),
        ({"num_kv_heads": 5}, "32 query heads over 5 K/V heads"),
        ({"dtype": torch.float64}, "dtype must be bfloat16, float16 or float32.*use attention_backend='torch'"),
        ({"kv_dtype": torch.int8}, "the K/V cache must be torch.bfloat16 or torch.float8_e4m3fn, got torch.int8"),
    ],
    ids=str,
)
def test_a_model_it_cannot_serve_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_support(CUDA, **{**GOOD, **change})


def test_fp8_cache_needs_hardware_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    on_capability(monkeypatch, 8, 0)
    with pytest.raises(ValueError, match="fp8 K/V cache needs sm_90 or newer; keep the cache in torch.bfloat16"):
        check_support(CUDA, **{**GOOD, "kv_dtype": torch.float8_e4m3fn})


def test_an_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    on_capability(monkeypatch, 7, 5)
    with pytest.raises(
        ValueError, match="need compute capability 8.0, this GPU has 7.5; use attention_backend='torch'"
    ):
        check_support(CUDA, **GOOD)


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="run on CUDA and ROCm devices, not on 'mps'"):
        check_support(torch.device("mps"), **GOOD)


def test_missing_and_old_triton_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "3.2.0")
    with pytest.raises(ValueError, match="triton 3.2.0 is too old: 3.4 or newer"):
        check_support(CUDA, **GOOD)

    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    with pytest.raises(
        ValueError, match="needs the package triton, which is not installed; use attention_backend='torch'"
    ):
        check_support(CUDA, **GOOD)


def test_targets_can_be_asked_without_triton() -> None:
    assert "triton" not in vars(targets)
