"""Loading: what the engine is told about a model, and which models are refused with which sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from cb_backend.config import EngineConfig
from cb_backend.errors import ModelError
from cb_backend.kv.storage import KVGeometry
from cb_backend.models.loader import LoadedModel, choose_device, choose_dtype, cpu_has_fast_bf16, load_model
from tests.tiny_models import ARCHITECTURES, build_model


def load(path: Path, **fields: Any) -> LoadedModel:
    return load_model(EngineConfig(model=str(path), device="cpu", **fields), attn_implementation="eager")


def edited(source: Path, target: Path, file: str = "config.json", **changes: Any) -> Path:
    """A copy of a model with fields of one JSON file changed; None deletes a field."""
    shutil.copytree(source, target)
    values = {**json.loads((target / file).read_text()), **changes}
    (target / file).write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return target


def write_config(config: Any, directory: Path) -> Path:
    """A directory with this configuration and some safetensors: enough for what is refused before weights are read."""
    config.save_pretrained(directory)
    (directory / "model.safetensors").write_bytes(b"")
    return directory


def test_the_demo_model_is_known_by_its_numbers(demo_model_path: Path) -> None:
    loaded = load(demo_model_path, dtype="bfloat16")
    assert loaded.name == "smollm2-135m-instruct"
    assert (loaded.max_model_len, loaded.vocab_size, loaded.eos_token_ids) == (8192, 49152, frozenset({2}))
    assert loaded.geometry == KVGeometry(num_layers=30, num_kv_heads=3, head_dim=64, num_heads=9)
    assert loaded.geometry.bytes_per_token(torch.bfloat16) == 23040
    assert loaded.tokenizer is not None and loaded.tokenizer.decode(loaded.tokenizer.encode("Grüße 🙂")) == "Grüße 🙂"
    assert not loaded.model.training
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_the_loaded_model_computes_what_transformers_computes(
    tiny_model: Callable[[str], Path], architecture: str
) -> None:
    path = tiny_model(architecture)
    loaded = load(path)
    reference = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    ids = torch.arange(3, 51)[None]
    with torch.inference_mode():
        assert torch.equal(loaded.model(ids).logits, reference(ids).logits)


@pytest.mark.parametrize(
    ("architecture", "geometry"),
    [
        ("llama", KVGeometry(3, 2, 16, 4)),
        ("gpt2", KVGeometry(3, 4, 16, 4)),
        ("qwen3", KVGeometry(3, 2, 32, 4)),
        ("gemma2", KVGeometry(3, 2, 16, 4)),
        ("gemma3", KVGeometry(3, 2, 16, 4)),
        ("mistral", KVGeometry(3, 2, 16, 4)),
    ],
)
def test_geometry(tiny_model: Callable[[str], Path], architecture: str, geometry: KVGeometry) -> None:
    loaded = load(tiny_model(architecture))
    assert loaded.geometry == geometry
    assert (loaded.max_model_len, loaded.vocab_size) == (1024, 512)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_every_tiny_architecture_takes_the_paged_attention(
    tiny_model: Callable[[str], Path], architecture: str
) -> None:
    loaded = load_model(EngineConfig(model=str(tiny_model(architecture)), device="cpu"))
    assert loaded.model.config._attn_implementation == "cb_paged"


@pytest.mark.parametrize(("value", "expected"), [(7, {7}), ([2, 5], {2, 5}), ([2, 9999], {2})])
def test_eos_ids_come_from_the_generation_config(tiny_llama: Path, tmp_path: Path, value: Any, expected: set) -> None:
    path = edited(tiny_llama, tmp_path / "m", "generation_config.json", eos_token_id=value)
    assert load(path).eos_token_ids == expected


def test_without_generation_config_eos_comes_from_the_configuration(tiny_llama: Path, tmp_path: Path) -> None:
    path = edited(tiny_llama, tmp_path / "m", eos_token_id=[4, 6])
    (path / "generation_config.json").unlink()
    assert load(path).eos_token_ids == {4, 6}


def test_a_model_without_tokenizer_still_loads(tiny_llama: Path, tmp_path: Path) -> None:
    for file in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy2(tiny_llama / file, tmp_path)
    loaded = load(tmp_path)
    assert loaded.tokenizer is None and loaded.eos_token_ids == {2}


def test_the_served_name_is_the_operators_choice(tiny_llama: Path) -> None:
    assert load(tiny_llama, served_model_name="chat").name == "chat"


@pytest.mark.parametrize(
    ("wanted", "checkpoint", "fast", "expected"),
    [
        ("auto", torch.float32, True, torch.float32),
        ("auto", torch.bfloat16, True, torch.bfloat16),
        ("auto", torch.bfloat16, False, torch.float32),
        ("auto", torch.float16, True, torch.bfloat16),
        ("auto", torch.float16, False, torch.float32),
        ("bfloat16", torch.float32, False, torch.bfloat16),
        ("float16", torch.bfloat16, True, torch.float16),
    ],
)
def test_dtype_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, wanted: str, checkpoint: torch.dtype, fast: bool, expected: torch.dtype
) -> None:
    monkeypatch.setattr("cb_backend.models.loader.cpu_has_fast_bf16", lambda: fast)
    assert choose_dtype(wanted, checkpoint, torch.device("cpu")) == expected


def test_auto_dtype_on_a_gpu_is_the_checkpoints() -> None:
    assert choose_dtype("auto", torch.float16, torch.device("cuda")) == torch.float16


@pytest.mark.parametrize(
    ("line", "fast"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16", True),
        ("flags\t\t: fpu amx_bf16 amx_tile", True),
        ("Features\t: fp asimd i8mm bf16", True),
        ("flags\t\t: fpu avx2 avx512f avx512_bitalg", False),
        ("model name\t: bf16 wonder", False),
    ],
)
def test_fast_bf16_is_read_from_the_cpus_flags(tmp_path: Path, line: str, fast: bool) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\n")
    assert cpu_has_fast_bf16(tmp_path / "cpuinfo") is fast
    assert cpu_has_fast_bf16(tmp_path / "absent") is False


def test_a_checkpoint_that_does_not_name_its_dtype_is_asked_itself(tmp_path: Path) -> None:
    built = build_model("llama", tmp_path / "half", dtype=torch.bfloat16)
    path = edited(built, tmp_path / "unnamed", dtype=None)
    assert load(path).dtype == (torch.bfloat16 if cpu_has_fast_bf16() else torch.float32)


def test_a_shorter_context_is_taken_and_a_longer_one_refused(tiny_llama: Path) -> None:
    assert load(tiny_llama, max_model_len=100).max_model_len == 100
    with pytest.raises(ModelError, match=r"^max_model_len 1025 is more than the 1024 positions that 'llama'"):
        load(tiny_llama, max_model_len=1025)


def test_an_unknown_dtype_is_named(tiny_llama: Path, tmp_path: Path) -> None:
    path = edited(tiny_llama, tmp_path / "m", dtype="float7")
    with pytest.raises(ModelError, match=r"^'m': dtype 'float7' in .*config\.json is none of float32, bfloat16"):
        load(path)


def test_a_config_that_is_not_json_is_named(tiny_llama: Path, tmp_path: Path) -> None:
    path = edited(tiny_llama, tmp_path / "m")
    (path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not a JSON object"):
        load(path)


def test_an_unknown_model_type_is_named(tiny_llama: Path, tmp_path: Path) -> None:
    path = edited(tiny_llama, tmp_path / "m", model_type="hyperllama")
    with pytest.raises(ModelError, match=r"transformers cannot read .*\(model type 'hyperllama'\)"):
        load(path)


def test_code_in_a_checkpoint_is_not_run(tiny_llama: Path, tmp_path: Path) -> None:
    path = edited(
        tiny_llama, tmp_path / "m", model_type="evil", auto_map={"AutoConfig": "evil.EvilConfig"}, architectures=None
    )
    (path / "evil.py").write_text("raise SystemExit('code of the checkpoint ran')")
    with pytest.raises(ModelError, match="transformers cannot read"):
        load(path)


def test_an_incomplete_checkpoint_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    path = edited(tiny_llama, tmp_path / "m", num_hidden_layers=4)
    with pytest.raises(ModelError, match=r"lacks 9 weights, e\.g\. model\.layers\.3\."):
        load(path)


def changed(source: Path, target: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """A copy of a model with one tensor changed."""
    path = edited(source, target)
    weights = load_file(path / "model.safetensors")
    key = "model.layers.1.mlp.up_proj.weight"
    weights[key] = change(weights[key].clone()).contiguous()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_damaged_numbers_are_told_with_their_tensor(tiny_llama: Path, tmp_path: Path, value: float) -> None:
    def damage(weight: torch.Tensor) -> torch.Tensor:
        weight[3, 2] = value
        return weight

    path = changed(tiny_llama, tmp_path / "m", damage)
    with pytest.raises(ModelError, match=r"damaged: model\.layers\.1\.mlp\.up_proj\.weight holds NaN or infinity"):
        load(path)


def test_a_lone_integer_weight_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    path = changed(tiny_llama, tmp_path / "m", lambda weight: (weight * 100).to(torch.int8))
    with pytest.raises(ModelError, match=r"up_proj\.weight in .* is I8; quantized weights are not supported"):
        load(path)


def test_more_layers_than_the_configuration_has_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    path = edited(tiny_llama, tmp_path / "m", num_hidden_layers=2)
    with pytest.raises(ModelError, match=r"more layers than its config\.json says, e\.g\. model\.layers\.2\."):
        load(path)


def test_a_buffer_that_older_checkpoints_hold_is_left_out(tiny_llama: Path, tmp_path: Path) -> None:
    path = edited(tiny_llama, tmp_path / "m")
    weights = load_file(path / "model.safetensors")
    weights["model.layers.1.self_attn.rotary_emb.inv_freq_of_old"] = torch.ones(4)
    weights["vision_tower.layers.9.weight"] = torch.ones(4)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    load(path)


def test_torn_weights_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    path = edited(tiny_llama, tmp_path / "m")
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(ModelError, match=r"^cannot load the weights of 'm' from "):
        load(path)


def test_a_broken_tokenizer_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    path = edited(tiny_llama, tmp_path / "m")
    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"^cannot read the tokenizer in "):
        load(path)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (lambda: transformers.T5Config(), "is an encoder-decoder model (t5)"),
        (lambda: transformers.BartConfig(), "is an encoder-decoder model (bart)"),
        (lambda: transformers.ViTConfig(), "(vit) is not a causal language model"),
        (lambda: transformers.MambaConfig(), "(mamba) has layers of type linear_attention, not K/V per token"),
        (lambda: transformers.RwkvConfig(), "(rwkv) has a recurrent state, not K/V per token"),
        (lambda: transformers.BloomConfig(), "(bloom) computes attention itself"),
        (lambda: transformers.Qwen3NextConfig(), "(qwen3_next) has layers of type linear_attention"),
    ],
    ids=["t5", "bart", "vit", "mamba", "rwkv", "bloom", "qwen3_next"],
)
def test_models_that_cannot_be_served_say_why(tmp_path: Path, config: Callable[[], Any], reason: str) -> None:
    path = write_config(config(), tmp_path / "m")
    with pytest.raises(ModelError) as error:
        load(path)
    assert reason in str(error.value)


def test_keys_wider_than_values_are_refused(tmp_path: Path) -> None:
    config = transformers.DeepseekV2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        n_routed_experts=2,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "mla")
    with pytest.raises(ModelError, match="'mla' layer 0 has keys of 24 and values of 16 per head"):
        load(tmp_path / "mla")


def test_bidirectional_attention_is_refused(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.BertLMHeadModel(config).save_pretrained(tmp_path / "bert")
    with pytest.raises(ModelError, match="'bert' layer 0 attends to later tokens"):
        load(tmp_path / "bert")


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (None, f"torch {torch.__version__} is built without CUDA: install a CUDA build"),
        (
            "13.0",
            "torch sees no GPU: give this container one (`docker run --gpus all`) and its host a driver for CUDA 13.0",
        ),
    ],
)
def test_a_gpu_that_is_wanted_and_absent_is_told_by_its_cause(
    monkeypatch: pytest.MonkeyPatch, build: str | None, reason: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelError) as refused:
        choose_device("cuda:0")
    assert str(refused.value) == f"device 'cuda:0': {reason}, or set device to 'cpu'"


def test_an_unknown_device_is_named() -> None:
    with pytest.raises(ModelError, match=r"^device 'toaster' is not a torch device"):
        choose_device("toaster")
