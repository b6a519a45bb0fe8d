"""docs/cases.md names every report once, and every test that it names exists."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROWS = re.findall(
    r"^\| (\d+) \| .* \| (.*) \|$", (ROOT / "docs" / "cases.md").read_text(encoding="utf-8"), re.MULTILINE
)
TESTS = re.compile(r"`([\w/]+\.py)::(\w+)`")
REASON = re.compile(r"Not applicable: \S")


def test_every_report_is_there_once_and_in_order() -> None:
    ids = json.loads((ROOT / "tests" / "data" / "cases_ids.json").read_text(encoding="utf-8"))
    assert [int(report) for report, _ in ROWS] == ids


def test_every_test_that_is_named_exists() -> None:
    named = {pair for _, cell in ROWS for pair in TESTS.findall(cell)}
    sources = {path: (ROOT / path).read_text(encoding="utf-8") for path, _ in named}
    assert [f"{path}::{name}" for path, name in sorted(named) if f"def {name}(" not in sources[path]] == []


def test_every_report_has_a_test_or_the_reason_why_it_cannot_apply() -> None:
    tested = 0
    for report, cell in ROWS:
        tests = TESTS.findall(cell)
        assert bool(tests) != bool(REASON.match(cell)), report
        tested += bool(tests)
    told = f"Of {len(ROWS)} reports {tested} have tests, and {len(ROWS) - tested} cannot apply."
    assert told in " ".join((ROOT / "docs" / "cases.md").read_text(encoding="utf-8").split())


def test_tests_that_carry_a_number_are_in_the_table() -> None:
    carried = set()
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name, numbers in re.findall(r"def (test_case((?:_\d{3})+)_\w+)\(", path.read_text(encoding="utf-8")):
            carried |= {(int(number), name) for number in numbers.strip("_").split("_")}
    told = {(int(report), name) for report, cell in ROWS for _, name in TESTS.findall(cell)}
    assert carried - told == set()
