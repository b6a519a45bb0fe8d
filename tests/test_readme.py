"""What the README promises about the configuration is what the code has."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_config_table", ROOT / "docs" / "generate_config_table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_configuration_table_is_current(generator: ModuleType) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert generator.updated(readme) == readme, "run `python docs/generate_config_table.py`"


def test_the_table_shows_nested_fields_sizes_and_choices(generator: ModuleType) -> None:
    rows = generator.render().splitlines()
    assert any(row.startswith("| `admission.risk` | `CB_ADMISSION__RISK` | `0.01` | ") for row in rows)
    assert any(row.startswith("| `swap_space` | `CB_SWAP_SPACE` | `4GiB` | ") for row in rows)
    assert any(row.startswith("| `model` | `CB_MODEL` | required | ") for row in rows)
    assert any("| One of `auto`, `bfloat16`, `float16`, `float32`. " in row for row in rows)
