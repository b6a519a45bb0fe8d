"""Builds the optional native CPU kernels at installation; everything else is in pyproject.toml.

A compiler that is absent or fails leaves a warning and a working installation that is slower on a CPU. `CB_NO_NATIVE=1`
skips the attempt and gives a pure-Python wheel.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

PACKAGE = Path("kernels") / "cb_kernels" / "cpu"
# By path: importing the package would import torch, which is not in the build environment.
_spec = importlib.util.spec_from_file_location("cb_cpu_build", Path(__file__).parent / PACKAGE / "build.py")
if _spec is None or _spec.loader is None:
    raise RuntimeError(f"{PACKAGE / 'build.py'} is missing: the source tree is not whole")
native = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(native)


class BuildNative(build_ext):
    """Not a Python extension: a plain shared library beside its sources, loaded with ctypes."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")[:-1]) / native.LIBRARY)

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        try:
            names = native.build(target)
        except (native.BuildError, OSError) as error:
            self.warn(f"native CPU kernels were not built, so the CPU path will be slower: {error}")
        else:
            self.announce(f"native CPU kernels: {', '.join(names)}", level=2)


class Wheel(bdist_wheel):
    """The library uses no Python ABI: one wheel serves every Python 3 of the platform."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return ("py3", "none", platform) if self.distribution.has_ext_modules() else (python, abi, platform)


sources = sorted(str(PACKAGE / "src" / path.name) for path in native.SOURCES.glob("*.cpp"))
setup(
    ext_modules=[]
    if os.environ.get("CB_NO_NATIVE", "0") not in {"", "0"}
    else [Extension("cb_kernels.cpu.libcb_cpu", sources, optional=True)],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": Wheel},
)
