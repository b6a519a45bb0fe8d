"""What is packed agrees with what is tested: one version, one set of pins, one list of packages."""

from __future__ import annotations

import re
from pathlib import Path

import setuptools
import yaml

import cb_backend._version

ROOT = Path(__file__).resolve().parent.parent


def test_the_bento_installs_the_tested_versions() -> None:
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    # A Bento's Python is 3.11: leave out the pins for others.
    tested = {
        pin.partition(" ;")[0] for pin in pins if "python_full_version < '3.11'" not in pin and ">= '3.12'" not in pin
    }
    bento = yaml.safe_load((ROOT / "bentofile.yaml").read_text(encoding="utf-8"))
    assert bento["docker"]["python_version"] == "3.11"
    assert set(bento["python"]["packages"]) <= tested


def test_the_wheel_holds_two_packages_and_no_tests() -> None:
    found = {
        name.partition(".")[0]
        for where in (".", "kernels")
        for name in setuptools.find_packages(str(ROOT / where), include=["cb_backend*", "cb_kernels*"])
    }
    assert found == {"cb_backend", "cb_kernels"}


def test_no_package_shadows_the_one_that_transformers_imports() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_the_version_is_written_once() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(r'^dynamic = \["version"\]$', project, re.MULTILINE)
    assert re.fullmatch(r"\d+\.\d+\.\d+", cb_backend._version.__version__)
