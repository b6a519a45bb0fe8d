"""Tool calls through HTTP: forced ones fit their schema whatever the model is, others are read out of its text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from cb_backend import Engine
from cb_backend.openai.app import openai_app
from tests.openai.scripted_engine import LeavingClient, ScriptedEngine, outputs

HI = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Köln", "東京"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
}


def tool(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TOOLS = [tool("weather", WEATHER, description="How it will be"), tool("now")]
NAMED = {"type": "function", "function": {"name": "weather"}}
FORCED = {"model": "tiny", "messages": HI, "tools": TOOLS, "max_tokens": 100}


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Iterator[Engine]:
    """Like the package's, with room for tools in the prompt: this tokenizer makes a token of nearly every letter."""
    made = Engine(
        model=str(tiny_llama),
        served_model_name="tiny",
        dtype="float32",
        device="cpu",
        max_model_len=1024,
        num_kv_blocks=128,
        block_size=16,
        swap_space=0,
        num_threads=1,
    )
    with made as engine:
        yield engine


async def scripted(*texts: str, template: str = "", reason: str = "stop", **fields: Any) -> LeavingClient:
    body = {"model": "scripted", "messages": HI, "tools": TOOLS, **fields}
    engine = ScriptedEngine(outputs(*texts, reason=reason), template=template)
    client = LeavingClient(openai_app(engine), "/chat/completions", body)
    await asyncio.wait_for(client.done, 5)
    assert client.status == 200, client.body
    return client


def choice_of(client: LeavingClient) -> dict[str, Any]:
    return json.loads(client.body)["choices"][0]


def calls_of(message: dict[str, Any]) -> list[tuple[str, str]]:
    assert all(call["type"] == "function" for call in message["tool_calls"])
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]


async def post(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await client.post("/chat/completions", json={**FORCED, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


@pytest.mark.parametrize("seed", range(3))
async def test_a_named_function_is_called_once_and_fits_its_schema(client: httpx.AsyncClient, seed: int) -> None:
    choice = await post(client, tool_choice=NAMED, seed=seed, temperature=1.5)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    [(name, arguments)] = calls_of(choice["message"])
    assert name == "weather"
    jsonschema.validate(json.loads(arguments), WEATHER)


@pytest.mark.parametrize("seed", range(3))
async def test_required_means_one_of_them(client: httpx.AsyncClient, seed: int) -> None:
    choice = await post(client, tool_choice="required", seed=seed, temperature=1.5)
    assert choice["finish_reason"] == "tool_calls"
    [(name, arguments)] = calls_of(choice["message"])
    if name == "weather":
        jsonschema.validate(json.loads(arguments), WEATHER)
    else:
        assert (name, json.loads(arguments)) == ("now", {})


async def test_required_and_parallel_may_be_several(client: httpx.AsyncClient) -> None:
    choice = await post(client, tools=[tool("now")], tool_choice="required", parallel_tool_calls=True, max_tokens=250)
    names = [name for name, _ in calls_of(choice["message"])]
    assert 1 <= len(names) <= 8
    assert set(names) == {"now"}


async def test_each_choice_has_a_call_of_its_own_and_streams_it(client: httpx.AsyncClient, engine: Engine) -> None:
    sent = {**FORCED, "tool_choice": NAMED, "n": 2, "seed": 1, "temperature": 1.0}
    whole = (await client.post("/chat/completions", json=sent)).json()["choices"]
    calls: dict[int, dict[str, Any]] = {}
    answer = await client.post("/chat/completions", json={**sent, "stream": True})
    for event in answer.text.split("\n\n")[:-2]:
        [choice] = json.loads(event.removeprefix("data: "))["choices"]
        for piece in choice["delta"].get("tool_calls", ()):
            assert piece["index"] == 0
            if "id" in piece:
                assert piece["function"]["arguments"] == ""
                calls[choice["index"]] = {**piece, "text": ""}
            calls[choice["index"]]["text"] += piece["function"]["arguments"]
    assert [[("weather", calls[i]["text"])] for i in (0, 1)] == [calls_of(one["message"]) for one in whole]
    assert calls[0]["id"] != calls[1]["id"]


async def test_the_official_client_reads_both(engine: Engine) -> None:
    transport = httpx.ASGITransport(openai_app(engine))
    http = httpx.AsyncClient(transport=transport)
    async with openai.AsyncOpenAI(base_url="http://test", api_key="none", http_client=http) as client:
        wanted: dict[str, Any] = {**FORCED, "tool_choice": "required", "seed": 3}
        whole = await client.chat.completions.create(**wanted)
        async with client.chat.completions.stream(**wanted) as events:
            streamed = await events.get_final_completion()
    first, second = whole.choices[0], streamed.choices[0]
    assert first.finish_reason == second.finish_reason == "tool_calls"
    assert first.message.tool_calls and second.message.tool_calls
    assert first.message.tool_calls[0].function.name == second.message.tool_calls[0].function.name
    assert first.message.tool_calls[0].function.arguments == second.message.tool_calls[0].function.arguments


async def test_tools_are_shown_to_a_template_that_knows_none_and_hidden_by_none(
    client: httpx.AsyncClient, engine: Engine
) -> None:
    def count(messages: list[Any]) -> int:
        return len(engine.chat.render(messages))

    async def prompt_tokens(**fields: Any) -> int:
        body = {"model": "tiny", "messages": HI, "tools": [tool("now")], "max_tokens": 1, **fields}
        return (await client.post("/chat/completions", json=body)).json()["usage"]["prompt_tokens"]

    assert await prompt_tokens(tool_choice="none") == await prompt_tokens(tools=[]) == count(HI)
    text = (
        "You can call functions to help with the user's request. Their signatures, one JSON object a line:\n"
        f"<tools>\n{json.dumps(tool('now'))}\n</tools>\n"
        "To call one, answer with its name and arguments as a JSON object between <tool_call> tags:\n"
        '<tool_call>\n{"name": <function-name>, "arguments": <arguments-object>}\n</tool_call>'
    )
    assert await prompt_tokens() == count([{"role": "system", "content": text}, *HI])


async def test_a_stream_has_text_then_names_then_arguments_and_the_reason_last() -> None:
    texts = ("I look.\n<tool", '_call>\n{"name": "weather", "argu', 'ments": {"city":', ' "Köln"}}\n</tool_call>')
    client = await scripted(*texts, stream=True)
    *events, done, _ = client.body.decode().split("\n\n")
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    ident = choices[2]["delta"]["tool_calls"][0]["id"]
    assert ident.startswith("call_")
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"content": "I look."},
        {
            "tool_calls": [
                {"index": 0, "id": ident, "type": "function", "function": {"name": "weather", "arguments": ""}}
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ' "Köln"}'}}]},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, None, "tool_calls"]
    assert done == "data: [DONE]"


FORMATS = [
    ("", '<tool_call>{"name": "now", "arguments": {}}</tool_call>'),
    ("{{ tools }}<tool_call>", '<tool_call>{"name": "now", "arguments": {}}</tool_call>'),
    ("{{ tools }}<|python_tag|>", '{"name": "now", "parameters": {}}'),
    ("{{ tools }}[TOOL_CALLS]", '[{"name": "now", "arguments": {}}]'),
]


@pytest.mark.parametrize(("template", "written"), FORMATS)
async def test_the_template_tells_the_format(template: str, written: str) -> None:
    choice = choice_of(await scripted(written, template=template))
    assert calls_of(choice["message"]) == [("now", "{}")]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")


TWO = '<tool_call>{"name": "now", "arguments": {}}</tool_call>\n' * 2


@pytest.mark.parametrize(("parallel", "count"), [(None, 2), (True, 2), (False, 1)])
async def test_parallel_calls_can_be_refused(parallel: bool | None, count: int) -> None:
    choice = choice_of(await scripted(TWO, parallel_tool_calls=parallel))
    assert calls_of(choice["message"]) == [("now", "{}")] * count


async def test_a_call_cut_short_says_length() -> None:
    choice = choice_of(await scripted('<tool_call>{"name": "weather", "arguments": {"ci', reason="length"))
    assert calls_of(choice["message"]) == [("weather", '{"ci')]
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("fields", [{}, {"tool_choice": "none"}, {"tools": []}])
async def test_text_stays_text(fields: dict[str, Any]) -> None:
    choice = choice_of(await scripted("plain <tool", " text", **fields))
    assert choice["message"] == {"role": "assistant", "content": "plain <tool text", "refusal": None}
    assert choice["finish_reason"] == "stop"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": {}}, "tools"),
    ({"tools": ["now"]}, "tools.0"),
    ({"tools": [{"type": "retrieval"}]}, "tools.0"),
    ({"tools": [tool("now"), {"type": "function"}]}, "tools.1.function"),
    ({"tools": [tool("no w")]}, "tools.0.function.name"),
    ({"tools": [tool("x" * 65)]}, "tools.0.function.name"),
    ({"tools": [tool("now"), tool("now")]}, "tools.1.function.name"),
    ({"tools": [tool("now", description=5)]}, "tools.0.function.description"),
    ({"tools": [tool("now", [])]}, "tools.0.function.parameters"),
    ({"tools": [tool("now", {"type": "string"})]}, "tools.0.function.parameters.type"),
    ({"tools": [tool(f"f{i}") for i in range(1000)]}, "tools"),
    ({"tools": [tool("now", {"properties": {"a": {"description": "x" * 300_000}}})]}, "tools"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"tools": None, "tool_choice": NAMED}, "tool_choice.function.name"),
    ({"tool_choice": "weather"}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice.function.name"),
    ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: str(value)[:60])
async def test_refused_with_the_field_named(client: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    answer = await client.post("/chat/completions", json={**FORCED, **fields})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"'{param}'")


async def test_a_schema_that_no_grammar_can_hold_is_the_tools_fault(client: httpx.AsyncClient) -> None:
    tools = [tool("now", {"properties": {"a": {"$ref": "#/nowhere"}}, "required": ["a"]})]
    answer = await client.post("/chat/completions", json={**FORCED, "tools": tools, "tool_choice": "required"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
