"""JSON schemas of the fields that pydantic takes as they come and that are checked where they are used.

They are annotations: they say in the OpenAPI description what text/chat.py, text/tools.py, text/grammar.py,
`SamplingParams` and `CompletionRequest.prompts` accept, and check nothing themselves.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any

from pydantic import WithJsonSchema

from ..params import SamplingParams
from ..text.chat import ROLES
from ..text.tools import MAX_TOOLS

MAX_PROMPTS = 1024

JSON = dict[str, Any]

_TEXT: JSON = {"type": "string"}
_NAMED_TEXT: JSON = {"type": ["string", "null"]}
_IDS: JSON = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}


def _parts(*types: str) -> JSON:
    part = {
        "type": "object",
        "properties": {"type": {"enum": list(types)}, "text": _TEXT},
        "required": ["type", "text"],
    }
    return {"anyOf": [_TEXT, {"type": "array", "items": part}]}


def _message(content: JSON) -> JSON:
    return {
        "type": "object",
        "properties": {"role": {"enum": list(ROLES)}, "content": content, "name": _NAMED_TEXT},
        "required": ["role", "content"],
    }


_CALL: JSON = {
    "type": "object",
    "properties": {
        "id": _NAMED_TEXT,
        "type": {"enum": ["function", None]},
        "function": {
            "type": "object",
            "properties": {"name": _TEXT, "arguments": {"description": "JSON as text, or an object."}},
            "required": ["name"],
        },
    },
    "required": ["function"],
}
_CALLING: JSON = {
    "type": "object",
    "properties": {
        "role": {"const": "assistant"},
        "content": {"anyOf": [*_parts("text")["anyOf"], {"type": "null"}]},
        "tool_calls": {"type": "array", "minItems": 1, "items": _CALL},
    },
    "required": ["role", "tool_calls"],
}
_TOOL: JSON = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"},
                "description": _NAMED_TEXT,
                "strict": {"type": ["boolean", "null"]},
                "parameters": {"type": ["object", "null"], "description": "A JSON schema of type object."},
            },
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}
_NAMED_FUNCTION: JSON = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "properties": {"name": _TEXT}, "required": ["name"]},
    },
    "required": ["type", "function"],
}


def _format(kind: str, *required: str, **fields: JSON) -> JSON:
    return {
        "type": "object",
        "properties": {"type": {"const": kind}, **fields},
        "required": ["type", *required],
    }


_SCHEMA: JSON = {"type": ["object", "boolean"], "description": "A JSON schema."}
_FORMATS = [_format("text"), _format("json_object")]
# The formats that OpenAI does not have.
_OTHER_FORMATS = [
    _format("regex", "regex", regex={"type": "string", "minLength": 1}),
    _format("choice", "choice", choice={"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}}),
    _format("grammar", "grammar", grammar={"type": "string", "minLength": 1, "description": "In Lark's notation."}),
]
_RESPONSE_FORMAT: JSON = {
    "anyOf": [
        *_FORMATS,
        _format("json_schema", "json_schema", json_schema={"type": "object", "properties": {"schema": _SCHEMA}}),
        *_OTHER_FORMATS,
        {"type": "null"},
    ]
}
_TEXT_FORMAT: JSON = {
    "anyOf": [*_FORMATS, _format("json_schema", schema=_SCHEMA), *_OTHER_FORMATS, {"type": "null"}],
}
_PROMPT: JSON = {
    "description": "A text, token ids, or a list of texts or of lists of token ids.",
    "anyOf": [
        {"type": "string", "minLength": 1},
        _IDS,
        {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": {"type": "string", "minLength": 1}},
        {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": _IDS},
    ],
}
_INPUT: JSON = {
    "description": "A text or a list of messages.",
    "anyOf": [
        _TEXT,
        {"type": "array", "minItems": 1, "items": _message(_parts("input_text", "output_text", "text"))},
    ],
}
_MESSAGES: JSON = {"type": "array", "minItems": 1, "items": {"anyOf": [_message(_parts("text")), _CALLING]}}

Prompt = Annotated[Any, WithJsonSchema(_PROMPT)]
Messages = Annotated[list[Any], WithJsonSchema(_MESSAGES)]
Input = Annotated[Any, WithJsonSchema(_INPUT)]
Tools = Annotated[
    list[Any] | None,
    WithJsonSchema({"anyOf": [{"type": "array", "maxItems": MAX_TOOLS, "items": _TOOL}, {"type": "null"}]}),
]
ToolChoice = Annotated[Any, WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required", None]}, _NAMED_FUNCTION]})]
ResponseFormat = Annotated[dict[str, Any] | None, WithJsonSchema(_RESPONSE_FORMAT)]
TextFormat = Annotated[dict[str, Any] | None, WithJsonSchema(_TEXT_FORMAT)]

# pydantic's words for bounds on a validated type, and JSON Schema's.
_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
# Fields that have a bound under another name.
_SAME = {"max_completion_tokens": "max_tokens", "max_output_tokens": "max_tokens", "top_logprobs": "logprobs"}


def with_bounds(schema: JSON) -> JSON:
    """Adds to each field of a request what `SamplingParams` demands of the parameter of that name."""
    for name, field in schema.get("properties", {}).items():
        bounds = _sampling_bounds().get(_SAME.get(name, name), {})
        for branch in field.get("anyOf", [field]):
            if branch.get("type") in ("integer", "number"):
                branch |= {key: bounds[key] for key in _BOUNDS.values() if key in bounds}
            elif branch.get("type") == "array":
                branch |= {key: bounds[key] for key in ("items", "maxItems") if key in bounds}
            elif branch.get("type") == "object" and "additionalProperties" in bounds:
                branch["additionalProperties"] = bounds["additionalProperties"]
                branch["propertyNames"] = {"pattern": "^(0|[1-9][0-9]{0,18})$"}
            elif branch.get("type") == "string" and "items" in bounds:
                branch |= bounds["items"]
    return schema


@cache
def _sampling_bounds() -> dict[str, JSON]:
    """Parameter -> its schema without null."""
    read = _spelt(SamplingParams.model_json_schema())["properties"]
    found: dict[str, JSON] = {name: {**field, **field.get("anyOf", [{}])[0]} for name, field in read.items()}
    # A format's own keys are told by `ResponseFormat`.
    del found["response_format"]
    return found


def _spelt(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_spelt(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {_BOUNDS.get(key, key): _spelt(value) for key, value in schema.items()}
