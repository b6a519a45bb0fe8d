"""Every call format: a transcript of two calls, whole and in every split, what is wrong left as text, forced calls."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from llguidance import LLMatcher, LLTokenizer

from cb_backend.config import ToolCallFormat
from cb_backend.text.calls.base import Function
from cb_backend.text.calls.formats import FORMATS, HERMES, call_format, shown_format, unread
from cb_backend.text.grammar import literal, styled
from cb_backend.text.tool_parser import CallArguments, CallStart, Text, ToolParser

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTIONS: dict[str, Any] = {"weather": PARAMETERS, "now": {"type": "object", "properties": {}}}

CITY = 'Köln <b> "alt"\nam Rhein, {x}'
BOTH: list[tuple[str, Any]] = [("weather", {"city": CITY, "days": 3, "tags": ["a", "b]"]}), ("now", {})]
FIRST, SECOND = json.dumps(BOTH[0][1], ensure_ascii=False), "{}"
OBJECTS = [f'{{"name": "weather", "KEY": {FIRST}}}', '{"name": "now", "KEY": {}}']


def objects(key: str, between: str) -> str:
    return between.join(OBJECTS).replace("KEY", key)


def tagged(begin: str, middle: str, end: str) -> str:
    return f"{begin}{FIRST}{middle}{SECOND}{end}"


DEEPSEEK = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
ONE_DEEPSEEK = "<｜tool▁call▁begin｜>{}<｜tool▁call▁end｜>"
PYTHON = f"weather(city={CITY!r}, days=3, tags=['a', 'b]']), now()"

# What a model of each format writes: text, then two calls.
TRANSCRIPTS: dict[str, str] = {
    "hermes": "<tool_call>\n" + objects("arguments", "\n</tool_call>\n<tool_call>\n") + "\n</tool_call>",
    "llama3_json": "<|python_tag|>" + objects("parameters", "; "),
    "mistral": "[TOOL_CALLS][" + objects("arguments", ", ") + "]",
    "mistral_args": tagged("[TOOL_CALLS]weather[ARGS]", "[TOOL_CALLS]now[ARGS]", ""),
    "granite": "<|tool_call|>[" + objects("arguments", ", ") + "]",
    "phi4": "<|tool_call|>[" + objects("arguments", ", ") + "]<|/tool_call|>",
    "qwen3_coder": (
        f"<tool_call>\n<function=weather>\n<parameter=city>\n{CITY}\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        '<parameter=tags>\n["a", "b]"]\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n<function=now>\n</function>\n</tool_call>"
    ),
    "glm": (
        f"<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>{CITY}</arg_value>\n<arg_key>days</arg_key>\n"
        '<arg_value>3</arg_value>\n<arg_key>tags</arg_key>\n<arg_value>["a", "b]"]</arg_value>\n</tool_call>\n'
        "<tool_call>now\n</tool_call>"
    ),
    "minimax_m2": (
        f'<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">{CITY}</parameter>\n'
        '<parameter name="days">3</parameter>\n<parameter name="tags">["a", "b]"]</parameter>\n</invoke>\n'
        '<invoke name="now">\n</invoke>\n</minimax:tool_call>'
    ),
    "kimi_k2": "<|tool_calls_section_begin|>"
    + tagged(
        "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>",
        "<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    )
    + "<|tool_calls_section_end|>",
    "deepseek_v3": DEEPSEEK.format(
        ONE_DEEPSEEK.format(f"function<｜tool▁sep｜>weather\n```json\n{FIRST}\n```")
        + "\n"
        + ONE_DEEPSEEK.format("function<｜tool▁sep｜>now\n```json\n{}\n```")
    ),
    "deepseek_v3_1": DEEPSEEK.format(
        ONE_DEEPSEEK.format(f"weather<｜tool▁sep｜>{FIRST}") + ONE_DEEPSEEK.format("now<｜tool▁sep｜>{}")
    ),
    "harmony": tagged(
        "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>",
        "<|call|><|start|>assistant to=functions.now<|channel|>commentary json<|message|>",
        "<|call|>",
    ),
    "pythonic": f"[{PYTHON}]",
    "llama4": f"<|python_start|>[{PYTHON}]<|python_end|>",
}
BARE = {"pythonic"}  # nothing marks its calls but that they begin the answer


def read(name: str, pieces: list[str]) -> tuple[str, list[tuple[str, str]], list[str | None]]:
    parser = ToolParser(FORMATS[name], FUNCTIONS)
    text, calls, idents = "", [], []
    for got in [*(one for piece in pieces for one in parser.push(piece)), *parser.finish()]:
        if isinstance(got, Text):
            text += got.text
        elif isinstance(got, CallStart):
            assert got.index == len(calls)
            calls.append((got.name, ""))
            idents.append(got.ident)
        else:
            assert got.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + got.piece)
    return text, calls, idents


def splits(written: str) -> list[list[str]]:
    return [list(written), *([written[:i], written[i:]] for i in range(1, len(written)))]


@pytest.mark.parametrize("name", FORMATS)
def test_a_transcript_whole_and_in_every_split(name: str) -> None:
    before = "" if name in BARE else "Let me look.\n\n"
    written = before + TRANSCRIPTS[name]
    text, calls, idents = whole = read(name, [written])
    assert text == before.strip()
    assert [(called, json.loads(arguments)) for called, arguments in calls] == BOTH
    assert idents == (["functions.weather:0", "functions.now:1"] if name == "kimi_k2" else [None, None])
    for pieces in splits(written):
        assert read(name, pieces) == whole, pieces


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_of_no_function_is_text_in_every_split(name: str) -> None:
    written = TRANSCRIPTS[name].replace("weather", "whether").split("now")[0]
    whole = read(name, [written])
    assert whole == (written, [], [])
    for pieces in splits(written):
        assert read(name, pieces) == whole, pieces


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_is_cut_is_the_same_in_every_split(name: str) -> None:
    for end in range(1, len(TRANSCRIPTS[name]), 3):
        written = TRANSCRIPTS[name][:end]
        assert read(name, list(written)) == read(name, [written])


@pytest.mark.parametrize("name", FORMATS)
def test_text_without_calls_is_text(name: str) -> None:
    for written in ("[1, 2] and {3}", '{"answer": 42}', "", " x ", "[", "<", "<tool", "a <b> c", "[now", "[now("):
        if written != "[now(" or FORMATS[name].bare is None:
            assert read(name, list(written)) == read(name, [written]) == (written, [], [])


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_are_handed_on_before_the_call_is_whole(name: str) -> None:
    parser = ToolParser(FORMATS[name], FUNCTIONS)
    written = TRANSCRIPTS[name]
    cut = written.index("am Rhein") + 40  # past the end of the first argument in each of them
    early = "".join(piece.piece for piece in parser.push(written[:cut]) if isinstance(piece, CallArguments))
    assert early.startswith('{"city": "Köln')


def forced(name: str, functions: list[Function], parallel: bool) -> LLMatcher:
    rules = FORMATS[name].grammar(functions, parallel, lambda plain: literal(plain, {}))
    matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark("\n".join(rules) + "\n"), log_level=0)
    assert matcher.get_error() == "", rules
    return matcher


def accepts(matcher: LLMatcher, text: str) -> bool:
    matcher = matcher.deep_copy()
    for byte in text.encode():
        if matcher.validate_tokens([byte]) != 1:
            return False
        matcher.consume_token(byte)
    return bool(matcher.is_accepting())


def forced_text(name: str) -> str:
    """The one text that a grammar of a function with constants leaves to write."""
    schema = {
        "type": "object",
        "properties": {"unit": {"type": "string", "enum": ["C"]}, "n": {"enum": [5]}},
        "required": ["unit", "n"],
        "additionalProperties": False,
    }
    matcher = forced(name, [Function("weather", styled(schema))], parallel=False)
    written = b""
    while not matcher.is_accepting():
        bits = matcher.compute_bitmask()
        allowed = [i for i in range(256) if bits[i // 8] >> (i % 8) & 1]
        assert len(allowed) == 1, (written, allowed)
        written += bytes(allowed)
        matcher.consume_token(allowed[0])
    return written.decode()


@pytest.mark.parametrize("name", FORMATS)
def test_a_forced_call_is_one_of_the_format_and_reads_back(name: str) -> None:
    written = forced_text(name)
    text, calls, _ = read(name, [written])
    assert text == ""
    assert [(called, json.loads(arguments)) for called, arguments in calls] == [("weather", {"unit": "C", "n": 5})]


@pytest.mark.parametrize("name", ["qwen3_coder", "minimax_m2", "pythonic", "hermes", "mistral_args"])
def test_a_grammar_takes_the_transcript_if_calls_may_be_parallel(name: str) -> None:
    functions = [Function(one, styled(schema)) for one, schema in FUNCTIONS.items()]
    written = TRANSCRIPTS[name]
    if name == "pythonic":
        written = f"[weather(city={json.dumps(CITY, ensure_ascii=False)}, days=3), now()]"
    assert accepts(forced(name, functions, True), written)
    assert not accepts(forced(name, functions, False), written)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ tools }}<|start|>assistant<|channel|>commentary to=functions.<|message|>", "harmony"),
        ("{{ tools }}<|tool_calls_section_begin|>", "kimi_k2"),
        ("{{ tools }}<｜tool▁calls▁begin｜>```json", "deepseek_v3"),
        ("{{ tools }}<｜tool▁calls▁begin｜>", "deepseek_v3_1"),
        ("{{ tools }}<minimax:tool_call>", "minimax_m2"),
        ("{{ tools }}<tool_call>{function-name}<arg_key>", "glm"),
        ("{{ tools }}<tool_call><function=example><parameter=x>", "qwen3_coder"),
        ("{{ tools }}[TOOL_CALLS]x[ARGS]", "mistral_args"),
        ("{{ tools }}[TOOL_CALLS] [", "mistral"),
        ("{{ tools }}<|tool_call|>[]<|/tool_call|>", "phi4"),
        ("{{ tools }}<|tool_call|>", "granite"),
        ("{{ tools }}<tool_call>", "hermes"),
        ("{{ tools }}<|python_start|>", "llama4"),
        ("{{ tools }}<|python_tag|>", "llama3_json"),
        ("{{ tools }}[func_name1(params_name1=params_value1)]", "pythonic"),
    ],
)
def test_the_template_tells_the_format(template: str, name: str) -> None:
    assert call_format(template).name == name
    assert not unread(template)


def test_a_template_in_a_form_that_is_not_read_is_told_from_one_without_tools() -> None:
    assert unread("{{ tools }} <call name=") and shown_format("{{ tools }} <call name=") is None
    assert not unread("{{ messages }}")
    assert call_format("{{ messages }}") is HERMES
    assert call_format("{{ tools }}<tool_call>", "glm").name == "glm"


def test_null_for_arguments_is_none_and_never_the_text_null() -> None:
    for name, key in (("hermes", "arguments"), ("llama3_json", "parameters")):
        written = f'{{"name": "now", "{key}": null}}'
        written = f"<tool_call>{written}</tool_call>" if name == "hermes" else written
        assert read(name, [written])[1] == [("now", "{}")]


def test_the_setting_knows_every_format() -> None:
    assert get_args(ToolCallFormat) == tuple(FORMATS)
