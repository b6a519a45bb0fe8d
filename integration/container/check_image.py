"""Runs an image as a cluster would and says what it does: `python check_image.py ROOTFS`, as root.

ROOTFS is the mounted root of an image of this service, read-only with a tmpfs at /tmp. Called in a network and mount
namespace of its own (as build_and_check.sh does), with loopback up. The container is process 1 of its own process
namespace, user `bentoml`. Prints one line per check; the exit status says whether all held.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from openai import OpenAI

PORT = 3000
URL = f"http://127.0.0.1:{PORT}"
ENTRYPOINT = "/home/bentoml/bento/env/docker/entrypoint.sh"
USER = "1034:1034"
START_SECONDS = 240.0
# A module that Python imports at its start, where it is on the path: on SIGUSR1 the engine's thread meets an exception
# without a handler.
FAULT = """
import ctypes, signal, threading
def strike(*_):
    for thread in threading.enumerate():
        if thread.name == "cb-engine":
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
signal.signal(signal.SIGUSR1, strike)
"""
MODEL = "smollm2-135m-instruct"
# What the image sets, as `buildah run` would, and a home that may be written: the root may not.
ENVIRONMENT = {
    "PATH": "/app/.venv/bin:/usr/local/bin:/usr/bin:/bin",
    "VIRTUAL_ENV": "/app/.venv",
    "LANG": "C.UTF-8",
    "BENTO_PATH": "/home/bentoml/bento",
    "BENTOML_CONTAINERIZED": "true",
    "BENTOML_DO_NOT_TRACK": "True",
    "BENTOML_HOME": "/tmp/bentoml",
    "HOME": "/tmp",
    "HF_HUB_OFFLINE": "1",
    # Of this machine, for the image's engine: CB_NUM_THREADS=1 where others use its cores too.
    **{name: value for name, value in os.environ.items() if name.startswith("CB_")},
}


@dataclass(frozen=True, slots=True)
class Container:
    """A running container; `pid` is its process 1 as this namespace sees it."""

    process: subprocess.Popen[bytes]
    pid: int
    log: Path

    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;]*m", "", self.log.read_text(errors="replace"))

    def wait_for(self, condition: Callable[[], bool], what: str, seconds: float = START_SECONDS) -> float:
        begin = time.monotonic()
        while not condition():
            if self.process.poll() is not None:
                raise CheckFailed(f"{what}: the container ended, its last words:\n{self.text()[-2000:]}")
            if time.monotonic() - begin > seconds:
                raise CheckFailed(f"{what}: not within {seconds:.0f} s:\n{self.text()[-2000:]}")
            time.sleep(0.05)
        return time.monotonic() - begin

    def exit_within(self, seconds: float) -> tuple[int, float]:
        """Exit status of the container and the time until it ended."""
        begin = time.monotonic()
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise CheckFailed(f"still running after {seconds:.0f} s:\n{self.text()[-2000:]}") from None
        return status, time.monotonic() - begin


class CheckFailed(Exception):
    """A check did not hold; the message says how."""


class Table:
    """The results, printed as they come, in Markdown."""

    def __init__(self) -> None:
        self.failed = 0
        print("| check | result | seconds |\n|---|---|---|", flush=True)

    def row(self, check: str, result: str, seconds: float | None = None) -> None:
        print(f"| {check} | {result} | {'' if seconds is None else f'{seconds:.1f}'} |", flush=True)

    @contextmanager
    def check(self, name: str) -> Iterator[None]:
        try:
            yield
        except CheckFailed as error:
            self.failed += 1
            self.row(name, "FAILED: " + str(error).partition("\n")[0])
            print(error, file=sys.stderr, flush=True)


def status(path: str) -> int:
    """HTTP status of a GET; 0 without an answer."""
    try:
        with urllib.request.urlopen(URL + path, timeout=3) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


@contextmanager
def running(root: Path, log: Path, *arguments: str, **variables: str) -> Iterator[Container]:
    environment = [f"{name}={value}" for name, value in (ENVIRONMENT | variables).items()]
    with log.open("wb") as sink:
        process = subprocess.Popen(
            ["unshare", "--pid", "--fork", "--kill-child", f"--mount-proc={root / 'proc'}"]
            + ["chroot", f"--userspec={USER}", "--groups=", str(root), "/usr/bin/env", "-i", *environment]
            + [ENTRYPOINT, "serve", "--host", "127.0.0.1", "--port", str(PORT), *arguments],
            stdout=sink,
            stderr=subprocess.STDOUT,
        )
    while not (first := children_of(process.pid)):
        if process.poll() is not None:
            raise CheckFailed(f"the container did not start:\n{log.read_text()}")
        time.sleep(0.01)
    try:
        yield Container(process, first[0], log)
    finally:
        if process.poll() is None:
            # Its end takes everything in the namespace along, and `unshare` ends when that is done.
            os.kill(first[0], signal.SIGKILL)
            process.wait()


def children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def inside(root: Path, command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["chroot", f"--userspec={USER}", "--groups=", str(root), "/bin/sh", "-c", command],
        capture_output=True,
        text=True,
    )


def client() -> OpenAI:
    return OpenAI(base_url=f"{URL}/v1", api_key="unused", max_retries=0, timeout=300)


def chat(question: str, max_tokens: int = 16) -> str:
    answer = client().chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": question}], max_tokens=max_tokens, temperature=0
    )
    return answer.choices[0].message.content or ""


class LongStream(threading.Thread):
    """A client that reads one stream to its end; `finish_reason` stays None where the stream breaks."""

    def __init__(self, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self.max_tokens = max_tokens
        self.chunks = 0
        self.finish_reason: str | None = None
        self.broken = ""

    def run(self) -> None:
        # Beyond OpenAI's fields: goes on past the model's end token.
        stream = client().completions.create(
            model=MODEL, prompt="Once", max_tokens=self.max_tokens, stream=True, extra_body={"ignore_eos": True}
        )
        try:
            for chunk in stream:
                self.chunks += 1
                if chunk.choices and chunk.choices[0].finish_reason:
                    self.finish_reason = chunk.choices[0].finish_reason
        except Exception as error:
            self.broken = f"{type(error).__name__}: {error}"


def serves_and_drains(root: Path, table: Table, log: Path) -> None:
    with running(root, log) as container:
        with table.check("alive while loading"):
            seconds = container.wait_for(lambda: status("/livez") == 200, "livez")
            table.row("/livez 200 while the model loads", f"/readyz {status('/readyz')}", seconds)
        with table.check("ready"):
            table.row("/readyz 200", "200", container.wait_for(lambda: status("/readyz") == 200, "readyz") + seconds)
        with table.check("user"):
            uid = re.search(r"^Uid:\s+(\d+)", Path(f"/proc/{container.pid}/status").read_text(), re.MULTILINE)
            if uid is None or uid[1] != "1034":
                raise CheckFailed(f"process 1 runs as {uid and uid[1]}")
            table.row("user of process 1", f"bentoml, {uid[1]}")
        with table.check("native kernels"):
            if not (
                found := re.search(r"fused \d+ decoder layers for the native CPU kernels \(\w+\)", container.text())
            ):
                raise CheckFailed("the native kernels are not in use")
            table.row("native CPU kernels", found[0])
        with table.check("a chat"):
            begin = time.monotonic()
            table.row(
                "a chat by the openai client", repr(chat("What is the capital of France?")), time.monotonic() - begin
            )
        with table.check("chats at once"):
            begin = time.monotonic()
            with ThreadPoolExecutor(8) as pool:
                answers = list(pool.map(chat, [f"Count to {n}." for n in range(2, 10)]))
            if not all(answers):
                raise CheckFailed(f"an empty answer in {answers}")
            table.row("8 chats at once", "8 answers", time.monotonic() - begin)
        with table.check("metrics"):
            with urllib.request.urlopen(f"{URL}/metrics", timeout=5) as page:
                metrics = page.read().decode()
            if not re.search(r"^vllm:num_requests_waiting\{.*\} 0.0$", metrics, re.MULTILINE):
                raise CheckFailed("vllm:num_requests_waiting is not in /metrics")
            table.row("/metrics", "cb_*, gen_ai_* and vllm:* there")
        with table.check("drain"):
            stream = LongStream(32)
            stream.start()
            container.wait_for(lambda: stream.chunks >= 4, "first tokens")
            os.kill(container.pid, signal.SIGTERM)
            code, seconds = container.exit_within(60)
            stream.join(10)
            if stream.finish_reason != "length" or code != 0:
                raise CheckFailed(
                    f"stream ended with {stream.finish_reason}, container with {code}:\n{container.text()}"
                )
            table.row("SIGTERM during a stream", "stream whole (32 tokens), exit status 0", seconds)


def drains_within_its_grace(root: Path, table: Table, log: Path, grace: int = 3) -> None:
    with running(root, log, "--timeout-graceful-shutdown", str(grace)) as container, table.check("bounded drain"):
        container.wait_for(lambda: status("/readyz") == 200, "readyz")
        stream = LongStream(4000)
        stream.start()
        container.wait_for(lambda: stream.chunks >= 4, "first tokens")
        os.kill(container.pid, signal.SIGTERM)
        code, seconds = container.exit_within(grace + 20)
        stream.join(10)
        if stream.finish_reason == "length":
            raise CheckFailed("the stream was whole: too short for this check")
        table.row(
            f"SIGTERM, grace {grace} s, a stream that is longer",
            f"cut off ({stream.broken or 'error event'}), exit status {code}",
            seconds,
        )


def workers_of(container: Container) -> list[int]:
    return [pid for pid in children_of(container.pid) if b"worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def is_restarted_when_its_engine_dies(root: Path, table: Table, log: Path) -> None:
    """What a kubelet does: /livez fails, SIGTERM, and the container is started again."""
    fault = root / "tmp" / "fault"
    fault.mkdir(exist_ok=True)
    (fault / "sitecustomize.py").write_text(FAULT, encoding="utf-8")
    with running(root, log, PYTHONPATH="/tmp/fault") as container, table.check("dead engine thread"):
        container.wait_for(lambda: status("/readyz") == 200, "readyz")
        stream = LongStream(4000)
        stream.start()
        container.wait_for(lambda: stream.chunks >= 4, "first tokens")
        for pid in workers_of(container):
            os.kill(pid, signal.SIGUSR1)
        seconds = container.wait_for(lambda: status("/livez") == 503, "livez 503", 10)
        stream.join(10)
        if stream.is_alive() or stream.finish_reason == "length":
            raise CheckFailed(f"the stream of the dead engine ended with {stream.finish_reason}")
        table.row("engine thread dies: /livez 503", f"its stream: {stream.broken or stream.finish_reason}", seconds)
        os.kill(container.pid, signal.SIGTERM)
        code, seconds = container.exit_within(30)
        table.row("SIGTERM after that", f"exit status {code}", seconds)
    with running(root, log) as container, table.check("restart"):
        seconds = container.wait_for(lambda: status("/readyz") == 200, "readyz")
        table.row("started again: /readyz 200 and a chat", repr(chat("What is the capital of France?")), seconds)


def ends_when_its_worker_dies(root: Path, table: Table, log: Path) -> None:
    with running(root, log) as container, table.check("dead worker"):
        container.wait_for(lambda: status("/readyz") == 200, "readyz")
        workers = workers_of(container)
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        code, seconds = container.exit_within(60)
        if not workers or code == 0:
            raise CheckFailed(f"killed {workers}, exit status {code}")
        table.row("worker killed", f"container ends with {code}, for the orchestrator to restart", seconds)


def says_what_to_do(root: Path, table: Table, log: Path) -> None:
    cases = {
        "the model is not there": {"CB_MODEL": "absent:1"},
        "a GPU is wanted and there is none": {"CB_DEVICE": "cuda"},
    }
    for name, variables in cases.items():
        with running(root, log, **variables) as container, table.check(name):
            found: list[str] = []

            def told(container: Container = container, found: list[str] = found) -> bool:
                found[:] = re.findall(r"\[ERROR\].*?(the model could not be loaded:? .*)", container.text())
                return bool(found)

            seconds = container.wait_for(told, "an error line")
            container.wait_for(lambda: status("/livez") == 503, "livez 503", 10)
            table.row(f"{name}: /livez 503", found[0].replace("|", "\\|"), seconds)


def ends_with_one_line(root: Path, table: Table, log: Path) -> None:
    """What cannot be served here ends before any worker starts."""
    small = root / "tmp" / "small"
    small.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=1777,size=1m", "tmpfs", str(small)], check=True)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        cases: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
            "a port that is taken": (("--port", str(port)), {}),
            "a home with 1 MiB": ((), {"BENTOML_HOME": "/tmp/small/bentoml"}),
        }
        for name, (arguments, variables) in cases.items():
            with running(root, log, *arguments, **variables) as container, table.check(name):
                code, seconds = container.exit_within(60)
                line = container.text().strip().splitlines()[-1]
                if code != 1 or not line.startswith("Error: [serve] `serve` failed: "):
                    raise CheckFailed(f"ended with {code}: {line}\n{container.text()}")
                table.row(f"{name}: exit status 1", line, seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("--log", type=Path, default=Path("/tmp/cb-image.log"))
    options = parser.parse_args()
    root = options.root.resolve()
    table = Table()
    with table.check("CUDA libraries"):
        pattern = re.compile(r"lib(cuda|cudnn|cublas|nccl|nvrtc|nvjitlink).*\.so", re.IGNORECASE)
        cuda = [path for path in root.rglob("*.so*") if pattern.match(path.name)]
        if cuda:
            raise CheckFailed(f"{len(cuda)} of them, such as {cuda[0]}")
        table.row("CUDA libraries in the image", "none")
    with table.check("read-only root"):
        for folder in ("/", "/home/bentoml", "/app/.venv"):
            if inside(root, f"touch {folder}/x").returncode == 0:
                raise CheckFailed(f"{folder} can be written")
        table.row("root file system", "read-only; /tmp can be written")
    serves_and_drains(root, table, options.log)
    drains_within_its_grace(root, table, options.log)
    is_restarted_when_its_engine_dies(root, table, options.log)
    ends_when_its_worker_dies(root, table, options.log)
    says_what_to_do(root, table, options.log)
    ends_with_one_line(root, table, options.log)
    return 1 if table.failed else 0


if __name__ == "__main__":
    sys.exit(main())
