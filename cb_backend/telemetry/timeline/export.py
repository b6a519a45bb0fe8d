"""What a recording becomes outside the page: a trace for Perfetto or chrome://tracing, a table, a PNG."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .cells import states
from .recording import load, row_name


def chrome_trace(recording: Mapping[str, Any]) -> dict[str, Any]:
    """Chrome's trace event format: a track per row, runs of the same state joined, and counters. Microseconds."""
    events: list[dict[str, Any]] = [_name("process_name", f"cb_backend {recording.get('model', '')}", 0)]
    cells = states(recording)
    for row in recording["rows"]:
        events.append(_name("thread_name", row_name(row), row["row"] + 1))
        events += _runs(row["row"], recording["steps"], cells)
    for step in recording["steps"]:
        at = _us(step["started"])
        for row, mode, why in step["preempted"]:
            events.append(
                {"ph": "i", "s": "t", "name": f"preempted ({mode}, {why})", "ts": at, "pid": 1, "tid": row + 1}
            )
        for name, values in (
            ("KV blocks", {"used": step["kv_used"], "cached": step["kv_cached"]}),
            ("tokens per step", {"tokens": step["tokens"]}),
            ("queue", {"waiting": step["waiting"], "swapped": step["swapped"]}),
        ):
            events.append({"ph": "C", "name": name, "ts": at, "pid": 1, "args": values})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _runs(row: int, steps: Sequence[Mapping[str, Any]], cells: Mapping[tuple[int, int], tuple[str, int]]) -> list[Any]:
    events: list[dict[str, Any]] = []
    state = None
    for step in steps:
        cell = cells.get((row, step["step"]))
        if cell is None:
            state = None
            continue
        # Each prefill chunk is an event of its own; decodes and waits are joined.
        if cell[0] == state and state != "prefill":
            events[-1]["dur"] = _us(step["ended"]) - events[-1]["ts"]
            events[-1]["args"]["steps"][1] = step["step"]
            events[-1]["args"]["tokens"] += cell[1]
            continue
        state = cell[0]
        begins, ends = _us(step["started"]), _us(step["ended"])
        arguments = {"steps": [step["step"], step["step"]], "tokens": cell[1]}
        events.append(
            {
                "ph": "X",
                "name": state,
                "cat": "request",
                "ts": begins,
                "dur": ends - begins,
                "pid": 1,
                "tid": row + 1,
                "args": arguments,
            }
        )
    return events


def text_table(recording: Mapping[str, Any]) -> str:
    """One line per step: its number, all its tokens, and the tokens of each row (`~` swapped, `.` waiting)."""
    cells = states(recording)
    rows = recording["rows"]
    names = [row_name(row) for row in rows]
    widths = [max(4, len(name)) for name in names]
    lines = ["  step tokens  " + "  ".join(name.rjust(width) for name, width in zip(names, widths, strict=True))]
    for step in recording["steps"]:
        fields = []
        for row, width in zip(rows, widths, strict=True):
            state, tokens = cells.get((row["row"], step["step"]), ("", 0))
            fields.append({"waiting": ".", "swapped": "~", "": ""}.get(state, str(tokens)).rjust(width))
        lines.append(f"{step['step']:6d} {step['tokens']:6d}  " + "  ".join(fields))
    return "\n".join(line.rstrip() for line in lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cb_backend.telemetry.recorder", description=__doc__)
    parser.add_argument("file", type=Path, help="a recording: /cb/timeline/data or Recorder.save()")
    parser.add_argument("--text", action="store_true", help="print step by step how many tokens each request got")
    parser.add_argument("--chrome", type=Path, metavar="OUT", help="write a trace for Perfetto (ui.perfetto.dev)")
    parser.add_argument("--png", type=Path, metavar="OUT", help="draw the picture of the timeline page")
    options = parser.parse_args(arguments)
    if not (options.text or options.chrome or options.png):
        parser.error("say what to make: --text, --chrome OUT or --png OUT")
    try:
        recording = load(options.file)
        if options.png:
            from .picture import draw

            draw(recording, options.png)
    except (ValueError, ImportError) as error:
        print(error, file=sys.stderr)
        return 1
    if options.chrome:
        options.chrome.write_text(json.dumps(chrome_trace(recording)), encoding="utf-8")
    if options.text:
        print(text_table(recording), end="")
    return 0


def _name(kind: str, name: str, thread: int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": 1, "tid": thread, "args": {"name": name}}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
