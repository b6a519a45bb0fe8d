"""The context that a configuration states, with each kind of rope scaling."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig

from cb_backend.errors import ModelError
from cb_backend.models.loader import _max_model_len


def config(**rope: Any) -> LlamaConfig:
    values: dict[str, Any] = {"rope_theta": 10000.0, **rope}
    return LlamaConfig(max_position_embeddings=4096, rope_parameters=values)


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        ({"rope_type": "default"}, 4096),
        ({"rope_type": "yarn", "factor": 4.0}, 16384),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048}, 4096),
        ({"rope_type": "linear", "factor": 8.0}, 4096),
        ({"rope_type": "linear", "factor": 8.0, "original_max_position_embeddings": 4096}, 32768),
        ({"rope_type": "dynamic", "factor": 2.0}, 4096),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 1024,
            },
            4096,
        ),
    ],
    ids=str,
)
def test_the_context_is_what_the_scaling_reaches(rope: dict[str, Any], context: int) -> None:
    """SkyRL#561: a YaRN model was held to its original context."""
    assert _max_model_len(config(**rope), None, "m") == context
    assert _max_model_len(config(**rope), context, "m") == context
    with pytest.raises(ModelError, match="needs rope scaling"):
        _max_model_len(config(**rope), context + 1, "m")
