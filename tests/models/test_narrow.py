"""A float32 model on weights of 16 bits is the float32 model, and is one again where nothing packs them."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from cb_backend import Engine, SamplingParams
from cb_backend.config import EngineConfig
from cb_backend.models.loader import load_model
from cb_backend.models.narrow import NarrowEmbedding, NarrowLinear, compute_in_float32, widen
from tests.engine.oracle import greedy
from tests.tiny_models import ARCHITECTURES, build_model

IDS = torch.tensor([[1, 5, 9, 100]])


def build(architecture: str, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(ARCHITECTURES[architecture](), dtype=dtype)
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2", "gemma3"])
def test_it_computes_in_float32(architecture: str, dtype: torch.dtype) -> None:
    model = build(architecture, dtype)
    wide = copy.deepcopy(model).float()
    expected = wide(IDS).logits
    compute_in_float32(model)
    assert model.dtype == torch.float32
    assert torch.equal(model(IDS).logits, expected)
    assert {module.weight.dtype for module in model.modules() if isinstance(module, NarrowLinear)} <= {dtype}
    widen(model)
    assert torch.equal(model(IDS).logits, expected)
    assert not any(isinstance(module, (NarrowLinear, NarrowEmbedding)) for module in model.modules())
    assert {tensor.dtype for tensor in model.state_dict().values() if tensor.is_floating_point()} == {torch.float32}


def test_tied_weights_stay_tied() -> None:
    model = build("llama", torch.bfloat16)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    compute_in_float32(model)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert embedding.weight.data_ptr() == head.weight.data_ptr() and embedding.weight.dtype == torch.bfloat16
    widen(model)
    assert embedding.weight is head.weight and head.weight.dtype == torch.float32


def load(path: Path, dtype: str = "float32") -> PreTrainedModel:
    return load_model(EngineConfig(model=str(path), device="cpu", dtype=dtype)).model


def test_a_checkpoint_of_one_narrow_dtype_is_loaded_in_it(tmp_path: Path) -> None:
    path = build_model("llama", tmp_path / "m", dtype=torch.bfloat16)
    model = load(path)
    assert model.model.layers[0].mlp.down_proj.weight.dtype == torch.bfloat16
    assert model.dtype == model.model.norm.weight.dtype == torch.float32
    assert type(load(path, "bfloat16").lm_head) is torch.nn.Linear


def test_a_checkpoint_that_says_less_than_it_holds_is_loaded_in_float32(tmp_path: Path) -> None:
    path = build_model("llama", tmp_path / "m", dtype=torch.bfloat16)
    mixed = tmp_path / "mixed"
    shutil.copytree(path, mixed)
    tensors = load_file(mixed / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float() + 2**-12
    save_file(tensors, mixed / "model.safetensors", {"format": "pt"})
    model = load(mixed)
    assert torch.equal(model.model.norm.weight, tensors["model.norm.weight"])
    assert model.model.layers[0].mlp.down_proj.weight.dtype == torch.float32


@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_every_backend_generates_what_float32_does(
    tmp_path_factory: pytest.TempPathFactory,
    native_kernels: object,
    tiny_model: Callable[[str], Path],
    architecture: str,
    backend: str,
) -> None:
    path = build_model(architecture, tmp_path_factory.mktemp("half") / architecture, dtype=torch.bfloat16)
    prompt = list(range(3, 40))
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    with Engine(model=str(path), dtype="float32", num_kv_blocks=16, attention_backend=backend) as engine:
        assert list(engine.generate([prompt], params)[0].token_ids) == greedy(path, prompt, 8)
