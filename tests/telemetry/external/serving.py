"""`bentoml serve` of the shipped service with a tiny model, on a port and in a BentoML home of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from tests.telemetry.external.conftest import ROOT

SERVICE = "integration.service:LLM"
MODEL = "test-model"
FAULT = "played: the grammar broke"  # of faulty_service.py


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until(check, seconds: float, what: str) -> Any:
    """The first true value of `check()`, asked ten times a second."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if found := check():
                return found
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise TimeoutError(f"{what} after {seconds} s")


class Process:
    """A server that is started, waited for and ended by this test alone."""

    def __init__(self, command: list[str], log: Path, environment: dict[str, str], cwd: Path = ROOT) -> None:
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=cwd, start_new_session=True
            )

    def wait_ready(self, url: str, seconds: float) -> None:
        def ready() -> bool:
            if self._process.poll() is not None:
                raise RuntimeError(f"it ended with {self._process.returncode}:\n{self.tail()}")
            return httpx.get(url, timeout=2).status_code == 200

        try:
            wait_until(ready, seconds, f"{url} is not ready")
        except (TimeoutError, RuntimeError):
            print(self.tail())
            self.stop()
            raise

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def stop(self, seconds: float = 30.0) -> float:
        """Asks it to end, and returns the seconds that it took."""
        began = time.monotonic()
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)  # its own session: only what it started
                raise
        return time.monotonic() - began


class Served(Process):
    def __init__(
        self, folder: Path, model: Path, *, service: str = SERVICE, config: str = "", **environment: str
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        variables = {
            **os.environ,
            "BENTOML_HOME": str(folder / "home"),
            "BENTOML_DO_NOT_TRACK": "True",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
            "OMP_NUM_THREADS": "1",
            "CB_MODEL": str(model),
            "CB_SERVED_MODEL_NAME": MODEL,
            "CB_NUM_THREADS": "1",
            **environment,
        }
        variables.pop("PROMETHEUS_MULTIPROC_DIR", None)
        if config:
            file = folder / "bentoml.yaml"
            file.write_text(config, encoding="utf-8")
            variables["BENTOML_CONFIG"] = str(file)
        command = [sys.executable, "-m", "bentoml", "serve", service, "--host", "127.0.0.1", "--port", str(self.port)]
        super().__init__(command, folder / "serve.log", variables)
        self.wait_ready(f"{self.url}/readyz", 90)

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the series of `name` that have these labels."""
        from prometheus_client.parser import text_string_to_metric_families

        text = httpx.get(f"{self.url}/metrics", timeout=10).text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def wait_idle(self) -> None:
        wait_until(
            lambda: self.metric("cb_requests_running") == 0 == self.metric("cb_requests_waiting"), 30, "not idle"
        )
