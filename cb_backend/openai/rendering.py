"""A chat request to token ids: with its tools if it has any, and off the event loop if it is large."""

from __future__ import annotations

import asyncio

from ..text.chat import ChatTemplate, check_messages
from ..text.tools import ToolSet, conversation_with_tools, knows_tools
from .protocol import ChatRequest

# A chat of more characters than this is rendered and tokenized off the event loop.
INLINE = 20_000


async def render_chat(chat: ChatTemplate, call: ChatRequest, tools: ToolSet | None) -> list[int]:
    """
    Raises:
        RequestError: names the message or option at fault.
    """
    if _size(call) > INLINE:
        return await asyncio.to_thread(_render, chat, call, tools)
    return _render(chat, call, tools)


def _render(chat: ChatTemplate, call: ChatRequest, tools: ToolSet | None) -> list[int]:
    options = call.template_options()
    listed = None if tools is None else tools.tools
    if not (listed or _speaks_of_tools(call)) or knows_tools(call.chat_template or chat.source):
        return chat.render(call.messages, tools=listed, **options)
    return chat.render(conversation_with_tools(check_messages(call.messages), listed or ()), **options)


def _speaks_of_tools(call: ChatRequest) -> bool:
    return any(isinstance(m, dict) and (m.get("role") == "tool" or m.get("tool_calls")) for m in call.messages)


def _size(call: ChatRequest) -> int:
    """Characters, roughly: only large ones matter."""
    tools = len(repr(call.tools)) if call.tools else 0
    return tools + sum(len(repr(m.get("content"))) if isinstance(m, dict) else 0 for m in call.messages)
