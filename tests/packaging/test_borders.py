"""What import-linter cannot see: parts of a package from outside, and what is really loaded."""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import cb_backend.openai

PACKAGE = Path(cb_backend.__file__).parent
HEAVY = {"bentoml", "_bentoml_sdk", "_bentoml_impl", "simple_di", "torch", "transformers"}
COMPAT = PACKAGE / "bento" / "compat.py"
OPENAI = sorted(module.name for module in pkgutil.walk_packages(cb_backend.openai.__path__, "cb_backend.openai."))


def imported(file: Path) -> Iterator[str]:
    """The modules of other packages that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_private(module: str) -> bool:
    top, *rest = module.split(".")
    return top in ("_bentoml_sdk", "_bentoml_impl", "simple_di") or (
        top == "bentoml" and any(part.startswith("_") for part in rest)
    )


def test_private_parts_of_bentoml_are_imported_in_one_file() -> None:
    found = {file for file in PACKAGE.rglob("*.py") if any(map(is_private, imported(file)))}
    assert found == {COMPAT}


def test_bentoml_is_imported_in_one_room() -> None:
    found = {
        file.relative_to(PACKAGE).parts[0]
        for file in PACKAGE.rglob("*.py")
        if any(module.split(".")[0] in ("bentoml", "bentoml_cli") for module in imported(file))
    }
    assert found == {"bento"}


@pytest.mark.parametrize("modules", [OPENAI, ["cb_backend.bento.mount"], ["cb_backend.bento.store"]], ids=str)
def test_these_load_neither_bentoml_nor_torch(modules: list[str]) -> None:
    code = (
        f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
        f"print(sorted({HEAVY!r} & {{*sys.modules}}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
