"""Stop strings against `str.find`, and holding back no more than is needed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cb_backend.text.stops import StopMatcher


def run(stops, parts, include=False):
    """(shown text, stop or None) after feeding `parts`."""
    matcher, shown = StopMatcher(stops, include), ""
    for part in parts:
        text, stop = matcher.push(part)
        shown += text
        if stop is not None:
            return shown, stop
    return shown + matcher.finish(), None


def oracle(stops, text, include=False):
    """Reads the text character by character: the first to complete wins, of equals the one that began first."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def test_every_substring_of_an_output_is_found():
    parts = [" is", " Par", "is", ",", " the", " capital", "."]
    text = "".join(parts)
    for start in range(len(text)):
        for size in range(1, 9):
            stop = text[start : start + size]
            assert run([stop], parts) == (text[: text.find(stop)], stop)


@pytest.mark.parametrize("include", [False, True])
@settings(max_examples=500, deadline=None)
@given(
    stops=st.lists(st.text("ab:\n", min_size=1, max_size=5), min_size=1, max_size=4),
    text=st.text("ab:\nc", max_size=40),
)
def test_character_by_character_is_the_oracle(include, stops, text):
    assert run(stops, list(text), include) == oracle(stops, text, include)


@pytest.mark.parametrize("include", [False, True])
@settings(max_examples=300, deadline=None)
@given(
    stops=st.lists(st.text("ab:", min_size=1, max_size=6), min_size=1, max_size=4),
    parts=st.lists(st.text("ab:c", max_size=5), max_size=12),
)
def test_how_the_text_is_cut_into_parts_changes_nothing(include, stops, parts):
    assert run(stops, parts, include) == oracle(stops, "".join(parts), include)


@settings(max_examples=500, deadline=None)
@given(
    stops=st.lists(st.text("ab:", min_size=1, max_size=6), min_size=1, max_size=4),
    parts=st.lists(st.text("ab:c", max_size=5), max_size=12),
)
def test_only_a_suffix_that_begins_a_stop_is_held(stops, parts):
    matcher = StopMatcher(stops)
    seen = ""
    for part in parts:
        _, stop = matcher.push(part)
        if stop is not None:
            return
        seen += part
        overlaps = [
            n for n in range(len(seen) + 1) if any(len(s) > n and s.startswith(seen[len(seen) - n :]) for s in stops)
        ]
        assert len(matcher.held) == max(overlaps)


def test_case_010_a_stop_inside_a_token_cuts_before_it():
    assert run(["Pari"], [" is", " Paris", "."]) == (" is ", "Pari")
    assert run(["ris."], [" is", " Paris", "."]) == (" is Pa", "ris.")


def test_case_011_a_false_beginning_is_shown_once():
    assert run(["\n", "Alice:"], [" Alice", "!"]) == (" Alice!", None)


def test_case_014_nothing_is_held_without_a_reason():
    matcher = StopMatcher(["zzzzzzzzzzzzzzzzzzzz"])
    assert matcher.push("I") == ("I", None)
    assert matcher.push(" am fine z") == (" am fine ", None)


def test_the_stop_may_be_kept():
    assert run(["END"], ["a E", "ND b"], include=True) == ("a END", "END")


def test_a_stop_read_over_is_shown_and_one_begun_meanwhile_still_matches():
    matcher = StopMatcher(["END", "two"])
    assert matcher.push("END tw", armed=False) == ("END ", None)
    assert matcher.held == "tw"
    assert matcher.push("o three") == ("", "two")


def test_a_whole_stop_that_was_read_over_is_not_held():
    matcher = StopMatcher(["END"])
    assert matcher.push("the END", armed=False) == ("the END", None)
    assert matcher.held == ""


def test_a_long_beginning_that_comes_to_nothing_is_shown_whole():
    stops = ["a" * 1000 + "b", *("b" + "a" * n + "c" for n in range(900, 915))]
    assert run(stops, ["a"] * 1500) == ("a" * 1500, None)
    assert run(stops, ["b", *["a"] * 914, "c"]) == ("", "b" + "a" * 914 + "c")
