"""Tools a chat may call: checking them, showing them to the model, and a grammar that forces a call.

A model writes a call in the format it was trained on, which its chat template tells:

    hermes    <tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>    Hermes, Qwen, and the default
    llama     {"name": ..., "parameters": {...}}                               Llama 3
    mistral   [TOOL_CALLS][{"name": ..., "arguments": {...}}]                  Mistral before Tekken v11

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

from ..errors import RequestError
from ..params import check_texts
from .json_style import style

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 256 * 1024
MAX_SCHEMA_DEPTH = 64
# More calls than this in one forced answer are a model that does not find the end.
MAX_FORCED_CALLS = 8

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes calls.

    `begin`, `separator` and `end` are what a forced answer holds around its calls. `opening` and `closing` are what
    tells calls from text when they are read; `bare` is the beginning of an answer that is a call without `opening`,
    which may be a special token and then is not shown. `listed`: the calls are one JSON list.
    """

    name: str
    begin: str
    separator: str
    end: str
    arguments: str
    opening: str
    closing: str = ""
    bare: re.Pattern[str] | None = None
    listed: bool = False


HERMES = CallFormat(
    name="hermes",
    begin="<tool_call>\n",
    separator="\n</tool_call>\n<tool_call>\n",
    end="\n</tool_call>",
    arguments="arguments",
    opening="<tool_call>",
    closing="</tool_call>",
)
LLAMA = CallFormat(
    name="llama",
    begin="",
    separator="; ",
    end="",
    arguments="parameters",
    opening="<|python_tag|>",
    bare=re.compile(r"(?=\{)"),
)
MISTRAL = CallFormat(
    name="mistral",
    begin="[TOOL_CALLS][",
    separator=", ",
    end="]",
    arguments="arguments",
    opening="[TOOL_CALLS]",
    closing="]",
    bare=re.compile(r"\[\s*(?=\{)"),
    listed=True,
)


def call_format(template: str) -> CallFormat:
    """The format that a chat template shows."""
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<tool_call>" not in template and ("<|python_tag|>" in template or '"parameters": dictionary' in template):
        return LLAMA
    return HERMES


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

    def grammar(self, style: CallFormat) -> dict[str, Any] | None:
        """The response format that lets nothing pass but calls of `forced`; None if nothing is forced."""
        if not self.forced:
            return None
        functions = [tool["function"] for tool in self.tools if tool["function"]["name"] in self.forced]
        calls = " | ".join(f"call_{i}" for i in range(len(functions)))
        more = f" ({json.dumps(style.separator)} call){{0,{MAX_FORCED_CALLS - 1}}}" if self.parallel else ""
        parts = [json.dumps(style.begin)] if style.begin else []
        parts += ["call" + more]
        parts += [json.dumps(style.end)] if style.end else []
        rules = [f"start: {' '.join(parts)}", f"call: {calls}"]
        for i, function in enumerate(functions):
            head = f'{{"name": {json.dumps(function["name"])}, "{style.arguments}": '
            rules.append(f'call_{i}: {json.dumps(head)} args_{i} "}}"')
            rules.append(f"args_{i}: %json {json.dumps(_arguments_schema(function))}")
        return {"type": "grammar", "grammar": "\n".join(rules) + "\n"}


def _arguments_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """Without parameters a function takes an empty object, as in OpenAI's API."""
    schema = function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}
    whole = {"type": "object", **schema, "x-guidance": style(schema)}
    # A parameter that the schema does not name is of no use to the function, and a small model invents many.
    if "properties" in schema:
        whole.setdefault("additionalProperties", False)
    return whole


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
    names: list[str] = []
    for i, tool in enumerate(tools):
        name = _check_tool(tool, f"tools.{i}")
        if name in names:
            raise _refuse(f"tools.{i}.function.name", f"{name!r} is there twice")
        names.append(name)
    if len(json.dumps(tools)) > MAX_TOOLS_BYTES:
        raise _refuse("tools", f"together larger than {MAX_TOOLS_BYTES} bytes")
    return tuple(names)


def _check_tool(tool: Any, where: str) -> str:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise _refuse(where, 'must be an object with type "function"')
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise _refuse(f"{where}.function", "must be an object with a name")
    check_texts({where: tool})
    name = function.get("name")
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise _refuse(f"{where}.function.name", f"must be 1 to 64 of a-z, A-Z, 0-9, '_', '-', '.' (got {name!r:.80})")
    for field, kind in (("description", str), ("strict", bool), ("parameters", Mapping)):
        if function.get(field) is not None and not isinstance(function[field], kind):
            raise _refuse(f"{where}.function.{field}", f"must be {_KINDS[kind]} (got {function[field]!r:.80})")
    parameters = function.get("parameters") or {}
    if parameters.get("type", "object") != "object":
        raise _refuse(f"{where}.function.parameters.type", f"must be 'object' (got {parameters['type']!r:.80})")
    _check_schema(parameters, f"{where}.function.parameters", 0)
    return name


def _check_schema(schema: Any, where: str, depth: int) -> None:
    """Faults that would otherwise show only when a model is forced to write by the schema, or never."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise _refuse(where, f"must be a JSON schema (got {schema!r:.80})")
    if depth > MAX_SCHEMA_DEPTH:
        raise _refuse(where, f"nested more than {MAX_SCHEMA_DEPTH} deep")
    kinds = schema.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind not in _TYPES:
            raise _refuse(f"{where}.type", f"must be one of {', '.join(_TYPES)} (got {kind!r:.80})")
    pattern = schema.get("pattern", "")
    try:
        re.compile(pattern)
    except (re.error, TypeError, RecursionError, OverflowError) as error:
        raise _refuse(f"{where}.pattern", f"is no regular expression: {error}") from None
    for field in ("properties", "$defs", "definitions", "patternProperties"):
        inner = schema.get(field, {})
        if not isinstance(inner, Mapping):
            raise _refuse(f"{where}.{field}", "must be an object")
        for key, value in inner.items():
            _check_schema(value, f"{where}.{field}.{key}", depth + 1)
    for field in ("items", "additionalProperties", "not"):
        if field in schema and not isinstance(schema[field], list):
            _check_schema(schema[field], f"{where}.{field}", depth + 1)
    for field in ("anyOf", "oneOf", "allOf", "prefixItems"):
        inner = schema.get(field, [])
        if not isinstance(inner, list):
            raise _refuse(f"{where}.{field}", "must be a list of JSON schemas")
        for i, value in enumerate(inner):
            _check_schema(value, f"{where}.{field}.{i}", depth + 1)


def _named(choice: Any) -> str:
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise _refuse(
            "tool_choice",
            "must be 'none', 'auto', 'required' or "
            f'{{"type": "function", "function": {{"name": ...}}}} (got {choice!r:.80})',
        )
    return name


_KINDS = {str: "a string", bool: "a boolean", Mapping: "a JSON schema"}


def _refuse(where: str, reason: str) -> RequestError:
    return RequestError(reason, path=where.split("."))
