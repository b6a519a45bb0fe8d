"""What an environment lacks is told before anything fails because of it."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from cb_backend import versions

ROOT = Path(__file__).parents[1]


def test_the_lowest_versions_are_those_that_pip_is_told() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    told = {name: re.search(rf'^    "{name}>=(\d+)\.(\d+)",$', project, re.MULTILINE) for name in versions.NEEDED}
    assert {name: (int(found[1]), int(found[2])) for name, found in told.items() if found} == dict(versions.NEEDED)
    assert 'requires-python = ">=3.10"' in project


@pytest.mark.parametrize("installed", ["2.8.0", "2.13.0+cpu", "3.0"])
def test_a_version_that_is_new_enough_will_do(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    monkeypatch.setattr(versions, "version", lambda package: installed)
    versions.check_versions({"torch": (2, 8)})


@pytest.mark.parametrize("installed", ["2.7.1", "2.4.0+cu121", "1.13.1"])
def test_an_old_version_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    monkeypatch.setattr(versions, "version", lambda package: installed)
    with pytest.raises(versions.VersionError) as refused:
        versions.check_versions({"torch": (2, 8)})
    assert str(refused.value) == f"torch {installed} is installed and too old: pip install 'torch>=2.8'"


def test_an_absent_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(versions, "version", absent)
    with pytest.raises(versions.VersionError, match=r"^torch is not installed: pip install 'torch>=2\.8'$"):
        versions.check_versions({"torch": (2, 8)})


def last_line(program: str, *path: Path) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {[str(p) for p in (*path, ROOT)]!r}\n{program}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 1
    return ran.stderr.splitlines()[-1]


def test_another_python_is_told_at_the_import() -> None:
    line = last_line("sys.version_info = (3, 9, 18, 'final', 0); sys.version = '3.9.18 (main)'\nimport cb_backend")
    assert line == f"RuntimeError: cb_backend needs Python 3.10 or later, {sys.executable} is 3.9.18"


def test_an_old_torch_is_told_before_it_is_imported(tmp_path: Path) -> None:
    (tmp_path / "torch-2.4.0.dist-info").mkdir()
    (tmp_path / "torch-2.4.0.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.4.0\n")
    line = last_line("sys.modules['torch'] = None\nimport cb_backend; cb_backend.Engine", tmp_path)
    assert line == "cb_backend.versions.VersionError: torch 2.4.0 is installed and too old: pip install 'torch>=2.8'"
