"""JSON schemas of the answers: bodies, stream events and errors. No answer holds a field that is not here."""

from __future__ import annotations

from collections.abc import Mapping

from .shapes import JSON

ERRORS: Mapping[str, str] = {
    "400": "A field is wrong, unknown or not supported; `param` names it.",
    "404": "The model is not the one that is served.",
    "413": "The body is too large.",
    "429": "The queue is full; `Retry-After` says when to come again.",
    "500": "The engine failed.",
    "503": "The model is not loaded (yet), the server is stopping, or the queue is too long for the `timeout`.",
    "504": "The request's own `timeout` passed before its first token.",
}

_TEXT: JSON = {"type": "string"}
_COUNT: JSON = {"type": "integer", "minimum": 0}
_NUMBER: JSON = {"type": "number"}
_TEXT_OR_NULL: JSON = {"type": ["string", "null"]}


def _object(optional: Mapping[str, JSON] | None = None, /, **required: JSON) -> JSON:
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }


def _list(items: JSON) -> JSON:
    return {"type": "array", "items": items}


def _or_null(schema: JSON) -> JSON:
    return {"anyOf": [schema, {"type": "null"}]}


def _one_of(*values: str | None) -> JSON:
    return {"enum": list(values)}


def _event(*contents: JSON, done: bool = True) -> JSON:
    """A server-sent event whose data is one of these, or the last word of a stream."""
    body = {"type": "string", "contentMediaType": "application/json"}
    data = [{**body, "contentSchema": {"anyOf": list(contents)}}]
    if done:
        data.insert(0, {"type": "string", "enum": ["[DONE]"]})
    return {"type": "object", "properties": {"data": {"anyOf": data}, "event": _TEXT}, "required": ["data"]}


_USAGE = _object(
    {"completion_tokens_details": _object(reasoning_tokens=_COUNT)},
    prompt_tokens=_COUNT,
    completion_tokens=_COUNT,
    total_tokens=_COUNT,
    prompt_tokens_details=_object(cached_tokens=_COUNT),
)
_STOPPED: JSON = {"anyOf": [_TEXT, {"type": "integer"}, {"type": "null"}]}
_FINISHED = _one_of("stop", "length")
_CHAT_FINISHED = _one_of("stop", "length", "tool_calls")
_ERROR = _object(error=_object(message=_TEXT, type=_TEXT, param=_TEXT_OR_NULL, code=_TEXT_OR_NULL))

_TOKEN = {"token": _TEXT, "logprob": _NUMBER, "bytes": _list({"type": "integer", "minimum": 0, "maximum": 255})}
_CHAT_LOGPROBS = _or_null(
    _object(
        content=_list(_object(**_TOKEN, top_logprobs=_list(_object(**_TOKEN)))),
        refusal={"type": "null"},
    )
)
_COMPLETION_LOGPROBS = _or_null(
    _object(
        tokens=_list(_TEXT),
        token_logprobs=_list({"type": ["number", "null"]}),
        top_logprobs=_list(_or_null({"type": "object", "additionalProperties": _NUMBER})),
        text_offset=_list(_COUNT),
    )
)
_CALL = _object(id=_TEXT, type=_one_of("function"), function=_object(name=_TEXT, arguments=_TEXT))
_CALL_DELTA = _object(
    {"id": _TEXT, "type": _one_of("function")},
    index=_COUNT,
    function=_object({"name": _TEXT}, arguments=_TEXT),
)
_MESSAGE = _object(
    {"tool_calls": _list(_CALL), "reasoning_content": _TEXT},
    role=_one_of("assistant"),
    content=_TEXT_OR_NULL,
    refusal={"type": "null"},
)
_DELTA = _object(
    {"role": _one_of("assistant"), "content": _TEXT, "reasoning_content": _TEXT, "tool_calls": _list(_CALL_DELTA)}
)


def _answer(kind: str, choice: JSON, usage: JSON | None = None) -> JSON:
    shared = {"id": _TEXT, "object": _one_of(kind), "created": _COUNT, "model": _TEXT, "choices": _list(choice)}
    if usage is not None:
        return _object(**shared, usage=usage)
    return _object({"usage": _or_null(_USAGE)}, **shared)


_COMPLETION_CHOICE = {"index": _COUNT, "text": _TEXT, "logprobs": _COMPLETION_LOGPROBS}
_CHAT_CHOICE = {"index": _COUNT, "logprobs": _CHAT_LOGPROBS}

_MODEL = _object(
    id=_TEXT,
    object=_one_of("model"),
    created=_COUNT,
    owned_by=_TEXT,
    max_model_len={"type": "integer", "minimum": 1},
    tool_call_format=_TEXT_OR_NULL,
)

_PART = _object(type=_one_of("output_text"), text=_TEXT, annotations=_list({}), logprobs=_list({}))
_STATUS = _one_of("in_progress", "completed", "incomplete")
_MESSAGE_ITEM = _object(
    id=_TEXT, type=_one_of("message"), role=_one_of("assistant"), status=_STATUS, content=_list(_PART)
)
_REASONING_ITEM = _object(
    id=_TEXT,
    type=_one_of("reasoning"),
    summary=_list({}),
    status=_STATUS,
    content=_list(_object(type=_one_of("reasoning_text"), text=_TEXT)),
)
_ITEM: JSON = {"anyOf": [_MESSAGE_ITEM, _REASONING_ITEM]}
_RESPONSE_USAGE = _object(
    input_tokens=_COUNT,
    input_tokens_details=_object(cached_tokens=_COUNT, cache_write_tokens=_COUNT),
    output_tokens=_COUNT,
    output_tokens_details=_object(reasoning_tokens=_COUNT),
    total_tokens=_COUNT,
)
_RESPONSE = _object(
    {"usage": _RESPONSE_USAGE, "user": _TEXT},
    id=_TEXT,
    object=_one_of("response"),
    created_at=_COUNT,
    status=_one_of("in_progress", "completed", "incomplete"),
    background={"type": "boolean"},
    error={"type": "null"},
    incomplete_details=_or_null(_object(reason=_one_of("max_output_tokens"))),
    instructions=_TEXT_OR_NULL,
    max_output_tokens={"type": ["integer", "null"]},
    metadata={"type": "object"},
    model=_TEXT,
    output=_list(_ITEM),
    parallel_tool_calls={"type": "boolean"},
    previous_response_id={"type": "null"},
    reasoning={"type": "object"},
    store={"type": "boolean"},
    temperature=_NUMBER,
    text={"type": "object"},
    tool_choice=_TEXT,
    tools=_list({}),
    top_p=_NUMBER,
    truncation=_TEXT,
)


def _named(kind: str, **fields: JSON) -> JSON:
    return _object(type=_one_of(kind), sequence_number=_COUNT, **fields)


_PLACE = {"output_index": _COUNT, "item_id": _TEXT, "content_index": _COUNT}
_RESPONSE_EVENTS = [
    *(
        _named(f"response.{moment}", response=_RESPONSE)
        for moment in ("created", "in_progress", "completed", "incomplete")
    ),
    *(_named(f"response.output_item.{moment}", output_index=_COUNT, item=_ITEM) for moment in ("added", "done")),
    *(_named(f"response.content_part.{moment}", part=_PART, **_PLACE) for moment in ("added", "done")),
    _named("response.output_text.delta", delta=_TEXT, logprobs=_list({}), **_PLACE),
    _named("response.output_text.done", text=_TEXT, logprobs=_list({}), **_PLACE),
    _named("response.reasoning_text.delta", delta=_TEXT, **_PLACE),
    _named("response.reasoning_text.done", text=_TEXT, **_PLACE),
    _named("error", message=_TEXT, param=_TEXT_OR_NULL, code=_TEXT_OR_NULL, **_ERROR["properties"]),
]

ANSWERS: Mapping[str, JSON] = {
    "OpenAIError": _ERROR,
    "Model": _MODEL,
    "ModelList": _object(object=_one_of("list"), data=_list(_MODEL)),
    "Completion": _answer(
        "text_completion",
        _object(**_COMPLETION_CHOICE, finish_reason=_FINISHED, stop_reason=_STOPPED),
        _USAGE,
    ),
    "CompletionEvent": _event(
        _answer(
            "text_completion",
            _object({"stop_reason": _STOPPED}, **_COMPLETION_CHOICE, finish_reason=_or_null(_FINISHED)),
        ),
        _ERROR,
    ),
    "ChatCompletion": _answer(
        "chat.completion",
        _object(**_CHAT_CHOICE, message=_MESSAGE, finish_reason=_CHAT_FINISHED, stop_reason=_STOPPED),
        _USAGE,
    ),
    "ChatCompletionEvent": _event(
        _answer(
            "chat.completion.chunk",
            _object({"stop_reason": _STOPPED}, **_CHAT_CHOICE, delta=_DELTA, finish_reason=_or_null(_CHAT_FINISHED)),
        ),
        _ERROR,
    ),
    "Response": _RESPONSE,
    "ResponseEvent": _event(*_RESPONSE_EVENTS, done=False),
    "Tokens": _object(
        count=_COUNT,
        max_model_len=_COUNT,
        tokens=_list(_COUNT),
        token_strs=_or_null(_list(_TEXT)),
    ),
    "Text": _object(prompt=_TEXT),
}
