"""The Helm chart and its rendered default: schemas, and what a restricted, drainable, monitored pod needs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from deploy.helm.render import CHART, DEPLOY, HEADER, RENDERED, copied_files, render
from service.settings import ENV_PREFIX, Settings
from tests.deploy.operators import SPECS

EXAMPLES = sorted((DEPLOY / "helm" / "examples").glob("*.yaml"))
OPERATOR_KINDS = {kind for _, kind in SPECS}
"""Kinds whose schemas do not come with Kubernetes."""
OLDEST = "1.30"
"""What Chart.yaml asks for."""

needs_helm = pytest.mark.skipif(
    importlib.util.find_spec("helm_python") is None, reason="helm-python-sdk is not installed"
)


def objects(text: str) -> list[dict[str, Any]]:
    return [item for item in yaml.safe_load_all(text) if item]


def of_kind(items: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    [item] = [item for item in items if item["kind"] == kind]
    return item


def example(name: str) -> list[dict[str, Any]]:
    return objects(render(yaml.safe_load((DEPLOY / "helm" / "examples" / f"{name}.yaml").read_text())))


def pod(items: list[dict[str, Any]]) -> dict[str, Any]:
    spec: dict[str, Any] = of_kind(items, "Deployment")["spec"]["template"]["spec"]
    return spec


def environment(items: list[dict[str, Any]]) -> dict[str, Any]:
    return {entry["name"]: entry.get("value") for entry in pod(items)["containers"][0]["env"]}


DEFAULT = objects(RENDERED.read_text())


@needs_helm
def test_the_rendered_default_is_what_the_chart_gives():
    assert RENDERED.read_text() == HEADER + render()


def test_rules_and_dashboard_in_the_chart_are_copies():
    copies = copied_files()
    assert {path.name for path in (CHART / "files").iterdir()} == {path.name for path in copies}
    for copy, source in copies.items():
        assert copy.read_bytes() == source.read_bytes(), copy.name


@needs_helm
def test_helm_lint_finds_no_fault():
    import helm_python

    assert helm_python.lint(str(CHART))["errors"] == []


@needs_helm
@pytest.mark.parametrize("values", [None, *EXAMPLES], ids=lambda path: path.stem if path else "default")
@pytest.mark.parametrize("version", [OLDEST, "newest"])
def test_manifests_satisfy_the_official_schemas(values: Path | None, version: str):
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    wanted = validator.latest_version() if version == "newest" else version
    items = objects(render(yaml.safe_load(values.read_text()) if values else None))
    for item in items:
        if item["kind"] not in OPERATOR_KINDS:
            validator.validate(item, wanted, strict=True)
    assert {"Deployment", "Service", "ServiceAccount", "PodDisruptionBudget"} <= {
        item["kind"] for item in items
    }


def check_operator_kinds(items: list[dict[str, Any]]) -> set[str]:
    """Kinds of operators among manifests, each of which satisfies its schema."""
    found = [item for item in items if item["kind"] in OPERATOR_KINDS]
    for item in found:
        jsonschema_rs.validate(SPECS[item["apiVersion"], item["kind"]], item["spec"])
    return {item["kind"] for item in found}


def test_the_rendered_objects_of_operators_have_the_fields_that_those_know():
    assert check_operator_kinds(DEFAULT) == {"PodMonitor", "PrometheusRule"}


@needs_helm
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_objects_of_operators_have_the_fields_that_those_know(path: Path):
    expected = {
        "cpu": set(),
        "hpa": {"PodMonitor", "PrometheusRule"},
        "deepseek-v2-lite": {"PodMonitor", "PrometheusRule", "ScaledObject", "InferencePool"},
    }
    assert check_operator_kinds(example(path.stem)) == expected[path.stem]


@needs_helm
@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("PodMonitor", lambda spec: spec["podMetricsEndpoints"][0].update(interval="15 s")),
        ("PodMonitor", lambda spec: spec.update(podMetricsEndpoint=[])),
        ("PrometheusRule", lambda spec: spec["groups"][0]["rules"][0].pop("expr")),
        ("PrometheusRule", lambda spec: spec["groups"][0]["rules"][0].update(record="both")),
        ("ScaledObject", lambda spec: spec["triggers"][0]["metadata"].update(threshold=4)),
        ("ScaledObject", lambda spec: spec.update(minReplicas=2)),
        ("InferencePool", lambda spec: spec["endpointPickerRef"].pop("port")),
        ("InferencePool", lambda spec: spec.update(extensionRef=spec.pop("endpointPickerRef"))),
    ],
)
def test_a_wrong_field_of_an_operator_is_found(kind: str, change: Callable[[dict[str, Any]], object]):
    item = of_kind(example("deepseek-v2-lite"), kind)
    change(item["spec"])
    with pytest.raises(jsonschema_rs.ValidationError):
        check_operator_kinds([item])


@needs_helm
@pytest.mark.parametrize(
    "values",
    [
        {"model": {"claim": "a", "hostPath": "/b"}},
        {"model": {"path": "without-a-volume"}},
        {"autoscaling": {"kind": "magic"}},
    ],
)
def test_impossible_values_are_refused(values: dict[str, Any]):
    import helm_python

    with pytest.raises(helm_python.HelmError):
        render(values)


def test_the_pod_is_restricted():
    spec = pod(DEFAULT)
    [container] = spec["containers"]
    assert spec["automountServiceAccountToken"] is False and spec["enableServiceLinks"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert of_kind(DEFAULT, "NetworkPolicy")["spec"]["egress"] == []
    assert of_kind(DEFAULT, "ServiceAccount")["automountServiceAccountToken"] is False


def test_the_pod_wants_a_b200():
    spec = pod(DEFAULT)
    assert spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert spec["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-B200"}
    assert spec["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert spec["containers"][0]["image"].endswith("-cuda")


def test_there_is_time_to_load_and_to_drain():
    spec = pod(DEFAULT)
    [container] = spec["containers"]
    drain = float(environment(DEFAULT)["EYAS_DRAIN_TIMEOUT"])
    before = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    # Ten seconds for clients that do not read their last words, and for the engine to end.
    assert spec["terminationGracePeriodSeconds"] >= before + drain + 10
    startup = container["startupProbe"]
    assert startup["httpGet"]["path"] == "/ready"
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800
    assert of_kind(DEFAULT, "Deployment")["spec"]["progressDeadlineSeconds"] >= 1800
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"


def test_prometheus_scrapes_the_pods_and_gets_the_shipped_rules():
    monitor = of_kind(DEFAULT, "PodMonitor")["spec"]
    labels = of_kind(DEFAULT, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    assert labels[monitor["jobLabel"]] == "eyas"
    assert monitor["podMetricsEndpoints"][0]["port"] == "http"
    rule_files = [path for path in copied_files().values() if path.suffix == ".yml"]
    groups = [group["name"] for path in rule_files for group in yaml.safe_load(path.read_text())["groups"]]
    assert sorted(group["name"] for group in of_kind(DEFAULT, "PrometheusRule")["spec"]["groups"]) == sorted(
        groups
    )


def test_every_variable_is_an_option():
    known = {ENV_PREFIX + name.upper() for name in Settings.model_fields}
    assert environment(DEFAULT).keys() <= known


@needs_helm
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_variable_of_the_examples_is_an_option(path: Path):
    known = {ENV_PREFIX + name.upper() for name in Settings.model_fields}
    assert environment(example(path.stem)).keys() <= known


@needs_helm
def test_numbers_of_options_are_written_as_they_were():
    values = {
        "options": {"max_body_bytes": 16777216, "seed": 1234567, "audit_rate": 0.25, "enforce_eager": True}
    }
    found = environment(objects(render(values)))
    assert (
        found.items()
        >= {
            "EYAS_MAX_BODY_BYTES": "16777216",
            "EYAS_SEED": "1234567",
            "EYAS_AUDIT_RATE": "0.25",
            "EYAS_ENFORCE_EAGER": "true",
        }.items()
    )


@needs_helm
def test_keys_come_from_a_secret_and_prometheus_has_one_of_them():
    items = example("hpa")
    secret = of_kind(items, "Secret")
    assert secret["stringData"] == {"keys": "first-key,second-key", "metrics": "first-key"}
    [key] = [entry for entry in pod(items)["containers"][0]["env"] if entry["name"] == "EYAS_API_KEY"]
    assert key["valueFrom"] == {"secretKeyRef": {"name": secret["metadata"]["name"], "key": "keys"}}
    [endpoint] = of_kind(items, "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": secret["metadata"]["name"], "key": "metrics"}
    assert "first-key" not in yaml.safe_dump([item for item in items if item["kind"] != "Secret"])


@needs_helm
def test_scaling_looks_at_the_queue_and_leaves_the_replicas_alone():
    hpa, keda = example("hpa"), example("deepseek-v2-lite")
    assert "replicas" not in of_kind(hpa, "Deployment")["spec"]
    [metric] = of_kind(hpa, "HorizontalPodAutoscaler")["spec"]["metrics"]
    assert metric["pods"]["metric"] == {"name": "eyas_requests_waiting"}
    adapter = yaml.safe_load((DEPLOY / "k8s" / "prometheus-adapter-values.yaml").read_text())
    assert adapter["rules"]["custom"][0]["seriesQuery"].startswith("eyas_requests_waiting{")
    [trigger] = of_kind(keda, "ScaledObject")["spec"]["triggers"]
    assert trigger["metadata"]["query"] == 'sum(eyas_requests_waiting{namespace="eyas", pod=~"eyas-.*"})'


@needs_helm
def test_an_inference_pool_selects_the_pods_and_knows_their_metrics():
    items = example("deepseek-v2-lite")
    template = of_kind(items, "Deployment")["spec"]["template"]["metadata"]["labels"]
    pool = of_kind(items, "InferencePool")["spec"]
    assert pool["selector"]["matchLabels"].items() <= template.items()
    assert template["inference.networking.k8s.io/engine-type"] == "vllm"
    assert environment(items)["EYAS_METRICS_COMPAT"] == "vllm"


@needs_helm
def test_checkpoints_are_mounted_read_only():
    for name, source in (("deepseek-v2-lite", "persistentVolumeClaim"), ("hpa", "hostPath")):
        spec = pod(example(name))
        [volume] = [volume for volume in spec["volumes"] if volume["name"] == "models"]
        assert source in volume
        [mount] = [mount for mount in spec["containers"][0]["volumeMounts"] if mount["name"] == "models"]
        assert mount == {"name": "models", "mountPath": "/models", "readOnly": True}


@needs_helm
def test_without_gpus_it_runs_anywhere():
    spec = pod(example("cpu"))
    assert "nodeSelector" not in spec and "tolerations" not in spec
    assert "nvidia.com/gpu" not in spec["containers"][0]["resources"]["limits"]
    assert spec["containers"][0]["image"].endswith("-cpu")
