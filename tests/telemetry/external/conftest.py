"""Tests with real tools: Prometheus, Chromium, Arize Phoenix (`.ci/install-tools.sh` installs them).

Where a tool is missing its tests are skipped with the reason, or fail with `CB_REQUIRE_TOOLS=1`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def phoenix_command() -> str | None:
    own = Path(os.environ.get("CB_PHOENIX_VENV") or ROOT / ".phoenix") / "bin" / "phoenix"
    return str(own) if own.is_file() else shutil.which("phoenix")


def _missing(marker: str) -> str | None:
    if marker == "needs_prometheus" and not (shutil.which("prometheus") and shutil.which("promtool")):
        return "prometheus and promtool are not installed"
    if marker == "needs_chromium" and not shutil.which("chromium"):
        return "chromium is not installed"
    if marker == "needs_chromium" and importlib.util.find_spec("playwright") is None:
        return "playwright is not installed"
    if marker == "needs_phoenix" and phoenix_command() is None:
        return "arize-phoenix is not installed"
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture, so that none starts a tool that is not there."""
    for marker in item.iter_markers():
        reason = _missing(marker.name)
        if reason is None:
            continue
        message = f"{reason}: run .ci/install-tools.sh"
        if os.environ.get("CB_REQUIRE_TOOLS") == "1":
            pytest.fail(message)
        pytest.skip(message)
