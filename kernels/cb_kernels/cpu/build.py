"""Compiles the native CPU kernels: `python -m cb_kernels.cpu.build`, and `setup.py` at installation.

One translation unit per instruction set, each with its own flags, and a dispatcher that chooses at run time; so a
library built anywhere runs on every CPU of the same architecture. A unit that the compiler cannot build (an old one
lacks AMX) is left out; only the portable unit is required. Needs g++ or clang++ (`CXX` names another); no headers but
the compiler's own. This module imports nothing outside the standard library, because `setup.py` loads it by path.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

LIBRARY = "libcb_cpu.so"
SOURCES = Path(__file__).resolve().parent / "src"

_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl")
_X86_UNITS: dict[str, tuple[str, ...]] = {
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512_bf16": (*_AVX512, "-mavx512bf16"),
    "amx": (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
}
# GCC's own intrinsics headers trip its uninitialized check; contraction would make a row's bits depend on its loop.
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno")


class BuildError(RuntimeError):
    """The library could not be built; the message holds the compiler's last words."""


def source_hash() -> str:
    """Hash of all native sources: what a library built from them reports as `cb_source_hash`."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in {".cpp", ".h"}:
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def cache_directory() -> Path:
    """Where a library goes when the package's own folder is read-only."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "cb_kernels" / source_hash()


def compiler() -> list[str]:
    """The C++ compiler's command.

    Raises:
        BuildError: none of `CXX`, g++, clang++ and c++ can be run.
    """
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name):
            return [name]
    raise BuildError("no C++ compiler found (g++, clang++ or the one that CXX names)")


def build(target: Path) -> list[str]:
    """Builds the library at `target` and returns the instruction sets in it.

    The file appears whole or not at all: a process that is loading it never sees half a library.

    Raises:
        BuildError: no compiler, or it failed on a required unit.
    """
    command = compiler()
    units: dict[str, tuple[str, ...]] = {"portable": ()}
    if platform.machine().lower() in {"x86_64", "amd64"}:
        units.update(_X86_UNITS)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        objects = {name: Path(folder) / f"{name}.o" for name in units}
        running = {
            name: _start([*command, *_FLAGS, *flags, "-c", str(SOURCES / f"isa_{name}.cpp"), "-o", str(objects[name])])
            for name, flags in units.items()
        }
        failures = {name: message for name, process in running.items() if (message := _finish(process))}
        if "portable" in failures:
            raise BuildError(failures["portable"])
        built = [name for name in units if name not in failures]
        defines = [f"-DCB_HAVE_{name.upper()}" for name in built] + [f'-DCB_SOURCE_HASH="{source_hash()}"']
        whole = Path(folder) / LIBRARY
        message = _finish(
            _start(
                [*command, *_FLAGS, *defines, "-shared", str(SOURCES / "dispatch.cpp"), str(SOURCES / "decoder.cpp")]
                + [str(objects[name]) for name in built]
                + ["-o", str(whole)]
            )
        )
        if message:
            raise BuildError(message)
        staged = target.with_name(f".{target.name}.{os.getpid()}")
        shutil.copyfile(whole, staged)
        os.replace(staged, target)
    return built


def _start(command: list[str]) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except OSError as error:
        raise BuildError(f"cannot run the C++ compiler {command[0]!r}: {error}") from None


def _finish(process: subprocess.Popen[str]) -> str:
    """Empty on success, else the end of the compiler's output."""
    output, _ = process.communicate()
    return "" if process.returncode == 0 else output.strip()[-2000:] or f"compiler exit status {process.returncode}"


def main() -> int:
    for folder in (Path(__file__).resolve().parent, cache_directory()):
        try:
            names = build(folder / LIBRARY)
        except BuildError as error:
            print(f"cb_kernels.cpu: not built: {error}", file=sys.stderr)
            return 1
        except OSError:
            continue  # a read-only installation: try the next folder
        print(f"cb_kernels.cpu: built {folder / LIBRARY} with {', '.join(names)}")
        return 0
    print("cb_kernels.cpu: not built: neither the package nor the cache folder can be written", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
