"""Embeddings and the final projection on packed weights: the same values, one copy."""

from __future__ import annotations

import copy

import pytest
import torch
from cb_kernels.cpu import Library
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PreTrainedModel

from cb_backend.models.packed_embeddings import PackedEmbedding, PackedHead, pack_embeddings
from cb_backend.models.projection import Projection

_SIZES = {
    "vocab_size": 130,
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def build(dtype: torch.dtype = torch.float32, *, tied: bool = True) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(**_SIZES, tie_word_embeddings=tied)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_embeddings_and_logits_are_the_models_own(native_kernels: Library, storage: torch.dtype, tied: bool) -> None:
    model = build(storage, tied=tied).float()
    plain = copy.deepcopy(model)
    if tied:
        plain.tie_weights()
    assert pack_embeddings(model, native_kernels)
    ids, hidden = torch.tensor([[0, 129, 7]]), torch.randn(5, 64)
    assert torch.equal(model.get_input_embeddings()(ids), plain.get_input_embeddings()(ids))
    expected = plain.lm_head(hidden)
    projection = Projection(model)
    assert projection.vocab_size == 130
    torch.testing.assert_close(projection(hidden), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model.lm_head(hidden[None])[0], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-4)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(embedding, PackedEmbedding) and isinstance(head, PackedHead)
    assert (embedding.matrix is head.matrix) == tied
    assert head.matrix.storage == storage
    assert model.dtype == torch.float32


def test_a_bias_of_the_projection_stays(native_kernels: Library) -> None:
    model = build(tied=False)
    model.lm_head.bias = torch.nn.Parameter(torch.randn(130), requires_grad=False)
    hidden = torch.randn(2, 64)
    expected = model.lm_head(hidden)
    assert pack_embeddings(model, native_kernels)
    torch.testing.assert_close(Projection(model)(hidden), expected)
    torch.testing.assert_close(model.lm_head(hidden), expected)


def test_an_embedding_that_does_more_stays(native_kernels: Library) -> None:
    sizes = {**_SIZES, "head_dim": 16}
    model = AutoModelForCausalLM.from_config(Gemma3TextConfig(**sizes), dtype=torch.float32)
    before = model.get_input_embeddings()
    assert not pack_embeddings(model, native_kernels)
    assert model.get_input_embeddings() is before and before.weight.numel() == 130 * 64


def test_bfloat16_logits_are_never_rounded(native_kernels: Library) -> None:
    model = build(torch.bfloat16)
    weight, hidden = model.lm_head.weight.double(), torch.randn(3, 64).bfloat16()
    pack_embeddings(model, native_kernels)
    got = Projection(model)(hidden)
    torch.testing.assert_close(got.double(), hidden.double() @ weight.T, rtol=1e-5, atol=1e-6)
    assert model.get_input_embeddings()(torch.tensor([3])).dtype == torch.bfloat16
