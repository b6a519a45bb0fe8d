"""Schemas and formats that clients send: unknown keys, patterns, annotations, and what a check may cost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cb_backend import RequestError
from cb_backend.text.grammar import GrammarCompiler
from cb_backend.text.one_of import MAX_WORK, Proof
from cb_backend.text.response_format import checked
from cb_backend.text.schema import larger_than, without_annotations
from cb_backend.text.tools import ToolSet
from tests.tiny_models import VOCAB_SIZE, build_tokenizer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(build_tokenizer(), VOCAB_SIZE, {2})


def tool(parameters: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **more}}


def test_a_json_object_with_a_schema_is_the_schema() -> None:
    assert checked({"type": "json_object", "schema": SCHEMA}) == {
        "type": "json_schema",
        "json_schema": {"schema": SCHEMA},
    }
    assert checked({"type": "json_object", "schema": None}) == {"type": "json_object"}


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"type": "json_schema", "json_schema": SCHEMA}, "response_format.json_schema.type"),
        ({"type": "json_schema", "json_schema": {"name": "x", "scheme": SCHEMA}}, "response_format.json_schema.scheme"),
        ({"type": "json_schema", "schema": SCHEMA}, "response_format.schema"),
        ({"type": "json_schema", "name": "x", "json_schema": {"schema": SCHEMA}}, "response_format.name"),
        ({"type": "json_object", "scheme": SCHEMA}, "response_format.scheme"),
        ({"type": "text", "json_schema": {}}, "response_format.json_schema"),
        ({"type": "regex", "regex": "a", "choice": ["a"]}, "response_format.choice"),
        ({"type": "tool_calls", "functions": []}, "response_format"),
    ],
    ids=str,
)
def test_a_key_that_nothing_reads_is_named(form: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        checked(form)
    assert caught.value.param == param


FORMS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"type": "text"}, ()),
    ({"type": "json_object"}, ()),
    ({"type": "json_object", "schema": SCHEMA}, ()),
    ({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, ()),
    ({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, ("json_schema",)),
    ({"type": "regex", "regex": "a"}, ()),
    ({"type": "choice", "choice": ["a"]}, ()),
    ({"type": "grammar", "grammar": 'start: "a"'}, ()),
]
KNOWN = {"type", "name", "description", "schema", "strict", "json_schema", "regex", "choice", "grammar"}


@given(st.sampled_from(FORMS), st.text(min_size=1, max_size=12).filter(lambda key: key not in KNOWN), st.integers())
def test_no_unknown_key_goes_unnoticed_at_any_depth(
    form: tuple[dict[str, Any], tuple[str, ...]], key: str, value: int
) -> None:
    whole, way = form
    assert checked(whole)
    spoilt = json.loads(json.dumps(whole))
    place = spoilt
    for step in way:
        place = place[step]
    place[key] = value
    with pytest.raises(RequestError) as caught:
        checked(spoilt)
    assert caught.value.path == ("response_format", *way, key)


@pytest.mark.parametrize(
    ("one", "param"),
    [
        (tool(None, paramaters=SCHEMA), "tools.0.function.paramaters"),
        (tool(None, input_schema=SCHEMA), "tools.0.function.input_schema"),
        ({**tool(SCHEMA), "input_schema": {}}, "tools.0.input_schema"),
    ],
    ids=str,
)
def test_a_misspelt_key_of_a_tool_is_named(one: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        ToolSet.parse([one], "auto", None)
    assert caught.value.param == param


PATTERNS = [r"\p{L}+", r"(?<y>\d{4})", r"\u{1F600}", r"[\w-.]", "\\d+[", "(?i)" + "[\\x00-\\uffff]" * 500]


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern[:12])
def test_patterns_of_tools_are_not_compiled_with_auto(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import re

    def refuse(*args: Any) -> None:
        raise AssertionError("a client's pattern was compiled")

    monkeypatch.setattr(re, "compile", refuse)
    assert ToolSet.parse([tool({"properties": {"a": {"type": "string", "pattern": pattern}}})], "auto", None)


@pytest.mark.parametrize("pattern", PATTERNS[:4])
def test_forced_patterns_are_in_the_grammars_dialect(compiler: GrammarCompiler, pattern: str) -> None:
    wanted = {"properties": {"a": {"type": "string", "pattern": pattern}}}
    tools = ToolSet.parse([tool(wanted)], "required", None)
    assert tools is not None
    from cb_backend.text.calls.formats import HERMES

    form = tools.grammar(HERMES)
    assert form is not None
    assert compiler.compile(form) is not None


def test_a_refused_pattern_is_told_whole(compiler: GrammarCompiler) -> None:
    with pytest.raises(RequestError) as caught:
        compiler.compile({"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "\\d+["}}})
    assert "unclosed character class" in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("name", ["path", "password", "binary", "int32", "date"])
def test_formats_are_annotations(compiler: GrammarCompiler, name: str) -> None:
    schema = {"type": "object", "properties": {"format": {"anyOf": [{"type": "string", "format": name}]}}}
    assert compiler.compile({"type": "json_schema", "json_schema": {"schema": schema}}) is not None


def test_only_annotations_are_left_out() -> None:
    schema = {"properties": {"format": {"format": "path", "enum": [{"format": "path"}]}}, "format": "date"}
    assert without_annotations(schema) == {
        "properties": {"format": {"enum": [{"format": "path"}]}},
        "format": "date",
    }


class Counted(dict[str, Any]):
    """A mapping that counts how often its items are read."""

    reads = 0

    def values(self) -> Any:
        Counted.reads += 1
        return super().values()


def test_a_size_is_measured_no_further_than_the_limit() -> None:
    Counted.reads = 0
    assert larger_than([Counted(a="x" * 90) for _ in range(1000)], 5_000)
    assert Counted.reads < 100
    assert not larger_than({"a": ["é" * 10, 1, None]}, 100)
    assert larger_than(["é" * 60], 100)
    assert larger_than([[]] * 1_000_000, 1000)


def test_sizes_are_refused_before_anything_is_read(compiler: GrammarCompiler) -> None:
    pattern = {"type": "string", "pattern": "a" * 4_000_000}
    with pytest.raises(RequestError, match="larger than 262144 bytes") as caught:
        ToolSet.parse([tool({"properties": {"a": pattern}})], "auto", None)
    assert caught.value.param == "tools"
    with pytest.raises(RequestError, match="larger than 262144 bytes"):
        compiler.compile({"type": "json_schema", "json_schema": {"schema": pattern}})


def many_one_of(width: int, shared: bool) -> dict[str, Any]:
    low, high = list(range(width)), list(range(width - shared, 2 * width))
    return {
        "$defs": {"low": {"enum": low}, "high": {"enum": high}},
        "type": "object",
        "properties": {f"p{i}": {"oneOf": [{"$ref": "#/$defs/low"}, {"$ref": "#/$defs/high"}]} for i in range(40)},
    }


@pytest.mark.parametrize("shared", [False, True])
def test_large_enums_are_told_apart_in_work_linear_in_the_schema(shared: bool) -> None:
    proof = Proof(many_one_of(3000, shared))
    assert proof.shown() is not shared
    assert proof.work < 40_000


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"enum": [[i, j] for j in range(60)]} for i in range(60)]},
        {
            "oneOf": [
                {"type": "object", "properties": {}, "required": [f"{i}-{j}" for j in range(90)]} for i in range(90)
            ]
        },
        {"oneOf": [{"anyOf": [{"anyOf": [{"type": "object"}] * 30}] * 30}] * 30},
        {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}] * 5000}}, "oneOf": [{"$ref": "#/$defs/a"}] * 5000},
        {
            "properties": {
                f"p{i}": {"oneOf": [{"enum": list(range(3000))}, {"enum": list(range(3000, 6000))}]} for i in range(40)
            }
        },
    ],
    ids=["lists", "required", "nested", "references", "enums"],
)
def test_a_proof_never_costs_more_than_its_budget(schema: dict[str, Any]) -> None:
    proof = Proof(schema)
    proof.shown()
    assert proof.work < 1.1 * MAX_WORK


def test_the_proof_is_part_of_the_compile_on_both_paths(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the pool's threads, so that the time limit holds: not where tools are read."""
    import threading

    from cb_backend.text import json_style
    from cb_backend.text.calls.formats import HERMES

    threads = []
    exclude = json_style.branches_exclude_each_other

    def watched(schema: Any) -> bool:
        threads.append(threading.current_thread().name)
        return exclude(schema)

    monkeypatch.setattr(json_style, "branches_exclude_each_other", watched)
    schema = many_one_of(20, False)
    tools = ToolSet.parse([tool(schema)], "required", None)
    assert tools is not None
    form = tools.grammar(HERMES)
    assert form is not None and threads == []
    compiler.compile(form)
    compiler.compile({"type": "json_schema", "json_schema": {"schema": schema}})
    assert len(threads) == 2
    assert all(name.startswith("cb-grammar") for name in threads)
