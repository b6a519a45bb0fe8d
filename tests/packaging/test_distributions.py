"""What a wheel and an sdist built from the tracked files hold, with a compiler, without one and with none wanted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import cb_backend

ROOT = Path(__file__).parents[2]
SOURCES = {f"cb_kernels/cpu/src/{path.name}" for path in (ROOT / "kernels" / "cb_kernels" / "cpu" / "src").iterdir()}
DATA = {"cb_backend/py.typed", "cb_kernels/py.typed", "cb_backend/telemetry/timeline/timeline.html"}
LIBRARY = "cb_kernels/cpu/libcb_cpu.so"

# Writes an empty file where it is told to: what is packed is of interest here, not the compiling.
COMPILER = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
: > "$2"
"""

# Compiles every unit, and is killed while it writes the library.
COMPILER_THAT_DIES_LINKING = """
case "$*" in *-shared*) dies=1;; esac
while [ "$1" != -o ]; do shift; done
echo half > "$2"
[ -z "$dies" ] || kill -9 $$
"""

Build = Callable[..., Path]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that git knows, as a fresh clone would have them."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    folder = tmp_path_factory.mktemp("checkout")
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def build(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Build:
    """`build("wheel", CXX="false")` builds with these variables and returns the file. Needs no network."""

    def run(kind: str, **environment: str) -> Path:
        out = tmp_path_factory.mktemp(kind)
        for left in (checkout / "build", checkout / "cb_backend.egg-info"):
            shutil.rmtree(left, ignore_errors=True)
        subprocess.run(
            [sys.executable, "-c", f"from setuptools import build_meta as b; b.build_{kind}({str(out)!r})"],
            cwd=checkout,
            env={**os.environ, **environment},
            check=True,
            capture_output=True,
            timeout=100,
        )
        return next(out.iterdir())

    return run


@pytest.fixture(scope="module")
def wheel(build: Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = tmp_path_factory.mktemp("bin") / "c++"
    compiler.write_text(COMPILER, encoding="utf-8")
    compiler.chmod(0o755)
    return build("wheel", CXX=str(compiler))


def contents(wheel: Path) -> tuple[set[str], Message]:
    """Names of the packed files that are not Python, and the metadata."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
        return {name for name in names if not name.endswith(".py")}, Parser().parsestr(archive.read(metadata).decode())


def test_the_wheel_holds_the_two_packages_and_nothing_else(wheel: Path, checkout: Path) -> None:
    files, metadata = contents(wheel)
    info = f"cb_backend-{cb_backend.__version__}.dist-info"
    about = {f"{info}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "top_level.txt", "licenses/LICENSE")}
    assert files == SOURCES | DATA | {LIBRARY} | about
    assert metadata["License-Expression"] == "Apache-2.0"
    with zipfile.ZipFile(wheel) as archive:
        assert {name.partition("/")[0] for name in archive.namelist()} == {"cb_backend", "cb_kernels", info}
        packed = {name for name in archive.namelist() if name.endswith(".py")}
    roots = {"cb_backend": checkout, "cb_kernels": checkout / "kernels"}
    assert packed == {
        str(path.relative_to(root)) for package, root in roots.items() for path in (root / package).rglob("*.py")
    }


def test_a_wheel_with_native_code_is_for_every_python_of_this_platform(wheel: Path) -> None:
    assert wheel.name.startswith(f"cb_backend-{cb_backend.__version__}-py3-none-linux_")


@pytest.mark.parametrize("code", ["exit 1", COMPILER_THAT_DIES_LINKING], ids=["at once", "in the middle"])
def test_a_compiler_that_fails_costs_the_native_library_and_not_the_installation(
    build: Build, tmp_path: Path, code: str
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\n" + code, encoding="utf-8")
    compiler.chmod(0o755)
    files, _ = contents(build("wheel", CXX=str(compiler)))
    assert files >= SOURCES
    assert LIBRARY not in files


def test_native_code_can_be_left_out(build: Build) -> None:
    wheel = build("wheel", CB_NO_NATIVE="1")
    assert wheel.name == f"cb_backend-{cb_backend.__version__}-py3-none-any.whl"
    assert LIBRARY not in contents(wheel)[0]


def test_the_core_needs_neither_bentoml_nor_triton_and_a_service_one_extra(wheel: Path) -> None:
    _, metadata = contents(wheel)
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert not [line for line in required if line.startswith(("bentoml", "triton", "starlette"))]
    extra = [line for line in metadata.get_all("Requires-Dist", []) if 'extra == "bento"' in line]
    assert [line for line in extra if line.startswith("bentoml")]


def test_the_sdist_holds_what_a_wheel_is_built_from(build: Build) -> None:
    archive = build("sdist")
    root = f"cb_backend-{cb_backend.__version__}"
    with tarfile.open(archive) as opened:
        names = {name.removeprefix(root + "/") for name in opened.getnames() if name != root}
    assert {name.partition("/")[0] for name in names} == {
        *("LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "constraints.txt"),
        *("cb_backend", "cb_backend.egg-info", "kernels", "pyproject.toml", "setup.cfg", "setup.py"),
    }
    assert {f"kernels/{name}" for name in SOURCES} <= names
    assert not [name for name in names if name.endswith(".so")]


def test_an_installed_wheel_generates_without_bentoml_and_triton(wheel: Path, tmp_path: Path, tiny_llama: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    # The stand-in of the compiler made no real library.
    (tmp_path / "site" / LIBRARY).unlink()
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path / "site")!r})
sys.modules["bentoml"] = sys.modules["triton"] = None
import cb_backend, cb_kernels
from cb_backend import Engine, SamplingParams
assert cb_kernels.__file__.startswith({str(tmp_path)!r}), cb_kernels.__file__
with Engine(model={str(tiny_llama)!r}, dtype="float32", num_kv_blocks=8, swap_space=0, num_threads=1) as engine:
    [output] = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))
print(output.usage.completion_tokens)
"""
    ran = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert ran.stdout.strip() == "4", ran.stderr
