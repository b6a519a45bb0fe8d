"""`make` says in one line what is wrong with the machine, before anything long is begun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_another_python_is_refused_with_the_versions_that_will_do(tmp_path: Path) -> None:
    told = "import sys; sys.version_info = (3, 9, 0); exec(sys.argv[1])"
    old = program(tmp_path / "python3.9", f"exec {sys.executable} -c '{told}' \"$2\"")
    made = make("install", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}")
    assert made.returncode != 0
    assert made.stderr.splitlines()[0] == f"Python 3.10 to 3.13 is needed, {old} is 3.9: set PYTHON="
    assert not (tmp_path / "venv").exists()


def serve(tmp_path: Path, port: int) -> subprocess.CompletedProcess[str]:
    """`make serve` in an environment that has everything already, with a stand-in for what serves."""
    venv = tmp_path / "venv"
    program(venv / "bin" / "python", 'case "$*" in *fetch*) exit 0;; esac\necho "python $*"')
    (venv / ".installed").touch()
    return make("serve", f"VENV={venv}", f"PORT={port}")


def test_serve_passes_on_the_service_and_the_address(tmp_path: Path) -> None:
    made = serve(tmp_path, 3456)
    assert made.returncode == 0, made.stderr
    served = "python -m cb_backend.bento.serve integration.service:LLM --host 127.0.0.1 --port 3456"
    assert served in made.stdout.splitlines()
