"""What a client sends costs no more than its size allows: sizes are looked at before values, and values before work."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from cb_backend.engine.limits import Limits
from cb_backend.errors import RequestError, shown
from cb_backend.openai.connection import MAX_VALUES
from cb_backend.openai.protocol import ChatRequest, CompletionRequest
from cb_backend.params import SamplingParams
from cb_backend.text.chat import ChatTemplate
from tests.tiny_models import build_tokenizer

from .fuzz_bodies import fuzz, tiny_engine

LIMITS = Limits(max_model_len=1024, vocab_size=512, pool_tokens=4096, max_num_seqs=8)


class Counted(list[Any]):
    """A list that counts how often its values are looked at."""

    looked = 0

    def __iter__(self) -> Any:
        type(self).looked += 1
        return super().__iter__()


def test_millions_of_ids_are_refused_by_their_number() -> None:
    ids = Counted([5]) * 8_000_000
    assert isinstance(ids, list)
    with pytest.raises(RequestError, match="8000000 tokens"):
        LIMITS.check_prompt(ids, SamplingParams())
    assert Counted.looked == 0


@pytest.mark.parametrize("wrong", [-1, 512, True, 1.0, None, "5"])
def test_the_first_wrong_id_is_named(wrong: Any) -> None:
    with pytest.raises(RequestError, match=r"prompt\[3\]"):
        LIMITS.check_prompt([1, 2, 3, wrong, wrong], SamplingParams())


def test_a_text_that_no_context_holds_is_not_tokenized() -> None:
    LIMITS.check_characters("x" * LIMITS.max_characters)
    with pytest.raises(RequestError) as raised:
        LIMITS.check_characters("x" * (LIMITS.max_characters + 1))
    assert raised.value.code == "context_length_exceeded"
    assert Limits(10**6, 512, 10**6, 8).max_characters == 64 * 10**6


def test_a_value_of_any_size_is_shown_in_eighty_characters() -> None:
    for value in ("x" * 10**7, [[5]] * 10**6, {str(i): i for i in range(10**5)}, b"x" * 10**7, 10**60):
        began = time.thread_time()
        assert len(shown(value)) <= 80
        assert time.thread_time() - began < 0.01  # `repr` of these takes 20 ms to a second
    assert shown("short") == "'short'"


@pytest.mark.parametrize(
    "fields",
    [
        {"bad_words": [[5]] * 100_000},
        {"stop_token_ids": [[5]] * 100_000},
        {"stop": [[5]] * 100_000},
        {"logit_bias": {str(i): "x" for i in range(100_000)}},
        {"n": [[5]] * 100_000},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_long_wrong_field_is_one_fault_and_not_one_for_each_value(fields: dict[str, Any]) -> None:
    [name] = fields
    began = time.thread_time()
    with pytest.raises(RequestError, match=f"^'{name}") as raised:
        CompletionRequest.parse({"model": "m", "prompt": "x", **fields}).sampling()
    assert len(raised.value.message) < 300
    assert time.thread_time() - began < 0.1  # pydantic's list of 100,000 faults takes a second


def test_banned_words_are_bounded_together() -> None:
    SamplingParams.parse({"bad_words": ["x" * 1024] * 32})
    with pytest.raises(RequestError, match="32768"):
        SamplingParams.parse({"bad_words": ["x" * 1024] * 33})


def test_variables_of_a_template_are_those_that_it_names() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ mood }}"
    chat = ChatTemplate(tokenizer)
    hi = [{"role": "user", "content": "hi"}]
    given = {"mood": "!", "padding_side": 1, "no_such": 2}
    assert chat.render_text(hi, template_kwargs=given) == "hi!"
    for reserved in ("self", "conversation", "conversations", "tokenize"):
        with pytest.raises(RequestError, match="cannot be set"):
            chat.render_text(hi, template_kwargs={reserved: "x"})
        with pytest.raises(RequestError, match="cannot be set"):
            ChatRequest.parse(
                {"model": "m", "messages": hi, "chat_template_kwargs": {reserved: "x"}}
            ).template_options()
    many = {f"k{i}": i for i in range(65)}
    with pytest.raises(RequestError, match="at most 64"):
        ChatRequest.parse({"model": "m", "messages": hi, "chat_template_kwargs": many}).template_options()


async def test_a_body_of_millions_of_values_is_not_parsed(client: Any) -> None:
    body = b'{"model": "tiny", "prompt": [' + b"5," * MAX_VALUES + b"5]}"
    answer = await client.post("/completions", content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


@pytest.mark.timeout(280)
def test_two_hundred_bodies_of_the_fuzzer() -> None:
    """A slice of `make fuzz`; the clock on the loop counts its thread's own time, so a busy neighbour does not."""
    with tiny_engine() as engine:
        result = asyncio.run(fuzz(engine, 200, seed=7))
    assert result["faults"] == []
    assert any(status.endswith(" 200") for status in result["statuses"])
