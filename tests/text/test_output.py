"""Deltas to outputs: text, stops, ends, usage, log-probabilities."""

from __future__ import annotations

import pytest

from cb_backend.client import OutputDelta
from cb_backend.params import SamplingParams
from cb_backend.request import FinishReason, Logprob, TokenDelta
from cb_backend.text.output import OutputBuilder, OutputCollector

from .tokenizers_made_here import tokenizer_of

TOKENIZER = tokenizer_of("byte_level")
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")


def ids_of(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def feed(ids, *, end=FinishReason.LENGTH, by_token=False, stop_reason=None, **params):
    """Token by token; the last one carries the end. Returns (builder, cumulative outputs)."""
    builder = OutputBuilder(TOKENIZER, SamplingParams(**params), "r", (5, 6))
    collector, outputs = OutputCollector(), []
    for i, token_id in enumerate(ids):
        last = i == len(ids) - 1
        delta = TokenDelta(
            "r",
            0,
            (token_id,),
            logprobs=(Logprob(token_id, -float(i)),),
            finish_reason=end if last else None,
            stop_reason=stop_reason if last else None,
            ends_with_stop_token=by_token and last,
            cached_tokens=1,
        )
        output = builder.feed(delta)
        if output is not None:
            collector.add(0, output)
            outputs.append(collector.output(0))
    return builder, outputs


def test_deltas_join_to_the_text_and_ids_are_cumulative():
    ids = ids_of("Hello 🦙 there")
    _, outputs = feed(ids)
    assert "".join(o.delta.text for o in outputs) == outputs[-1].text == "Hello 🦙 there"
    assert [len(o.token_ids) for o in outputs] == list(range(1, len(ids) + 1))
    assert [o.finish_reason for o in outputs] == [None] * (len(ids) - 1) + ["length"]
    usage = outputs[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (2, len(ids), 1)
    assert usage.total_tokens == 2 + len(ids)


def test_a_stop_string_ends_before_the_engine_does():
    ids = ids_of("one two three four")
    builder, outputs = feed(ids, stop="two")
    last = outputs[-1]
    assert (last.text, last.finish_reason, last.stop_reason) == ("one ", "stop", "two")
    assert builder.stopped_by_text and builder.finished
    assert TOKENIZER.decode(last.token_ids).endswith("two")  # up to the token that completed it, no further
    assert "".join(o.delta.text for o in outputs) == "one "


def test_a_stop_string_in_the_very_last_token_needs_no_word_to_the_engine():
    builder, outputs = feed(ids_of("one two"), stop=["two"])
    assert (outputs[-1].finish_reason, outputs[-1].text) == ("stop", "one ")
    assert not builder.stopped_by_text


def test_the_stop_string_may_stay_in_the_output():
    _, outputs = feed(ids_of("one two three"), stop="two", include_stop_str_in_output=True)
    assert outputs[-1].text == "one two"


@pytest.mark.parametrize(
    "params, text",
    [({}, "one "), ({"include_stop_str_in_output": True}, "one <|im_end|>"), ({"skip_special_tokens": False}, "one ")],
)
def test_a_stop_string_that_is_a_special_token_matches_it(params, text):
    ids = [*ids_of("one "), END, *ids_of("two")]
    builder, outputs = feed(ids, stop=["x", "<|im_end|>"], **params)
    last = outputs[-1]
    assert (last.text, last.finish_reason, last.stop_reason) == (text, "stop", "<|im_end|>")
    assert last.token_ids == tuple(ids[: ids.index(END) + 1])
    assert builder.stopped_by_text and "".join(o.delta.text for o in outputs) == text


def test_a_hidden_stop_ends_nothing_within_min_tokens():
    ids = [END, *ids_of("one"), END, *ids_of("two")]
    _, outputs = feed(ids, stop="<|im_end|>", min_tokens=1)
    assert (outputs[-1].text, outputs[-1].stop_reason) == ("one", "<|im_end|>")


def test_text_that_a_hidden_stop_finds_held_is_shown():
    _, outputs = feed([*ids_of("one tw"), END, *ids_of("o")], stop=["two", "<|im_end|>"])
    assert (outputs[-1].text, outputs[-1].stop_reason) == ("one tw", "<|im_end|>")


def test_text_held_back_in_vain_is_shown_at_the_end():
    _, outputs = feed(ids_of("one tw"), stop="two")
    assert outputs[-1].text == "one tw"


def test_stop_strings_are_not_looked_for_before_min_tokens():
    ids = ids_of("two two two")
    _, outputs = feed(ids, stop="two", min_tokens=len(ids_of("two two")))
    assert outputs[-1].text.startswith("two two")
    assert outputs[-1].finish_reason == "stop"


def test_a_stop_string_begun_within_min_tokens_may_end_after_them():
    ids = ids_of("x two")
    assert TOKENIZER.decode(ids[:-1]) == "x tw"
    _, outputs = feed([*ids, *ids_of(" y")], stop="two", min_tokens=len(ids) - 1)
    assert (outputs[-1].text, outputs[-1].token_ids) == ("x ", tuple(ids))


def test_several_tokens_at_once_end_at_the_one_that_completes_the_stop():
    ids = tuple(ids_of("one two three"))
    needed = len(ids_of("one two"))
    builder = OutputBuilder(TOKENIZER, SamplingParams(stop="two", logprobs=0), "r", (5,))
    output = builder.feed(TokenDelta("r", 0, ids, logprobs=tuple(Logprob(i, -1.0) for i in ids)))
    assert (output.text, output.token_ids, len(output.logprobs)) == ("one ", ids[:needed], needed)
    assert builder.stopped_by_text
    assert builder.feed(TokenDelta("r", 0, (ids[-1],))) is None


@pytest.mark.parametrize("reason", list(FinishReason))
def test_what_is_held_is_shown_for_every_reason_to_end(reason):
    _, outputs = feed(ids_of("one tw"), end=reason, stop="two")
    assert (outputs[-1].text, outputs[-1].finish_reason) == ("one tw", reason.value)


def test_a_delta_that_says_nothing_gives_no_output():
    builder = OutputBuilder(TOKENIZER, SamplingParams(), "r", (5,))
    assert builder.feed(TokenDelta("r", 0, ())) is None


@pytest.mark.parametrize(
    "params, text",
    [
        ({}, "hello world"),
        ({"include_stop_str_in_output": True}, "hello world"),
        ({"skip_special_tokens": False}, "hello world<|im_end|>"),
    ],
)
def test_case_008_013_a_special_end_token_cuts_nothing(params, text):
    _, outputs = feed([*ids_of("hello world"), END], end=FinishReason.STOP, by_token=True, **params)
    assert outputs[-1].text == text
    assert outputs[-1].token_ids[-1] == END


@pytest.mark.parametrize("include, text", [(False, "hello"), (True, "hello world")])
def test_an_ordinary_stop_token_is_hidden_unless_included(include, text):
    hello, world = ids_of("hello"), ids_of(" world")
    ids = [*hello, *world]
    _, outputs = feed(
        ids, end=FinishReason.STOP, by_token=True, stop_reason=ids[-1], include_stop_str_in_output=include
    )
    shown = TOKENIZER.decode(ids if include else ids[:-1])
    assert outputs[-1].text == shown
    assert outputs[-1].stop_reason == ids[-1]


def test_every_logprob_appears_once_and_none_past_a_stop():
    ids = ids_of("one two three four")
    _, outputs = feed(ids, stop="two", logprobs=0)
    given = [p for o in outputs for p in o.delta.logprobs]
    assert tuple(given) == outputs[-1].logprobs
    assert [p.token_id for p in given] == list(outputs[-1].token_ids)


def test_without_a_tokenizer_there_are_ids_and_no_text():
    builder = OutputBuilder(None, SamplingParams(stop="x"), "r", (1,))
    output = builder.feed(TokenDelta("r", 0, (4,), finish_reason=FinishReason.LENGTH))
    assert (output.text, output.token_ids, output.finish_reason) == ("", (4,), "length")


def test_an_error_without_tokens_is_an_output_and_an_empty_delta_is_none():
    builder = OutputBuilder(TOKENIZER, SamplingParams(), "r", (1,))
    assert builder.feed(TokenDelta("r", 0, ())) is None
    output = builder.feed(TokenDelta("r", 0, (), finish_reason=FinishReason.ERROR, error="broken"))
    assert (output.finish_reason, output.error) == ("error", "broken")


def test_a_delta_costs_no_more_late_than_early():
    """What a streaming front end reads holds what is new: its size does not grow with the text."""
    builder = OutputBuilder(TOKENIZER, SamplingParams(max_tokens=4000), "r", (5,))
    [word] = ids_of(" the")[:1]
    deltas = [builder.feed(TokenDelta("r", 0, (word,))) for _ in range(2000)]
    assert {(delta.text, delta.token_ids) for delta in deltas[1:]} == {(TOKENIZER.decode([word]), (word,))}
    assert [delta.usage.completion_tokens for delta in deltas] == list(range(1, 2001))


def test_choices_are_joined_each_for_itself():
    collector = OutputCollector()
    for index, text in ((1, "b"), (0, "a"), (1, "B")):
        collector.add(index, OutputDelta("r", index, text, (7,)))
    result = collector.result()
    assert [(choice.index, choice.text, choice.token_ids) for choice in result.choices] == [
        (0, "a", (7,)),
        (1, "bB", (7, 7)),
    ]
    assert (result.text, result.delta.text) == ("a", "a")
