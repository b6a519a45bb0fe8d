"""Which models the engine can serve, and the shape of their K/V.

The engine needs decoder layers that all keep one K and one V row per token and that hand their attention to
transformers' attention interface. What breaks that (encoders, recurrent state, compressed or shared K/V, position
biases inside the attention) is refused here, before memory is spent, with the reason.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import ModelError
from ..kv.storage import KVGeometry

_SERVABLE_LAYERS = {"full_attention", "sliding_attention"}


def causal_lm_class(config: Any, name: str) -> type:
    """The transformers class that serves `config`.

    Raises:
        ModelError: no causal language model of transformers fits the engine; says why.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    text = config.get_text_config(decoder=True)
    kind = config.model_type
    if config.is_encoder_decoder or getattr(text, "is_encoder_decoder", False):
        raise ModelError(f"'{name}' is an encoder-decoder model ({kind}); only decoder-only language models are served")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"'{name}' ({kind}) is not a causal language model; serve one that generates text")
    model_class: type = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    other = sorted(set(getattr(text, "layer_types", None) or ()) - _SERVABLE_LAYERS)
    if getattr(model_class, "_is_stateful", False) or other:
        layers = f"layers of type {', '.join(other)}" if other else "a recurrent state"
        raise ModelError(f"'{name}' ({kind}) has {layers}, not K/V per token; serve a model with attention layers only")
    if not getattr(model_class, "_supports_attention_backend", False):
        raise ModelError(
            f"'{name}' ({kind}) computes attention itself instead of through transformers' attention interface, so it "
            "cannot use paged K/V; serve a model of another architecture, or try a newer transformers"
        )
    if getattr(text, "num_kv_shared_layers", None):
        raise ModelError(f"'{name}' ({kind}) shares K/V between layers, which the paged cache does not support")
    return model_class


def kv_geometry(model: nn.Module, name: str) -> KVGeometry:
    """Reads the K/V's shape off the built model and checks it against the configuration.

    Raises:
        ModelError: K and V differ in width, layers differ from each other, or attention is not causal.
    """
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    layers = _attention_layers(model)
    num_layers = text.num_hidden_layers
    if sorted(layers) != list(range(num_layers)):
        raise ModelError(f"'{name}' ({config.model_type}): found attention in layers {sorted(layers)} of {num_layers}")
    num_heads = text.num_attention_heads
    num_kv_heads = 1 if getattr(text, "multi_query", False) else getattr(text, "num_key_value_heads", None) or num_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // num_heads
    for index, layer in layers.items():
        _check_layer(layer, index, name, num_kv_heads * head_dim)
    return KVGeometry(num_layers, num_kv_heads, head_dim, num_heads)


def attention_features(model: nn.Module) -> dict[str, bool]:
    """Whether some attention layer has a sliding window, a softcap or sinks, by the names of `AttentionNeeds`."""
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    windows = "sliding_attention" in (getattr(text, "layer_types", None) or ())
    layers = _attention_layers(model).values()
    return {
        "windows": windows or any(isinstance(getattr(layer, "sliding_window", None), int) for layer in layers),
        "softcap": bool(getattr(text, "attn_logit_softcapping", None)),
        "sinks": any(getattr(layer, "sinks", None) is not None for layer in layers),
    }


def _attention_layers(model: nn.Module) -> dict[int, nn.Module]:
    """Attention modules by layer: what transformers gives both a place in the cache and a causality flag."""
    found: dict[int, nn.Module] = {}
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and hasattr(module, "is_causal"):
            found.setdefault(index, module)
    return found


def _check_layer(layer: nn.Module, index: int, name: str, width: int) -> None:
    where = f"'{name}' layer {index}"
    if not layer.is_causal:
        raise ModelError(f"{where} attends to later tokens; only causal language models are served")
    key_dim = getattr(layer, "qk_head_dim", None)
    value_dim = getattr(layer, "v_head_dim", None)
    if key_dim is not None and value_dim is not None and key_dim != value_dim:
        raise ModelError(
            f"{where} has keys of {key_dim} and values of {value_dim} per head; the cache holds both in one tensor and "
            "needs them equal (latent attention is not supported)"
        )
    for projection in ("k_proj", "v_proj"):
        features = getattr(getattr(layer, projection, None), "out_features", width)
        if features != width:
            raise ModelError(f"{where}: {projection} gives {features} numbers per token, {width} were expected")
