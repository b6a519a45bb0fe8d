"""Tools a chat may call: checking them, showing them to the model, and a grammar that forces a call.

A model writes a call in the format it was trained on, which its chat template tells (text/calls/formats.py).
`ToolSet.grammar` is what the choices `required` and a named function enforce; with `auto` the model writes what it
likes and text/tool_parser.py reads it. A template that does not know tools gets them as a system message in the words
of the Hermes format, and calls and results of the conversation as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import RequestError, shown
from ..params import check_texts
from .calls.base import CallFormat
from .calls.formats import HERMES
from .schema import check_schema, larger_than

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 256 * 1024
TOOL_CALLS = "tool_calls"  # the type of the response format that forces calls; no client may send it

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_KEYS = ("type", "function")
_FUNCTION_KEYS = ("name", "description", "parameters", "strict")


def knows_tools(template: str) -> bool:
    return "tools" in template


@dataclass(frozen=True, slots=True)
class ToolSet:
    """Checked tools and what a request wants of them.

    `forced`: the functions of which one must be called; empty with `auto`. `parallel`: an answer may hold more than one
    call.
    """

    tools: tuple[Mapping[str, Any], ...]
    forced: tuple[str, ...] = ()
    parallel: bool = False

    @classmethod
    def parse(cls, tools: Any, choice: Any, parallel: bool | None) -> ToolSet | None:
        """The tools of a request; None if the model is to see none: there are none, or `tool_choice` is "none".

        A forced answer holds exactly one call unless the client asks for `parallel_tool_calls`, and exactly one if
        it names the function.

        Raises:
            RequestError: names the first field at fault.
        """
        names = _check_tools(tools) if tools else ()
        if choice is None or choice in ("none", "auto"):
            return None if not names or choice == "none" else cls(tuple(tools), parallel=parallel is not False)
        if choice != "required":
            wanted = _named(choice)
            if wanted not in names:
                raise _refuse("tool_choice.function.name", f"{wanted[:80]!r} is not among the tools")
            return cls(tuple(tools), (wanted,))
        if not names:
            raise _refuse("tool_choice", "'required' needs tools")
        return cls(tuple(tools), names, bool(parallel))

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool["function"]["name"] for tool in self.tools)

    @property
    def functions(self) -> dict[str, Mapping[str, Any] | None]:
        """The functions by name, with the JSON schemas of their parameters."""
        return {tool["function"]["name"]: tool["function"].get("parameters") for tool in self.tools}

    def grammar(self, style: CallFormat) -> dict[str, Any] | None:
        """The response format that lets nothing pass but calls of `forced`; None if nothing is forced.

        It is compiled by text/grammar.py, under the bounds of all response formats: nothing costly happens here.
        """
        if not self.forced:
            return None
        functions = [tool["function"] for tool in self.tools if tool["function"]["name"] in self.forced]
        wanted = [{"name": function["name"], "schema": _arguments_schema(function)} for function in functions]
        return {"type": TOOL_CALLS, "format": style.name, "functions": wanted, "parallel": self.parallel}


def _arguments_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """Without parameters a function takes an empty object, as in OpenAI's API."""
    schema = function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}
    # A parameter that the schema does not name is of no use to the function, and a small model invents many.
    closed = {"additionalProperties": False} if "properties" in schema else {}
    return {"type": "object", **closed, **schema}


def conversation_with_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The messages for a template that knows no tools: these in a system message, calls and results as text.

    Args:
        messages: as `check_messages` gives them, with their content as plain strings.
    """
    told = [_as_text(message) for message in messages]
    if not tools:
        return told
    text = _system_text(tools)
    if told[0]["role"] in ("system", "developer"):
        return [{**told[0], "content": f"{told[0]['content']}\n\n{text}"}, *told[1:]]
    return [{"role": "system", "content": text}, *told]


def _system_text(tools: Sequence[Mapping[str, Any]]) -> str:
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You can call functions to help with the user's request. Their signatures, one JSON object a line:\n"
        f"<tools>\n{listed}\n</tools>\n"
        "To call one, answer with its name and arguments as a JSON object between <tool_call> tags:\n"
        '<tool_call>\n{"name": <function-name>, "arguments": <arguments-object>}\n</tool_call>'
    )


def _as_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if message["role"] != "assistant" or not calls:
        return message
    written = [_call_as_text(call["function"]) for call in calls]
    return {"role": "assistant", "content": "\n".join([message["content"], *written]).strip()}


def _call_as_text(function: Mapping[str, Any]) -> str:
    arguments = function["arguments"]
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'{HERMES.begin}{{"name": {json.dumps(function["name"])}, "arguments": {written}}}{HERMES.end}'


def _check_tools(tools: Any) -> tuple[str, ...]:
    """The names of the tools, in order."""
    if not isinstance(tools, list):
        raise _refuse("tools", f"must be a list (got {type(tools).__name__})")
    if len(tools) > MAX_TOOLS:
        raise _refuse("tools", f"at most {MAX_TOOLS} (got {len(tools)})")
    if larger_than(tools, MAX_TOOLS_BYTES):
        raise _refuse("tools", f"together larger than {MAX_TOOLS_BYTES} bytes")
    names: list[str] = []
    for i, tool in enumerate(tools):
        name = _check_tool(tool, f"tools.{i}")
        if name in names:
            raise _refuse(f"tools.{i}.function.name", f"{shown(name)} is there twice")
        names.append(name)
    return tuple(names)


def _check_tool(tool: Any, where: str) -> str:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise _refuse(where, 'must be an object with type "function"')
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise _refuse(f"{where}.function", "must be an object with a name")
    check_texts(tool, *where.split("."))
    for keys, given, place in ((_KEYS, tool, where), (_FUNCTION_KEYS, function, f"{where}.function")):
        for key, value in given.items():
            if key not in keys and value is not None:
                raise _refuse(f"{place}.{key}", f"no such key; there are {', '.join(keys)}")
    name = function.get("name")
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise _refuse(f"{where}.function.name", f"must be 1 to 64 of a-z, A-Z, 0-9, '_', '-', '.' (got {shown(name)})")
    for field, kind in (("description", str), ("strict", bool), ("parameters", Mapping)):
        if function.get(field) is not None and not isinstance(function[field], kind):
            raise _refuse(f"{where}.function.{field}", f"must be {_KINDS[kind]} (got {shown(function[field])})")
    parameters = function.get("parameters") or {}
    if parameters.get("type", "object") != "object":
        raise _refuse(f"{where}.function.parameters.type", f"must be 'object' (got {shown(parameters['type'])})")
    check_schema(parameters, (*where.split("."), "function", "parameters"))
    return name


def _named(choice: Any) -> str:
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise _refuse(
            "tool_choice",
            "must be 'none', 'auto', 'required' or "
            f'{{"type": "function", "function": {{"name": ...}}}} (got {shown(choice)})',
        )
    return name


_KINDS = {str: "a string", bool: "a boolean", Mapping: "a JSON schema"}


def _refuse(where: str, reason: str) -> RequestError:
    return RequestError(reason, path=where.split("."))
