"""A benchmark command that stays loaded between its measured runs, so that two of them can take turns.

The command must know `--repeat` and `--gated`: before each run it prints a line `ready` and waits for a line.
"""

from __future__ import annotations

import json
import queue
import shlex
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

READY = "ready"
Found = TypeVar("Found")


def figures_in(line: str, figures: Sequence[str]) -> dict[str, Any] | None:
    """The JSON object that a line ends with, if it has all of `figures`."""
    start = line.find("{")
    if start < 0:
        return None
    try:
        found = json.loads(line[start:])
    except ValueError:
        return None
    return found if all(figure in found for figure in figures) else None


class Loaded:
    """A command that is loaded and waits for its next turn; it ends with the `with` block.

    Args:
        repeat: how many runs it will have.
        limit: seconds that loading or one run may take.
    """

    def __init__(self, command: list[str], repeat: int, limit: float) -> None:
        self._command = [*command, "--gated", "--repeat", str(repeat)]
        self._limit = limit
        self._left = repeat
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        self._lines: queue.Queue[str | None] = queue.Queue()  # None: no more
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> Loaded:
        """Waits until it is loaded.

        Raises:
            RuntimeError: it ended, or needed longer than the limit.
        """
        try:
            self._wait_ready()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._end()

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._errors.close()

    def run(self, figures: Sequence[str]) -> dict[str, Any]:
        """One measured run; what it printed with all of `figures`. Returns when the next one could begin.

        Raises:
            RuntimeError: it ended, or needed longer than the limit.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: told below
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        found = self._until(lambda line: figures_in(line, figures))
        self._left -= 1
        if self._left:
            self._wait_ready()
        return found

    def _wait_ready(self) -> None:
        self._until(lambda line: READY if line.strip() == READY else None)

    def _until(self, wanted: Callable[[str], Found | None]) -> Found:
        end = time.monotonic() + self._limit
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise RuntimeError(f"{shlex.join(self._command)} was not done after {self._limit:.0f} s") from None
            if line is None:
                self._errors.seek(0)
                said = self._errors.read().decode(errors="replace")[-2000:]
                raise RuntimeError(f"{shlex.join(self._command)} ended with {self._process.wait()} too early:\n{said}")
            found = wanted(line)
            if found is not None:
                return found

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)
