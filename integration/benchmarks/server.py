"""A server for the time of a benchmark: started by its command, waited for, and ended with all its processes."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def started(command: str, url: str, *, log: Path, limit: float) -> Iterator[float]:
    """Runs `command` until the block ends; the block begins once GET `url` answers 200, and gets the seconds it took.

    Raises:
        RuntimeError: it ended, or did not answer within `limit` seconds; the message holds the end of its log.
    """
    begin = time.monotonic()
    with log.open("wb") as sink:
        process = subprocess.Popen(shlex.split(command), stdout=sink, stderr=sink, start_new_session=True)
    try:
        while not _answers(url):
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with {process.returncode}:\n{_tail(log)}")
            if time.monotonic() - begin > limit:
                raise RuntimeError(f"the server did not answer {url} within {limit:.0f} s:\n{_tail(log)}")
            time.sleep(0.1)
        yield time.monotonic() - begin
    finally:
        _stop(process)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Asks, and after ten seconds insists. The session is the server's own, so its workers go with it."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(log: Path) -> str:
    return log.read_bytes()[-3000:].decode(errors="replace")
