"""Families of decoder layers: by which names a layer holds its parts. One row per family.

A row says nothing of what the parts compute: that is read off the modules (features.py) and compared with their own
forward before it is relied on (fused.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Family:
    """Names of submodules and attributes; a layer is of the family if it has these submodules and no others.

    Attributes:
        models: for documentation and log lines.
        before_attention, after_attention, before_mlp, after_mlp: norms of the layer; None: there is none. Those after
            a part are applied before its result is added to the residual.
        qkv, gate_up: the projections whose results side by side are q, k and v, or gate and up.
        head_norms: norms of q and k before the rotary embedding, of each head or of all heads together.
        idle: submodules that do nothing when serving.
        residual_multiplier: attribute of the layer that scales both parts before they are added, or None.
        uses_rope: attribute of the attention that says whether it rotates, or None: it always does.
    """

    models: str
    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    head_norms: tuple[str, str] | None = None
    out: str = "o_proj"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    activation: str = "act_fn"
    down: str = "down_proj"
    idle: tuple[str, ...] = ()
    residual_multiplier: str | None = None
    uses_rope: str | None = None

    @property
    def norms(self) -> tuple[str, ...]:
        named = (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp)
        return tuple(name for name in named if name is not None)


_LLAMA = Family("Llama, Mistral, Qwen2")

FAMILIES: tuple[Family, ...] = (
    _LLAMA,
    replace(_LLAMA, models="Qwen3", head_norms=("q_norm", "k_norm")),
    replace(
        _LLAMA,
        models="Phi-3",
        qkv=("qkv_proj",),
        gate_up=("gate_up_proj",),
        activation="activation_fn",
        idle=("resid_attn_dropout", "resid_mlp_dropout"),
    ),
)
