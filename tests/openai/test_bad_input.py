"""Every kind of bad input through HTTP: a 4xx that names the field, in OpenAI's shape, and a neighbour that notices
nothing."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from cb_backend import Engine
from cb_backend.openai.app import MAX_BODY_BYTES
from cb_backend.text.grammar import GrammarCompiler
from tests.text.slow_schema import slow_schema

HI = [{"role": "user", "content": "hi"}]
VOCABULARY = 512
POOL_TOKENS = 640
CONTEXT = 256

# (fields, param of the error); the message must name it too.
COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [[1], "a"]}, "prompt"),
    ({"prompt": ["a", 3]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [5, -7, 9]}, "prompt"),
    ({"prompt": [VOCABULARY]}, "prompt"),
    ({"prompt": [2**70]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [[3, None]]}, "prompt"),
    ({"prompt": [5] * (CONTEXT + 1)}, "prompt"),
    ({"prompt": [5] * (POOL_TOKENS + 1)}, "prompt"),
    ({"prompt": [5] * CONTEXT}, "prompt"),
    ({"prompt": [5] * 200, "max_tokens": 57}, "max_tokens"),
    ({"prompt": ["a"] * 1025}, "prompt"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 2**40}, "max_tokens"),
    ({"max_tokens": 1.0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 1e30}, "temperature"),
    ({"temperature": "nan"}, "temperature"),
    ({"temperature": "0.5"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 5e-324}, "repetition_penalty"),
    ({"n": 0}, "n"),
    ({"n": 0, "stream": True}, "n"),
    ({"n": 129}, "n"),
    ({"seed": 2**63}, "seed"),
    ({"stop": [""]}, "stop.0"),
    ({"stop": ""}, "stop.0"),
    ({"stop": [1]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [VOCABULARY]}, "stop_token_ids"),
    ({"stop_token_ids": [True]}, "stop_token_ids"),
    ({"logit_bias": {"007": 1}}, "logit_bias"),
    ({"logit_bias": {" 5": 1}}, "logit_bias"),
    ({"logit_bias": {"5.0": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {str(VOCABULARY): 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"logit_bias": {str(i): 1 for i in range(5000)}}, "logit_bias"),
    ({"bad_words": ["x"] * 5000}, "bad_words"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"ignore_eos": "yes"}, "ignore_eos"),
    ({"stream": "true"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ({"timeout": 0}, "timeout"),
    ({"priority": 1.5}, "priority"),
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 3}, "best_of"),
    ({"best_of": True}, "best_of"),
    ({"response_format": {"type": "yaml"}}, "response_format"),
    ({"temprature": 0.5}, "temprature"),
    ({"model": 5}, "model"),
    ({"model": None}, "model"),
]

CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": ["hi"]}, "messages.0"),
    ({"messages": [{}]}, "messages.0.role"),
    ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages.0.role"),
    ({"messages": [{"role": 123, "content": "hi"}]}, "messages.0.role"),
    ({"messages": [*HI, {"role": "user"}]}, "messages.1.content"),
    ({"messages": [{"role": "user", "content": "hi", "name": {}}]}, "messages.0.name"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///"}}]}]},
        "messages.0.content.0",
    ),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": 2}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"store": True}, "store"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"prompt": "x"}, "prompt"),
]

ROWS = [("/completions", {"prompt": "A", **fields}, param) for fields, param in COMPLETIONS]
ROWS += [("/chat/completions", {"messages": HI, **fields}, param) for fields, param in CHATS]


def check_error(answer: httpx.Response, param: str | None, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    [(key, error)] = answer.json().items()
    assert key == "error"
    assert set(error) == {"message", "type", "param", "code"}
    if param is not None:
        assert error["param"] is not None
        assert error["param"].endswith(param)
        assert error["param"].split(".")[0] in error["message"]
    return error


@pytest.mark.parametrize(("path", "body", "param"), ROWS, ids=lambda value: str(value)[:60])
async def test_refused_with_the_field_named(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    answer = await client.post(path, json={"model": "tiny", **body})
    check_error(answer, param)


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "presence_penalty", "max_tokens"])
async def test_not_a_number_is_no_json(client: httpx.AsyncClient, field: str, literal: str) -> None:
    body = f'{{"model": "tiny", "prompt": "A", "{field}": {literal}}}'
    assert check_error(await client.post("/completions", content=body), None)["code"] == "invalid_json"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"model": "tiny", "prompt": "A"',
        b"\xff\xfe",
        b'{"prompt": "\\ud83d", "model": "tiny"}',
        b"[" * 5000,
    ],
    ids=["empty", "open", "cut", "no UTF-8", "lone surrogate", "too deep"],
)
@pytest.mark.parametrize("path", ["/completions", "/chat/completions"])
async def test_invalid_json(client: httpx.AsyncClient, path: str, body: bytes) -> None:
    assert check_error(await client.post(path, content=body), None)["code"] == "invalid_json"


@pytest.mark.parametrize("body", ["null", '"text"', "[123]", "[{}]", "7", "true"])
async def test_a_body_that_is_no_object(client: httpx.AsyncClient, body: str) -> None:
    assert check_error(await client.post("/completions", content=body), None)["code"] == "invalid_body"


@pytest.mark.parametrize("field", ["model", "prompt"])
async def test_a_missing_field(client: httpx.AsyncClient, field: str) -> None:
    body = {"model": "tiny", "prompt": "A"}
    del body[field]
    error = check_error(await client.post("/completions", json=body), field)
    assert error["code"] == "missing_required_parameter"


@pytest.mark.parametrize("model", ["gpt-4o", "", "http://127.0.0.1:1/x", "TINY"])
@pytest.mark.parametrize("path", ["/completions", "/chat/completions"])
async def test_an_unknown_model_is_404(client: httpx.AsyncClient, path: str, model: str) -> None:
    body = {"model": model, **({"prompt": "A"} if path == "/completions" else {"messages": HI})}
    assert check_error(await client.post(path, json=body), "model", 404)["code"] == "model_not_found"


async def test_models_are_listed_and_found_by_id(client: httpx.AsyncClient) -> None:
    card = {"id": "tiny", "object": "model", "created": 0, "owned_by": "cb_backend"}
    card |= {"max_model_len": CONTEXT, "tool_call_format": "hermes"}
    assert (await client.get("/models/")).json() == (await client.get("/models")).json()
    assert (await client.get("/models")).json() == {"object": "list", "data": [card]}
    assert (await client.get("/models/tiny")).json() == card
    check_error(await client.get("/models/org/other"), "model", 404)


@pytest.mark.parametrize("declared", [True, False], ids=["content-length", "chunked"])
async def test_a_body_that_is_too_large(client: httpx.AsyncClient, declared: bool) -> None:
    body = json.dumps({"model": "tiny", "prompt": "x" * MAX_BODY_BYTES}).encode()

    async def pieces() -> Any:
        for i in range(0, len(body), 1 << 20):
            yield body[i : i + (1 << 20)]

    answer = await client.post("/completions", content=body if declared else pieces())
    assert check_error(answer, None, 413)["code"] == "body_too_large"


async def test_another_method_is_405_in_the_same_shape(client: httpx.AsyncClient) -> None:
    check_error(await client.get("/completions"), None, 405)


SLOW = {"name": "slow", "schema": slow_schema(6)}
TOO_SLOW: list[tuple[str, dict[str, Any], str]] = [
    (
        "/chat/completions",
        {"messages": HI, "response_format": {"type": "json_schema", "json_schema": SLOW}},
        "response_format",
    ),
    (
        "/chat/completions",
        {
            "messages": HI,
            "tools": [{"type": "function", "function": {"name": "slow", "parameters": SLOW["schema"]}}],
            "tool_choice": "required",
        },
        "tools",
    ),
    ("/responses", {"input": "hi", "text": {"format": {"type": "json_schema", **SLOW}}}, "text.format"),
]


@pytest.mark.parametrize(("path", "body", "param"), TOO_SLOW, ids=["format", "tools", "responses"])
async def test_a_grammar_too_slow_to_compile(
    client: httpx.AsyncClient,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    param: str,
) -> None:
    impatient = GrammarCompiler(engine.tokenizer, engine.vocab_size, {2}, max_compile_seconds=0.01)
    monkeypatch.setattr(engine.parts.grammar, "compile", impatient.compile)
    error = check_error(await client.post(path, json={"model": "tiny", **body}), param)
    assert error["message"] == f"'{param}': compiling it took more than 0.01 s; simplify it"


async def test_a_neighbour_notices_nothing(client: httpx.AsyncClient, engine: Engine) -> None:
    good = {"model": "tiny", "prompt": "A request", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    alone = (await client.post("/completions", json=good)).json()["choices"]
    beside = asyncio.ensure_future(client.post("/completions", json=good))
    for path, body, _ in ROWS:
        assert (await client.post(path, json={"model": "tiny", **body})).status_code == 400
    assert (await beside).json()["choices"] == alone
    stats = engine.stats()
    assert (stats["running"], stats["waiting"], stats["kv_blocks_used"]) == (0, 0, 0)
