"""What the documentation names exists: files, links, metrics, settings. `make docs` also finds pages left out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cb_backend.config import AdmissionConfig, EngineConfig
from cb_backend.telemetry.metrics.table import BY_NAME

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [*PAGES, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"))]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def leaves(entries: list[Any]) -> Iterator[str]:
    for entry in entries:
        for value in entry.values():
            yield from [value] if isinstance(value, str) else leaves(value)


def test_the_navigation_has_every_page_once() -> None:
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert sorted(leaves(navigation)) == sorted(page.relative_to(DOCS).as_posix() for page in PAGES)


def test_every_page_can_be_reached_from_the_overview() -> None:
    reached, rest = set(), [DOCS / "index.md"]
    while rest:
        page = rest.pop()
        if page in reached:
            continue
        reached.add(page)
        links = re.findall(r"\]\(([^)#\s]+\.md)", page.read_text(encoding="utf-8"))
        rest += [(page.parent / link).resolve() for link in links if "://" not in link]
    assert set(PAGES) <= reached


@pytest.mark.parametrize("page", TEXTS, ids=name_of)
def test_lines_of_prose_are_wrapped(page: Path) -> None:
    outside_code = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    long = [line for line in outside_code.splitlines() if len(line) > 120 and not line.lstrip().startswith(("|", "!["))]
    assert long == []


@pytest.mark.parametrize("page", TEXTS, ids=name_of)
def test_commits_are_not_used_as_dates(page: Path) -> None:
    named = re.findall(r"\b[0-9a-f]{7,12}\b", page.read_text(encoding="utf-8"))
    assert [word for word in named if re.search("[a-f]", word) and re.search("[0-9]", word)] == []


@pytest.mark.parametrize("page", TEXTS, ids=name_of)
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"`((?:integration|tests)/[\w/.-]+?)`", page.read_text(encoding="utf-8"))
    assert [name for name in named if not (ROOT / name).exists()] == []


def words(pattern: str) -> set[str]:
    """What the pages quote and `pattern` matches whole."""
    pages = [page.read_text(encoding="utf-8") for page in (*PAGES, ROOT / "README.md")]
    return {word for page in pages for word in re.findall(rf"`({pattern})[`={{]", page)}


def test_metrics_that_are_named_exist() -> None:
    named = words("(?:cb|gen_ai|vllm)[_:][a-z_]+") - {"cb_backend", "cb_kernels"}
    labels = {label for metric in BY_NAME.values() for label in metric.labels}
    assert {"cb_requests_waiting", "vllm:kv_cache_usage_perc"} < named
    assert named - labels <= set(BY_NAME)


def test_variables_that_are_named_are_read_somewhere() -> None:
    fields = {f"CB_{name.upper()}" for name in EngineConfig.model_fields}
    fields |= {f"CB_ADMISSION__{name.upper()}" for name in AdmissionConfig.model_fields}
    others = words("CB_[A-Z_]+") - fields
    sources = [*ROOT.glob("*.py"), *(ROOT / "integration" / "container").iterdir()]
    sources += [path for folder in ("cb_backend", "kernels") for path in (ROOT / folder).rglob("*.py")]
    read = "".join(path.read_text(encoding="utf-8") for path in sources if path.is_file())
    assert "CB_BASE_IMAGE" in others
    assert sorted(name for name in others if not re.search(rf"\b{name}\b", read)) == []


def test_arguments_that_keep_their_name_are_fields() -> None:
    guide = (ROOT / "docs" / "migrate.md").read_text(encoding="utf-8")
    [row] = [line for line in guide.splitlines() if line.endswith("| the same name |")]
    names = re.findall(r"`(\w+)`", row)
    assert len(names) > 8
    assert set(names) <= set(EngineConfig.model_fields)
