"""What a decoder layer computes, read off its modules: norms, biases, rotary form, activation, multipliers.

Whatever is not understood makes the layer `NotFused`, with the reason; it then keeps its own modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..narrow import NarrowLinear
from .families import FAMILIES, Family

Norm = tuple[torch.Tensor, float]  # weight, epsilon

# Attributes that change nothing in what a layer computes, or whose effect is seen in its attention call.
_KNOWN = {
    "config", "hidden_size", "intermediate_size", "layer_idx", "layer_type", "attention_type", "is_sliding", "training",
    "head_dim", "num_heads", "num_key_value_heads", "num_key_value_groups", "num_attention_heads", "is_causal",
    "scaling", "sliding_window", "attention_dropout", "attn_logit_softcapping", "rotary_fn", "gradient_checkpointing",
}  # fmt: skip
_PROBE_ROWS = 3


class NotFused(Exception):
    """Why a layer keeps its own modules."""


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """A root-mean-square norm. `native`: its weight and epsilon where the native kernel computes the same."""

    module: nn.Module
    native: Norm | None


@dataclass(frozen=True, slots=True)
class LayerFeatures:
    """One layer's parts and what they do. Heads are [num_heads, head_dim] as q, k and v are stacked in `qkv`."""

    kind: str  # its class, for log lines
    layer_idx: int
    before_attention: RMSNorm | None
    after_attention: RMSNorm | None
    before_mlp: RMSNorm | None
    after_mlp: RMSNorm | None
    qkv: tuple[nn.Linear, ...]
    head_norms: tuple[RMSNorm, RMSNorm] | None
    norms_whole_heads: bool  # `head_norms` are of all heads together
    out: nn.Linear
    gate_up: tuple[nn.Linear, ...]
    activation: Callable[[torch.Tensor], torch.Tensor]
    is_silu: bool
    down: nn.Linear
    residual_multiplier: float
    uses_rope: bool
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def mlp_biases(self) -> bool:
        return any(part.bias is not None for part in (*self.gate_up, self.down))

    @property
    def linears(self) -> tuple[nn.Linear, ...]:
        return (*self.qkv, self.out, *self.gate_up, self.down)


def read_features(layer: nn.Module) -> LayerFeatures:
    """The features of a decoder layer whose weights are still in place.

    Raises:
        NotFused: something in it is not understood.
    """
    family = _family(layer)
    attention: Any = layer.self_attn
    mlp: Any = layer.mlp
    _check_attributes(layer, family)
    qkv = _linears(attention, family.qkv, "self_attn")
    (out,) = _linears(attention, (family.out,), "self_attn")
    gate_up = _linears(mlp, family.gate_up, "mlp")
    (down,) = _linears(mlp, (family.down,), "mlp")
    head_dim = getattr(attention, "head_dim", None)
    if not isinstance(head_dim, int) or not isinstance(attention.layer_idx, int):
        raise NotFused("its attention does not say its head_dim and layer_idx")
    num_heads, rest = divmod(out.in_features, head_dim)
    num_kv_heads, odd = divmod(sum(part.out_features for part in qkv) - out.in_features, 2 * head_dim)
    if rest or odd or num_kv_heads < 1 or sum(part.out_features for part in gate_up) != 2 * down.in_features:
        raise NotFused("the sizes of its projections do not fit together")
    activation = getattr(mlp, family.activation)
    names = family.head_norms
    head_norms = None if names is None else (_norm(attention, names[0]), _norm(attention, names[1]))
    whole = head_norms is not None and _width(head_norms[0]) == num_heads * head_dim != head_dim
    if head_norms is not None and not whole and {_width(norm) for norm in head_norms} != {head_dim}:
        raise NotFused(f"its norms of q and k are of {_width(head_norms[0])} numbers")

    def norm(name: str | None) -> RMSNorm | None:
        return None if name is None else _norm(layer, name)

    return LayerFeatures(
        kind=type(layer).__name__,
        layer_idx=attention.layer_idx,
        before_attention=norm(family.before_attention),
        after_attention=norm(family.after_attention),
        before_mlp=norm(family.before_mlp),
        after_mlp=norm(family.after_mlp),
        qkv=qkv,
        head_norms=head_norms,
        norms_whole_heads=whole,
        out=out,
        gate_up=gate_up,
        activation=activation,
        is_silu=_is_silu(activation, down.weight.dtype),
        down=down,
        residual_multiplier=float(getattr(layer, family.residual_multiplier)) if family.residual_multiplier else 1.0,
        uses_rope=bool(getattr(attention, family.uses_rope)) if family.uses_rope else True,
        hidden_size=out.out_features,
        intermediate_size=down.in_features,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )


def _family(layer: nn.Module) -> Family:
    """The row whose names are exactly those of the layer's submodules."""
    found = {
        "": {name for name, _ in layer.named_children()},
        "self_attn": {name for name, _ in getattr(layer, "self_attn", nn.Module()).named_children()},
        "mlp": {name for name, _ in getattr(layer, "mlp", nn.Module()).named_children()},
    }
    nearest: list[str] | None = None
    for family in FAMILIES:
        wanted = {
            "": {"self_attn", "mlp", *family.norms, *family.idle},
            "self_attn": {*family.qkv, family.out, *(family.head_norms or ())},
            "mlp": {*family.gate_up, family.down, family.activation},
        }
        differing = [
            f"{sign} {f'{where}.{name}'.lstrip('.')}"
            for where, names in wanted.items()
            for sign, those in (("has", found[where] - names), ("lacks", names - found[where]))
            for name in sorted(those)
        ]
        if not differing:
            return family
        if nearest is None or len(differing) < len(nearest):
            nearest = differing
    raise NotFused(f"beside the nearest known family, it {', '.join((nearest or [])[:4])}")


def _check_attributes(layer: nn.Module, family: Family) -> None:
    """Refuses parameters, buffers and numbers that no row and no feature speaks of."""
    known = _KNOWN | {family.residual_multiplier, family.uses_rope}
    parts: Any = (("", layer), ("self_attn.", layer.self_attn), ("mlp.", layer.mlp))
    for where, module in parts:
        own: Iterable[str] = (*module._parameters, *module._buffers)
        for name in own:
            raise NotFused(f"{where}{name} is a tensor of a kind that is not known")
        for name, value in vars(module).items():
            if name not in known and not name.startswith("_") and isinstance(value, (int, float)) and value is not None:
                raise NotFused(f"{where}{name} = {value} is not known")


def _linears(owner: Any, names: tuple[str, ...], where: str) -> tuple[nn.Linear, ...]:
    parts = tuple(getattr(owner, name) for name in names)
    for name, part in zip(names, parts, strict=True):
        if type(part) not in (nn.Linear, NarrowLinear):
            raise NotFused(f"{where}.{name} is a {type(part).__name__}, not a plain Linear")
    return parts


def _width(norm: RMSNorm) -> int:
    weight: Any = norm.module.weight
    return int(weight.shape[0])


@torch.no_grad()
def _norm(owner: nn.Module, name: str) -> RMSNorm:
    """Which root-mean-square norm `owner.name` is, by what it does to a few rows."""
    module: Any = getattr(owner, name)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if epsilon is None or weight is None or weight.dim() != 1 or getattr(module, "bias", None) is not None:
        raise NotFused(f"{name} is a {type(module).__name__}, not a root-mean-square norm")
    rows = torch.linspace(-2, 3, _PROBE_ROWS * weight.numel(), dtype=torch.float32).view(_PROBE_ROWS, -1)
    rows = (rows + rows.sin()).to(weight.dtype)
    theirs = module(rows).float()
    normed = rows.float() * (rows.float().square().mean(-1, keepdim=True) + epsilon).rsqrt()
    tolerance = 1e-5 if weight.dtype == torch.float32 else 2e-2
    for offset in (0.0, 1.0):
        if torch.allclose(theirs, normed * (weight.float() + offset), rtol=tolerance, atol=tolerance):
            if offset and weight.dtype != torch.float32:
                return RMSNorm(module, None)  # its sum with 1 is not rounded elsewhere
            return RMSNorm(module, ((weight + offset).detach() if offset else weight.detach(), float(epsilon)))
    raise NotFused(f"{name} ({type(module).__name__}) is a norm that is not known")


@torch.no_grad()
def _is_silu(activation: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> bool:
    x = torch.linspace(-6, 6, 64, dtype=dtype)
    return torch.allclose(activation(x), nn.functional.silu(x), rtol=1e-3, atol=1e-4)
