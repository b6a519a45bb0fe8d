"""The OpenAPI description of the OpenAI routes, made from the models that read requests: `app.state.describe`.

The dialect is OpenAPI 3.0's, as BentoML's docs page cannot show a later one: null is `nullable`, and an exclusive bound
is a flag.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from .answer_shapes import ANSWERS, ERRORS
from .protocol import ChatRequest, CompletionRequest
from .responses import ResponsesRequest
from .shapes import JSON
from .tokens import DetokenizeRequest, TokenizeRequest

_REF = "#/components/schemas/{model}"

# Route -> who reads its body, the answer, an event of its stream, and one line about it.
_POSTS: Mapping[str, tuple[type[BaseModel], str, str | None, str]] = {
    "/completions": (CompletionRequest, "Completion", "CompletionEvent", "Completes one or more prompts."),
    "/chat/completions": (ChatRequest, "ChatCompletion", "ChatCompletionEvent", "Answers a chat."),
    "/responses": (ResponsesRequest, "Response", "ResponseEvent", "Answers a text or a chat; nothing is stored."),
    "/tokenize": (TokenizeRequest, "Tokens", None, "The token ids of a prompt."),
    "/detokenize": (DetokenizeRequest, "Text", None, "The text of token ids."),
}


def openai_description() -> dict[str, Any]:
    """`paths`, below where the application is mounted, and `components`, whose names do not meet BentoML's."""
    schemas: dict[str, JSON] = dict(ANSWERS)
    paths: dict[str, JSON] = {
        "/models": {"get": _operation("list_models", "The model that is served.", "ModelList")},
        "/models/{model}": {
            "get": {
                **_operation("retrieve_model", "The model, if it is the one that is served.", "Model"),
                "parameters": [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}],
            }
        },
    }
    for path, (reader, answer, event, about) in _POSTS.items():
        own = reader.model_json_schema(ref_template=_REF)
        schemas |= own.pop("$defs", {})
        schemas[reader.__name__] = {"anyOf": [own, _chat_to_tokenize()]} if reader is TokenizeRequest else own
        body = {"application/json": {"schema": _ref(reader.__name__)}}
        paths[path] = {
            "post": {
                **_operation(path[1:].replace("/", "_"), about, answer, event),
                "requestBody": {"required": True, "content": body},
            }
        }
    described: JSON = _in_3_0({"paths": paths, "components": {"schemas": schemas}})
    return described


def _chat_to_tokenize() -> JSON:
    """The other body that `/tokenize` takes: the fields of a chat that decide its tokens."""
    chat = ChatRequest.model_json_schema(ref_template=_REF)["properties"]
    properties = {name: chat[name] for name in TokenizeRequest.CHAT_FIELDS}
    properties |= {"model": {"type": ["string", "null"]}, "return_token_strs": {"type": ["boolean", "null"]}}
    properties["add_special_tokens"] = {"enum": [None, False], "description": "The template writes them itself."}
    return {"type": "object", "properties": properties, "required": ["messages"], "additionalProperties": False}


def _operation(name: str, about: str, answer: str, event: str | None = None) -> JSON:
    content = {"application/json": {"schema": _ref(answer)}}
    if event is not None:
        content["text/event-stream"] = {"schema": _ref(event)}
    failures = {
        status: {"description": text, "content": {"application/json": {"schema": _ref("OpenAIError")}}}
        for status, text in ERRORS.items()
    }
    return {
        "operationId": f"openai_{name}",
        "summary": about,
        "tags": ["OpenAI"],
        "responses": {"200": {"description": "The answer.", "content": content}, **failures},
    }


def _ref(name: str) -> JSON:
    return {"$ref": _REF.format(model=name)}


def _in_3_0(value: Any) -> Any:
    """JSON Schema of 2020 in the words of OpenAPI 3.0."""
    if isinstance(value, list):
        return [_in_3_0(one) for one in value]
    if not isinstance(value, dict):
        return value
    said = {key: _in_3_0(inner) for key, inner in value.items() if key != "propertyNames"}
    if "const" in said:
        said["enum"] = [said.pop("const")]
    if said.get("default", said) is None:
        del said["default"]
    kinds = said.get("type")
    if isinstance(kinds, list):
        others = [kind for kind in kinds if kind != "null"]
        del said["type"]
        said |= {"type": others[0]} if len(others) == 1 else {"anyOf": [{"type": kind} for kind in others]}
        said |= {"nullable": True} if len(others) < len(kinds) else {}
    branches = said.get("anyOf")
    if isinstance(branches, list) and {"type": "null"} in branches:
        left = [branch for branch in branches if branch != {"type": "null"}]
        del said["anyOf"]
        said = {**said, "nullable": True, **(left[0] if len(left) == 1 and "$ref" not in left[0] else {"anyOf": left})}
    for bound in ("minimum", "maximum"):
        exclusive = f"exclusive{bound.capitalize()}"
        if isinstance(said.get(exclusive), (int, float)) and not isinstance(said[exclusive], bool):
            said |= {bound: said[exclusive], exclusive: True}
    return said
