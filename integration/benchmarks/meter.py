"""What every benchmark here shares: reading a workload file, and what a run cost. Standard library only.

Peers run from environments of their own, so nothing here may need this project's dependencies.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def load_workload(path: Path, first: int | None = None) -> list[dict[str, Any]]:
    """The requests of a workload file, or its `first` ones: `prompt_token_ids`, `max_tokens` and more."""
    return json.loads(path.read_text(encoding="utf-8"))["requests"][:first]


def wait_for_turn(gated: bool) -> None:
    """With `gated`, says `ready` and waits for a line: `compare --loaded` gives every command its turn."""
    if gated:
        print("ready", flush=True)
        sys.stdin.readline()


class Meter:
    """Time and CPU of the `with` block.

    Attributes:
        wall: seconds.
        cpu: CPU seconds of this process, all threads, children not included.
        foreign: cores that other processes kept busy, on average; NaN where the system does not say.
    """

    wall = cpu = foreign = 0.0

    def __enter__(self) -> Meter:
        self._cpu, self._machine, self._start = time.process_time(), machine_cpu(), time.perf_counter()
        return self

    def __exit__(self, *exc: object) -> None:
        self.wall = time.perf_counter() - self._start
        self.cpu = time.process_time() - self._cpu
        self.foreign = max(0.0, machine_cpu() - self._machine - self.cpu) / self.wall

    def figures(self, out_tok: int) -> dict[str, float]:
        """What `compare` reads, for a run that generated `out_tok` tokens."""
        return {
            "wall_s": round(self.wall, 3),
            "out_tok_s": round(out_tok / self.wall, 1),
            "out_tok": out_tok,
            "cpu_s": round(self.cpu, 2),
            "out_tok_per_cpu_s": round(out_tok / self.cpu, 1),
            "foreign_cpu": round(self.foreign, 2),
        }


def machine_cpu() -> float:
    """Busy seconds of all cores since boot; NaN where the system does not say."""
    try:
        fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return math.nan
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest of `values` that at least `percent` of them do not exceed (nearest rank); NaN of none."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)]
