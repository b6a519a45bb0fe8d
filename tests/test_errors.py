"""Errors of other libraries are quoted by one line."""

from __future__ import annotations

import pytest

from cb_backend.errors import first_line


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
