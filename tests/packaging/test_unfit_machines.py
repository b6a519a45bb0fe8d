"""`bentoml serve` on a machine that cannot serve ends with one line that says what to do, by whichever command."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEW, LEGACY = "integration.service:LLM", "integration.legacy_service:svc"


def serve(home: Path, port: int, service: str, *, command: str = "bentoml serve", path: Path = ROOT) -> list[str]:
    """The lines that it ends with."""
    ended = subprocess.run(
        [sys.executable, "-m", *command.split(), service, "--host", "127.0.0.1", "--port", str(port)],
        cwd=ROOT,
        env={**os.environ, "BENTOML_HOME": str(home), "PYTHONPATH": os.pathsep.join((str(path), str(ROOT)))},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 1, ended.stderr
    return ended.stderr.strip().splitlines()


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.parametrize("service", [NEW, LEGACY])
def test_a_port_in_use(tmp_path: Path, taken: int, service: str) -> None:
    lines = serve(tmp_path, taken, service)
    assert lines[-1] == (
        f"Error: [serve] `serve` failed: port {taken} is in use: stop what listens there, or set --port (make: PORT=)"
    )
    assert not [line for line in lines if "Traceback" in line]


def test_a_torch_that_is_too_old(tmp_path: Path) -> None:
    about = tmp_path / "site" / "torch-2.4.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Name: torch\nVersion: 2.4.0\n")
    lines = serve(tmp_path / "home", 0, NEW, path=about.parent)
    assert lines[-1] == (
        "Error: [serve] `serve` failed: torch 2.4.0 is installed and too old: pip install 'torch>=2.8'"
    )


def test_a_home_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    [line] = serve(tmp_path / "file", 0, NEW, command="cb_backend.bento.serve")
    assert line == f"error: {tmp_path / 'file'}: Not a directory; set BENTOML_HOME to a directory that you can write to"
