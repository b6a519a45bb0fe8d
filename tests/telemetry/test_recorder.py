"""The flight recorder against scripted engines, and what a recording becomes."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
from PIL import Image

from cb_backend.telemetry.timeline.cells import COLOURS, states
from cb_backend.telemetry.timeline.export import chrome_trace, main, text_table
from cb_backend.telemetry.timeline.picture import CHART_HEIGHT, GAP, LEFT, ROW_HEIGHT, draw
from cb_backend.telemetry.timeline.recorder import Recorder
from cb_backend.telemetry.timeline.recording import load
from tests.scheduling.scripted import MADE, make_request
from tests.telemetry.scripted_engine import ScriptedEngine

ROOT = Path(__file__).parents[2]
EMPTY = ScriptedEngine()


def record(engine: ScriptedEngine, *requests, capacity: int = 4096) -> dict:
    recorder = Recorder(lambda: engine.core.snapshot, "tiny", capacity)
    engine.core.observers.append(recorder)
    engine.run(*requests)
    return recorder.snapshot()


def swapping() -> dict:
    """`young` loses its memory to `old` by swap and comes back."""
    engine = ScriptedEngine({"num_blocks": 6, "block_size": 4, "host_blocks": 64, "mode": "swap", "budget": 16})
    return record(engine, engine.request("old", 8, 12), engine.request("young", 8, 12))


def test_each_step_tells_who_got_how_many_tokens():
    engine = ScriptedEngine({"budget": 8})
    engine.before[2] = lambda: engine.send(engine.request("b", 5, 2))
    recording = record(engine, engine.request("a", 4, 4), engine.request("b-end", 1, 1))
    assert [step["items"] for step in recording["steps"][:4]] == [
        [[0, 0, 4], [1, 0, 1]],
        [[0, 4, 1]],
        [[0, 5, 1], [2, 0, 5]],
        [[0, 6, 1], [2, 5, 1]],
    ]
    assert [step["tokens"] for step in recording["steps"][:4]] == [5, 1, 6, 2]
    assert [step["admitted"] for step in recording["steps"][:4]] == [[0, 1], [], [2], []]


def test_a_row_tells_what_its_request_was():
    engine = ScriptedEngine()
    recording = record(engine, engine.request("r", 5, 3, request_class="chat", priority=2))
    (row,) = recording["rows"]
    arrival, finished = row.pop("arrival"), row.pop("finished")
    assert finished > arrival > 1.6e9
    assert row == {
        "row": 0,
        "id": "r",
        "index": 0,
        "class": "chat",
        "priority": 2,
        "prompt_tokens": 5,
        "max_tokens": 3,
        "after": 0,
        "until": 3,
        "reason": "length",
    }


def test_a_preemption_tells_mode_and_reason():
    lost = [entry for step in swapping()["steps"] for entry in step["preempted"]]
    assert lost == [[1, "swap", "memory"]]


def test_a_victim_of_a_better_priority_is_told_from_one_of_memory():
    engine = ScriptedEngine({"num_blocks": 4, "block_size": 4})
    engine.before[2] = lambda: engine.send(engine.request("vip", 8, 2, priority=-1))
    recording = record(engine, engine.request("batch", 8, 6))
    assert [entry for step in recording["steps"] for entry in step["preempted"]] == [[0, "recompute", "priority"]]


def test_a_failed_step_is_in_the_recording():
    engine = ScriptedEngine(failing={2, 3})
    recording = record(engine, engine.request("r"))
    assert [step["error"] for step in recording["steps"]] == [None, *["RuntimeError: the device is gone"] * 2]
    assert recording["rows"][0]["reason"] == "error"


def test_a_request_that_ends_while_its_step_is_on_the_device_leaves_the_step_without_it():
    engine = ScriptedEngine(overlap=True)
    engine.before[3] = lambda: engine.abort("gone")
    recording = record(engine, engine.request("gone", 4, 9), engine.request("stays", 4, 5))
    assert [step["items"] for step in recording["steps"]][2] == [[1, 5, 1]]
    assert [step["tokens"] for step in recording["steps"]] == [8, 2, 2, 1, 1]


def test_only_the_last_steps_and_their_rows_are_kept():
    engine = ScriptedEngine({"max_num_seqs": 1})
    recording = record(engine, *[engine.request(f"r{i}", 2, 5) for i in range(10)], capacity=7)
    assert [step["step"] for step in recording["steps"]] == list(range(44, 51))
    assert [row["id"] for row in recording["rows"]] == ["r8", "r9"]


def test_a_recording_keeps_no_request_alive():
    recorder = Recorder(lambda: EMPTY.core.snapshot, "tiny")
    engine = ScriptedEngine()
    engine.core.observers.append(recorder)
    requests = engine.request("r", 4, 3)
    mark = type("Mark", (), {})()
    watched = weakref.ref(mark)
    requests[0].trace_context = mark
    engine.run(requests)
    for request in requests:
        del MADE[request.seq_id]
    del requests, request, mark
    engine.core.observers.clear()
    del engine
    gc.collect()
    assert watched() is None


def test_requests_that_never_ran_do_not_pile_up():
    from cb_backend.request import FinishReason, TokenDelta

    recorder = Recorder(lambda: EMPTY.core.snapshot, "tiny", capacity=2)
    for i in range(100):
        (request,) = make_request(f"r{i}")
        recorder.on_added(request)
        recorder.on_finished(request, TokenDelta(request.request_id, 0, (), finish_reason=FinishReason.ABORT))
    assert len(recorder.snapshot()["rows"]) == 32


def test_polling_gives_only_what_is_new_until_the_service_restarts():
    engine = ScriptedEngine()
    recorder = Recorder(lambda: engine.core.snapshot, "tiny")
    engine.core.observers.append(recorder)
    engine.run(engine.request("r", 4, 5))
    whole = recorder.snapshot()
    assert [s["step"] for s in recorder.snapshot(3, whole["epoch"])["steps"]] == [4, 5]
    assert recorder.snapshot(5, whole["epoch"])["last_step"] == 5
    assert [s["step"] for s in recorder.snapshot(3, whole["epoch"] - 1)["steps"]] == [1, 2, 3, 4, 5]


def test_cells_have_the_state_of_every_row_in_every_step():
    recording = swapping()
    young = {step: state for (row, step), (state, _tokens) in states(recording).items() if row == 1}
    spelled = "".join({"prefill": "P", "decode": "d", "waiting": ".", "swapped": "~"}[young[s]] for s in sorted(young))
    lost, back = spelled.index("~"), spelled.rindex("~")
    assert spelled.startswith("Pd")
    assert set(spelled[lost : back + 1]) == {"~"}
    assert set(spelled[back + 1 :]) == {"d"}


def test_the_table_shows_tokens_per_step_and_request():
    engine = ScriptedEngine({"budget": 8, "max_num_seqs": 2})
    recording = record(engine, engine.request("a", 4, 3), engine.request("b", 6, 2), engine.request("c", 1, 1))
    assert text_table(recording) == (
        "  step tokens     a     b     c\n"
        "     1      8     4     4     .\n"
        "     2      3     1     2     .\n"
        "     3      2     1     1     .\n"
        "     4      1                 1\n"
    )


def test_the_chrome_trace_has_a_track_per_row_and_counters():
    recording = swapping()
    events = chrome_trace(recording)["traceEvents"]
    young = [e for e in events if e["ph"] == "X" and e["tid"] == 2]
    assert [e["name"] for e in young] == ["prefill", "decode", "swapped", "decode"]
    assert all(e["dur"] > 0 for e in young)
    assert sum(e["args"]["tokens"] for e in young) == 8 + 12 - 1
    assert {e["name"] for e in events if e["ph"] == "C"} == {"KV blocks", "tokens per step", "queue"}
    assert [e["name"] for e in events if e["ph"] == "i"] == ["preempted (swap, memory)"]


def test_the_png_draws_the_cells_in_their_colours(tmp_path):
    recording = swapping()
    path = tmp_path / "out.png"
    draw(recording, path)
    image = Image.open(path).convert("RGB")
    column = 12
    columns = {step["step"]: i for i, step in enumerate(recording["steps"])}
    top = 2 * (CHART_HEIGHT + GAP) + GAP
    for (row, step), (state, _tokens) in states(recording).items():
        pixel = image.getpixel((LEFT + columns[step] * column + column // 2, top + row * ROW_HEIGHT + ROW_HEIGHT // 2))
        assert "#{:02x}{:02x}{:02x}".format(*pixel) == COLOURS[state], (row, step, state)


def test_the_command_makes_all_forms_of_a_saved_file(tmp_path, capsys):
    engine = ScriptedEngine()
    recorder = Recorder(lambda: engine.core.snapshot, "tiny")
    engine.core.observers.append(recorder)
    engine.run(engine.request("r", 4, 2))
    saved, png, chrome = tmp_path / "saved.json", tmp_path / "out.png", tmp_path / "trace.json"
    recorder.save(saved)
    assert load(saved) == recorder.snapshot()
    assert main([str(saved), "--text", "--png", str(png), "--chrome", str(chrome)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["1", "4", "4"]
    assert png.read_bytes().startswith(b"\x89PNG")
    assert json.loads(chrome.read_text())["traceEvents"]


def test_the_module_is_a_command_that_loads_nothing_heavy(tmp_path):
    saved = tmp_path / "saved.json"
    saved.write_text(json.dumps(swapping()))
    command = [sys.executable, "-W", "error", "-X", "importtime", "-m", "cb_backend.telemetry.recorder"]
    done = subprocess.run([*command, str(saved), "--text"], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("  step tokens")
    loaded = {line.rsplit("|", 1)[1].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert {"torch", "transformers", "bentoml"}.isdisjoint(loaded)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not a readable recording"),
        ("[]", "not a recording of format 1"),
        ('{"format": 99}', "not a recording of format 1"),
        ('{"format": 1, "steps": []}', "'rows' must be a list"),
    ],
)
def test_a_file_that_is_no_recording_is_refused_with_a_reason(tmp_path, capsys, content, message):
    path = tmp_path / "bad.json"
    path.write_text(content)
    assert main([str(path), "--text"]) == 1
    assert message in capsys.readouterr().err
