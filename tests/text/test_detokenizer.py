"""Joined pieces are what decoding everything at once gives, and no piece shows half a character."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cb_backend.text.detokenizer import REPLACEMENT, IncrementalDetokenizer, byte_fallback_ids

from .tokenizers_made_here import FAMILIES, tokenizer_of

TEXT = st.text(
    st.one_of(
        st.sampled_from(list("abc XYZ.,\n\té東京한글🙂🦙🔥👩\u200d\u0301\ufffd\u00a0")),
        st.characters(min_codepoint=32, max_codepoint=0x1F6FF, exclude_categories=["Cs"]),
    ),
    max_size=30,
)


def pieces(tokenizer, ids, sizes, skip=True):
    detokenizer = IncrementalDetokenizer(tokenizer, skip)
    out, at = [], 0
    for size in sizes:
        out.append(detokenizer.push(ids[at : at + size]))
        at += size
    out.append(detokenizer.push(ids[at:]))
    return out, detokenizer.finish()


def whole(tokenizer, ids, skip=True):
    return tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=350, deadline=None)
@given(text=TEXT, sizes=st.lists(st.integers(1, 5), max_size=60), skip=st.booleans())
@example(text="ok 🦙🔥 done", sizes=[1] * 60, skip=True)
@example(text="👩‍👩‍👧 e\u0301", sizes=[1] * 60, skip=True)
def test_pieces_of_any_text_join_to_the_whole(family, text, sizes, skip):
    tokenizer = tokenizer_of(family)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    out, rest = pieces(tokenizer, ids, sizes, skip)
    assert "".join(out) + rest == whole(tokenizer, ids, skip)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=350, deadline=None)
@given(data=st.data(), sizes=st.lists(st.integers(1, 5), max_size=60), skip=st.booleans())
def test_pieces_of_any_ids_join_to_the_whole(family, data, sizes, skip):
    """Random ids: invalid bytes, special tokens anywhere, ids that the tokenizer does not have."""
    tokenizer = tokenizer_of(family)
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 20), max_size=40))
    out, rest = pieces(tokenizer, ids, sizes, skip)
    assert "".join(out) + rest == whole(tokenizer, ids, skip)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=100, deadline=None)
@given(text=TEXT.filter(lambda text: REPLACEMENT not in text))
def test_no_piece_of_valid_text_holds_a_replacement_character(family, text):
    tokenizer = tokenizer_of(family)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    out, _ = pieces(tokenizer, ids, [1] * len(ids))
    if REPLACEMENT not in whole(tokenizer, ids):
        assert not any(REPLACEMENT in piece for piece in out)


def test_words_come_one_by_one_and_only_characters_in_the_making_wait():
    tokenizer = tokenizer_of("byte_level")
    ids = tokenizer("ab 🦙 c", add_special_tokens=False)["input_ids"]
    out, rest = pieces(tokenizer, ids, [1] * len(ids))
    assert rest == ""
    assert "".join(out) == "ab 🦙 c"
    assert out[0] != ""  # nothing is held back without a reason
    assert " 🦙" in out  # the whole character in one piece


def test_an_incomplete_character_at_the_end_is_shown_as_decoding_shows_it():
    tokenizer = tokenizer_of("byte_level")
    ids = tokenizer("x🦙", add_special_tokens=False)["input_ids"][:-1]
    out, rest = pieces(tokenizer, ids, [1] * len(ids))
    assert "".join(out) == "x"
    assert rest == REPLACEMENT


def test_byte_tokens_are_recognised_only_where_they_spell_bytes():
    assert len(byte_fallback_ids(tokenizer_of("metaspace"))) == 256
    assert byte_fallback_ids(tokenizer_of("byte_level")) == byte_fallback_ids(tokenizer_of("unigram")) == frozenset()


def test_the_window_stays_short():
    tokenizer = tokenizer_of("byte_level")
    ids = tokenizer("The quick brown fox jumps over the lazy dog. " * 30, add_special_tokens=False)["input_ids"]
    detokenizer = IncrementalDetokenizer(tokenizer)
    longest = 0
    for token_id in ids:
        detokenizer.push([token_id])
        longest = max(longest, len(detokenizer._window))
    assert longest <= 4
