"""A pytest plugin: one line on what was skipped and why, and an error when no test ran at all.

A run in which every test is skipped would otherwise exit with 0, as if it had shown something.
"""

from __future__ import annotations

from collections import Counter

import pytest


def skip_line(reports: list[pytest.TestReport | pytest.CollectReport]) -> str:
    """`skipped 3: 2 no Prometheus; 1 no GPU`: the reasons of the skipped tests, the most frequent one first."""
    reasons = Counter(_reason(report) for report in reports)
    return f"skipped {len(reports)}: " + "; ".join(f"{count} {reason}" for reason, count in reasons.most_common())


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The reason given to `pytest.skip` or a skip mark, on one line."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return " ".join(text.removeprefix("Skipped: ").split())


def _only_skipped(config: pytest.Config) -> bool:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return False
    ran = any(reporter.stats.get(outcome) for outcome in ("passed", "failed", "error", "xfailed", "xpassed"))
    return bool(reporter.stats.get("skipped")) and not ran


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.OK and not session.config.option.collectonly and _only_skipped(session.config):
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    if skipped:
        terminalreporter.write_line(skip_line(skipped))
    if _only_skipped(terminalreporter.config):
        terminalreporter.write_line("error: no test ran, all were skipped", red=True)
