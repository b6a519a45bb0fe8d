"""`oneOf` is written as `anyOf` exactly where they mean the same."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cb_backend import Engine, RequestError, SamplingParams
from cb_backend.text.grammar import GrammarCompiler
from cb_backend.text.one_of import branches_exclude_each_other
from tests.tiny_models import VOCAB_SIZE, build_tokenizer

CLOSED = {"type": "object", "additionalProperties": False}


def tagged(tag: Any) -> dict[str, Any]:
    return {**CLOSED, "properties": {"kind": {"const": tag}, "n": {"type": "integer"}}, "required": ["kind", "n"]}


def referring(*branches: Any) -> dict[str, Any]:
    names = [f"b{i}" for i in range(len(branches))]
    return {"$defs": dict(zip(names, branches, strict=True)), "oneOf": [{"$ref": f"#/$defs/{name}"} for name in names]}


EXCLUSIVE = [
    {"oneOf": [{"type": "string"}, {"type": ["integer", "null"]}]},
    {"oneOf": [{"const": "a"}, {"enum": ["b", "c"]}, {"type": "number"}]},
    {"oneOf": [tagged("cat"), tagged("dog")]},
    referring(tagged("cat"), tagged("dog"), {"type": "null"}),
    referring({"allOf": [tagged("cat")]}, {**tagged("dog"), "title": "Dog"}),
    referring({**CLOSED, "properties": {"a": {}}, "required": ["a"]}, {**CLOSED, "properties": {"b": {}}}),
    {"oneOf": [{"anyOf": [{"type": "string"}, {"const": 5}]}, {"type": "boolean"}]},
    {"type": "array", "items": {"properties": {"x": {"oneOf": [{"const": 1}, {"const": 2}]}}}},
    {"oneOf": [{"const": 1}, {"const": True}]},
    referring(tagged("cat"), {"type": "object", "properties": {"kind": {"const": "dog"}}}),
    {"type": "string"},
]
SHARED = [
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"oneOf": [{}, {"type": "string"}]},
    {"oneOf": [{"enum": ["a", "b"]}, {"enum": ["b"]}]},
    referring({"type": "object", "properties": {"a": {}}}, {"type": "object", "properties": {"b": {}}}),
    {"oneOf": [{"$ref": "#/nowhere"}, {"type": "string"}]},
    {"oneOf": [{"$ref": "#"}, {"$ref": "#"}]},
    {"type": "array", "items": {"oneOf": [{"minimum": 5}, {"minimum": 3}]}},
]


@pytest.mark.parametrize("schema", EXCLUSIVE, ids=str)
def test_branches_that_exclude_each_other(schema: dict[str, Any]) -> None:
    assert branches_exclude_each_other(schema)


@pytest.mark.parametrize("schema", SHARED, ids=str)
def test_branches_that_may_share_a_value(schema: dict[str, Any]) -> None:
    assert not branches_exclude_each_other(schema)


LEAVES: Any = st.sampled_from(
    [True, {}, {"type": "string"}, {"type": "integer"}, {"type": "number"}, {"const": 1}, {"const": "a"}]
    + [{"enum": ["a", 1, None]}, {"type": ["null", "string"]}, {"const": True}, {"enum": [0, False]}]
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.dictionaries(st.sampled_from("ab"), inner)},
            optional={
                "required": st.lists(st.sampled_from("ab"), unique=True),
                "additionalProperties": st.just(False),
            },
        ),
        st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner),
        st.builds(lambda a, b: {"allOf": [a, b]}, inner, inner),
    ),
    max_leaves=4,
)
SCALARS: list[Any] = [None, True, False, 0, 1, 1.5, "a", "b"]
VALUES = [*SCALARS, {}, *({k: v} for k in "ab" for v in SCALARS), *({"a": v, "b": w} for v in SCALARS for w in SCALARS)]


@settings(max_examples=150, deadline=None)
@given(a=SCHEMAS, b=SCHEMAS)
def test_what_is_shown_is_true(a: Any, b: Any) -> None:
    if branches_exclude_each_other({"oneOf": [a, b]}):
        one, other = jsonschema.Draft202012Validator(a), jsonschema.Draft202012Validator(b)
        assert [value for value in VALUES if one.is_valid(value) and other.is_valid(value)] == []


def test_a_model_keeps_to_one_branch(tiny_llama: Any) -> None:
    schema = referring(tagged("cat"), tagged("dog"))
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    with Engine(model=str(tiny_llama), dtype="float32", num_kv_blocks=100, block_size=8) as engine:
        each = [SamplingParams(max_tokens=60, seed=seed, response_format=form) for seed in range(6)]
        outputs = engine.generate(["A pet:"] * 6, each)
    kinds = set()
    for output in outputs:
        if output.finish_reason == "stop":
            value = json.loads(output.text)
            jsonschema.validate(value, schema)
            kinds.add(value["kind"])
    assert kinds <= {"cat", "dog"}
    assert kinds


def test_what_cannot_be_shown_is_refused_by_the_keywords_name() -> None:
    compiler = GrammarCompiler(build_tokenizer(), VOCAB_SIZE, {2})
    for keyword, schema in (("oneOf", SHARED[0]), ("not", {"not": {}}), ("uniqueItems", {"uniqueItems": True})):
        with pytest.raises(RequestError, match=keyword) as raised:
            compiler.compile({"type": "json_schema", "json_schema": {"schema": schema}})
        assert raised.value.param == "response_format"
