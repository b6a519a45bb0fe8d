"""Tools: what is refused, what a forced answer may be, and how a template without tools is told of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from cb_backend import RequestError
from cb_backend.text.calls.base import CallFormat, Function
from cb_backend.text.calls.formats import FORMATS, HERMES, LLAMA, MISTRAL, call_format
from cb_backend.text.calls.json_objects import JsonObjects
from cb_backend.text.grammar import literal, styled
from cb_backend.text.tool_parser import CallArguments, CallStart, ToolParser
from cb_backend.text.tools import ToolSet, conversation_with_tools

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


FAULTS: list[tuple[Any, str]] = [
    ({"type": "object", "properties": []}, "properties"),
    ({"properties": {"a": "string"}}, "properties.a"),
    ({"properties": {"a": {"type": "something"}}}, "properties.a.type"),
    ({"properties": {"a": {"type": ["string", "nil"]}}}, "properties.a.type"),
    ({"properties": {"a": {"pattern": 5}}}, "properties.a.pattern"),
    ({"properties": {"a": {"type": "array", "items": "x"}}}, "properties.a.items"),
    ({"properties": {"a": {"anyOf": {}}}}, "properties.a.anyOf"),
    ({"properties": {"a": {"anyOf": [{"type": 1}]}}}, "properties.a.anyOf.0.type"),
    ({"$defs": {"d": {"type": "x"}}}, "$defs.d.type"),
    ({"additionalProperties": 3}, "additionalProperties"),
]


@pytest.mark.parametrize(("schema", "where"), FAULTS, ids=lambda value: str(value)[:50])
def test_a_faulty_schema_is_named(schema: Any, where: str) -> None:
    with pytest.raises(RequestError) as caught:
        ToolSet.parse([tool("f", schema)], "auto", None)
    assert caught.value.param == f"tools.0.function.parameters.{where}"
    assert f"'{caught.value.param}'" in caught.value.message


def test_a_schema_nested_without_end_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100):
        schema = {"properties": {"a": schema}}
    with pytest.raises(RequestError, match="nested more than 64 deep"):
        ToolSet.parse([tool("f", schema)], "auto", None)


def test_types_that_cannot_be_hashed_are_refused() -> None:
    with pytest.raises(RequestError, match="must be one of string"):
        ToolSet.parse([tool("f", {"properties": {"a": {"type": {}}}})], "auto", None)


def accepts(response_format: dict[str, Any], text: str) -> bool:
    functions = [Function(one["name"], styled(one["schema"])) for one in response_format["functions"]]
    style = FORMATS[response_format["format"]]
    rules = style.grammar(functions, response_format["parallel"], lambda plain: literal(plain, {}))
    matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark("\n".join(rules) + "\n"), log_level=0)
    assert matcher.get_error() == ""
    for byte in text.encode():
        if matcher.validate_tokens([byte]) != 1:
            return False
        matcher.consume_token(byte)
    return bool(matcher.is_accepting())


def written(style: JsonObjects, *calls: str) -> str:
    return style.begin + style.separator.join(call.replace("KEY", style.key) for call in calls) + style.end


F, G = '{"name": "f", "KEY": {"a": 5}}', '{"name": "g", "KEY": {}}'


@pytest.mark.parametrize("style", [HERMES, LLAMA, MISTRAL], ids=lambda style: style.name)
def test_a_forced_answer_is_calls_and_reads_back(style: JsonObjects) -> None:
    tools = [tool("f", SCHEMA), tool("g"), tool("h")]
    one = ToolSet.parse(tools, "required", None)
    several = ToolSet.parse(tools, "required", True)
    named = ToolSet.parse(tools, {"type": "function", "function": {"name": "g"}}, True)
    grammars = [choice and choice.grammar(style) for choice in (one, several, named)]
    single, many, only = grammars
    assert single and many and only
    assert accepts(single, written(style, F))
    assert accepts(single, written(style, G))
    assert not accepts(single, written(style, F, G))
    assert accepts(many, written(style, F, G))
    assert accepts(only, written(style, G))
    assert not accepts(only, written(style, F))
    for wrong in (F.replace("5", '"5"'), F.replace('"a": 5', ""), F.replace("5", '5, "b": 1'), G.replace("g", "z")):
        assert not accepts(single, written(style, wrong))
    parser = ToolParser(style, {"f", "g"})
    pieces = parser.push(written(style, F, G)) + parser.finish()
    assert pieces == [CallStart(0, "f"), CallArguments(0, '{"a": 5}'), CallStart(1, "g"), CallArguments(1, "{}")]


def test_nothing_is_forced_by_auto_and_nothing_is_shown_by_none() -> None:
    auto = ToolSet.parse([tool("f")], "auto", None)
    assert auto is not None
    assert auto.grammar(HERMES) is None
    assert ToolSet.parse([tool("f")], "none", None) is None
    assert ToolSet.parse([], "auto", None) is None


@pytest.mark.parametrize(
    ("template", "style"),
    [
        ("", HERMES),
        ("{% for tool in tools %}<tool_call>{% endfor %}", HERMES),
        ('{"name": function name, "parameters": dictionary of argument name and its value}', LLAMA),
        ("{{ '<|python_tag|>' }}", LLAMA),
        ("{{ '[AVAILABLE_TOOLS] [TOOL_CALLS] [' }}", MISTRAL),
    ],
)
def test_the_format_is_the_templates(template: str, style: CallFormat) -> None:
    assert call_format(template) is style


def test_a_conversation_for_a_template_without_tools() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": "ü"}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]
    system, *rest = conversation_with_tools(messages, [tool("f")])
    assert system["content"].startswith("Be brief.\n\nYou can call functions")
    assert json.dumps(tool("f")) in system["content"]
    assert rest == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": '<tool_call>\n{"name": "f", "arguments": {"a": "ü"}}\n</tool_call>'},
        {"role": "user", "content": "<tool_response>\n42\n</tool_response>"},
    ]
    assert conversation_with_tools(messages, [])[0] == messages[0]
    assert conversation_with_tools(messages[1:2], [tool("f")])[0]["role"] == "system"
