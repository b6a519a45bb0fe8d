"""Joined pieces are what decoding everything at once gives, and no piece shows half a character."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from transformers import PreTrainedTokenizerFast

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


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=350, deadline=None)
@given(data=st.data(), size=st.integers(1, 4), skip=st.booleans())
def test_hidden_tokens_and_holes_part_nothing_that_decoding_joins(family, data, size, skip):
    """Few ids, all awkward: bytes of characters, spaces, special tokens and holes between them."""
    tokenizer = tokenizer_of(family)
    pool = [0, 1, 2, 3, len(tokenizer) + 5, *awkward_ids(tokenizer, family)]
    ids = data.draw(st.lists(st.sampled_from(pool), max_size=14))
    out, rest = pieces(tokenizer, ids, [size] * len(ids), skip)
    assert "".join(out) + rest == whole(tokenizer, ids, skip)


def awkward_ids(tokenizer, family):
    if family == "metaspace":
        tokens = [*(f"<0x{byte:02X}>" for byte in "🦙é".encode()), "▁", "a"]
    elif family == "byte_level":
        tokens = ["ð", "Ł", "¦", "Ļ", "Ã", "©", "Ġ", "a"]  # the letters for the bytes of a llama and an e acute
    else:
        tokens = ["▁", "a"]
    ids = tokenizer.convert_tokens_to_ids(tokens)
    assert tokenizer.unk_token_id not in ids
    return ids


def test_a_character_spelled_around_a_hidden_token_comes_whole():
    tokenizer = tokenizer_of("metaspace")
    first, *others = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in "🦙".encode()])
    hidden, x = tokenizer.convert_tokens_to_ids(["<|im_end|>", "▁"])
    out, rest = pieces(tokenizer, [first, hidden, *others, x], [1] * 6)
    assert "".join(out) + rest == "🦙 "


DECODERS = {
    "like Gemma": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    "first word stripped": decoders.Metaspace(prepend_scheme="first"),
    "never stripped": decoders.Metaspace(prepend_scheme="never"),
    "WordPiece": decoders.WordPiece(prefix="▁"),
    "word ends": decoders.BPEDecoder(suffix="e"),
    "none": None,
}


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data(), sizes=st.lists(st.integers(1, 5), max_size=40))
def test_other_decoders_join_to_the_whole(name, data, sizes):
    tokenizer = with_decoder(name)
    known = range(len(tokenizer))
    if name == "word ends":  # the mark stands at a token's end and nowhere else
        known = [i for i in known if "e" not in tokenizer.convert_ids_to_tokens(i)[:-1]]
    ids = data.draw(st.lists(st.sampled_from([*known, len(tokenizer)]), max_size=30))
    out, rest = pieces(tokenizer, ids, sizes)
    assert "".join(out) + rest == whole(tokenizer, ids)


def with_decoder(name):
    state = json.loads(tokenizer_of("metaspace").backend_tokenizer.to_str())
    made = Tokenizer.from_str(json.dumps(state | {"decoder": None}))
    if DECODERS[name] is not None:
        made.decoder = DECODERS[name]
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def test_text_after_a_prompt_keeps_the_space_that_decoding_alone_strips():
    tokenizer = tokenizer_of("metaspace")
    prompt = tokenizer("Hello! I am", add_special_tokens=False)["input_ids"]
    ids = tokenizer("here to help.", add_special_tokens=False)["input_ids"]
    continued = IncrementalDetokenizer(tokenizer, after=prompt)
    assert "".join(continued.push([i]) for i in ids) + continued.finish() == " here to help."
    assert whole(tokenizer, ids) == "here to help."


def test_a_character_begun_in_the_prompt_is_shown_when_it_is_whole():
    tokenizer = tokenizer_of("byte_level")
    *prompt, last = tokenizer("🦙", add_special_tokens=False)["input_ids"]
    assert IncrementalDetokenizer(tokenizer, after=prompt).push([last]) == "🦙"


@pytest.mark.parametrize(
    "family, token",
    [("byte_level", "a"), ("byte_level", "æ"), ("unigram", "▁"), ("unigram", "</s>"), ("unigram", None)],
)
def test_the_window_stays_short(family, token):
    """Of ordinary tokens, of bytes that never make a character, of spaces, of hidden tokens and of holes."""
    tokenizer = tokenizer_of(family)
    token_id = len(tokenizer) + 5 if token is None else tokenizer.convert_tokens_to_ids(token)
    detokenizer = IncrementalDetokenizer(tokenizer)
    text, longest = "", 0
    for _ in range(200):
        text += detokenizer.push([token_id])
        longest = max(longest, len(detokenizer._window))
    assert text + detokenizer.finish() == whole(tokenizer, [token_id] * 200)
    assert longest <= 17


class LeftContext:
    """A tokenizer without a fast backend whose token 7 is written by what stands before it, 8 hidden, 9 nothing."""

    unk_token_id = 0
    all_special_ids = (8,)
    added_tokens_decoder: dict = {}

    def convert_tokens_to_ids(self, tokens):
        return [0] * len(tokens)

    def decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces):
        out = ""
        for token_id in ids:
            if token_id == 7:
                out += "" if not out else " and" if out.endswith(" ") else " so"
            elif token_id == 8:
                out += "" if skip_special_tokens else "<end>"
            elif token_id != 9:
                out += "abc "[token_id % 4]
        return out


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 9), max_size=40), size=st.sampled_from([1, 2, 3, 5, 8]), skip=st.booleans())
def test_case_005_the_text_does_not_depend_on_how_tokens_are_grouped(ids, size, skip):
    tokenizer = LeftContext()
    out, rest = pieces(tokenizer, ids, [size] * len(ids), skip)
    assert "".join(out) + rest == tokenizer.decode(ids, skip, False)


def test_case_001_no_piece_freezes_half_an_emoji():
    tokenizer = tokenizer_of("byte_level")
    ids = tokenizer("ok 🧑‍🚀 🫠 done", add_special_tokens=False)["input_ids"]  # emoji that are several tokens each
    assert len(ids) > 12
    out, rest = pieces(tokenizer, ids, [1] * len(ids))
    assert "".join(out) == "ok 🧑‍🚀 🫠 done" and rest == ""
    assert not any(REPLACEMENT in piece for piece in out)


def test_case_002_no_bytes_go_from_one_request_to_another():
    tokenizer = tokenizer_of("byte_level")
    broken = tokenizer("🫠", add_special_tokens=False)["input_ids"][:2]
    plain = tokenizer("plain text", add_special_tokens=False)["input_ids"]
    first, second, text = IncrementalDetokenizer(tokenizer), IncrementalDetokenizer(tokenizer), ""
    for i, token_id in enumerate(plain):
        first.push(broken[i : i + 1])
        text += second.push([token_id])
    assert text + second.finish() == "plain text"


@pytest.mark.parametrize("family", FAMILIES)
def test_case_004_words_do_not_run_together(family):
    tokenizer = tokenizer_of(family)
    ids = tokenizer("Hello! I am here to help.", add_special_tokens=False)["input_ids"]
    out, rest = pieces(tokenizer, ids, [1] * len(ids))
    assert "".join(out) + rest == "Hello! I am here to help."
