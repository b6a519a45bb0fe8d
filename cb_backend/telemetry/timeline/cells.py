"""A recording as a picture's cells: which row was in which state in which step. The page computes the same in the
browser (timeline.html); tests hold the two against each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

State = Literal["prefill", "decode", "waiting", "swapped"]

# Okabe and Ito's palette: distinct for colour-blind eyes too.
COLOURS: dict[State, str] = {
    "prefill": "#0072b2",
    "decode": "#009e73",
    "waiting": "#e6e6e6",
    "swapped": "#d55e00",
}


def states(recording: Mapping[str, Any]) -> dict[tuple[int, int], tuple[State, int]]:
    """(row, step number) -> (state, tokens of that step), for every step in which the row's request was unfinished.

    `prefill` is every chunk that is not one token beyond the prompt: a recomputed part counts as one. A row is
    `swapped` from a preemption by swap until it resumes, and `waiting` wherever it gets no token otherwise.
    """
    rows = {row["row"]: row for row in recording["rows"]}
    cells: dict[tuple[int, int], tuple[State, int]] = {}
    swapped: set[int] = set()
    for step in recording["steps"]:
        number = step["step"]
        for row, mode, _why in step["preempted"]:
            if mode == "swap":
                swapped.add(row)
        swapped.difference_update(step["resumed"])
        for row, start, tokens in step["items"]:
            prompt = rows[row]["prompt_tokens"] if row in rows else 0
            cells[row, number] = ("decode" if tokens == 1 and start >= prompt else "prefill", tokens)
        for row, meta in rows.items():
            alive = meta["after"] < number and (meta["until"] is None or number <= meta["until"])
            if alive and (row, number) not in cells:
                cells[row, number] = ("swapped" if row in swapped else "waiting", 0)
    return cells
