"""Reports of models that were loaded wrongly: what is wrong in a directory is said, and no code in it runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PhiConfig, PhiForCausalLM

from cb_backend import Engine, SamplingParams
from cb_backend.errors import ModelError
from tests.engine.oracle import greedy
from tests.tiny_models import build_tokenizer

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


def copied(source: Path, target: Path, **config: Any) -> Path:
    shutil.copytree(source, target)
    path = target / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **config}), encoding="utf-8")
    return target


def opened(path: Path) -> Engine:
    return Engine(model=str(path), dtype="float32", device="cpu", num_kv_blocks=20, block_size=16, num_threads=1)


def answer(path: Path, prompt: list[int]) -> tuple[int, ...]:
    with opened(path) as engine:
        return engine.generate([prompt], GREEDY)[0].token_ids


def test_case_128_a_window_that_no_layer_has_is_not_applied(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    plain = tiny_model("qwen3")
    layers = json.loads((plain / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"]
    full = ["full_attention"] * layers
    named = copied(plain, tmp_path / "m", sliding_window=16, use_sliding_window=False, layer_types=full)
    prompt = [(5 * i) % 500 + 3 for i in range(64)]
    assert answer(named, prompt) == answer(plain, prompt)


@pytest.mark.parametrize("kept", ["lm_head.weight", "model.embed_tokens.weight"])
def test_case_187_a_tied_weight_is_there_under_either_name(tiny_llama: Path, tmp_path: Path, kept: str) -> None:
    from safetensors.torch import load_file, save_file

    tied = copied(tiny_llama, tmp_path / "m", tie_word_embeddings=True)
    tensors = load_file(tied / "model.safetensors")
    weight = tensors.pop("model.embed_tokens.weight")
    tensors.pop("lm_head.weight", None)
    whole = copied(tied, tmp_path / "whole")
    save_file({**tensors, "model.embed_tokens.weight": weight}, whole / "model.safetensors", {"format": "pt"})
    save_file({**tensors, kept: weight}, tied / "model.safetensors", {"format": "pt"})
    prompt = [5, 6, 7, 8]
    assert answer(tied, prompt) == answer(whole, prompt)


def test_case_188_an_index_that_names_a_missing_shard_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "m"
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    shutil.copytree(tiny_llama, path, ignore=shutil.ignore_patterns("*.safetensors"))
    model.save_pretrained(path, max_shard_size="100KB")
    shards = sorted(path.glob("model-*.safetensors"))
    assert len(shards) > 1
    shards[1].unlink()
    with pytest.raises(ModelError, match=shards[1].name):
        opened(path).start()


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_case_190_191_code_beside_the_weights_is_not_run(tiny_llama: Path, tmp_path: Path, file: str) -> None:
    path = copied(tiny_llama, tmp_path / "m")
    sentinel = tmp_path / "it ran"
    (path / "evil.py").write_text(f"open({str(sentinel)!r}, 'w').close()\nclass Evil: pass\n", encoding="utf-8")
    hooks = {
        "AutoConfig": "evil.Evil",
        "AutoModelForCausalLM": "evil.Evil",
        "AutoTokenizer": ["evil.Evil", "evil.Evil"],
    }
    settings = json.loads((path / file).read_text(encoding="utf-8"))
    (path / file).write_text(json.dumps({**settings, "auto_map": hooks}), encoding="utf-8")
    opened(path).start().close()
    assert not sentinel.exists()


def test_case_131_a_bias_of_the_output_stays_with_tied_embeddings(tmp_path: Path) -> None:
    path = tmp_path / "phi"
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config = PhiConfig(
        **sizes, num_attention_heads=4, tie_word_embeddings=True, initializer_range=0.2, max_position_embeddings=256
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = PhiForCausalLM(config)
        model.lm_head.bias.data.normal_(std=3.0)
    model.save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    prompt = [5, 6, 7, 8]
    wanted = greedy(path, prompt, 12)
    assert answer(path, prompt) == tuple(wanted)
    model.lm_head.bias.data.zero_()
    model.save_pretrained(tmp_path / "plain")
    assert greedy(tmp_path / "plain", prompt, 12) != wanted  # the bias decides
