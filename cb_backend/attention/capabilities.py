"""What an attention backend declares, and what a model asks of one: data that every choice is derived from."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..kv.storage import KVGeometry


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What one engine asks of its backend.

    `kv_dtype` is what K and V are kept in. `max_decodes`: most sequences with one query token in a step.
    `windows`, `softcap`, `sinks`: whether some layer has them (see `AttentionCall`).
    """

    geometry: KVGeometry
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    max_decodes: int = 1
    windows: bool = False
    softcap: bool = False
    sinks: bool = False


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do.

    Attributes:
        name: what `attention_backend` calls it.
        devices: torch device types that it runs on; None: any.
        auto_devices: those where `attention_backend="auto"` may take it.
        dtypes: of queries, keys and values; None: any.
        head_dims: the head dims that it takes; None: any.
        max_group: most query heads that may share a K/V head; None: any number.
        narrow_kv_dtypes: what K and V may be kept in besides the model's dtype. A backend that has some measures their
            scales before the first request: it has `with_scales`.
        windows, softcap, sinks: whether layers may ask for them.
        graph_safe: what it launches depends on shapes only, so that a CUDA graph may replay it.
        compiles: has kernels to compile before the first request: it has `warm_up`.
        runs_triton: Triton's other kernels (sampling, copies of blocks) run where it does.
        comparison_only: slow; named only by an operator who compares.
        fuses_layers: layers may be rewritten for the native CPU kernels, see `models/layers`.
    """

    name: str
    devices: frozenset[str] | None = None
    auto_devices: frozenset[str] = frozenset()
    dtypes: tuple[torch.dtype, ...] | None = None
    head_dims: range | None = None
    max_group: int | None = None
    narrow_kv_dtypes: frozenset[torch.dtype] = field(default=frozenset())
    windows: bool = True
    softcap: bool = True
    sinks: bool = True
    graph_safe: bool = False
    compiles: bool = False
    runs_triton: bool = False
    fuses_layers: bool = False
    comparison_only: bool = False

    def lack(self, needs: AttentionNeeds) -> str | None:
        """The first thing of `needs` that is not declared here, as the end of a sentence; None: nothing."""
        geometry = needs.geometry
        if self.devices is not None and needs.device.type not in self.devices:
            return f"does not run on {needs.device.type}"
        if self.dtypes is not None and needs.dtype not in self.dtypes:
            return f"takes {_either([_name(dtype) for dtype in self.dtypes])}, not {_name(needs.dtype)}"
        if self.head_dims is not None and geometry.head_dim not in self.head_dims:
            return f"takes head dims {_range(self.head_dims)}, not {geometry.head_dim}"
        heads, kv_heads = geometry.num_heads, geometry.num_kv_heads
        if self.max_group is not None and (heads % kv_heads or heads // kv_heads > self.max_group):
            return f"takes up to {self.max_group} query heads per K/V head, not {heads} over {kv_heads}"
        if needs.kv_dtype != needs.dtype and needs.kv_dtype not in self.narrow_kv_dtypes:
            return f"keeps no K/V in {_name(needs.kv_dtype)} for a model in {_name(needs.dtype)}"
        for feature, what in (("windows", "sliding windows"), ("softcap", "soft-capped scores"), ("sinks", "sinks")):
            if getattr(needs, feature) and not getattr(self, feature):
                return f"has no {what}, which this model's layers ask for"
        return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _either(names: list[str]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _range(values: range) -> str:
    step = f" that are multiples of {values.step}" if values.step > 1 else ""
    return f"from {values[0]} to {values[-1]}{step}"
