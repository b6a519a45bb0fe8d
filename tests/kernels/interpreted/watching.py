"""Sees what a step launches: operators, kernels with their grids and addresses; and fails where it reads a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cb_kernels.kv_copy import launch as kv_copy_launch
from cb_kernels.paged_attention import launch as attention_launch
from cb_kernels.sampling import launch as sampling_launch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

# On a device these wait for everything before them, and cannot be captured.
READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select", "aten::unique")
# Kernel arguments that must lie at one address in every replay of a graph.
FIXED = (
    *("k_ptr", "v_ptr", "table_ptr", "seq_lens_ptr", "cu_seqlens_ptr", "partial_ptr", "lse_ptr", "slots_ptr"),
    *("k_cache_ptr", "v_cache_ptr", "sinks_ptr", "k_scale_ptr", "v_scale_ptr"),
)
KERNELS = (
    (attention_launch, "paged_attention_kernel"),
    (attention_launch, "combine_splits_kernel"),
    (kv_copy_launch, "write_kv_kernel"),
    (kv_copy_launch, "copy_blocks_kernel"),
    (sampling_launch, "adjust_logits_kernel"),
    (sampling_launch, "sample_kernel"),
)


class _Watched:
    """A kernel that notes each launch and then runs unwatched."""

    def __init__(self, kernel: Any, name: str, watch: Watch) -> None:
        self.kernel, self.name, self.watch = kernel, name, watch

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            names = self.kernel.arg_names
            # Intermediate tensors lie in a graph's own memory; here they move. Among them are the K and V that are to
            # be written and, without split keys, the output that the partials' pointers stand for.
            moving: tuple[str, ...] = () if options.get("SPLIT", True) else ("partial_ptr", "lse_ptr")
            if self.name == "write_kv_kernel":
                moving = ("k_ptr", "v_ptr")
            fixed = tuple(
                arg.data_ptr()
                for name, arg in zip(names, args, strict=False)
                if name in FIXED and name not in moving and torch.is_tensor(arg)
            )
            numbers = tuple(arg for arg in args if not torch.is_tensor(arg))
            if self.watch.active:
                self.watch.seen.append((self.name, grid, fixed, numbers, tuple(sorted(options.items()))))
            with self.watch.paused(), _disable_current_modes():
                self.kernel[grid](*args, **options)

        return launch


class Watch(TorchDispatchMode):
    """`seen`: what was launched inside, in order. Inside, reading a tensor's values is an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.active = False
        for module, name in KERNELS:
            monkeypatch.setattr(module, name, _Watched(getattr(module, name), name, self))
        for method in ("tolist", "numpy", "item", "__bool__"):
            monkeypatch.setattr(torch.Tensor, method, self._guarded(getattr(torch.Tensor, method), method))

    def _guarded(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def guarded(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            if self.active:
                raise AssertionError(f"a step reads a tensor of shape {tuple(tensor.shape)} with {name}()")
            return method(tensor, *args, **options)

        return guarded

    @contextmanager
    def paused(self) -> Iterator[None]:
        before, self.active = self.active, False
        try:
            yield
        finally:
            self.active = before

    @contextmanager
    def watching(self) -> Iterator[None]:
        before, self.active = self.active, True
        try:
            with self:
                yield
        finally:
            self.active = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().startswith(READS):
            raise AssertionError(f"a step reads a tensor with {func.name()}")
        self.seen.append((func.name(), _shapes(args)))
        return func(*args, **(kwargs or {}))


def _shapes(value: Any) -> Any:
    """Tensors as their shapes, in lists too; all else as it is."""
    if torch.is_tensor(value):
        return tuple(value.shape)
    return [_shapes(item) for item in value] if isinstance(value, (list, tuple)) else value
