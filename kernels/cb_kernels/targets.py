"""The devices that the Triton kernels ship configurations for, and what each cannot do.

Importable without Triton: `check_support` is what an engine asks at start, before anything heavy happens.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

import torch

MIN_TRITON = (3, 4)
OTHER_BACKEND = "use attention_backend='torch' instead"


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of device, as Triton's compiler names it.

    Attributes:
        backend, arch, warp_size: what `triton.backends.compiler.GPUTarget` takes.
        shared_bytes: most shared memory a program may use.
        programs: how many programs keep the largest member of the family busy.
        fp8: whether float8_e4m3fn loads compile for it.
    """

    backend: str
    arch: int | str
    warp_size: int
    shared_bytes: int
    programs: int
    fp8: bool


TARGETS: dict[str, Target] = {
    # Also what sm_86, sm_89 and sm_120 use: their programs may hold 99 KiB.
    "sm_80": Target("cuda", 80, 32, 99 * 1024, 4 * 108, fp8=False),
    "sm_90": Target("cuda", 90, 32, 227 * 1024, 4 * 132, fp8=True),
    "sm_100": Target("cuda", 100, 32, 227 * 1024, 4 * 148, fp8=True),
    "gfx942": Target("hip", "gfx942", 64, 64 * 1024, 2 * 304, fp8=True),
}


def target_of(device: torch.device) -> str:
    """The name in `TARGETS` whose configurations fit `device`; a CPU, where only the interpreter runs, counts as sm_90.

    Raises:
        ValueError: a GPU older than sm_80, or not CUDA or ROCm.
    """
    if device.type == "cpu":
        return "sm_90"
    if device.type != "cuda":
        raise ValueError(f"the Triton kernels run on CUDA and ROCm devices, not on '{device.type}'; {OTHER_BACKEND}")
    if torch.version.hip is not None:
        return "gfx942"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise ValueError(
            f"the Triton kernels need compute capability 8.0, this GPU has {major}.{minor}; {OTHER_BACKEND}"
        )
    return {9: "sm_90", 10: "sm_100"}.get(major, "sm_80")


def check_support(
    device: torch.device, *, head_dim: int, num_heads: int, num_kv_heads: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    """Returns where the attention kernel can serve a model of this shape on `device`.

    Raises:
        ValueError: names what cannot be served and which backend to use instead.
    """
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        raise ValueError(
            f"attention_backend='triton' needs the package triton, which is not installed; {OTHER_BACKEND}"
        ) from None
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_TRITON:
        raise ValueError(f"triton {version} is too old: 3.4 or newer is needed; {OTHER_BACKEND}")
    target = TARGETS[target_of(device)]
    if not 1 <= head_dim <= 256:
        raise ValueError(f"head_dim must be between 1 and 256 for the Triton kernel, got {head_dim}; {OTHER_BACKEND}")
    if num_heads % num_kv_heads or num_heads // num_kv_heads > 128:
        raise ValueError(
            f"{num_heads} query heads over {num_kv_heads} K/V heads: the Triton kernel needs a multiple of up to 128; "
            f"{OTHER_BACKEND}"
        )
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(
            f"dtype must be bfloat16, float16 or float32 for the Triton kernel, got {dtype}; {OTHER_BACKEND}"
        )
    if kv_dtype != dtype and kv_dtype != torch.float8_e4m3fn:
        raise ValueError(f"the K/V cache must be {dtype} or torch.float8_e4m3fn, got {kv_dtype}; {OTHER_BACKEND}")
    if kv_dtype == torch.float8_e4m3fn and not target.fp8:
        raise ValueError(
            f"an fp8 K/V cache needs sm_90 or newer; keep the cache in {dtype} on this GPU: kv_cache_dtype='auto'"
        )
