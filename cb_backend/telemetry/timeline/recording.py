"""A saved recording of steps: its format, which docs/operations.md describes, and how it is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FORMAT = 1


def load(path: Path) -> dict[str, Any]:
    """Reads a saved recording.

    Raises:
        ValueError: the file is not one; the message says what is missing.
    """
    try:
        recording = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a readable recording: {error}") from None
    if not isinstance(recording, dict) or recording.get("format") != FORMAT:
        raise ValueError(f"{path} is not a recording of format {FORMAT}: save /cb/timeline/data or Recorder.save()")
    for key in ("rows", "steps"):
        if not isinstance(recording.get(key), list):
            raise ValueError(f"{path}: '{key}' must be a list")
    return recording


def row_name(row: Mapping[str, Any]) -> str:
    """What a row is called: its request, and its choice where there are several."""
    return f"{row['id']}/{row['index']}" if row["index"] else str(row["id"])
