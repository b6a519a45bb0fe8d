"""A neighbour that keeps one core busy: `python -m integration.benchmarks.neighbour --core 1 --seconds 60`.

`compare --busy CORE` runs beside one. It computes in its own process and ends by itself after its seconds, or when
the process that started it is gone.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_CHECK_EVERY = 100_000  # additions between two looks at the clock: about 3 ms


def stay_busy(seconds: float) -> None:
    """Computes on the calling thread for that long, or until the parent process is another one."""
    parent, end = os.getppid(), time.monotonic() + seconds
    while time.monotonic() < end and os.getppid() == parent:
        total = 0
        for i in range(_CHECK_EVERY):
            total += i


@contextmanager
def neighbour(core: int, seconds: float) -> Iterator[subprocess.Popen[bytes]]:
    """Keeps `core` busy while the block runs, at most `seconds`; yields the process that does.

    Raises:
        RuntimeError: it ended before the block did, so the block had no neighbour all the time.
    """
    command = [sys.executable, "-m", "integration.benchmarks.neighbour", "--core", str(core), "--seconds", str(seconds)]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        yield process
        if process.poll() is not None:
            raise RuntimeError(f"the neighbour on core {core} ended before the run did, with {process.returncode}")
    finally:
        process.kill()
        process.wait()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m integration.benchmarks.neighbour")
    parser.add_argument("--core", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    args = parser.parse_args(argv)
    os.sched_setaffinity(0, {args.core})
    stay_busy(args.seconds)


if __name__ == "__main__":
    main()
