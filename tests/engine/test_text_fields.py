"""Every string that a client can give, with half of a surrogate pair in it: refused by the field's name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cb_backend import Engine, RequestError, SamplingParams
from cb_backend.params import check_texts
from cb_backend.text.tools import ToolSet

HALF = "a\ud83d b"
ONE = SamplingParams(max_tokens=1)


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Iterator[Engine]:
    with Engine(model=str(tiny_llama), dtype="float32", num_kv_blocks=20, block_size=8) as engine:
        yield engine


def formatted(kind: str, value: Any) -> SamplingParams:
    return SamplingParams(max_tokens=1, response_format={"type": kind, kind: value})


@pytest.mark.parametrize(
    ("prompt", "params", "options", "param"),
    [
        (HALF, ONE, {}, "prompt"),
        (b"bytes", ONE, {}, "prompt"),
        ("A", ONE, {"request_class": HALF}, "request_class"),
        ("A", ONE, {"request_class": 5}, "request_class"),
        ("A", ONE, {"salt": HALF}, "salt"),
        ("A", ONE, {"salt": 5}, "salt"),  # a number could be taken for a block of another prefix
        ("A", ONE, {"request_id": HALF}, "request_id"),
        ("A", formatted("regex", HALF), {}, "response_format.regex"),
        ("A", formatted("choice", ["a", HALF]), {}, "response_format.choice.1"),
        ("A", formatted("grammar", f'start: "{HALF}"'), {}, "response_format.grammar"),
        ("A", formatted("json_schema", {"schema": {"enum": [HALF]}}), {}, "response_format.json_schema.schema.enum.0"),
        ("A", formatted("json_schema", {"schema": {"properties": {"\ud83d": {}}}}), {}, None),
        ("A", SamplingParams(max_tokens=1, response_format={"type": HALF}), {}, "response_format.type"),
    ],
)
def test_a_request_is_refused(
    engine: Engine, prompt: Any, params: SamplingParams, options: dict[str, Any], param: str | None
) -> None:
    with pytest.raises(RequestError) as raised:
        engine.generate([prompt], params, **options)
    assert raised.value.param == (param or "response_format.json_schema.schema.properties.'\\ud83d'")
    assert f"'{raised.value.param}'" in raised.value.message
    assert engine.generate(["A"], ONE)[0].finish_reason == "length"


@pytest.mark.parametrize("prompt", [None, 5.5])
def test_a_prompt_that_is_neither_text_nor_ids_is_refused(engine: Engine, prompt: Any) -> None:
    with pytest.raises(RequestError) as raised:
        engine.generate([prompt], ONE)
    assert raised.value.param == "prompt"


@pytest.mark.parametrize("field", ["stop", "bad_words"])
def test_words_are_refused(field: str) -> None:
    with pytest.raises(RequestError) as raised:
        SamplingParams.parse({field: ["good", HALF]})
    assert raised.value.param == f"{field}.1"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": HALF}, "messages.0.content"),
        ({"role": "user", "content": [{"type": "text", "text": HALF}]}, "messages.0.content.0.text"),
        ({"role": HALF, "content": "x"}, "messages.0.role"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": HALF}}]}, "messages.0.tool_calls.0.function.name"),
        ({"role": "user", "content": "x", "name": HALF}, "messages.0.name"),
    ],
)
def test_messages_are_refused(engine: Engine, message: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as raised:
        engine.chat.render([message])
    assert raised.value.param == param


def test_tools_are_refused_where_they_stand() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": HALF}}
    with pytest.raises(RequestError) as raised:
        ToolSet.parse([tool], "auto", None)
    assert raised.value.param == "tools.0.function.description"
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"p": {"enum": [HALF]}}}}}
    with pytest.raises(RequestError) as raised:
        ToolSet.parse([tool], "auto", None)
    assert raised.value.param == "tools.0.function.parameters.properties.p.enum.0"


def test_whole_characters_and_depth_are_nothing_to_refuse() -> None:
    deep: Any = "🙂"
    for _ in range(5000):
        deep = {"a": [deep, 1, None]}
    check_texts({"messages": deep})


@pytest.mark.parametrize("allowed", [False, True])
def test_a_requests_own_template_is_for_the_operator_to_allow(tiny_llama, allowed):
    with Engine(model=str(tiny_llama), dtype="float32", num_kv_blocks=60, allow_request_template=allowed) as engine:
        chat = [{"role": "user", "content": "hi"}]
        if allowed:
            assert engine.chat.render_text(chat, template="own") == "own"
        else:
            with pytest.raises(RequestError, match="chat_template"):
                engine.chat.render_text(chat, template="own")
