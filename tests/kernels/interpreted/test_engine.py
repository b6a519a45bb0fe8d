"""The whole engine on the Triton backend, interpreted: chunked, preempted, and equal to the reference backend."""

from __future__ import annotations

import pytest

from cb_backend import Engine, SamplingParams
from tests.tiny_models import build_model


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_a_tiny_model_gives_what_the_reference_backend_gives(tmp_path, architecture):
    path = build_model(architecture, tmp_path / architecture)
    prompts = [[5, 6] * 7, [7] * 14, [8, 9] * 10]
    params = [SamplingParams(max_tokens=5, temperature=float(i % 2), seed=i, ignore_eos=True) for i in range(3)]
    outputs = {}
    for backend in ("triton", "reference"):
        with Engine(
            model=str(path),
            dtype="float32",
            attention_backend=backend,
            block_size=16,
            num_kv_blocks=5,
            max_num_batched_tokens=20,
            admission={"policy": "prompt"},
        ) as engine:
            outputs[backend] = [o.token_ids for o in engine.generate(prompts, params)]
            stats = engine.stats()
        if backend == "triton":  # the reference may be done with one before the next has arrived
            assert stats["preemptions_swap"] + stats["preemptions_recompute"] > 0
    assert outputs["triton"] == outputs["reference"]
