"""Errors of other libraries are quoted by one line; ours carry the path of their field as data, so that another
interface can name it in its own words."""

from __future__ import annotations

import pytest

from cb_backend.errors import RequestError, first_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("no such file."), "no such file"),
        (RuntimeError("\n  CUDA out of memory\nTraceback: ..."), "CUDA out of memory"),
        (KeyError(), "KeyError"),
        (OSError("\n \n"), "OSError"),
        ("lexer error\nstate: ...", "lexer error"),
        ("", "no reason given"),
    ],
)
def test_the_first_line_that_says_something(error: BaseException | str, line: str) -> None:
    assert first_line(error) == line


def test_a_long_line_is_cut() -> None:
    assert first_line(ValueError("x" * 1000), most=10) == "x" * 10


def test_a_path_begins_the_message_and_is_the_param() -> None:
    error = RequestError("must be a string", path=("messages", 0, "content"))
    assert (error.message, error.param) == ("'messages.0.content': must be a string", "messages.0.content")
    assert str(error) == error.message


def test_a_message_of_its_own_keeps_its_words() -> None:
    error = RequestError("this model has no chat template", param="messages")
    assert (error.message, error.param, error.path) == ("this model has no chat template", "messages", ("messages",))
    moved = error.at("input")
    assert (moved.message, moved.param) == ("this model has no chat template", "input")


def test_the_same_refusal_at_another_path_keeps_all_but_its_name() -> None:
    error = RequestError("'a': the field is 'a'", path=("a",), status=503, code="busy", retry_after=2.0)
    error.counted = True
    moved = error.at("b", 1)
    assert moved.message == "'b.1': 'a': the field is 'a'"
    assert (moved.param, moved.path) == ("b.1", ("b", 1))
    assert (moved.status, moved.code, moved.retry_after, moved.counted) == (503, "busy", 2.0, True)
    assert error.at("b", code="other").code == "other"


@pytest.mark.parametrize("path", [(), ("a",)])
def test_a_refusal_of_no_field_has_no_param(path: tuple[str, ...]) -> None:
    moved = RequestError("no", path=path).at()
    assert (moved.message, moved.param) == ("no", None)
