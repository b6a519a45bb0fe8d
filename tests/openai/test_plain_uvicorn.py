"""The OpenAI routes on uvicorn alone, through OpenAI's own client: BentoML is not even imported."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def server(tiny_llama: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tests.openai.plain_server", str(tiny_llama), str(port)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 90
        while process.poll() is None and time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1", process
    finally:
        process.kill()
        process.wait(10)


def test_a_chat_is_streamed_and_bentoml_is_never_loaded(server: tuple[str, subprocess.Popen[str]]) -> None:
    url, process = server
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        [model] = client.models.list().data
        asked = {"model": model.id, "prompt": "The cache", "max_tokens": 8, "temperature": 0.0}
        whole = client.completions.create(**asked).choices[0].text
        pieces = [event.choices[0].text for event in client.completions.create(**asked, stream=True)]
    assert "".join(pieces) == whole != ""
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30)[0].splitlines()[-1:] == ["[]"]
