"""The timeline page and its data, without a browser (with one: external/test_timeline_page.py)."""

from __future__ import annotations

import re

import pytest
from starlette.testclient import TestClient

from cb_backend.telemetry.timeline.cells import COLOURS
from cb_backend.telemetry.timeline.page import page, timeline_app, timeline_enabled
from cb_backend.telemetry.timeline.recorder import Recorder
from tests.telemetry.scripted_engine import ScriptedEngine


@pytest.fixture
def recorder() -> Recorder:
    engine = ScriptedEngine()
    recorder = Recorder(lambda: engine.core.snapshot, "tiny")
    engine.core.observers.append(recorder)
    engine.run(engine.request("r", 4, 5))
    return recorder


def test_the_data_is_the_recording(recorder):
    client = TestClient(timeline_app(lambda: recorder))
    assert client.get("/data").json() == recorder.snapshot()
    epoch = recorder.snapshot()["epoch"]
    assert client.get(f"/data?since=3&epoch={epoch}").json() == recorder.snapshot(3, epoch)
    assert client.get("/data?since=3&epoch=junk").json() == recorder.snapshot()


@pytest.mark.parametrize("since", ["-1", "x", "1e3", "٣", "9" * 30])
def test_a_bad_step_number_is_refused(recorder, since):
    answer = TestClient(timeline_app(lambda: recorder)).get("/data", params={"since": since})
    assert answer.status_code == 400
    assert "'since'" in answer.json()["error"]["message"]


def test_before_the_engine_has_started_there_is_no_data():
    assert TestClient(timeline_app(lambda: None)).get("/data").status_code == 503


def test_the_page_loads_nothing_from_outside(recorder):
    answer = TestClient(timeline_app(lambda: recorder)).get("/")
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert not re.search(r"https?://|<link|@import|src=", answer.text)


def test_the_page_has_the_pictures_colours():
    for state, colour in COLOURS.items():
        assert f'{state}: "{colour}"' in page()


@pytest.mark.parametrize(("value", "enabled"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_the_operator_switches_it_on(monkeypatch, value, enabled):
    monkeypatch.setenv("CB_TIMELINE", value)
    assert timeline_enabled() is enabled
