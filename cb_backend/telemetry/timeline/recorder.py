"""The flight recorder: what each of the last N steps held, which requests came, were preempted and why.

An observer on the engine thread that keeps plain tuples and no request, so that nothing is kept alive by it. `snapshot`
gives the recording as JSON-ready data (docs/operations.md describes it), which telemetry/timeline/page.py serves,
telemetry/timeline/picture.py draws and telemetry/timeline/export.py turns into a trace for Perfetto or a table.

    python -m cb_backend.telemetry.recorder FILE [--text] [--chrome OUT] [--png OUT]
"""

from __future__ import annotations

import json
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ...request import Request, TokenDelta
from ...scheduling.plan import StepPlan
from .recording import FORMAT

GONE = -1


class Occupancy(Protocol):
    """What the recorder reads after each step, and when a recording is asked for: the engine's newest snapshot."""

    @property
    def kv_blocks(self) -> int: ...

    @property
    def kv_blocks_used(self) -> int: ...

    @property
    def kv_blocks_cached(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def bytes_per_block(self) -> int: ...

    @property
    def waiting(self) -> int: ...

    @property
    def swapped(self) -> int: ...


@dataclass(slots=True)
class _Row:
    """One choice of one request, a row of the picture. `after`: the last step before it came; `until`: its last one."""

    number: int
    request_id: str
    index: int
    request_class: str
    priority: int
    prompt_tokens: int
    max_tokens: int
    arrival: float
    after: int
    until: int | None = None
    finished: float | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class _Step:
    step: int
    started: float
    ended: float
    items: array[int]  # row, first position, tokens, row, ...: 12 bytes a sequence instead of 100
    admitted: tuple[int, ...]
    resumed: tuple[int, ...]
    preempted: tuple[tuple[int, str, str], ...]  # (row, "swap" | "recompute", "memory" | "priority")
    kv_used: int
    kv_cached: int
    waiting: int
    swapped: int
    error: str | None


class Recorder:
    """Observer of `EngineCore`.

    Args:
        occupancy: gives the engine's newest snapshot; called from any thread.
        model: id that clients use.
        capacity: steps kept.
    """

    def __init__(self, occupancy: Callable[[], Occupancy], model: str, capacity: int = 4096) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1 step, got {capacity}")
        self.model = model
        self.capacity = capacity
        self._occupancy = occupancy
        self._epoch = time.time() - time.monotonic()
        self._steps: deque[_Step] = deque(maxlen=capacity)
        self._open: dict[int, _Row] = {}  # by seq_id
        self._closed: deque[_Row] = deque()  # in the order of their ends; kept while a kept step shows them
        self._num_rows = 0
        self._last_step = 0
        self._lock = threading.Lock()  # the engine thread appends while another one reads

    # -- observer ---------------------------------------------------------------------------------------------------

    def on_added(self, request: Request) -> None:
        row = _Row(
            self._num_rows,
            request.request_id,
            request.index,
            request.request_class,
            request.priority,
            request.prompt_len,
            request.max_tokens,
            request.timings.arrival,
            self._last_step,
        )
        self._num_rows += 1
        with self._lock:
            self._open[request.seq_id] = row

    def on_step(self, plan: StepPlan, started: float, ended: float, error: str | None = None) -> None:
        # With overlap a request may end while a step with it is on the device: it has no number any more.
        rows, occupancy = self._open, self._occupancy()

        def number_of(seq_id: int) -> int:
            row = rows.get(seq_id)
            return GONE if row is None else row.number

        numbers = [number_of(seq_id) for seq_id in plan.seq_ids]
        items = array("i", np.stack([numbers, plan.starts, plan.lengths], axis=1).astype(np.int32).tobytes())
        step = _Step(
            plan.step,
            started,
            ended,
            items,
            tuple([number_of(seq_id) for seq_id in plan.admitted]),
            tuple([number_of(seq_id) for seq_id in plan.resumed]),
            tuple([(number_of(seq_id), mode, self._why(seq_id, plan)) for seq_id, mode in plan.preempted]),
            occupancy.kv_blocks_used,
            occupancy.kv_blocks_cached,
            occupancy.waiting,
            occupancy.swapped,
            error,
        )
        with self._lock:
            self._steps.append(step)
            self._last_step = plan.step
            oldest = self._steps[0].step
            while self._closed and (self._closed[0].until or 0) < oldest:
                self._closed.popleft()

    def on_finished(self, request: Request, delta: TokenDelta) -> None:
        with self._lock:
            row = self._open.pop(request.seq_id, None)
            if row is None:
                return
            row.until = self._last_step
            row.finished = request.timings.finished or time.monotonic()
            row.reason = delta.finish_reason.value if delta.finish_reason else None
            self._closed.append(row)
            # Requests that end without a step (refused by a dead device, aborted in the queue) must not pile up.
            while len(self._closed) > 16 * self.capacity:
                self._closed.popleft()

    def _why(self, victim: int, plan: StepPlan) -> str:
        """What a request was preempted for: one of a better priority that came in its step, or memory."""
        row = self._open.get(victim)
        came = [self._open.get(seq_id) for seq_id in (*plan.admitted, *plan.resumed)]
        better = row is not None and any(other is not None and other.priority < row.priority for other in came)
        return "priority" if better else "memory"

    # -- any thread -------------------------------------------------------------------------------------------------

    def snapshot(self, since: int = 0, epoch: float | None = None) -> dict[str, Any]:
        """The recording as plain data, with the steps after number `since` and the rows that they or the future need.

        Times are seconds since the epoch. `epoch`: that of the recording that `since` belongs to; if it was another
        one (the service was restarted), all steps are given.
        """
        if epoch is not None and epoch != self._epoch:
            since = 0
        with self._lock:
            steps = [step for step in self._steps if step.step > since]
            rows = [_row(row, self._epoch) for row in self._closed if row.until is None or row.until >= since]
            rows += [_row(row, self._epoch) for row in self._open.values()]
        occupancy = self._occupancy()
        return {
            "format": FORMAT,
            "epoch": self._epoch,
            "model": self.model,
            "capacity": self.capacity,
            "kv_blocks": occupancy.kv_blocks,
            "block_size": occupancy.block_size,
            "last_step": steps[-1].step if steps else since,
            "rows": sorted(rows, key=lambda row: row["row"]),
            "steps": [_step(step, self._epoch) for step in steps],
        }

    def save(self, path: Path) -> None:
        """Writes the recording to a file that this module's command and the timeline page read."""
        path.write_text(json.dumps(self.snapshot()), encoding="utf-8")


def _row(row: _Row, epoch: float) -> dict[str, Any]:
    return {
        "row": row.number,
        "id": row.request_id,
        "index": row.index,
        "class": row.request_class,
        "priority": row.priority,
        "prompt_tokens": row.prompt_tokens,
        "max_tokens": row.max_tokens,
        "arrival": epoch + row.arrival,
        "after": row.after,
        "until": row.until,
        "finished": None if row.finished is None else epoch + row.finished,
        "reason": row.reason,
    }


def _step(step: _Step, epoch: float) -> dict[str, Any]:
    return {
        "step": step.step,
        "started": epoch + step.started,
        "ended": epoch + step.ended,
        "tokens": sum(step.items[2::3]),
        "items": [step.items[i : i + 3].tolist() for i in range(0, len(step.items), 3) if step.items[i] != GONE],
        "admitted": [row for row in step.admitted if row != GONE],
        "resumed": [row for row in step.resumed if row != GONE],
        "preempted": [list(entry) for entry in step.preempted if entry[0] != GONE],
        "kv_used": step.kv_used,
        "kv_cached": step.kv_cached,
        "waiting": step.waiting,
        "swapped": step.swapped,
        "error": step.error,
    }
