"""Schemathesis against `bentoml serve`: by the description on the service's docs page, and by OpenAI's own.

Bodies are pinned to the served model and a few tokens wherever that leaves them as right or wrong as they were.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import bentoml
import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from jsonschema import Draft202012Validator
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.bento.servers import Server
from tests.clients.conftest import TINY

pytestmark = pytest.mark.timeout(240)

ROOT = Path(__file__).parents[2]
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
BOUNDED = settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


def pinned(context: Any, body: Any) -> Any:
    """Of what is right already: the model's name, how much is generated in how many choices, and a time for it."""
    if not isinstance(body, dict):
        return body
    body = dict(body)
    if isinstance(body.get("model"), str):
        body["model"] = TINY
    if "tokenize" in context.operation.path:
        return body
    limit = "max_output_tokens" if context.operation.path.endswith("/responses") else "max_tokens"
    named = [name for name in LIMITS if body.get(name) is not None]
    for name in named or [limit]:
        value = body.get(name)
        if value is None or (is_a(int, value) and value > 4):
            body[name] = 4
    if is_a(int, body.get("n")) and body["n"] > 2:
        body["n"] = 2
    if is_a((int, float), body.get("timeout")) and 0 < body["timeout"] < 30:
        body["timeout"] = 30  # one that cannot be kept is answered with 503 or 504, as described
    return body


def is_a(kind: type | tuple[type, ...], value: Any) -> bool:
    """A boolean is no number."""
    return isinstance(value, kind) and not isinstance(value, bool)


def reaches_the_app(context: Any, path_parameters: Any) -> bool:
    """BentoML mounts an application below a path of one line: its own router answers what has a line break in it."""
    return not any("\n" in unquote(str(value)) for value in (path_parameters or {}).values())


def schema_of(description: dict[str, Any], **only: Any) -> Any:
    """Of the routes of `description`, those that `only` picks."""
    schema = schemathesis.openapi.from_dict(description)
    schema.hook("map_body")(pinned)
    schema.hook("filter_path_parameters")(reaches_the_app)
    schema.config.max_stream_events = 1000  # it would leave after 20, and not see how a stream ends
    return schema.include(**only)


DESCRIPTION = bentoml.load("integration.service:LLM", working_dir=str(ROOT)).openapi_spec.asdict()
OURS = schema_of(DESCRIPTION, path_regex="^/v1/")


@OURS.parametrize()
@BOUNDED
def test_the_docs_page_tells_what_is_accepted_and_answered(case: Any, tiny_server: Server) -> None:
    # That a body fits does not make it right: some fields exclude each other, and prompts may be too long.
    case.call_and_validate(base_url=tiny_server.url, timeout=60, excluded_checks=[positive_data_acceptance])


CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Lyon"]}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": CITY}}
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
# Route -> bodies that are right, which a generator finds too seldom; each is also sent as a stream.
RIGHT: list[tuple[str, dict[str, Any]]] = [
    ("/completions", {"prompt": "One", "max_tokens": 5}),
    ("/completions", {"prompt": ["One", "Two"], "max_tokens": 5, "n": 2, "logprobs": 2}),
    ("/completions", {"prompt": "One", "max_tokens": 5, "echo": True, "logprobs": 2}),
    ("/chat/completions", {**HELLO, "max_tokens": 5}),
    ("/chat/completions", {**HELLO, "max_tokens": 5, "n": 2, "logprobs": True, "top_logprobs": 2}),
    ("/chat/completions", {**HELLO, "max_tokens": 200, "tools": [TOOL], "tool_choice": "required"}),
    ("/chat/completions", {**HELLO, "max_tokens": 200, "response_format": FORMAT}),
]
# The cut of OpenAI's description has no Responses API.
OF_OURS_ONLY: list[tuple[str, dict[str, Any]]] = [("/responses", {"input": "Hello", "max_output_tokens": 5})]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("path", "body"), RIGHT + OF_OURS_ONLY)
def test_right_bodies_are_answered_by_the_description(
    path: str, body: dict[str, Any], stream: bool, tiny_server: Server
) -> None:
    usage = {"stream_options": {"include_usage": True}} if stream and path != "/responses" else {}
    case = OURS[f"/v1{path}"]["POST"].Case(
        body={"model": TINY, **body, "stream": stream, **usage}, media_type="application/json"
    )
    answer = case.call_and_validate(base_url=tiny_server.url, timeout=60)
    assert answer.status_code == 200
    kind = "text/event-stream" if stream else "application/json"
    assert answer.headers["content-type"][0].startswith(kind)


def test_the_docs_page_serves_this_description(tiny_server: Server) -> None:
    answer = httpx.get(f"{tiny_server.url}/docs.json").json()
    assert answer["paths"].keys() == DESCRIPTION["paths"].keys()
    assert {path for path in answer["paths"] if path.startswith("/v1/")} == {
        f"/v1/{route}"
        for route in (
            "models",
            "models/{model}",
            "completions",
            "chat/completions",
            "responses",
            "tokenize",
            "detokenize",
        )
    }
    assert answer["components"]["schemas"]["ChatRequest"] == DESCRIPTION["components"]["schemas"]["ChatRequest"]


PUBLIC = json.loads((ROOT / "tests" / "data" / "openai" / "openapi_cut.json").read_text(encoding="utf-8"))
THEIRS = schema_of(PUBLIC, path_regex="completions")
EVENTS = {
    "/completions": "CreateCompletionResponse",
    "/chat/completions": "CreateChatCompletionStreamResponse",
}


def with_null(value: Any) -> Any:
    """JSON Schema of 2020 for what is told by `nullable`, a word of OpenAPI 3.0 in a document of 3.1."""
    if isinstance(value, list):
        return [with_null(one) for one in value]
    if not isinstance(value, dict):
        return value
    said = {key: with_null(inner) for key, inner in value.items()}
    return or_null(said) if said.pop("nullable", None) is True else said


def their_answers() -> dict[str, Any]:
    """Their schemas, with the nulls that they forget of completions."""
    schemas = with_null(PUBLIC["components"]["schemas"])
    choice = schemas["CreateCompletionResponse"]["properties"]["choices"]["items"]["properties"]
    # It is the shape of a stream's events too, where the reason is null until the choice ends.
    choice["finish_reason"] = or_null(choice["finish_reason"])
    # Nothing comes before the first token of a prompt that `echo` repeats: it has no log-probability.
    logprobs = choice["logprobs"]["anyOf"][0]["properties"]
    for name in ("token_logprobs", "top_logprobs"):
        logprobs[name]["items"] = or_null(logprobs[name]["items"])
    return {"components": {"schemas": schemas}}


def or_null(schema: Any) -> Any:
    return {"anyOf": [schema, {"type": "null"}]}


ANSWERS = their_answers()


@THEIRS.parametrize()
@BOUNDED
def test_what_openais_own_description_allows_is_answered_by_it(case: Any, tiny_server: Server) -> None:
    """Or refused: it also allows what needs other models (images, audio, web search)."""
    answer = case.call(base_url=f"{tiny_server.url}/v1", timeout=60)
    if answer.status_code == 200:
        conforms(case, answer)
        return
    assert answer.status_code in ((400, 404) if case.method == "POST" else (405,)), answer.text
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("path", "body"), RIGHT)
def test_right_bodies_are_answered_by_openais_own_description(
    path: str, body: dict[str, Any], stream: bool, tiny_server: Server
) -> None:
    case = THEIRS[path]["POST"].Case(body={"model": TINY, **body, "stream": stream}, media_type="application/json")
    answer = case.call(base_url=f"{tiny_server.url}/v1", timeout=60)
    assert answer.status_code == 200, answer.text
    assert conforms(case, answer) >= 1  # what a reader has not taken yet is joined: how many events there are is chance


def conforms(case: Any, answer: Any) -> int:
    """Checks the body, or every event of the stream; returns how many these were."""
    if answer.headers["content-type"][0].startswith("application/json"):
        responses = case.operation.definition.raw["responses"]
        schema = responses["200"]["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[-1]
        validate(answer.json(), schema)
        return 1
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    for event in events:
        validate(json.loads(event.removeprefix("data: ")), EVENTS[case.operation.path])
    return len(events)


def validate(body: Any, name: str) -> None:
    Draft202012Validator({**ANSWERS, "$ref": f"#/components/schemas/{name}"}).validate(body)
