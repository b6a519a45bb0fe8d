"""Tokenizing and detokenizing through HTTP agree with what the generation routes compute; other paths say 404."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from cb_backend import Engine
from cb_backend.openai.app import openai_app
from tests.openai.scripted_engine import ScriptedEngine

TEXT = "Grüße aus 東京 🙂"
HI = [{"role": "user", "content": "hi"}]


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_prompt_there_and_back(client: httpx.AsyncClient, engine: Engine) -> None:
    ids = engine.tokenizer(TEXT)["input_ids"]
    expected = {"count": len(ids), "max_model_len": engine.max_model_len, "tokens": ids, "token_strs": None}
    assert await post(client, "/tokenize", model="tiny", prompt=TEXT) == expected
    assert await post(client, "/tokenize", prompt=TEXT) == expected
    assert await post(client, "/detokenize", model="tiny", tokens=ids) == {"prompt": TEXT}


async def test_special_tokens_are_kept_in_both_directions(client: httpx.AsyncClient) -> None:
    told = await post(client, "/tokenize", prompt="<|im_start|>A<|im_end|>", return_token_strs=True)
    assert (told["tokens"][0], told["tokens"][-1]) == (1, 2)
    assert told["token_strs"] == ["<|im_start|>", "A", "<|im_end|>"]
    assert await post(client, "/detokenize", tokens=told["tokens"]) == {"prompt": "<|im_start|>A<|im_end|>"}


async def test_a_long_prompt_is_the_same(client: httpx.AsyncClient, engine: Engine) -> None:
    told = await post(client, "/tokenize", prompt=TEXT * 2000, add_special_tokens=False)
    assert told["tokens"] == engine.tokenizer(TEXT * 2000, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("fields", [{}, {"tools": [{"type": "function", "function": {"name": "now"}}]}])
async def test_a_chat_is_what_the_chat_route_computes(client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    told = await post(client, "/tokenize", messages=HI, **fields)
    # With tools it is longer than this model's context: the refusal then tells the number.
    answer = await client.post("/chat/completions", json={"model": "tiny", "messages": HI, "max_tokens": 1, **fields})
    if answer.status_code == 200:
        assert answer.json()["usage"]["prompt_tokens"] == told["count"]
    else:
        assert f"the prompt has {told['count']} tokens" in answer.json()["error"]["message"]


async def test_nothing_is_nothing(client: httpx.AsyncClient) -> None:
    assert (await post(client, "/tokenize", prompt=""))["tokens"] == []
    assert await post(client, "/detokenize", tokens=[]) == {"prompt": ""}


BAD: list[tuple[str, Any, int, str | None]] = [
    ("/tokenize", [], 400, None),
    ("/tokenize", {}, 400, "prompt"),
    ("/tokenize", {"prompt": 5}, 400, "prompt"),
    ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
    ("/tokenize", {"prompt": "a", "model": 5}, 400, "model"),
    ("/tokenize", {"prompt": "a", "messages": HI}, 400, "prompt"),
    ("/tokenize", {"prompt": "a", "max_tokens": 3}, 400, "max_tokens"),
    ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, 400, "add_special_tokens"),
    ("/tokenize", {"messages": HI, "add_special_tokens": True}, 400, "add_special_tokens"),
    ("/tokenize", {"messages": HI, "add_special_tokens": 0}, 400, "add_special_tokens"),
    ("/tokenize", {"messages": HI, "model": {}}, 400, "model"),
    ("/tokenize", {"messages": HI, "model": False}, 400, "model"),
    ("/tokenize", {"messages": HI, "return_token_strs": "yes"}, 400, "return_token_strs"),
    ("/tokenize", {"messages": HI, "temperature": 1}, 400, "temperature"),
    ("/tokenize", {"messages": []}, 400, "messages"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
    ("/detokenize", {"tokens": [512]}, 400, "tokens"),
    ("/detokenize", {"tokens": [True]}, 400, "tokens"),
    ("/detokenize", {"tokens": "5"}, 400, "tokens"),
    ("/detokenize", {}, 400, "tokens"),
]


@pytest.mark.parametrize(("path", "body", "status", "param"), BAD, ids=lambda value: str(value)[:60])
async def test_refused_with_the_field_named(
    client: httpx.AsyncClient, path: str, body: Any, status: int, param: str | None
) -> None:
    answer = await client.post(path, json=body)
    assert answer.status_code == status, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert answer.json()["error"]["param"] == param


async def test_without_a_tokenizer_it_says_so() -> None:
    transport = httpx.ASGITransport(openai_app(ScriptedEngine([])))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        answer = await client.post("/detokenize", json={"tokens": [1]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_tokenizer")


@pytest.mark.parametrize("path", ["/embeddings", "/audio/transcriptions", "/files", "/nothing/here", "/"])
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
async def test_under_v1_every_other_path_is_404_in_openais_shape(engine: Engine, method: str, path: str) -> None:
    transport = httpx.ASGITransport(openai_app(engine), root_path="/v1")
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        answer = await client.request(method, f"/v1{path}")
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (404, "unsupported_endpoint")
        assert error["message"].startswith(f"{method} /v1{path}: not served")
        assert (await client.get("/v1/models")).status_code == 200
        assert (await client.get("/v1/completions")).status_code == 405
