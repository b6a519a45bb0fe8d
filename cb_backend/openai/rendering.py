"""From a parsed request to what the engine is asked: prompts, sampling, options. One function for every front end.

A chat becomes token ids here: with its tools if it has any, and off the event loop if it is large.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import orjson

from ..client import ChatRenderer, EngineClient, GenerationOptions, Prompt
from ..errors import RequestError
from ..params import SamplingParams, Thinking
from ..telemetry import phase, request_context
from ..telemetry.semconv import CHAT, TEXT_COMPLETION
from ..text.calls.base import CallFormat
from ..text.calls.formats import FORMATS
from ..text.chat import check_messages
from ..text.thoughts import opened_by, shown_thoughts
from ..text.tools import ToolSet, conversation_with_tools, knows_tools
from .protocol import ChatRequest, CompletionRequest, GenerationRequest
from .responses import ResponsesRequest

# A chat of more characters than this is rendered and tokenized off the event loop.
INLINE = 20_000


@dataclass(frozen=True, slots=True)
class Generation:
    """A checked request, ready for the engine.

    Attributes:
        prompts: each becomes a request of `params.n` choices.
        continues_prompt: texts go on their prompts'.
        tools, style: what may be called, and how the model writes calls; None without tools.
        grammar_path: the field of the client's that became `params.response_format`.
    """

    prompts: Sequence[Prompt]
    params: SamplingParams
    options: GenerationOptions
    continues_prompt: bool = False
    tools: ToolSet | None = None
    style: CallFormat | None = None
    grammar_path: tuple[str, ...] = ("response_format",)


async def prepare(engine: EngineClient, call: GenerationRequest, *, stream: bool) -> Generation:
    """
    Args:
        stream: the client gets tokens as they come; for traces.

    Raises:
        RequestError: names the field at fault.
    """
    if isinstance(call, CompletionRequest):
        context = request_context(TEXT_COMPLETION, stream=stream)
        return Generation(call.prompts(), call.sampling(), call.options(context), bool(call.echo))
    if isinstance(call, ChatRequest):
        return await _chat(engine, call, stream)
    if isinstance(call, ResponsesRequest):
        return await _response(engine, call, stream)
    raise TypeError(f"no prompt is made of a {type(call).__name__}")


async def _chat(engine: EngineClient, call: ChatRequest, stream: bool) -> Generation:
    params, chat = call.sampling(), renderer(engine)
    context = request_context(CHAT, stream=stream, messages=call.messages)
    with phase(context, "compile tools") if call.tools else nullcontext():
        tools = call.tool_set()
        ids = await render_chat(chat, call, tools)
        params = _thinking(engine, call, ids, params)
        if tools is None:
            return Generation([ids], params, call.options(context))
        style = FORMATS[chat.tool_call_format(call.chat_template)]
        params = params.model_copy(
            update={"shown_special_tokens": tuple({*params.shown_special_tokens, *style.specials})}
        )
        grammar = tools.grammar(style)
    if grammar is None:
        return Generation([ids], params, call.options(context), tools=tools, style=style)
    params = params.model_copy(update={"response_format": grammar})
    return Generation([ids], params, call.options(context), tools=tools, style=style, grammar_path=("tools",))


def _thinking(engine: EngineClient, call: ChatRequest, ids: Sequence[int], params: SamplingParams) -> SamplingParams:
    """The parameters of a chat with a model whose template shows thoughts.

    Raises:
        RequestError: a budget for thoughts that the model does not have.
    """
    style = shown_thoughts(call.chat_template or renderer(engine).source)
    if style is None:
        effort = call.reasoning_effort
        if effort not in (None, "none") and "reasoning_effort" not in (call.chat_template or renderer(engine).source):
            raise RequestError(
                "this model's chat template shows no thoughts",
                path=("reasoning_effort",),
                code="unsupported_parameter",
            )
        if call.thinking_token_budget is not None:
            raise RequestError("this model's chat template shows no thoughts", path=("thinking_token_budget",))
        return params
    end = "" if engine.tokenizer is None else engine.tokenizer.decode(list(ids[-32:]), skip_special_tokens=False)
    thinking = Thinking(format=style.name, opened=opened_by(end, style), budget=call.thinking_token_budget)
    return params.model_copy(update={"thinking": thinking, "shown_special_tokens": style.specials})


async def _response(engine: EngineClient, call: ResponsesRequest, stream: bool) -> Generation:
    params, messages = call.sampling(), call.messages()
    chat = renderer(engine, "input")
    asked = ChatRequest(model=call.model, messages=messages)
    try:
        ids = await render_chat(chat, asked, None)
    except RequestError as error:
        raise error.at(*call.path_of(error.path)) if error.path[:1] == ("messages",) else error from None
    context = request_context(CHAT, stream=stream, messages=messages)
    params = _thinking(engine, asked, ids, params)
    return Generation([ids], params, call.options(context), grammar_path=("text", "format"))


def renderer(engine: EngineClient, param: str = "messages") -> ChatRenderer:
    """
    Raises:
        RequestError: the model has no tokenizer; `param` is the field that holds the chat.
    """
    if engine.chat is None:
        raise RequestError(
            "this model has no tokenizer: use /v1/completions with token ids", param=param, code="no_tokenizer"
        )
    return engine.chat


async def render_chat(chat: ChatRenderer, call: ChatRequest, tools: ToolSet | None) -> list[int]:
    """The token ids of a chat.

    Raises:
        RequestError: names the message or option at fault.
    """
    if _size(call) > INLINE:
        return await asyncio.to_thread(_render, chat, call, tools)
    return _render(chat, call, tools)


def _render(chat: ChatRenderer, call: ChatRequest, tools: ToolSet | None) -> list[int]:
    options = call.template_options()
    listed = None if tools is None else tools.tools
    if not (listed or _speaks_of_tools(call)) or knows_tools(call.chat_template or chat.source):
        return chat.render(call.messages, tools=listed, **options)
    return chat.render(conversation_with_tools(check_messages(call.messages), listed or ()), **options)


def _speaks_of_tools(call: ChatRequest) -> bool:
    return any(isinstance(m, dict) and (m.get("role") == "tool" or m.get("tool_calls")) for m in call.messages)


def _size(call: ChatRequest) -> int:
    """Bytes of what is rendered, as JSON."""
    try:
        return len(orjson.dumps((call.messages, call.tools, call.chat_template, call.chat_template_kwargs)))
    except TypeError:  # not from JSON: a call within the process
        return INLINE + 1
