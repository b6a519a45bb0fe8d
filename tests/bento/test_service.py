"""The mixin and the factory within one process: what they hand to BentoML, and calls that come without HTTP."""

from __future__ import annotations

from pathlib import Path

import pytest
from bentoml.exceptions import BentoMLException

import cb_backend
from cb_backend.bento import endpoints


def test_the_factory_keeps_streams_whole_and_leaves_the_rest_to_its_caller() -> None:
    made = cb_backend.llm_service("name:latest", name="one", resources={"gpu": 1}, traffic={"max_concurrency": 7})
    assert made.name == "one"
    assert made.inner.model == "name:latest"
    assert made.config["traffic"] == {"timeout": 3600, "max_concurrency": 7}
    assert made.config["runner_connection"] == {"max_requests": 10**9, "max_age": 1e9}
    assert made.config["resources"] == {"gpu": 1}
    assert set(made.apis) == {"generate", "chat", "stream", "stats"}


def test_the_shipped_front_depends_on_such_a_service() -> None:
    from integration.depends_service import LLM, Front

    assert Front.dependencies["llm"].on is LLM
    assert LLM.config["traffic"]["timeout"] == 3600


async def test_calls_within_the_process_wait_for_the_model_and_agree(tiny_llama: Path) -> None:
    class Own(cb_backend.ContinuousBatching):
        model = str(tiny_llama)
        engine_config = {"dtype": "float32", "num_kv_blocks": 40, "block_size": 16, "swap_space": 0, "num_threads": 1}

    service = Own()
    greedy = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    try:
        whole = await service.generate("The cache", **greedy)
        streamed = "".join([text async for text in endpoints.texts(service.stream("The cache", **greedy))])
        assert whole["text"] == streamed
        assert whole["usage"]["completion_tokens"] == len(whole["token_ids"]) == 12
        several = await service.generate("The cache", n=3, seed=5, max_tokens=4)
        assert [len(choice["token_ids"]) for choice in several["choices"]] == [4, 4, 4]
        assert several["usage"]["completion_tokens"] == 12
        with pytest.raises(BentoMLException, match="'top_p'"):
            await service.generate("The cache", top_p=3.0)
        with pytest.raises(BentoMLException, match="'prompt' and 'messages'"):
            [piece async for piece in service.stream("A", [{"role": "user", "content": "A"}])]
        assert service.__is_ready__()
    finally:
        await service.stop_engine()
    assert not service.__is_ready__()
