"""The fields, results and events of the service's own endpoints (`generate`, `chat`, `stream`) and of the runner.

Fields are those of the OpenAI routes without what only these know. An event is one line of ASCII JSON, so that a
proxy that cuts the bytes in transit cuts no character:

    data: {"index": 0, "text": "Hello", "token_ids": [19556], "finish_reason": null}
    data: {"index": 0, "text": ".", "token_ids": [30], "finish_reason": "length", "stop_reason": null, "usage": {...}}

A failure is `event: error` with `data: {"error": {...}}`; nothing follows it. A stream without a `finish_reason` for
each choice was cut off.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from typing import Any

from pydantic import ConfigDict, Field, GetJsonSchemaHandler, create_model

from ..client import OutputDelta
from ..errors import RequestError
from ..openai.protocol import ChatRequest, CompletionRequest, GenerationRequest
from ..openai.shapes import JSON, with_bounds
from ..params import check_texts
from ..request import Logprob, RequestOutput, Usage
from .compat import IODescriptor

# Fields that mean nothing here, or something else.
_OPENAI_ONLY = frozenset(
    ("model", "stream", "stream_options", "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key")
    + ("prompt_cache_options", "prompt_cache_retention", "parallel_tool_calls", "prediction", "max_completion_tokens")
    + ("echo", "best_of")
    + ("prompt", "messages", "logprobs", "top_logprobs", "tools", "tool_choice")
)


class _Input(IODescriptor):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> JSON:
        return with_bounds(handler.resolve_ref_schema(handler(core_schema)))


def _input_of(name: str, source: type[GenerationRequest], **own: Any) -> type[IODescriptor]:
    shared = {key: (field.annotation, field) for key, field in source.model_fields.items() if key not in _OPENAI_ONLY}
    made: type[IODescriptor] = create_model(name, __base__=_Input, **own, **shared)  # type: ignore[call-overload]
    return made


_PROMPT = (Any, Field(description="A text or a list of token ids."))
_LOGPROBS = (int | None, Field(None, description="Log-probabilities of this many alternatives per token, 0 to 20."))

GenerateInput = _input_of("GenerateInput", CompletionRequest, prompt=_PROMPT, logprobs=_LOGPROBS)
ChatInput = _input_of("ChatInput", ChatRequest, messages=(list[Any], Field()))
StreamInput = _input_of(
    "StreamInput",
    ChatRequest,
    prompt=(Any, Field(None, description="A text or a list of token ids.")),
    messages=(list[Any] | None, Field(None, description="A chat, instead of a prompt.")),
)


def parse(fields: Mapping[str, Any], model: str) -> CompletionRequest | ChatRequest:
    """The request in `fields`: a chat if it has `messages`, else one prompt. None means absent.

    Raises:
        RequestError: names the first field at fault.
    """
    kept = {name: value for name, value in fields.items() if value is not None}
    check_texts(kept)
    if kept.get("echo"):
        raise RequestError("not supported by this method", path=("echo",), code="unsupported_parameter")
    if "messages" in kept:
        if "prompt" in kept:
            raise RequestError("'prompt' and 'messages' exclude each other", param="prompt")
        chat: ChatRequest = ChatRequest.parse({"model": model, **kept})
        return chat
    if "prompt" not in kept:
        raise RequestError("required", path=("prompt",))
    completion: CompletionRequest = CompletionRequest.parse({"model": model, **kept})
    if len(completion.prompts()) != 1:
        raise RequestError("one prompt at a time here; see /v1/completions", path=("prompt",))
    return completion


def result(output: RequestOutput) -> dict[str, Any]:
    """One request's result; with several choices the first one's fields, and all of them in `choices`."""
    choices = output.choices or (output,)
    total = Usage(
        output.usage.prompt_tokens,
        sum(choice.usage.completion_tokens for choice in choices),
        max(choice.usage.cached_tokens for choice in choices),
    )
    body = {"request_id": output.request_id, **_choice(output), "usage": usage(total)}
    if len(choices) > 1:
        body["choices"] = [_choice(choice) for choice in choices]
    return body


def event(delta: OutputDelta) -> str:
    """A delta as one event; empty if nothing is new in it."""
    if not (delta.text or delta.token_ids or delta.finished):
        return ""
    body: dict[str, Any] = {
        "index": delta.index,
        "text": delta.text,
        "token_ids": list(delta.token_ids),
        "finish_reason": delta.finish_reason,
    }
    if delta.finished:
        body |= {"stop_reason": delta.stop_reason, "usage": usage(delta.usage)}
    return f"data: {json.dumps(body)}\n\n"


def error_event(body: dict[str, Any]) -> str:
    return f"event: error\ndata: {json.dumps(body)}\n\n"


async def texts(events: AsyncIterable[str]) -> AsyncIterator[str]:
    """The text in a stream of events, however the events are cut into pieces.

    Raises:
        RequestError: the stream says that the request failed, or ends before the request did.
    """
    rest, finished = "", False
    async for piece in events:
        *whole, rest = (rest + piece).split("\n\n")
        for one in whole:
            body = json.loads(one[one.index("data: ") + 6 :])
            if "error" in body:
                raise RequestError(body["error"]["message"], status=502, code=body["error"]["code"] or "failed")
            finished = body["finish_reason"] is not None
            if body["text"]:
                yield body["text"]
    if not finished:
        raise RequestError("the stream was cut off", status=502, code="incomplete_stream")


def usage(counts: Usage) -> dict[str, int]:
    return {
        "prompt_tokens": counts.prompt_tokens,
        "completion_tokens": counts.completion_tokens,
        "total_tokens": counts.total_tokens,
        "cached_tokens": counts.cached_tokens,
    }


def _choice(output: RequestOutput) -> dict[str, Any]:
    body: dict[str, Any] = {
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }
    if output.logprobs is not None:
        body["logprobs"] = [_logprob(one) for one in output.logprobs]
    return body


def _logprob(one: Logprob) -> dict[str, Any]:
    return {"token_id": one.token_id, "logprob": one.logprob, "top": [list(pair) for pair in one.top]}
