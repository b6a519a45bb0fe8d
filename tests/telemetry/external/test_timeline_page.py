"""The timeline page in headless Chromium: what it draws is what the recorder has."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount

from cb_backend.telemetry.timeline.cells import states
from cb_backend.telemetry.timeline.page import PATH, timeline_app
from cb_backend.telemetry.timeline.recorder import Recorder
from tests.telemetry.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.needs_chromium


class Live:
    """The page of a scripted engine that runs when the test says so."""

    def __init__(self) -> None:
        self.engine = ScriptedEngine(
            {"num_blocks": 14, "block_size": 4, "host_blocks": 64, "mode": "swap", "budget": 16}
        )
        self.recorder = Recorder(lambda: self.engine.core.snapshot, "tiny")
        self.engine.core.observers.append(self.recorder)
        app = Starlette(routes=[Mount(PATH, timeline_app(lambda: self.recorder))])
        config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}{PATH}/"

    def run(self) -> None:
        engine = self.engine
        requests = [engine.request(f"chat-{i}", 3 + 5 * i % 17, 6 + 7 * i % 19) for i in range(8)]
        engine.run(*requests)

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(5)


@pytest.fixture
def live() -> Iterator[Live]:
    served = Live()
    yield served
    served.close()


@pytest.fixture
def page():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 640})
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda m: problems.append(m.text) if "Content Security Policy" in m.text else None)
        page.on("request", lambda request: None if "127.0.0.1" in request.url else problems.append(request.url))
        yield page
        browser.close()
        assert problems == []


def wait_for_steps(page, count: int) -> None:
    page.wait_for_function(
        "n => window.timeline.recording && window.timeline.recording.steps.length >= n", arg=count, timeout=10_000
    )


def drawn_colours(page) -> dict[tuple[int, int], str]:
    """The colour in the middle of each drawn cell, read from the canvas."""
    script = """() => {
        const pen = document.getElementById("canvas").getContext("2d"), scale = window.devicePixelRatio || 1;
        return window.timeline.drawn.map(cell => {
            const x = (cell.x + cell.width / 2) * scale, y = (cell.y + cell.height / 2) * scale;
            const [r, g, b] = pen.getImageData(x, y, 1, 1).data;
            return [cell.row, cell.step, "#" + [r, g, b].map(v => v.toString(16).padStart(2, "0")).join("")];
        });
    }"""
    return {(row, step): colour for row, step, colour in page.evaluate(script)}


def test_a_live_page_draws_what_the_recorder_has(live, page, tmp_path):
    page.goto(live.url)
    page.wait_for_function("() => window.timeline.recording !== null")
    assert page.evaluate("() => window.timeline.recording.steps") == []
    live.run()
    recording = live.recorder.snapshot()
    expected = states(recording)
    assert {state for state, _tokens in expected.values()} == {"prefill", "decode", "waiting", "swapped"}
    wait_for_steps(page, len(recording["steps"]))
    shown = page.evaluate("() => window.timeline.cells()")
    assert {k: tuple(v) for k, v in shown.items()} == {f"{r}:{s}": cell for (r, s), cell in expected.items()}
    colours = page.evaluate("() => window.timeline.colours")
    assert drawn_colours(page) == {key: colours[state] for key, (state, _tokens) in expected.items()}
    # docs/timeline.png is kept by CB_SCREENSHOTS=docs.
    page.screenshot(path=str(Path(os.environ.get("CB_SCREENSHOTS") or tmp_path) / "timeline.png"))


def test_the_keyboard_reads_cells_and_says_them(live, page):
    live.run()
    page.goto(live.url)
    wait_for_steps(page, 1)
    for _ in range(20):  # nothing but the keyboard: to the canvas by Tab
        page.keyboard.press("Tab")
        if page.evaluate("() => document.activeElement.id") == "canvas":
            break
    page.keyboard.press("Home")
    page.keyboard.press("Home")
    assert page.evaluate("() => window.timeline.live") is False
    first = live.recorder.snapshot()["steps"][0]
    said = page.locator("#cell").inner_text()
    assert said.startswith(f"Step {first['step']}: {first['tokens']} tokens, {len(first['items'])} sequences")
    assert "chat-0: prefill, 3 tokens, admitted" in said
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("() => window.timeline.cursor") == {"row": 1, "step": first["step"] + 1}
    assert "chat-1: " in page.locator("#cell").inner_text()
    page.keyboard.press("End")
    assert page.evaluate("() => window.timeline.cursor.step") == live.recorder.snapshot()["last_step"]
    page.keyboard.press("Space")
    assert page.get_by_role("button", name="Live").get_attribute("aria-pressed") == "true"


def test_a_saved_file_is_drawn_without_the_service(live, page, tmp_path):
    live.run()
    saved = tmp_path / "saved.json"
    live.recorder.save(saved)
    page.goto(live.url)
    page.wait_for_function("() => window.timeline.recording !== null")
    page.set_input_files("#file", saved)
    page.wait_for_function("() => !window.timeline.live")
    expected = {f"{r}:{s}": [state, tokens] for (r, s), (state, tokens) in states(live.recorder.snapshot()).items()}
    assert page.evaluate("() => window.timeline.cells()") == expected
    bad = tmp_path / "bad.json"
    bad.write_text('{"format": 7}')
    page.set_input_files("#file", bad)
    page.wait_for_function("() => document.getElementById('status').textContent.includes('cannot be shown')")
    assert page.evaluate("() => window.timeline.cells()") == expected


def test_a_service_that_goes_away_is_said_and_not_fatal(live, page):
    page.goto(live.url)
    page.wait_for_function("() => window.timeline.recording !== null")
    page.route("**/data*", lambda route: route.abort())
    page.wait_for_function("() => document.getElementById('status').textContent.startsWith('Not connected')")
    page.unroute("**/data*")
    page.wait_for_function("() => document.getElementById('status').textContent.endsWith('steps')")
