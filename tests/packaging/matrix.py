"""Installs what is shipped in clean virtual environments and uses it: `make packaging-test`, some minutes.

| environment | installed | used |
|---|---|---|
| core | the sdist, with no C++ compiler | the engine, with bentoml and triton absent |
| service | the wheel with its extra `bento` | a user's Bento: built, served, asked by the openai client |

Serving happens in a network namespace that has only loopback (as root; else with the hub switched off). Packages come
through this machine's pip. Prints a table; the exit status says whether all held. The names of environments may follow
as arguments: `python -m tests.packaging.matrix core`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from openai import APIConnectionError, APIStatusError, OpenAI

ROOT = Path(__file__).parents[2]
MODEL = "smollm2-135m-instruct"
PORT = 3000
ISOLATED = "--in-namespace"
CONSTRAINTS = ROOT / "constraints.txt"

GENERATE = """
import importlib.util, sys
from pathlib import Path
import cb_backend, cb_kernels
assert not importlib.util.find_spec("bentoml") and not importlib.util.find_spec("triton"), "not a clean environment"
assert ".venv" not in cb_backend.__file__
native = (Path(cb_kernels.__file__).parent / "cpu" / "libcb_cpu.so").exists()
with cb_backend.Engine(model=sys.argv[1], num_kv_blocks=64, swap_space=0) as engine:
    [output] = engine.generate(["The capital of France is"], cb_backend.SamplingParams(max_tokens=4, temperature=0.0))
print(f"{'with' if native else 'without'} native kernels:{output.text!r}")
"""


def run(*command: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    """Standard output; a command that fails ends the program with what it said."""
    done = subprocess.run(
        [str(part) for part in command], env={**os.environ, **(env or {})}, cwd=cwd, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"error: {' '.join(map(str, command[:6]))}\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


class Step:
    """A row of the table: `with Step("what") as step: ... step.result = "..."`."""

    def __init__(self, name: str) -> None:
        self.name, self.result = name, "ok"

    def __enter__(self) -> Step:
        self.begin = time.monotonic()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            print(f"| {self.name} | {self.result} | {time.monotonic() - self.begin:.0f} |", flush=True)


def environment(folder: Path, *requirements: str, env: Mapping[str, str] | None = None) -> Path:
    """A new virtual environment's folder of programs; nothing of this one is visible in it."""
    run(sys.executable, "-m", "venv", folder)
    run(
        *(folder / "bin" / "python", "-m", "pip", "install", "-q", "--prefer-binary", "--no-cache-dir"),
        *("-c", CONSTRAINTS, *requirements),
        env=env,
    )
    return folder / "bin"


def distributions(folder: Path) -> tuple[Path, Path]:
    """Wheel and sdist of the files that git knows."""
    checkout = folder / "checkout"
    run("git", "clone", "-q", ROOT, checkout)
    for kind in ("sdist", "wheel"):
        run(
            sys.executable,
            "-c",
            f"from setuptools import build_meta as b; b.build_{kind}({str(folder)!r})",
            cwd=checkout,
        )
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


def demo_model() -> Path:
    home = Path(os.environ.get("BENTOML_HOME") or Path.home() / "bentoml")
    entry = home / "models" / MODEL
    try:
        return entry / (entry / "latest").read_text(encoding="utf-8").strip()
    except OSError:
        sys.exit(f"error: {MODEL} is not in {home / 'models'}: run `make model`")


def ask(bento: Path, bentoml: Path, home: Path) -> str:
    """Serves a Bento, asks it one thing, and stops it."""
    environ = {**os.environ, "BENTOML_HOME": str(home), "HF_HUB_OFFLINE": "1", "BENTOML_DO_NOT_TRACK": "True"}
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(
            [str(bentoml), "serve", str(bento), "--host", "127.0.0.1", "--port", str(PORT)],
            env=environ, stdout=log, stderr=subprocess.STDOUT, cwd=home,
        )  # fmt: skip
        client = OpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key="unused", max_retries=0)
        end = time.monotonic() + 180
        try:
            while True:
                try:
                    answer = client.chat.completions.create(
                        model=MODEL,
                        messages=[{"role": "user", "content": "What is the capital of France?"}],
                        max_tokens=16,
                        temperature=0,
                    )
                    return answer.choices[0].message.content or ""
                except (APIConnectionError, APIStatusError) as error:
                    if time.monotonic() > end or server.poll() is not None:
                        log.seek(0)
                        sys.exit(f"error: no answer: {error}\n{log.read()[-3000:].decode()}")
                    time.sleep(0.2)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)


def use_the_core(folder: Path, sdist: Path, model: Path) -> None:
    with Step("sdist into a clean environment, no compiler"):
        core = environment(folder / "core", str(sdist), env={"CXX": "/nonexistent/c++"})
    with Step("a program with the engine") as step:
        step.result = run(core / "python", "-c", GENERATE, model, cwd=folder, env={"PYTHONPATH": ""}).strip()


def use_a_service(folder: Path, wheel: Path, model: Path) -> None:
    with Step("wheel with [bento] into a clean environment"):
        programs = environment(folder / "service", f"{wheel}[bento]", "uv")
    home = folder / "home"
    (home / "models").mkdir(parents=True)
    (home / "models" / MODEL).symlink_to(model.parent)
    isolated = (
        ["unshare", "--net", "--", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"] if os.geteuid() == 0 else []
    )
    offline = {"BENTOML_HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONPATH": "", "BENTOML_DO_NOT_TRACK": "True"}
    offline["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"
    with Step("bentoml build of integration/user_bento, offline") as step:
        mine = folder / "mine"
        shutil.copytree(ROOT / "integration" / "user_bento", mine)
        told = run(*isolated, programs / "bentoml", "build", "-o", "tag", cwd=mine, env=offline)
        tag = told.strip().splitlines()[-1].removeprefix("__tag__:")
        bento = home / "bentos" / tag.replace(":", "/")
        step.result = f"{sum(file.stat().st_size for file in bento.rglob('*') if file.is_file()) >> 10} KiB"
    with Step("bentoml serve of it, offline; a chat by the openai client") as step:
        asking = (sys.executable, "-m", "tests.packaging.matrix", ISOLATED, bento, programs / "bentoml", home)
        step.result = repr(run(*isolated, *asking, cwd=ROOT).strip())


def main() -> int:
    if sys.argv[1:2] == [ISOLATED]:
        print(ask(*(Path(argument) for argument in sys.argv[2:5])))
        return 0
    wanted = sys.argv[1:] or ["core", "service"]
    if unknown := set(wanted) - {"core", "service"}:
        sys.exit(f"error: no environment {unknown.pop()}; there are core and service")
    model = demo_model()
    print("| step | result | seconds |\n|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory(prefix="cb-matrix-") as name:
        folder = Path(name)
        with Step("wheel and sdist of a clean clone") as step:
            wheel, sdist = distributions(folder)
            step.result = (
                f"{wheel.name} ({wheel.stat().st_size >> 10} KiB), {sdist.name} ({sdist.stat().st_size >> 10} KiB)"
            )
        if "core" in wanted:
            use_the_core(folder, sdist, model)
        if "service" in wanted:
            use_a_service(folder, wheel, model)
    return 0


if __name__ == "__main__":
    sys.exit(main())
