"""What cannot be served is refused at once, naming the field, and no other request is affected."""

from __future__ import annotations

import asyncio
import math

import pytest
from pydantic import ValidationError

from cb_backend import Engine, EngineConfig, RequestError, SamplingParams
from cb_backend.config import parse_size
from cb_backend.errors import ModelError

PARAMS = SamplingParams(max_tokens=3, temperature=0.0)


@pytest.fixture(scope="module")
def engine(tiny_llama):
    with Engine(model=str(tiny_llama), dtype="float32", num_kv_blocks=20, block_size=8) as engine:
        yield engine


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"model": ""}, "must name a directory"),
        ({"swap_space": "lots"}, "must be a size"),
        ({"swap_space": -1}, "must not be negative"),
        ({"swap_space": True}, "must be a number of bytes"),
        ({"admission": {"risk": 0.0}}, "greater than 0"),
        ({"admission": {"risk": 1.0}}, "less than 1"),
        ({"admission": {"risk": math.nan}}, "finite"),
        ({"admission": {"policy": "hope"}}, "forecast"),
        ({"block_size": 0}, "greater than or equal to 1"),
        ({"max_num_seqs": 0}, "greater than or equal to 1"),
        ({"num_kv_blocks": 0}, "greater than 0"),
        ({"attention_backend": "magic"}, "triton"),
        ({"no_such_field": 1}, "Extra inputs"),
    ],
)
def test_a_bad_configuration_is_named_before_anything_loads(fields, words):
    with pytest.raises(ValidationError, match=words):
        EngineConfig(**{"model": "m"} | fields)


@pytest.mark.parametrize("text, size", [("0", 0), ("4GiB", 2**32), ("512MB", 512 * 10**6), ("1.5k", 1500), (7, 7)])
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"num_kv_blocks": 2, "block_size": 8, "max_model_len": 64}, "holds 16 tokens.*less than one sequence.*64"),
        ({"kv_cache_memory": "10"}, "no memory is left for the KV pool"),
        ({"swap_space": "900TiB"}, "more than the machine's memory"),
        ({"max_model_len": 5000}, "more than the 1024 positions"),
    ],
)
def test_memory_that_cannot_be_had_is_an_error_at_start(tiny_llama, fields, words):
    with pytest.raises(ModelError, match=words):
        Engine(model=str(tiny_llama), dtype="float32", **fields).start()


def test_no_swap_space_is_a_choice(tiny_llama):
    with Engine(model=str(tiny_llama), dtype="float32", num_kv_blocks=8, swap_space=0) as engine:
        assert engine.stats()["host_blocks"] == 0
        assert engine.generate([5, 6, 7], PARAMS)[0].finish_reason == "length"


@pytest.mark.parametrize(
    "prompt, params, options, param",
    [
        ([], PARAMS, {}, "prompt"),
        ("", PARAMS, {}, "prompt"),
        ([-1], PARAMS, {}, "prompt"),
        ([10**9], PARAMS, {}, "prompt"),
        ([True], PARAMS, {}, "prompt"),
        ([1.5], PARAMS, {}, "prompt"),
        (["a"], PARAMS, {}, "prompt"),
        ([5] * 161, PARAMS, {}, "prompt"),
        ([5] * 160, PARAMS, {}, "max_tokens"),
        ([5] * 160, SamplingParams(), {}, "prompt"),
        ([5], SamplingParams(max_tokens=160), {}, "max_tokens"),
        ([5], SamplingParams(stop_token_ids=(512,)), {}, "stop_token_ids"),
        ([5], SamplingParams(logit_bias={-1: 1.0}), {}, "logit_bias"),
        ([5], PARAMS, {"priority": 1.0}, "priority"),
        ([5], PARAMS, {"priority": True}, "priority"),
        ([5], PARAMS, {"timeout": 0}, "timeout"),
        ([5], PARAMS, {"timeout": -1.0}, "timeout"),
        ([5], PARAMS, {"timeout": math.nan}, "timeout"),
        ([5], PARAMS, {"timeout": math.inf}, "timeout"),
        ([5], PARAMS, {"request_class": "x" * 65}, "request_class"),
    ],
)
def test_a_bad_request_is_refused_and_the_next_is_served(engine, prompt, params, options, param):
    with pytest.raises(RequestError) as raised:
        engine.generate([prompt], params, **options)
    assert raised.value.param == param
    assert 400 <= raised.value.status < 500
    good = engine.generate([[5, 6, 7]], PARAMS)[0]
    assert good.finish_reason == "length"
    assert engine.stats()["kv_blocks_used"] == 0


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2.0}, "min_p"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": math.nan}, "frequency_penalty"),
        ({"n": 0}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"seed": 2**63}, "seed"),
        ({"stop": [""]}, "stop.0"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_a_bad_sampling_parameter_is_named(fields, param):
    with pytest.raises(RequestError) as raised:
        SamplingParams.parse(fields)
    assert raised.value.param == param


def test_more_choices_than_may_run_at_once_are_refused(tiny_llama):
    with (
        Engine(model=str(tiny_llama), dtype="float32", num_kv_blocks=8, max_num_seqs=2) as engine,
        pytest.raises(RequestError, match="at most 2 sequences") as raised,
    ):
        engine.generate([5], SamplingParams(n=3, max_tokens=1))
    assert raised.value.param == "n"


def test_more_than_a_thousand_classes_take_bounded_memory(engine):
    def observe() -> int:
        for i in range(1005):
            engine.parts.curves.observe(f"class-{i}", 5, True)
        return engine.parts.curves.num_classes

    assert engine.core.call(observe) <= 1000


def test_a_full_queue_is_429_with_a_time_to_retry(tiny_llama):
    async def flood(engine):
        async def one(i):
            async for output in engine.stream([5 + i], SamplingParams(max_tokens=100, ignore_eos=True)):
                return output

        return await asyncio.gather(*(one(i) for i in range(40)), return_exceptions=True)

    with Engine(
        model=str(tiny_llama), dtype="float32", num_kv_blocks=40, block_size=8, max_num_seqs=2, max_queue_size=3
    ) as engine:
        results = asyncio.run(flood(engine))
    refused = [r for r in results if isinstance(r, RequestError)]
    assert refused and {r.status for r in refused} == {429}
    assert all(r.retry_after is not None and r.retry_after >= 1 for r in refused)
    assert len(refused) < 40


def test_a_deadline_that_cannot_be_met_is_refused_early_unless_the_operator_says_otherwise(tiny_llama):
    long = SamplingParams(max_tokens=600, ignore_eos=True)
    fields = {"model": str(tiny_llama), "dtype": "float32", "num_kv_blocks": 100, "max_num_batched_tokens": 16}
    with Engine(**fields) as engine:
        engine.generate([[5] * 200], SamplingParams(max_tokens=20, ignore_eos=True))  # now it knows its speed
        with pytest.raises(RequestError, match="cannot be kept") as raised:
            engine.generate([[7] * 400], long, timeout=1e-4)
        assert raised.value.param == "timeout"
    with Engine(**fields, admission={"refuse_late": False}) as engine:
        output = engine.generate([[7] * 400], long, timeout=1e-4)[0]
        assert output.finish_reason == "timeout"


def test_a_refused_burst_is_not_even_tokenized(tiny_llama, monkeypatch):
    with Engine(model=str(tiny_llama), dtype="float32", num_kv_blocks=8, max_queue_size=1) as engine:
        encoded = []
        monkeypatch.setattr(engine, "_encode", lambda prompt: encoded.append(prompt) or [5])
        monkeypatch.setattr(type(engine.core), "num_waiting", property(lambda core: 1))

        async def one():
            async for _ in engine.stream("a prompt", PARAMS):
                pass

        with pytest.raises(RequestError, match="queue is full"):
            asyncio.run(one())
        assert encoded == []
