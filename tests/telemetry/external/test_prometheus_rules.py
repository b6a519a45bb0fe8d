"""The files of integration/prometheus as Prometheus itself reads them."""

from __future__ import annotations

import subprocess

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from cb_backend.telemetry.metrics.table import METRICS
from tests.telemetry.external.conftest import ROOT
from tests.telemetry.test_metrics import Measured

pytestmark = pytest.mark.needs_prometheus
FOLDER = ROOT / "integration" / "prometheus"


def promtool(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    command = ["promtool", *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, cwd=FOLDER, timeout=60)


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "recording_rules.yml", "alert_rules.yml"),
        ("test", "rules", "rules_test.yml"),
    ],
    ids=" ".join,
)
def test_promtool_agrees_with_the_files(arguments):
    done = promtool(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_finds_nothing_to_say_about_our_metrics():
    measured = Measured()
    measured.run(measured.engine.request("r"))
    # The colon of the aliases is what promtool would complain about; it is the reason why they exist.
    ours = CollectorRegistry()
    ours.register(_Without(measured.registry, "vllm:"))
    done = promtool("check", "metrics", text=generate_latest(ours).decode())
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert sum(1 for m in METRICS if m.name.startswith("vllm:")) == 4


class _Without:
    """A collector that gives what another registry holds, without names that begin with `prefix`."""

    def __init__(self, registry: CollectorRegistry, prefix: str) -> None:
        self._registry = registry
        self._prefix = prefix

    def collect(self):
        return [family for family in self._registry.collect() if not family.name.startswith(self._prefix)]
