"""A fused model is the same model."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cb_kernels.cpu import Library
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.llama.modeling_llama import LlamaMLP

from cb_backend import Engine, SamplingParams
from cb_backend.attention.batch import RaggedBatch
from cb_backend.attention.cpu import NativeAttention
from cb_backend.attention.hook import IMPLEMENTATION, register
from cb_backend.models.layers.fused import fuse_model
from cb_backend.models.layers.products import merged_linear
from tests.engine.oracle import greedy, random_prompts

_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.1,
}
CONFIGS = {
    "llama": LlamaConfig(**_SIZES),
    "mistral": MistralConfig(**_SIZES, sliding_window=5),
    "qwen2": Qwen2Config(**_SIZES),
    "qwen3": Qwen3Config(**{**_SIZES, "head_dim": 32}),
    "phi3": Phi3Config(**_SIZES, sliding_window=5, pad_token_id=0),
    "phi3 with a partial rotary embedding": Phi3Config(
        **_SIZES,
        pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ),
    "llama with all biases": LlamaConfig(**_SIZES, mlp_bias=True, attention_bias=True),
    "llama with biases in the mlp": LlamaConfig(**_SIZES, mlp_bias=True),
    "llama with biases in the attention": LlamaConfig(**_SIZES, attention_bias=True),
    "llama with scaled rotary factors": LlamaConfig(
        **_SIZES,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "attention_factor": 1.3,
        },
    ),
}


def build(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    register()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=IMPLEMENTATION, dtype=dtype)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms of ones and biases of zeros would hide mistakes
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model.eval().requires_grad_(False)


def run(model: PreTrainedModel, backend: NativeAttention) -> tuple[torch.Tensor, torch.Tensor]:
    """A chunk of 9 tokens and a decode at position 0: hidden states, and the cache that they left."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv = torch.zeros(4, config.num_hidden_layers, 2, config.num_key_value_heads, 8, head_dim, dtype=model.dtype)
    q_lens = [9, 1]
    batch = RaggedBatch(
        input_ids=torch.arange(10) * 7 % 128,
        positions=torch.tensor([*range(9), 0]),
        slots=torch.tensor([*range(8), 16, 24]),
        block_tables=torch.tensor([[0, 2], [3, 0]], dtype=torch.int32),
        seq_lens=torch.tensor(q_lens, dtype=torch.int32),
        cu_seqlens=torch.tensor([0, *itertools.accumulate(q_lens)], dtype=torch.int32),
        q_lens=q_lens,
        kv_lens=q_lens,
        storage=SimpleNamespace(  # type: ignore[arg-type]
            layers=[(kv[:, layer, 0], kv[:, layer, 1]) for layer in range(config.num_hidden_layers)], block_size=8
        ),
    )
    with torch.inference_mode():
        hidden = model.base_model(
            input_ids=batch.input_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            cb_batch=batch,
            cb_backend=backend,
        ).last_hidden_state[0]
    return hidden, kv


@pytest.mark.parametrize("name", CONFIGS)
def test_float32_states_and_cache_are_equal(native_kernels: Library, name: str) -> None:
    backend = NativeAttention(native_kernels)
    model = build(CONFIGS[name], torch.float32)
    expected, expected_kv = run(model, backend)
    assert fuse_model(model, backend.library).fused == 2
    got, kv = run(model, backend)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    if "partial" in name:  # the numbers of a key then lie in another order
        kv, expected_kv = kv.sort(dim=-1).values, expected_kv.sort(dim=-1).values
    torch.testing.assert_close(kv, expected_kv, rtol=1e-5, atol=1e-5)
    assert torch.equal(model.lm_head(got).argmax(-1), model.lm_head(expected).argmax(-1))


@pytest.mark.parametrize("name", CONFIGS)
def test_bfloat16_is_as_near_to_float32_as_the_plain_model(native_kernels: Library, name: str) -> None:
    backend = NativeAttention(native_kernels)
    model = build(CONFIGS[name], torch.bfloat16)
    exact, _ = run(copy.deepcopy(model).float(), backend)
    plain_error = (run(model, backend)[0].float() - exact).norm()
    fuse_model(model, backend.library)
    assert (run(model, backend)[0].float() - exact).norm() <= 1.25 * plain_error


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("name", CONFIGS)
def test_an_engine_with_fused_layers_gives_what_generate_gives(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model"
    build(CONFIGS[name], torch.float32).save_pretrained(path)
    prompts = random_prompts(3, (2, 40), 128)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    with Engine(model=str(path), dtype="float32", num_kv_blocks=16, max_num_batched_tokens=16) as engine:
        outputs = engine.generate(prompts, params)
    assert [list(output.token_ids) for output in outputs] == [greedy(path, prompt, 8) for prompt in prompts]


def test_layers_that_the_one_call_cannot_do_are_fused_one_by_one(native_kernels: Library) -> None:
    report = fuse_model(build(CONFIGS["llama with biases in the mlp"], torch.float32), native_kernels)
    assert (report.whole, report.single) == (0, 2)
    assert str(report) == "2 decoder layers: 2 one by one (biases in the MLP)"
    report = fuse_model(build(CONFIGS["llama with biases in the attention"], torch.float32), native_kernels)
    assert str(report) == "2 decoder layers: 2 as one call"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", ["llama", "llama with biases in the mlp"], ids=["one call", "one by one"])
@pytest.mark.parametrize("odd", [0, 1])
def test_a_layer_whose_forward_differs_keeps_its_modules(
    native_kernels: Library,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    config: str,
    dtype: torch.dtype,
    odd: int,
) -> None:
    """Nothing that could be read off the modules says so: only running them does."""
    forward = LlamaMLP.forward
    model = build(CONFIGS[config], dtype)
    monkeypatch.setattr(
        LlamaMLP,
        "forward",
        lambda self, x: forward(self, x) * (1.2 if self is model.base_model_layers[odd].mlp else 1),
    )
    model.base_model_layers = list(model.base_model.layers)
    backend = NativeAttention(native_kernels)
    expected, expected_kv = run(model, backend)
    report = fuse_model(model, backend.library)
    assert report.fused == 1
    assert sum(report.not_fused.values()) == 1
    assert "LlamaDecoderLayer" in next(iter(report.not_fused))
    assert f"LlamaDecoderLayer {odd} " in caplog.text
    got, kv = run(model, backend)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(kv, expected_kv, rtol=tolerance, atol=tolerance)


def _another_module(layer: Any) -> None:
    layer.self_attn.gate = torch.nn.Linear(64, 4)


def _another_number(layer: Any) -> None:
    layer.residual_multiplier = 0.22


def _another_tensor(layer: Any) -> None:
    layer.self_attn.sinks = torch.nn.Parameter(torch.zeros(4))


def _another_norm(layer: Any) -> None:
    layer.input_layernorm = torch.nn.LayerNorm(64)


def _another_linear(layer: Any) -> None:
    layer.mlp.up_proj = torch.nn.Sequential(layer.mlp.up_proj)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_another_module, "LlamaDecoderLayer: beside the nearest known family, it has self_attn.gate"),
        (_another_number, "LlamaDecoderLayer: residual_multiplier = 0.22 is not known"),
        (_another_tensor, "LlamaDecoderLayer: self_attn.sinks is a tensor of a kind that is not known"),
        (_another_norm, "LlamaDecoderLayer: input_layernorm is a LayerNorm, not a root-mean-square norm"),
        (_another_linear, "LlamaDecoderLayer: mlp.up_proj is a Sequential, not a plain Linear"),
    ],
    ids=["module", "number", "tensor", "norm", "linear"],
)
def test_what_is_not_understood_is_named_and_not_fused(
    native_kernels: Library, caplog: pytest.LogCaptureFixture, change: Callable[[Any], None], reason: str
) -> None:
    model = build(CONFIGS["llama"], torch.float32)
    change(model.base_model.layers[1])
    caplog.set_level("INFO")
    backend = NativeAttention(native_kernels)
    expected, _ = run(model, backend)
    report = fuse_model(model, native_kernels)
    assert report.not_fused == {reason: 1}
    assert report.single == 1
    assert f"2 decoder layers: 1 one by one; 1 not fused: {reason} for the native CPU kernels" in caplog.text
    torch.testing.assert_close(run(model, backend)[0], expected, rtol=1e-5, atol=1e-5)


def test_unpacked_weights_are_dropped(native_kernels: Library) -> None:
    model = build(CONFIGS["llama"], torch.bfloat16)
    layer = model.base_model.layers[0]
    fuse_model(model, native_kernels)
    assert layer.self_attn.q_proj.weight.numel() == layer.mlp.down_proj.weight.numel() == 0


def test_other_architectures_stay_as_they_are(native_kernels: Library) -> None:
    model = build(Gemma2Config(**_SIZES), torch.float32)
    assert fuse_model(model, native_kernels).fused == 0
    assert model.base_model.layers[0].self_attn.q_proj.weight.numel() > 0


@pytest.mark.parametrize("rows", [1, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_merged_linear_puts_results_side_by_side(native_kernels: Library, dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(0)
    parts = [torch.nn.Linear(32, n, dtype=dtype) for n in (16, 8)]
    x = torch.randn(rows, 32).to(dtype)
    with torch.inference_mode():
        expected = torch.cat([part(x) for part in parts], -1)
        torch.testing.assert_close(merged_linear(parts, native_kernels)(x), expected)


def test_without_packed_weights_the_public_product_serves(
    native_kernels: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise RuntimeError("no such layout")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refuse)
    part = torch.nn.Linear(32, 16, dtype=torch.bfloat16)
    x = torch.randn(2, 32).bfloat16()
    with torch.inference_mode():
        expected = part(x)
        assert torch.equal(merged_linear([part], native_kernels)(x), expected)
