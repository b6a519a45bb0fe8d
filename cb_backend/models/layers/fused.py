"""Rewrites recognized decoder layers for the native CPU kernels: fewer passes over memory, weights packed once.

In float32, and in bf16 on a CPU with bf16 dot products, all layers of a recognized model (Llama, Mistral, Qwen2, Qwen3)
become one native call (`cb_kernels.cpu.decoder`). Elsewhere each recognized layer gets q/k/v and gate/up as one product
each, and one kernel each for norm with the residual sum, rotary with the K/V write, and the gated activation; bf16
weights are reordered for oneDNN at load, which else happens at every call. The unpacked copies are dropped, so a fused
model cannot be saved. Layers of other architectures keep their own modules. The arithmetic and its roundings are those
of transformers; only sums inside matrix products may be ordered differently.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from cb_kernels.cpu.decoder import Decoder, DecoderShape, LayerWeights, Norm, runs_decoder
from torch import nn
from torch.nn.functional import linear

from ...attention.batch import RaggedBatch
from ...attention.hook import AttentionBackend, AttentionCall
from ...device.shared_cores import SharedCores
from ...errors import first_line

if TYPE_CHECKING:
    from cb_kernels.cpu import Library
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)

# How each layer class says its sliding window; their forwards are otherwise one and the same.
_WINDOWS: dict[str, Callable[[Any], int | None]] = {
    "LlamaDecoderLayer": lambda attention: None,
    "MistralDecoderLayer": lambda attention: getattr(attention.config, "sliding_window", None),
    "Qwen2DecoderLayer": lambda attention: attention.sliding_window,
    "Qwen3DecoderLayer": lambda attention: attention.sliding_window,
}
_ROWS_HINT = 64  # rows that oneDNN lays the packed weights out for; others work too


def fuse_model(model: PreTrainedModel, library: Library) -> int:
    """Rewrites the model's recognized layers in place and returns how many there were.

    Afterwards the model runs with the backend `cpu` only.
    """
    body: Any = model.base_model
    layers = list(getattr(body, "layers", ()))
    recognized = [layer for layer in layers if _recognized(layer) and not isinstance(layer.forward, _FusedLayer)]
    if recognized and len(recognized) == len(layers) and _runs_whole(layers, library):
        body.layers = nn.ModuleList([_WholeDecoder(layers, library)])
    else:
        for layer in recognized:
            layer.forward = _FusedLayer(layer, library)
    if recognized:
        _log.info("fused %d decoder layers for the native CPU kernels (%s)", len(recognized), library.isa)
    return len(recognized)


def _runs_whole(layers: Sequence[Any], library: Library) -> bool:
    return {_shape(layer) for layer in layers} == {_shape(layers[0])} and runs_decoder(
        library, _shape(layers[0]), layers[0].mlp.down_proj.weight.dtype
    )


def _shape(layer: Any) -> DecoderShape:
    attention = layer.self_attn
    return DecoderShape(
        hidden_size=attention.q_proj.weight.shape[1],
        intermediate_size=layer.mlp.up_proj.weight.shape[0],
        num_heads=attention.q_proj.weight.shape[0] // attention.head_dim,
        num_kv_heads=attention.k_proj.weight.shape[0] // attention.head_dim,
        head_dim=attention.head_dim,
    )


class _WholeDecoder(nn.Module):
    """Stands in for all layers of a model: the one element of its `layers`."""

    def __init__(self, layers: Sequence[Any], library: Library) -> None:
        super().__init__()
        self.decoder = Decoder(library, _shape(layers[0]), _take_weights(layers), layers[0].mlp.down_proj.weight.dtype)
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
        cos, sin = position_embeddings
        batch = self.decoder.library.batch(cb_batch.block_tables, cb_batch.seq_lens, cb_batch.cu_seqlens)
        began = time.monotonic()
        kept_back = self.decoder(hidden_states[0], cos[0], sin[0], cb_batch.slots, batch, cb_batch.storage.layers)
        ended = time.monotonic()
        self.cores.saw(ended, ended - began, kept_back)
        return hidden_states


def _take_weights(layers: Sequence[Any]) -> Iterator[LayerWeights]:
    """One layer after the other, each dropped from its modules before the next one is read."""
    for layer in layers:
        attention, mlp = layer.self_attn, layer.mlp
        qkv, qkv_bias = _take([attention.q_proj, attention.k_proj, attention.v_proj])
        out, out_bias = _take([attention.o_proj])
        yield LayerWeights(
            input_norm=_norm(layer.input_layernorm),
            middle_norm=_norm(layer.post_attention_layernorm),
            head_norms=_head_norms(attention),
            qkv=qkv,
            qkv_bias=qkv_bias,
            out=out,
            out_bias=out_bias,
            gate=_take([mlp.gate_proj])[0],
            up=_take([mlp.up_proj])[0],
            down=_take([mlp.down_proj])[0],
            scale=attention.scaling,
            window=_window(layer),
        )


def _recognized(layer: nn.Module) -> bool:
    kind = type(layer)
    if kind.__name__ not in _WINDOWS or not kind.__module__.startswith("transformers.models."):
        return False
    config: Any = layer.self_attn.config  # type: ignore[union-attr]
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        config.hidden_act in ("silu", "swish")
        and rope.get("partial_rotary_factor", 1.0) == 1.0
        and config.hidden_size % 8 == 0
        and config.intermediate_size % 8 == 0
    )


class _FusedLayer:
    """Stands in for one decoder layer's `forward`."""

    def __init__(self, layer: Any, library: Library) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.library = library
        self.input_norm = _norm(layer.input_layernorm)
        self.middle_norm = _norm(layer.post_attention_layernorm)
        self.head_norms = _head_norms(attention)
        self.shape = _shape(layer)
        self.call = AttentionCall(attention.layer_idx, attention.scaling, _window(layer))
        self.qkv = merged_linear([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out = merged_linear([attention.o_proj])
        self.gate_up = merged_linear([mlp.gate_proj, mlp.up_proj])
        self.down = merged_linear([mlp.down_proj])

    def __call__(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        cb_batch: RaggedBatch,
        cb_backend: AttentionBackend,
        **ignored: Any,
    ) -> torch.Tensor:
        """hidden_states [1, T, hidden_size], which it overwrites with its result."""
        library = self.library
        hidden = hidden_states[0]
        qkv = self.qkv(library.rms_norm(hidden, *self.input_norm))
        shape = self.shape
        heads = qkv.view(-1, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
        q, k, v = heads.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
        if self.head_norms is not None:
            q, k = (
                library.rms_norm(x.reshape(-1, shape.head_dim), *norm).view(x.shape)
                for x, norm in zip((q, k), self.head_norms, strict=True)
            )
        cos, sin = position_embeddings
        k_cache, v_cache = cb_batch.storage.layers[self.call.layer]
        library.rotary_write_kv(q, k, v, cos[0], sin[0], k_cache, v_cache, cb_batch.slots)
        attended = cb_backend.attend(q, cb_batch, self.call)
        projected = self.out(attended.view(attended.shape[0], -1))
        normed = library.rms_norm(projected, *self.middle_norm, residual=hidden)  # hidden += projected
        hidden += self.down(library.silu_and_mul(self.gate_up(normed)))
        return hidden_states


def _window(layer: nn.Module) -> int:
    return _WINDOWS[type(layer).__name__](layer.self_attn) or 0


def _norm(module: Any) -> Norm:
    return module.weight.detach(), module.variance_epsilon


def _head_norms(attention: Any) -> tuple[Norm, Norm] | None:
    """Qwen3 normalizes each query and key head."""
    return (_norm(attention.q_norm), _norm(attention.k_norm)) if hasattr(attention, "q_norm") else None


def merged_linear(modules: Sequence[nn.Linear]) -> Callable[[torch.Tensor], torch.Tensor]:
    """One product in place of several on the same input: x [rows, in] -> their results side by side.

    The modules' own weights are dropped.
    """
    weight, bias = _take(modules)
    return _packed(weight, bias) or (lambda x: linear(x, weight, bias))


def _take(modules: Sequence[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias of the modules, stacked; their own weights are dropped."""
    weights = [module.weight.detach() for module in modules]
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]
    biases = [module.bias for module in modules]
    bias = None if biases[0] is None else torch.cat([part.detach() for part in biases])
    for module in modules:
        module.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)
    return weight, bias


def _packed(weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The product with weights in oneDNN's own order, or None where this torch or dtype has no such thing.

    The operators are internal to torch: they are probed by comparing with the public one.
    """
    if weight.dtype != torch.bfloat16:
        return None
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)

        def product(x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
            return y

        probe = torch.linspace(-1, 1, 3 * weight.shape[1], dtype=weight.dtype).view(3, -1)
        torch.testing.assert_close(product(probe), linear(probe, weight, bias), rtol=2e-2, atol=2e-2)
    except (AttributeError, RuntimeError, AssertionError) as error:
        _log.info("weights stay unpacked: %s", first_line(error))
        return None
    return product
