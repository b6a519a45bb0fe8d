"""The text in the service's own events, however a proxy cuts them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from cb_backend.bento import endpoints
from cb_backend.client import OutputDelta
from cb_backend.errors import RequestError
from cb_backend.request import Usage


def output(text: str, finish_reason: str | None = None) -> OutputDelta:
    return OutputDelta("r", 0, text, (7,), finish_reason=finish_reason, usage=Usage(3, 1, 2))  # type: ignore[arg-type]


async def pieces(text: str, size: int) -> AsyncIterator[str]:
    for start in range(0, len(text), size):
        yield text[start : start + size]


WHOLE = endpoints.event(output("Grüße\n\n")) + endpoints.event(output("🙂", "length"))


def test_an_event_is_one_line_of_ascii() -> None:
    assert WHOLE.isascii()
    assert WHOLE == (
        'data: {"index": 0, "text": "Gr\\u00fc\\u00dfe\\n\\n", "token_ids": [7], "finish_reason": null}\n\n'
        'data: {"index": 0, "text": "\\ud83d\\ude42", "token_ids": [7], "finish_reason": "length", "stop_reason": null,'
        ' "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4, "cached_tokens": 2}}\n\n'
    )


@pytest.mark.parametrize("size", [1, 2, 7, 64, 10_000])
async def test_the_text_comes_out_whole_however_the_events_are_cut(size: int) -> None:
    assert "".join([text async for text in endpoints.texts(pieces(WHOLE, size))]) == "Grüße\n\n🙂"


async def test_a_stream_that_is_cut_off_is_no_clean_end() -> None:
    with pytest.raises(RequestError, match="cut off"):
        [text async for text in endpoints.texts(pieces(WHOLE[:-5], 50))]


async def test_a_failure_in_a_stream_is_raised_after_the_text_before_it() -> None:
    failed = endpoints.event(output("A")) + endpoints.error_event(
        {"error": {"message": "the device is gone", "code": "x"}}
    )
    texts: list[str] = []
    with pytest.raises(RequestError, match="the device is gone"):
        async for text in endpoints.texts(pieces(failed, 20)):
            texts.append(text)
    assert texts == ["A"]
