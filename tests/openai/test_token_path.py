"""How many modules one token crosses from sampling to the socket. docs/design.md lists them."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import cb_backend
from cb_backend import Engine
from cb_backend.openai.app import openai_app
from tests.openai.scripted_engine import LeavingClient

PACKAGE = Path(cb_backend.__file__).parent
DESIGN = PACKAGE.parent / "docs" / "design.md"
MOST = 15

SAMPLED = ("sampling/host.py", "read")  # the sampled ids are taken off the device
POSTED = ("engine/delivery.py", "post")  # the engine thread hands a delta to the event loop


class Entered:
    """Every function of the package that is entered or returned to, in order, by thread; and a test's own marks."""

    def __init__(self) -> None:
        self.by_thread: dict[int, list[tuple[str, str]]] = {}

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        entered = frame if event == "call" else frame.f_back if event == "return" else None
        if entered is not None and entered.f_code.co_filename.startswith(str(PACKAGE)):
            name = entered.f_code.co_name if event == "call" else "returned to"
            self.add(Path(entered.f_code.co_filename).relative_to(PACKAGE).as_posix(), name)

    def add(self, file: str, function: str) -> None:
        self.by_thread.setdefault(threading.get_ident(), []).append((file, function))


def between(entries: list[tuple[str, str]], begin: tuple[str, str], end: tuple[str, str], number: int) -> list[str]:
    """The files entered from the `number`-th `begin` to the first `end` after it, both included, each once."""
    start = [i for i, entry in enumerate(entries) if entry == begin][number]
    stop = entries.index(end, start + 1)
    return list(dict.fromkeys(file for file, _function in entries[start : stop + 1]))


async def path_of_a_token(model: Path) -> list[str]:
    entered = Entered()
    threading.setprofile(entered)  # for the engine thread, which starts now
    sys.setprofile(entered)
    try:
        options: dict[str, Any] = {"num_kv_blocks": 40, "block_size": 16, "swap_space": 0, "num_threads": 1}
        with Engine(model=str(model), served_model_name="tiny", dtype="float32", device="cpu", **options) as engine:
            body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, "stream": True}
            client = LeavingClient(
                openai_app(engine), "/chat/completions", {**body, "temperature": 0, "ignore_eos": True}
            )
            client.on_send = lambda: entered.add("", "send")
            await client.done
            assert client.status == 200
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    [engine_thread] = [entries for entries in entered.by_thread.values() if POSTED in entries]
    loop = entered.by_thread[threading.get_ident()]
    sent = ("", "send")
    onwards = [file for file in between(loop, sent, sent, 6) if file]
    return list(dict.fromkeys(between(engine_thread, SAMPLED, POSTED, 6) + onwards))


async def test_a_streamed_token_crosses_few_modules_and_the_design_lists_them(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CB_DEBUG_THREADS", raising=False)  # a check of tests, which wraps every access
    path = await path_of_a_token(tiny_llama)
    assert len(path) <= MOST, path
    listed = re.search(r"<!-- path of a token -->\n(.*?)\n\n", DESIGN.read_text(encoding="utf-8"), re.DOTALL)
    assert listed is not None
    assert set(re.findall(r"`([\w/]+\.py)`", listed[1])) == set(path)
