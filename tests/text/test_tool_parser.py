"""Calls out of text: three formats, whole and in pieces, and what only looks like a call."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cb_backend.text.calls.base import CallFormat
from cb_backend.text.calls.formats import HERMES, LLAMA, MISTRAL
from cb_backend.text.tool_parser import CallArguments, CallStart, Text, ToolParser

NAMES = {"weather", "time"}
CALL = '{"name": "weather", "arguments": {"city": "Köln {\\"}"}}'
ARGUMENTS = '{"city": "Köln {\\"}"}'

# (format, what the model wrote, its text, its calls)
ROWS: list[tuple[CallFormat, str, str, list[tuple[str, str]]]] = [
    (HERMES, " no call \n", " no call \n", []),
    (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", "", [("weather", ARGUMENTS)]),
    (HERMES, f"<tool_call>{CALL}</tool_call>\n", "", [("weather", ARGUMENTS)]),
    (HERMES, f"Let me see.\n\n<tool_call>\n{CALL}\n</tool_call>\n", "Let me see.", [("weather", ARGUMENTS)]),
    (HERMES, f"<tool_call>{CALL}</tool_call>\n\nSo.", "So.", [("weather", ARGUMENTS)]),
    (
        HERMES,
        f'<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{{"name":"time","arguments":{{}}}}\n</tool_call>',
        "",
        [("weather", ARGUMENTS), ("time", "{}")],
    ),
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "time"}</tool_call>', "", [("time", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "time"}</tool_call>', "", [("time", "{}")]),
    (HERMES, '<tool_call>{"name": "time", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("time", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "time", "arguments": {}, "id": "}"}</tool_call>', "", [("time", "{}")]),
    (HERMES, '<tool_call>{"name": "time", "arguments": {}\n</tool_call>', "", [("time", "{}")]),
    (HERMES, '<tool_call>{"name": "time", "arguments": {"a": [1', "", [("time", '{"a": [1')]),
    (HERMES, '<tool_call>{"name": "time", "arguments": {}}\n</tool', "", [("time", "{}")]),
    (HERMES, '<tool_call>{"name": "ti', '<tool_call>{"name": "ti', []),
    (HERMES, "<tool_call>no JSON</tool_call>", "<tool_call>no JSON</tool_call>", []),
    (HERMES, "<tool_call></tool_call>", "<tool_call></tool_call>", []),
    (HERMES, '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
    (HERMES, '<tool_call>{"a" 5}</tool_call> x', '<tool_call>{"a" 5}</tool_call> x', []),
    (
        HERMES,
        '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
        [],
    ),
    (HERMES, "a <tool_ and <tool_cal", "a <tool_ and <tool_cal", []),
    (LLAMA, '{"name": "time", "parameters": {"a": 1}}', "", [("time", '{"a": 1}')]),
    (LLAMA, '<|python_tag|>{"name": "time", "parameters": {}}', "", [("time", "{}")]),
    (
        LLAMA,
        '\n{"name": "time", "parameters": {}}; {"name": "weather", "parameters": {}}',
        "",
        [("time", "{}"), ("weather", "{}")],
    ),
    (LLAMA, '{"answer": 42}', '{"answer": 42}', []),
    (LLAMA, 'Use {"name": "time", "parameters": {}}', 'Use {"name": "time", "parameters": {}}', []),
    (MISTRAL, '[TOOL_CALLS][{"name": "time", "arguments": {"a": [1]}}]', "", [("time", '{"a": [1]}')]),
    (MISTRAL, '[TOOL_CALLS] [{"name": "time", "arguments": {}}]', "", [("time", "{}")]),
    (
        MISTRAL,
        ' [ {"name": "time", "arguments": {}}, {"name": "weather", "arguments": {}}]',
        "",
        [("time", "{}"), ("weather", "{}")],
    ),
    (MISTRAL, "[1, 2]", "[1, 2]", []),
    (MISTRAL, "[TOOL_CALLS]]", "[TOOL_CALLS]]", []),
    (MISTRAL, "[", "[", []),
]


def read(style: CallFormat, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolParser(style, NAMES)
    text, calls = "", []
    for got in [*(one for piece in pieces for one in parser.push(piece)), *parser.finish()]:
        if isinstance(got, Text):
            text += got.text
        elif isinstance(got, CallStart):
            assert got.index == len(calls)
            calls.append((got.name, ""))
        else:
            assert got.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + got.piece)
    assert parser.calls == len(calls)
    return text, calls


@pytest.mark.parametrize(("style", "written", "text", "calls"), ROWS, ids=lambda value: str(value)[:40])
def test_text_and_calls(style: CallFormat, written: str, text: str, calls: list[tuple[str, str]]) -> None:
    assert read(style, [written]) == (text, calls)


@pytest.mark.parametrize(("style", "written", "text", "calls"), ROWS, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_the_same_in_pieces(
    size: int, style: CallFormat, written: str, text: str, calls: list[tuple[str, str]]
) -> None:
    assert read(style, [written[i : i + size] for i in range(0, len(written), size)]) == (text, calls)


WORDS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", '"name"', '"time"', '"arguments"', "}}", "\n"]
WORDS += [
    "{",
    "}",
    "[",
    "]",
    ":",
    ",",
    ";",
    " ",
    "\\",
    '"',
    "x",
    '{"name": "time", "arguments": {',
    *(r[1] for r in ROWS),
]


@given(st.sampled_from([HERMES, LLAMA, MISTRAL]), st.lists(st.sampled_from(WORDS), max_size=12), st.integers(1, 9))
def test_pieces_never_matter(style: CallFormat, words: list[str], size: int) -> None:
    written = "".join(words)
    whole = read(style, [written])
    assert whole == read(style, words) == read(style, [written[i : i + size] for i in range(0, len(written), size)])
    if not whole[1]:
        assert whole[0] == written


def test_the_name_comes_before_the_arguments_and_these_come_as_written() -> None:
    parser = ToolParser(HERMES, NAMES)
    assert parser.push('Look:\n<tool_call>\n{"name": "time", "argum') == [Text("Look:")]
    assert parser.push('ents": {"zo') == [CallStart(0, "time"), CallArguments(0, '{"zo')]
    assert parser.push('ne": 1}') == [CallArguments(0, 'ne": 1}')]
    assert parser.push("}\n</tool_call>") == []
    assert parser.finish() == []
