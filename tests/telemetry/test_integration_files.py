"""The files that users copy name only metrics, attributes and keys that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from cb_backend.telemetry import semconv
from cb_backend.telemetry.metrics.table import METRICS

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "integration" / "prometheus"
OTEL = ROOT / "integration" / "otel"

_WORDS = {"sum", "by", "le", "and", "rate", "increase", "deriv", "histogram_quantile", "label_values"}


def series() -> dict[str, set[str]]:
    """What can be queried: name -> labels."""
    found: dict[str, set[str]] = {}
    for metric in METRICS:
        labels = set(metric.labels)
        if metric.kind == "histogram":
            found |= {f"{metric.name}_{part}": labels for part in ("sum", "count")}
            found[f"{metric.name}_bucket"] = labels | {"le"}
        else:
            found[metric.name] = labels
    return found


def rules(file: str) -> list[dict]:
    document = yaml.safe_load((PROMETHEUS / file).read_text(encoding="utf-8"))
    return [rule for group in document["groups"] for rule in group["rules"]]


def recorded() -> set[str]:
    return {rule["record"] for rule in rules("recording_rules.yml")}


def dashboard() -> dict:
    return json.loads((PROMETHEUS / "grafana_dashboard.json").read_text(encoding="utf-8"))


def queries() -> list[tuple[str, str]]:
    found = [(rule.get("record") or rule["alert"], rule["expr"]) for rule in rules("recording_rules.yml")]
    found += [(rule["alert"], rule["expr"]) for rule in rules("alert_rules.yml")]
    for panel in dashboard()["panels"]:
        found += [(panel["title"], target["expr"]) for target in panel["targets"]]
    found += [("variable " + v["name"], v["query"]) for v in dashboard()["templating"]["list"] if v["type"] == "query"]
    return found


def names_and_labels(query: str) -> tuple[set[str], set[str]]:
    """Metric names, and label names of matchers and groupings."""
    labels = set(re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"', query))
    for grouping in re.findall(r"\bby\s*\(([^)]*)\)", query):
        labels |= {label.strip() for label in grouping.split(",")}
    bare = re.sub(r"\bby\s*\([^)]*\)|\{[^}]*\}|\[[^\]]*\]|\"[^\"]*\"", " ", query)
    names = set(re.findall(r"[a-zA-Z_:][a-zA-Z0-9_:]*", bare)) - _WORDS
    return names - {"model"} if query.startswith("label_values") else names, labels


@pytest.mark.parametrize(("where", "query"), queries())
def test_every_query_names_metrics_and_labels_that_exist(where, query):
    known = series()
    names, labels = names_and_labels(query)
    assert names, query
    assert names <= known.keys() | recorded(), f"{where}: {names - known.keys() - recorded()}"
    allowed = {"model", "gen_ai_request_model"}.union(*(known.get(name, set()) for name in names))
    assert labels <= allowed, f"{where}: {labels - allowed}"


def test_a_query_of_an_unknown_metric_would_be_seen():
    assert names_and_labels('sum by (mode) (rate(cb_nothing_total{kind="x"}[5m]))') == (
        {"cb_nothing_total"},
        {"mode", "kind"},
    )


def test_every_metric_of_ours_is_on_the_dashboard():
    shown = " ".join(query for _where, query in queries())
    ours = [metric.name for metric in METRICS if not metric.name.startswith("vllm:")]
    assert [name for name in ours if name not in shown] == []


def test_the_dashboards_panels_do_not_overlap():
    places = [tuple(panel["gridPos"][key] for key in "xywh") for panel in dashboard()["panels"]]
    taken = {(x + dx, y + dy) for x, y, w, h in places for dx in range(w) for dy in range(h)}
    assert len(taken) == sum(w * h for _x, _y, w, h in places)
    assert len({panel["id"] for panel in dashboard()["panels"]}) == len(places)


def test_every_alert_and_rule_is_unit_tested():
    tests = (PROMETHEUS / "rules_test.yml").read_text(encoding="utf-8")
    assert [rule["alert"] for rule in rules("alert_rules.yml") if f"alertname: {rule['alert']}" not in tests] == []


@pytest.mark.parametrize("version", [1, 2])
def test_bentoml_accepts_the_tracing_configuration(version):
    """It reads the file at import by version 1 of its schema, and for the service by version 2."""
    from bentoml._internal.configuration.containers import BentoMLConfiguration

    file = str(OTEL / "bentoml-tracing.yaml")
    configuration = BentoMLConfiguration(override_config_file=file, use_version=version)
    tracing = configuration.to_dict()["services"]["tracing"]
    assert tracing["sample_rate"] == 1.0
    assert tracing["otlp"]["endpoint"].endswith("/v1/traces")


def test_the_collector_selects_by_attributes_that_exist():
    document = yaml.safe_load((OTEL / "collector.yaml").read_text(encoding="utf-8"))
    policies = document["processors"]["tail_sampling"]["policies"]
    keys = [p["numeric_attribute"]["key"] for p in policies if "numeric_attribute" in p]
    assert keys == [semconv.PREEMPTIONS]
    pipeline = document["service"]["pipelines"]["traces"]
    assert {*pipeline["receivers"]} <= document["receivers"].keys()
    assert {*pipeline["processors"]} <= document["processors"].keys()
    assert {*pipeline["exporters"]} <= document["exporters"].keys()
