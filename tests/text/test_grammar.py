"""Structured output on a random-weight model: only the grammar can make its text valid."""

from __future__ import annotations

import json
import re
import threading
import time

import pytest

from cb_backend import Engine, RequestError, SamplingParams
from cb_backend.text.grammar import MAX_COMPILE_SECONDS, MAX_GRAMMAR_BYTES, GrammarCompiler
from tests.pace import seconds_of
from tests.text.slow_schema import slow_schema
from tests.tiny_models import VOCAB_SIZE, build_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine(tiny_llama):
    with Engine(model=str(tiny_llama), dtype="float32", num_kv_blocks=300, block_size=8) as engine:
        yield engine


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(build_tokenizer(), VOCAB_SIZE, {2})


def run(engine, response_format, seeds=range(6), **params):
    each = [SamplingParams(max_tokens=80, seed=s, response_format=response_format, **params) for s in seeds]
    return engine.generate(["Give me:"] * len(each), each)


def test_json_schema_holds_for_every_seed(engine):
    for output in run(engine, {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}}):
        assert output.finish_reason == "stop"
        value = json.loads(output.text)
        assert set(value) == {"name", "age"} and 0 <= value["age"] <= 99 and len(value["name"]) <= 8


def test_regex_and_choice(engine):
    for output in run(engine, {"type": "regex", "regex": r"[a-c]{2}-[0-9]{2}"}):
        assert re.fullmatch(r"[a-c]{2}-[0-9]{2}", output.text)
    texts = {o.text for o in run(engine, {"type": "choice", "choice": ["yes", "no", "not now"]}, range(20))}
    assert texts <= {"yes", "no", "not now"} and len(texts) > 1


def test_json_object_begins_as_one(engine):
    for output in run(engine, {"type": "json_object"}):
        assert output.text.startswith("{")
        if output.finish_reason == "stop":
            assert isinstance(json.loads(output.text), dict)


def test_choices_of_one_request_each_follow_the_grammar(engine):
    (output,) = run(engine, {"type": "regex", "regex": r"[0-9]{3}"}, [5], n=4)
    assert all(re.fullmatch(r"[0-9]{3}", choice.text) for choice in output.choices)
    assert len({choice.text for choice in output.choices}) > 1


def test_neighbours_without_a_grammar_are_untouched(engine):
    plain = SamplingParams(max_tokens=20, temperature=0.0)
    alone = engine.generate("Tell me", plain)[0]
    mixed = engine.generate(
        ["Tell me", "Give me:"], [plain, SamplingParams(max_tokens=20, response_format={"type": "json_object"})]
    )
    assert mixed[0].token_ids == alone.token_ids


def test_preemption_and_stop_strings_change_nothing(engine, tiny_llama):
    form = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    wanted = [o.token_ids for o in run(engine, form, range(12))]
    with Engine(
        model=str(tiny_llama),
        dtype="float32",
        num_kv_blocks=14,
        block_size=8,
        max_num_batched_tokens=24,
        admission={"policy": "prompt"},
    ) as tight:
        assert [o.token_ids for o in run(tight, form, range(12))] == wanted
        stats = tight.stats()
    assert stats["preemptions_swap"] + stats["preemptions_recompute"] > 0
    for output in run(engine, form, stop=['"age"']):
        assert (output.finish_reason, output.stop_reason) == ("stop", '"age"')


def test_the_grammar_goes_before_min_tokens(engine):
    (output,) = run(engine, {"type": "choice", "choice": ["yes"]}, [0], min_tokens=30)
    assert (output.text, output.finish_reason) == ("yes", "stop")


@pytest.mark.parametrize(
    "form, param",
    [
        ({"type": "xml"}, "response_format"),
        ({}, "response_format"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"schema": 5}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"schema": {"type": "king"}}}, "response_format"),
        ({"type": "regex"}, "response_format.regex"),
        ({"type": "regex", "regex": "("}, "response_format"),
        ({"type": "regex", "regex": "\ud83d"}, "response_format.regex"),
        ({"type": "choice", "choice": []}, "response_format.choice"),
        ({"type": "choice", "choice": [1]}, "response_format.choice"),
        ({"type": "grammar", "grammar": "start: ("}, "response_format"),
    ],
)
def test_a_faulty_format_is_named(compiler, form, param):
    with pytest.raises(RequestError) as raised:
        compiler.compile(form)
    assert raised.value.param == param


def test_a_grammar_too_large_is_refused_at_once(compiler):
    with pytest.raises(RequestError, match="larger than"):
        compiler.compile({"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * MAX_GRAMMAR_BYTES]}}})
    with pytest.raises(RequestError, match="larger than"):
        compiler.compile({"type": "choice", "choice": ["x" * MAX_GRAMMAR_BYTES]})


def schema_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def deep(levels, kind):
    schema = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema} if kind == "array" else {"oneOf": [schema, {"type": "string"}]}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"foo": "bar"}},
        {"type": "strin"},
        {"$ref": "#/nowhere"},
        {"$ref": "#"},
        {"enum": ["\ud83d"]},
        deep(300, "array"),
        deep(1500, "array"),
    ],
    ids=["bare property", "no such type", "dangling reference", "endless reference", "surrogate", "deep", "deeper"],
)
def test_case_071_a_malformed_schema_is_refused(compiler, schema):
    with pytest.raises(RequestError) as raised:
        compiler.compile(schema_format(schema))
    assert raised.value.param.split(".")[0] == "response_format"
    assert "\n" not in raised.value.message


def test_case_071_a_schema_that_allows_everything_is_legal(compiler):
    assert compiler.compile(schema_format({})) is not None


@pytest.mark.parametrize("pattern", ["(", "[a", "(?P<x", "(?<=a)b", "a" * 1_000_000], ids=lambda p: p[:8])
def test_case_073_a_broken_pattern_is_refused(compiler, pattern):
    with pytest.raises(RequestError):
        compiler.compile({"type": "regex", "regex": pattern})


@pytest.mark.parametrize("levels", [12, 20])
def test_case_074_nested_alternatives_cost_bounded_time(compiler, levels):
    began = time.monotonic()
    with pytest.raises(RequestError, match="oneOf"):
        compiler.compile(schema_format(deep(levels, "oneOf")))
    assert time.monotonic() - began < MAX_COMPILE_SECONDS


def test_an_explosive_regex_costs_bounded_time(compiler):
    began = time.monotonic()
    constraint = compiler.compile({"type": "regex", "regex": "(((a{1,1000}){1,1000}){1,1000}){1,1000}b{1,1000}"})
    constraint.allowed()
    assert time.monotonic() - began < MAX_COMPILE_SECONDS


def test_a_grammar_too_slow_to_compile_is_refused_in_bounded_time():
    compiler = GrammarCompiler(build_tokenizer(), VOCAB_SIZE, {2}, max_compile_seconds=0.02)
    compiler._ll_tokenizer()  # made at the first use
    whole = GrammarCompiler(build_tokenizer(), VOCAB_SIZE, {2}, max_compile_seconds=600.0)
    whole._ll_tokenizer()
    began = time.monotonic()
    with pytest.raises(RequestError, match="^'response_format': compiling it took more than 0.02 s; ") as raised:
        compiler.compile(schema_format(slow_schema(6)))
    refused = time.monotonic() - began
    assert refused < seconds_of(lambda: whole.compile(schema_format(slow_schema(6)))) / 2
    assert (raised.value.status, raised.value.param) == (400, "response_format")


def test_a_grammar_that_takes_long_is_compiled_where_there_is_time(compiler):
    assert compiler.compile(schema_format(slow_schema(6))) is not None


def test_slow_grammars_hold_back_no_other_for_ever():
    """Two compile at a time: a third waits its time, is refused, and is not compiled once its caller has left."""
    compiler = GrammarCompiler(build_tokenizer(), VOCAB_SIZE, {2}, max_compile_seconds=0.01)
    built, go_on, build = [], threading.Event(), compiler._build

    def late(wanted):
        built.append(wanted["choice"])
        go_on.wait(30)
        return build(wanted)

    compiler._build = late
    for choice in ("one", "two", "three"):
        with pytest.raises(RequestError, match="more than 0.01 s"):
            compiler.compile({"type": "choice", "choice": [choice]})
    go_on.set()
    compiler._pool.shutdown(wait=True)
    assert built == [["one"], ["two"]]


def test_text_is_no_constraint_and_a_schema_is_compiled_once(compiler):
    assert compiler.compile({"type": "text"}) is None
    form = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    first, second = compiler.compile(form), compiler.compile(form)
    before = len(compiler._cache)
    first.accept(compiler.tokenizer.convert_tokens_to_ids("{"))
    assert first.allowed().tolist() != second.allowed().tolist()  # states of their own
    assert len(compiler._cache) == before
