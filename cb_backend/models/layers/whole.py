"""All decoder layers of a model as one native call per step (`cb_kernels.cpu.decoder`)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from cb_kernels.cpu.decoder import Decoder, DecoderShape, LayerWeights, runs_decoder
from torch import nn

from ...attention.batch import RaggedBatch
from ...attention.hook import AttentionCall
from ...device.shared_cores import SharedCores
from .features import LayerFeatures
from .products import stacked
from .rotary import widen
from .single import head_norms, qkv_weights

if TYPE_CHECKING:
    from cb_kernels.cpu import Library


class WholeDecoder(nn.Module):
    """Stands in for the layers that `decoder` holds, in place of the first of them."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder
        self.cores = SharedCores()

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        cb_batch: RaggedBatch,
        **ignored: Any,
    ) -> torch.Tensor:
        """hidden_states [1, T, hidden_size], which it overwrites with its result."""
        began = time.monotonic()
        kept_back = run_decoder(self.decoder, hidden_states, position_embeddings, cb_batch)
        ended = time.monotonic()
        self.cores.saw(ended, ended - began, kept_back)
        return hidden_states


class Done(nn.Module):
    """Stands in for a layer whose work an earlier element has done; the others keep their places in the list."""

    def forward(self, hidden_states: torch.Tensor, **ignored: Any) -> torch.Tensor:
        return hidden_states


def run_decoder(
    decoder: Decoder,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    batch: RaggedBatch,
    only: int | None = None,
) -> float:
    """One step, see `Decoder`; `only`: of one layer."""
    cos, sin = widen(position_embeddings[0][0], position_embeddings[1][0], decoder.shape.head_dim)
    prepared = decoder.library.batch(batch.block_tables, batch.seq_lens, batch.cu_seqlens)
    return decoder(hidden_states[0], cos, sin, batch.slots, prepared, batch.storage.layers, only=only)


def shape_of(f: LayerFeatures) -> DecoderShape:
    return DecoderShape(f.hidden_size, f.intermediate_size, f.num_heads, f.num_kv_heads, f.head_dim)


def obstacle(
    layers: Sequence[LayerFeatures], calls: Sequence[AttentionCall], library: Library, dtype: torch.dtype
) -> str | None:
    """What of the layers the native decoder cannot do; None: it can do all."""
    shapes = {shape_of(f) for f in layers}
    if len(shapes) != 1:
        return "layers of several shapes"
    if [f.layer_idx for f in layers] != list(range(len(layers))):
        return "layers out of order"
    for f, call in zip(layers, calls, strict=True):
        norms = (f.before_attention, f.before_mlp, *(f.head_norms or ()))
        if f.after_attention is not None or f.after_mlp is not None:
            return "norms after attention or MLP"
        if any(norm is None or norm.native is None for norm in norms) or f.norms_whole_heads:
            return "norms of another kind"
        if f.mlp_biases:
            return "biases in the MLP"
        if not f.is_silu:
            return "an activation that is not SiLU"
        if f.residual_multiplier != 1.0:
            return "a residual multiplier"
        if not f.uses_rope:
            return "layers without a rotary embedding"
        if call.softcap or call.sinks is not None:
            return "soft-capped scores or sinks"
    if not runs_decoder(library, next(iter(shapes)), dtype):
        return f"sizes or {str(dtype).removeprefix('torch.')} on {library.isa}"
    return None


def layer_weights(f: LayerFeatures, call: AttentionCall, rotated: int) -> LayerWeights:
    """What the native decoder takes of a layer that has no `obstacle`."""
    assert f.before_attention is not None and f.before_attention.native is not None
    assert f.before_mlp is not None and f.before_mlp.native is not None
    qkv, qkv_bias = qkv_weights(f, rotated)
    out, out_bias = stacked([f.out])
    norms = head_norms(f, rotated)
    gate_up = [part.weight.detach() for part in f.gate_up]
    gate, up = gate_up if len(gate_up) == 2 else gate_up[0].chunk(2)
    natives = None if norms is None else (norms[0].native, norms[1].native)
    return LayerWeights(
        input_norm=f.before_attention.native,
        middle_norm=f.before_mlp.native,
        head_norms=natives,  # type: ignore[arg-type]
        qkv=qkv,
        qkv_bias=qkv_bias,
        out=out,
        out_bias=out_bias,
        gate=gate,
        up=up,
        down=f.down.weight.detach(),
        scale=call.scale,
        window=call.window,
    )
