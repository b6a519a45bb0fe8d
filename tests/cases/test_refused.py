"""Reports in which one bad request hurt a server: each is refused by its field's name, and no other
request is affected."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from cb_backend import Engine
from cb_backend.errors import ModelError

from .asking import GREEDY, choices
from .conftest import CONTEXT, SCARCE_TOKENS

V = 512
HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "pattern": "\\d+["}}}


def tools(parameters: Any, count: int = 1) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": f"f{i}", "parameters": parameters}} for i in range(count)]


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": HI, **fields}


def part(url: str) -> dict[str, Any]:
    return chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}])


# (report, body, first part of the error's param)
ROWS: list[tuple[int, dict[str, Any], str]] = [
    (19, {"stop": ""}, "stop"),
    (19, {"stop": [""]}, "stop"),
    (19, {"stop": ["a"] * 17}, "stop"),
    *((37, {"prompt": ids}, "prompt") for ids in ([-1], [5, -7, 9], [True], [1.5], ["a", 3])),
    *((38, {"prompt": ids}, "prompt") for ids in ([0, 0, V], [V + 1])),
    *((40, {"logit_bias": {key: 1}}, "logit_bias") for key in ("-1", str(V), "007", " 5", "5.0")),
    *((40, {"stop_token_ids": [i]}, "stop_token_ids") for i in (-1, V)),
    (41, {"logit_bias": {"191222": -100, "5": 1}}, "logit_bias"),
    (43, {"stop_token_ids": [V + 100], "min_tokens": 5}, "stop_token_ids"),
    *((47, {field: "nan"}, field) for field in ("temperature", "top_p", "min_p", "repetition_penalty")),
    *((47, {field: "nan"}, field) for field in ("presence_penalty", "frequency_penalty")),
    (49, {"temperature": "Infinity"}, "temperature"),
    (49, {"temperature": 1e300}, "temperature"),
    (50, {"top_k": -2}, "top_k"),
    (70, chat(messages=[]), "messages"),
    *(
        (71, {"response_format": schema}, "response_format")
        for schema in (
            {"type": "json_schema", "json_schema": {"schema": {"properties": {"foo": "bar"}}}},
            {"type": "json_schema", "json_schema": {"schema": {"type": "strin"}}},
            {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/nowhere"}}},
            {"type": "json_schema", "json_schema": {"schema": None}},
            {"type": "json_schema"},
        )
    ),
    *(
        (73, {"response_format": {"type": "regex", "regex": text}}, "response_format")
        for text in (
            "(",
            "[a",
            "(?P<x",
            "(?<=a)b",
            "a" * 2**20,
        )
    ),
    (145, {"n": 0, "stream": True}, "n"),
    (145, chat(n=0, stream=True), "n"),
    (193, chat(chat_template="{{ 1 }}"), "chat_template"),
    *(
        (193, chat(chat_template_kwargs={key: "x"}), "chat_template_kwargs")
        for key in ("chat_template", "messages", "tools")
    ),
    (196, chat(tools=tools({"type": "something"})), "tools"),
    (196, chat(tools=tools(SCHEMA), tool_choice="required"), "tools"),
    (196, chat(tools=tools("not an object")), "tools"),
    (196, chat(tools=tools({}, 1000)), "tools"),
    (197, {"bad_words": ["x"] * 100_000}, "bad_words"),
    (197, {"logit_bias": {str(i): 1 for i in range(100_000)}}, "logit_bias"),
    (197, {"stop_token_ids": [5] * 100_000}, "stop_token_ids"),
    (197, {"stop": "x" * 2**20}, "stop"),
    *((199, part(url), "messages") for url in ("http://169.254.169.254/", "file:///etc/passwd")),
]
IDS = [f"case_{report:03d}_{i}" for i, (report, _, _) in enumerate(ROWS)]


def path_of(body: dict[str, Any]) -> str:
    return "/chat/completions" if "messages" in body else "/completions"


@pytest.mark.parametrize(("report", "body", "param"), ROWS, ids=IDS)
async def test_refused(client: httpx.AsyncClient, report: int, body: dict[str, Any], param: str) -> None:
    sent = {"model": "tiny", "max_tokens": 5, **({} if "messages" in body else {"prompt": "A"}), **body}
    answer = await client.post(path_of(body), json=sent)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].split(".")[0] == param


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"])
async def test_case_047_049_literals_that_are_no_json(client: httpx.AsyncClient, field: str, literal: str) -> None:
    body = f'{{"model": "tiny", "prompt": "A", "{field}": {literal}}}'
    assert (await client.post("/completions", content=body)).status_code == 400


@pytest.mark.parametrize("model", ["http://127.0.0.1:1/x", "org/model", "../../etc", ""])
async def test_case_200_a_model_that_is_not_loaded_is_fetched_from_nowhere(
    client: httpx.AsyncClient, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr("socket.socket.connect", refuse)
    answer = await client.post("/completions", json={"model": model, "prompt": "A"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("field", ["prompt", "stop", "user"])
@pytest.mark.parametrize("text", ["emoji \\ud83d", "x \\ude00 y"])
async def test_case_149_half_a_surrogate_pair(client: httpx.AsyncClient, field: str, text: str) -> None:
    body = f'{{"model": "tiny", "prompt": "A", "max_tokens": 1, "{field}": "{text}"}}'
    assert (await client.post("/completions", content=body)).status_code == 400
    paired = body.replace(text, "\\ud83d\\ude00")
    assert (await client.post("/completions", content=paired)).status_code == 200


async def test_case_085_larger_than_the_memory_is_refused_at_once(scarce: httpx.AsyncClient) -> None:
    answer = await scarce.post("/completions", json={"model": "tiny", "prompt": [5] * (SCARCE_TOKENS + 1)})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    assert (await choices(scarce, prompt=[5] * 20, max_tokens=5, **GREEDY))[0]["finish_reason"] == "length"


def test_case_085_a_context_that_the_memory_cannot_hold_is_refused_at_the_start(tiny_llama: Path) -> None:
    with pytest.raises(ModelError, match="raise num_kv_blocks or kv_cache_memory, or lower max_model_len"):
        Engine(model=str(tiny_llama), device="cpu", max_model_len=512, num_kv_blocks=16, block_size=16).start()


async def test_case_032_a_prompt_may_be_all_of_the_context_but_one_token(client: httpx.AsyncClient) -> None:
    body = await choices(client, prompt=[5] * (CONTEXT - 1), max_tokens=1, **GREEDY)
    assert body[0]["finish_reason"] == "length"
    answer = await client.post("/completions", json={"model": "tiny", "prompt": [5] * CONTEXT, "max_tokens": 1})
    assert answer.status_code == 400


async def test_case_031_035_refusals_wedge_nothing(client: httpx.AsyncClient, engine: Engine) -> None:
    good = {"max_tokens": 20, **GREEDY}
    alone = await choices(client, **good)
    first = [asyncio.ensure_future(choices(client, **good)) for _ in range(8)]
    bad = {"model": "tiny", "prompt": [5] * (CONTEXT + 1), "max_tokens": 1}
    refused = await asyncio.gather(*(client.post("/completions", json=bad) for _ in range(20)))
    assert {answer.status_code for answer in refused} == {400}
    second = [asyncio.ensure_future(choices(client, **good)) for _ in range(8)]
    assert await asyncio.wait_for(asyncio.gather(*first, *second), 30) == [alone] * 16
    stats = engine.stats()
    assert (stats["running"], stats["waiting"], stats["kv_blocks_used"]) == (0, 0, 0)


@pytest.mark.parametrize("path", ["/completions", "/chat/completions"])
async def test_case_151_a_body_of_27_megabytes_is_413(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.post(path, content=b'{"model": "' + b"x" * 27_000_000 + b'"}')
    assert answer.status_code == 413
