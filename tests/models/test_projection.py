"""Our final projection is the model's own, and a model that does more than is known is refused at the start."""

from __future__ import annotations

import pytest
from transformers import LlamaForCausalLM

from cb_backend import Engine
from cb_backend.errors import ModelError


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3", "gemma2", "gemma3", "mistral"])
def test_every_served_architecture_agrees_with_its_own_forward(tiny_model, architecture, dtype):
    with Engine(model=str(tiny_model(architecture)), dtype=dtype, num_kv_blocks=2) as engine:
        engine.parts.core.executor.check_projection()


def test_an_unknown_step_after_the_projection_is_refused(tiny_llama, monkeypatch):
    forward = LlamaForCausalLM.forward

    def louder(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        output.logits = output.logits * 1.5
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", louder)
    with pytest.raises(ModelError, match="LlamaForCausalLM changes its scores after the output projection"):
        Engine(model=str(tiny_llama), dtype="float32", num_kv_blocks=2).start()
