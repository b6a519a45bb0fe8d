"""Responses, their events and the models by OpenAI's own description (completions and chats: tests/clients)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from jsonschema import Draft202012Validator

from cb_backend import Engine
from cb_backend.openai.app import openai_app
from tests.openai.scripted_engine import ScriptedEngine, outputs

DATA = Path(__file__).parents[1] / "data" / "openai"
RESPONSES = json.loads((DATA / "responses_cut.json").read_text(encoding="utf-8"))
REST = json.loads((DATA / "openapi_cut.json").read_text(encoding="utf-8"))
BROKEN = [outputs("one", "two")[0], RuntimeError("broken")]

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}


def validate(description: dict[str, Any], body: Any, name: str) -> None:
    wanted = {"components": description["components"], "$ref": f"#/components/schemas/{name}"}
    Draft202012Validator(wanted).validate(body)


def http_of(engine: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(openai_app(engine)), base_url="http://test")


async def events_of(engine: Any, **fields: Any) -> list[dict[str, Any]]:
    async with http_of(engine) as http:
        answer = await http.post("/responses", json={"stream": True, **fields})
    assert answer.status_code == 200, answer.text
    *events, rest = answer.text.split("\n\n")
    assert rest == ""
    return [json.loads(event.split("\ndata: ")[1]) for event in events]


@pytest.mark.parametrize("fields", [{"instructions": "Be brief.", "user": "me"}, {"text": FORMAT}, {"temperature": 0}])
async def test_a_whole_response(client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    answer = await client.post("/responses", json={"model": "tiny", "input": "hi", "max_output_tokens": 20, **fields})
    assert answer.status_code == 200, answer.text
    validate(RESPONSES, answer.json(), "Response")


@pytest.mark.parametrize(
    ("script", "last"),
    [
        (outputs("one", "two"), "response.completed"),
        (outputs("one", "two", reason="length"), "response.incomplete"),
        (BROKEN, "error"),
    ],
    ids=["stop", "length", "broken"],
)
async def test_the_events_of_a_response(script: list[Any], last: str) -> None:
    events = await events_of(ScriptedEngine(script), model="scripted", input="hi")
    for number, event in enumerate(events):
        validate(RESPONSES, event, "ResponseStreamEvent")
        assert event["sequence_number"] == number
    assert events[-1]["type"] == last


async def test_a_broken_stream_of_a_response_is_raised_by_the_official_client() -> None:
    engine = ScriptedEngine(BROKEN)
    async with openai.AsyncOpenAI(base_url="http://test", api_key="none", http_client=http_of(engine)) as client:
        stream = await client.responses.create(model="scripted", input="hi", stream=True)
        with pytest.raises(openai.APIError, match="internal error"):
            [event async for event in stream]


async def test_models(client: httpx.AsyncClient, engine: Engine) -> None:
    listed, one = await client.get("/models"), await client.get(f"/models/{engine.model_name}")
    validate(REST, listed.json(), "ListModelsResponse")
    validate(REST, one.json(), "Model")
