"""The timeline page's picture as a PNG, without a browser. Needs Pillow (`pip install cb-backend[timeline]`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .cells import COLOURS, states
from .recording import row_name

ROW_HEIGHT = 12  # pixels
MAX_WIDTH = 8000
CHART_HEIGHT = 60
LEFT = 160
GAP = 8
LEGEND_HEIGHT = 20


def draw(recording: Mapping[str, Any], path: Path) -> None:
    """Writes the picture: KV use and tokens per step above, a row per request and a column per step below.

    Raises:
        ImportError: Pillow is not installed; the message says how to get it.
        ValueError: the recording holds no step, or more of them than `MAX_WIDTH` columns.
    """
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        raise ImportError("drawing needs Pillow: pip install 'cb-backend[timeline]'") from None
    steps, rows = recording["steps"], recording["rows"]
    if not steps:
        raise ValueError("the recording holds no step: there is nothing to draw")
    column = max(1, min(12, (MAX_WIDTH - LEFT) // len(steps)))
    if len(steps) * column > MAX_WIDTH:
        raise ValueError(f"{len(steps)} steps are more than {MAX_WIDTH} columns: save a shorter recording")
    top = 2 * (CHART_HEIGHT + GAP) + GAP
    size = (LEFT + len(steps) * column + GAP, top + len(rows) * ROW_HEIGHT + LEGEND_HEIGHT)
    image = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(image)

    blocks = max(1, recording["kv_blocks"])
    most = max(1, *(step["tokens"] for step in steps))
    pen.text((4, GAP), f"KV blocks of {blocks}", fill="black")
    pen.text((4, GAP + CHART_HEIGHT + GAP), f"tokens (most {most})", fill="black")
    for i, step in enumerate(steps):
        left, right = LEFT + i * column, LEFT + (i + 1) * column - 1
        used, cached = step["kv_used"] / blocks, step["kv_cached"] / blocks
        _bar(pen, left, right, GAP + CHART_HEIGHT, used + cached, "#cccccc")
        _bar(pen, left, right, GAP + CHART_HEIGHT, used, "#cc79a7")
        _bar(pen, left, right, 2 * (GAP + CHART_HEIGHT), step["tokens"] / most, "#56b4e9")

    columns = {step["step"]: i for i, step in enumerate(steps)}
    lines = {row["row"]: i for i, row in enumerate(rows)}
    for row in rows:
        pen.text((4, top + lines[row["row"]] * ROW_HEIGHT), row_name(row)[:24], fill="black")
    for (number, step_number), (state, _tokens) in states(recording).items():
        if number not in lines:
            continue
        left = LEFT + columns[step_number] * column
        upper = top + lines[number] * ROW_HEIGHT
        pen.rectangle((left, upper + 1, left + column - 1, upper + ROW_HEIGHT - 2), fill=COLOURS[state])
    for i, (state, colour) in enumerate(COLOURS.items()):
        left, upper = LEFT + 80 * i, size[1] - LEGEND_HEIGHT + 4
        pen.rectangle((left, upper, left + 10, upper + 10), fill=colour)
        pen.text((left + 14, upper), state, fill="black")
    image.save(path, format="PNG")


def _bar(pen: Any, left: int, right: int, bottom: int, share: float, colour: str) -> None:
    height = round(min(1.0, share) * CHART_HEIGHT)
    if height:
        pen.rectangle((left, bottom - height, right, bottom), fill=colour)
