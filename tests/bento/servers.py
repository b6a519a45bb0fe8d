"""A real `bentoml serve` for a test: own port, own BentoML home, stopped by its process id, every wait bounded."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
START_SECONDS = 90.0


@dataclass
class Server:
    url: str
    process: subprocess.Popen[bytes]
    log: Path
    readiness: list[int] = field(default_factory=list)  # answers of /readyz until it was ready

    def is_ready(self) -> bool:
        self.readiness.append(self.status("/readyz"))
        return self.readiness[-1] == 200

    def status(self, path: str, timeout: float = 5) -> int:
        """HTTP status of a GET; 0 if no answer comes in time."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=timeout) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def post(self, path: str, **body: Any) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read().decode()
            return json.loads(text) if answer.headers["content-type"].startswith("application/json") else text

    def until(self, condition: Callable[[], bool], what: str, seconds: float = START_SECONDS) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"the server ended:\n{self.log.read_text()[-4000:]}"
            assert time.monotonic() < end, f"not within {seconds} s: {what}\n{self.log.read_text()[-4000:]}"
            time.sleep(0.05)


@contextmanager
def serving(
    target: str, folder: Path, model: Path, *, wait: bool = True, options: Sequence[str] = (), **config: Any
) -> Iterator[Server]:
    """`options`: of `bentoml serve`. `config`: fields of EngineConfig, given as CB_ variables."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fields = {"model": model, "served_model_name": "tiny", "dtype": "float32", "num_threads": 1, "swap_space": 0}
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("CB_")},
        **{f"CB_{key.upper()}": str(value) for key, value in (fields | config).items()},
        "BENTOML_HOME": str(folder / "home"),
        "BENTOML_DO_NOT_TRACK": "True",
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "kernels"))),
        "OMP_NUM_THREADS": "1",
    }
    log = folder / "log.txt"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "bentoml", "serve", target, "--host", "127.0.0.1", "--port", str(port), *options],
            cwd=ROOT,
            env=environment,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        if wait:
            server.until(server.is_ready, "ready")
        yield server
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Asks, and after ten seconds insists; the session is the server's own, so it takes its workers along."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
