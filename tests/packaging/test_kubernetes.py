"""The manifests in integration/kubernetes: valid, agreeing with each other, and about metrics that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from cb_backend.telemetry.metrics.table import BY_NAME

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "integration" / "kubernetes"
SCHEMAS = ROOT / "tests" / "data" / "kubernetes"
KUBERNETES = "1.34"

DOCUMENTS = [
    (path.name, document)
    for path in sorted(FOLDER.glob("*.yaml"))
    if path.name != "kustomization.yaml"
    for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))
]


def of_kind(kind: str) -> dict[str, Any]:
    [document] = [document for _, document in DOCUMENTS if document["kind"] == kind]
    return document


def container() -> dict[str, Any]:
    [only] = of_kind("Deployment")["spec"]["template"]["spec"]["containers"]
    return only


def metrics_in(text: str) -> set[str]:
    return set(re.findall(r"\b(?:cb|gen_ai|vllm|bentoml)[_:][a-z_]+[a-z]\b", text))


@pytest.mark.parametrize(("name", "document"), DOCUMENTS, ids=[f"{name}-{doc['kind']}" for name, doc in DOCUMENTS])
def test_every_document_is_valid_and_has_no_unknown_field(name: str, document: dict[str, Any]) -> None:
    schema = SCHEMAS / f"{document['kind'].lower()}.json"
    if schema.exists():
        jsonschema.validate(document, json.loads(schema.read_text(encoding="utf-8")))
    else:
        assert kubernetes_validate.validate(document, KUBERNETES, strict=True)


@pytest.mark.parametrize("kind", ["Deployment", "ScaledObject"])
def test_validation_notices_a_misspelt_field(kind: str) -> None:
    document = {**of_kind(kind)}
    document["spec"] = {**document["spec"], "minReplicaCuont": 1}
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        test_every_document_is_valid_and_has_no_unknown_field(kind, document)


def test_every_metric_that_is_named_exists() -> None:
    named = set().union(*(metrics_in(path.read_text(encoding="utf-8")) for path in FOLDER.glob("*.yaml")))
    # The adapter's name for vllm:kv_cache_usage_perc, defined in the same file.
    assert named - {"cb_kv_usage"} <= set(BY_NAME)
    assert {"cb_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:num_requests_waiting"} <= named
    assert "as: cb_kv_usage" in (FOLDER / "autoscaling-hpa.yaml").read_text(encoding="utf-8")


def test_everything_selects_the_pods_of_the_deployment() -> None:
    labels = of_kind("Deployment")["spec"]["template"]["metadata"]["labels"]
    selectors = [
        of_kind("Service")["spec"]["selector"],
        *(of_kind(kind)["spec"]["selector"]["matchLabels"] for kind in ("Deployment", "PodDisruptionBudget")),
        *(of_kind(kind)["spec"]["selector"]["matchLabels"] for kind in ("PodMonitor", "InferencePool")),
    ]
    assert all(selector and selector.items() <= labels.items() for selector in selectors)
    targets = [of_kind(kind)["spec"]["scaleTargetRef"]["name"] for kind in ("HorizontalPodAutoscaler", "ScaledObject")]
    assert targets == [of_kind("Deployment")["metadata"]["name"]] * 2


def test_all_ports_are_the_one_that_is_served() -> None:
    args, [port] = container()["args"], container()["ports"]
    assert args[args.index("--port") + 1] == str(port["containerPort"])
    assert of_kind("InferencePool")["spec"]["targetPorts"] == [{"number": port["containerPort"]}]
    assert of_kind("Service")["spec"]["ports"][0]["targetPort"] == port["name"]
    assert of_kind("PodMonitor")["spec"]["podMetricsEndpoints"][0]["port"] == port["name"]


def test_a_pod_has_time_to_finish_what_it_answers() -> None:
    args = container()["args"]
    drain = int(args[args.index("--timeout-graceful-shutdown") + 1])
    pause = int(container()["lifecycle"]["preStop"]["exec"]["command"][1])
    assert of_kind("Deployment")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= pause + drain + 10


def test_the_pod_has_no_rights_that_it_does_not_need() -> None:
    pod = of_kind("Deployment")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsUser"] == 1034  # the user that BentoML makes in its images
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container()["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    writable = {mount["mountPath"] for mount in container()["volumeMounts"]}
    [home] = [variable["value"] for variable in container()["env"] if variable["name"] == "BENTOML_HOME"]
    assert any(home.startswith(path) for path in writable)


def test_settings_of_the_engine_are_fields_that_it_has() -> None:
    from cb_backend.config import EngineConfig

    settings = {variable["name"]: variable["value"] for variable in container()["env"]}
    fields = {name[3:].lower(): value for name, value in settings.items() if name.startswith("CB_")}
    config = EngineConfig(model="m").replace(fields)
    assert (config.kv_cache_memory, config.swap_space) == (2 << 30, 1 << 30)
    # Weights of a small model, the pool, the swap space and what Python and torch take.
    assert container()["resources"]["limits"]["memory"] == "6Gi"
