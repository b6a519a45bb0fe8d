"""What the pages for contributors name exists, and the hosted checks are those of the repository."""

from __future__ import annotations

import importlib.util
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
GUIDES = ["CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "docs/how-to-add.md", "docs/glossary.md"]
GUIDES += sorted(f"docs/decisions/{page.name}" for page in (ROOT / "docs" / "decisions").glob("*.md"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
FOLDERS = r"(?:cb_backend|cb_kernels|kernels|integration|tests|docs|\.ci|\.github)"


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", GUIDES)
def test_paths_and_links_lead_somewhere(page: str) -> None:
    named = set(re.findall(rf"`({FOLDERS}/[\w/.-]*)`", text(page)))
    links = {link for link in re.findall(r"\]\(([^)#\s]+)", text(page)) if "://" not in link}
    assert {name for name in named if not (ROOT / name).exists()} == set()
    assert {link for link in links if not (ROOT / page).parent.joinpath(link).exists()} == set()


@pytest.mark.parametrize("page", GUIDES)
def test_modules_that_are_named_exist(page: str) -> None:
    current = text(page) if page != "CHANGELOG.md" else ""  # which tells of modules that are gone
    named = re.findall(r"`((?:cb_backend|cb_kernels|integration)(?:\.[a-z_]+)+)`", current)
    named += re.findall(r"python -m ((?:cb_backend|cb_kernels|integration|tests)[\w.]*)", text(page))
    assert [name for name in named if importlib.util.find_spec(name) is None] == []


@pytest.mark.parametrize("page", [*GUIDES, "README.md"])
def test_make_targets_that_are_named_exist(page: str) -> None:
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text(page), re.MULTILINE)) <= TARGETS


def test_the_changelog_says_where_modules_went() -> None:
    rows = re.findall(r"^ +\| (`cb_backend.*?) \| (`cb_backend.*?) \|$", text("CHANGELOG.md"), re.MULTILINE)
    folders = {name for _before, now in rows for name in re.findall(r"`(cb_backend\.\w+)\.", now)}
    assert len(folders) >= 7
    assert [name for name in folders if importlib.util.find_spec(name) is None] == []


def contracts() -> list[dict[str, Any]]:
    return list(tomllib.loads(text("pyproject.toml"))["tool"]["importlinter"]["contracts"])


def test_the_page_on_layout_has_the_layers_that_are_checked() -> None:
    [layers] = [contract["layers"] for contract in contracts() if contract["type"] == "layers"]
    rows = re.findall(r"^\| (`\w+[/.].*?) \|", text("docs/decisions/layout.md"), re.MULTILINE)
    named = [re.findall(r"`(\w+)(?:/|\.py)`", row) for row in rows]
    assert [name for row in named for name in row] == [
        name for layer in layers for name in layer.split(" : ") if name != "_version"
    ]


def test_no_import_is_excepted_from_the_layers() -> None:
    held = [contract for contract in contracts() if contract["type"] in ("layers", "acyclic_siblings")]
    assert len(held) == 2
    assert [contract["id"] for contract in held if "ignore_imports" in contract] == []


def workflow() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(text(".github/workflows/ci.yml"))
    return loaded


def test_the_workflow_calls_the_commands_of_the_repository() -> None:
    runs = [step["run"] for job in workflow()["jobs"].values() for step in job["steps"] if "run" in step]
    assert ".ci/run" in runs
    assert (ROOT / ".ci" / "run").stat().st_mode & stat.S_IXUSR
    assert [run for run in runs if not re.fullmatch(r"\.ci/run|make [a-z-]+( [A-Z_]+=\S+)*", run)] == []
    assert {run.split()[1] for run in runs if run.startswith("make ")} <= TARGETS


def test_the_workflow_checks_every_python_that_the_project_admits() -> None:
    admitted = re.search(r"Python (3\.\d+) to (3\.\d+)\.", text("Makefile"))
    assert admitted is not None
    first, last = (int(version.split(".")[1]) for version in admitted.groups())
    assert workflow()["jobs"]["check"]["strategy"]["matrix"]["python"] == [f"3.{n}" for n in range(first, last + 1)]


def test_issue_forms_and_hooks_are_well_formed() -> None:
    for form in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        loaded = yaml.safe_load(form.read_text(encoding="utf-8"))
        if form.name != "config.yml":
            assert loaded.keys() >= {"name", "description", "body"}
            assert all(field["attributes"]["label"] for field in loaded["body"])
    [repository] = yaml.safe_load(text(".pre-commit-config.yaml"))["repos"]
    assert repository["repo"] == "local"
    checks = {tool for target in ("lint", "type", "imports") for tool in recipe_tools(target)}
    assert {hook["entry"].split()[0].split("/")[-1] for hook in repository["hooks"]} == checks | {"clang-format"}


def recipe_tools(target: str) -> list[str]:
    made = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return re.findall(r"^\S+/bin/(?!python)([\w-]+)", made, re.MULTILINE)
