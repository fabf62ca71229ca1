"""What the monitoring files ask: rules, alerts, dashboard queries, and the names of metrics in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from deploy.grafana.generate import dashboard
from service.metrics import ServiceMetrics

DEPLOY = Path(__file__).parents[2] / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
STANDARD = {"up", "process_start_time_seconds", "process_resident_memory_bytes"}
"""Metrics that Prometheus itself, or the standard process collector, provides."""


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def shipped_rules() -> list[str]:
    """Rule files that the shipped configuration loads."""
    files: list[str] = load(PROMETHEUS / "prometheus.yml")["rule_files"]
    return files


def rules(*files: str) -> list[dict[str, Any]]:
    """All rules of files in ``deploy/prometheus``."""
    return [rule for file in files for group in load(PROMETHEUS / file)["groups"] for rule in group["rules"]]


def exported() -> set[str]:
    """Names of the series that a server has."""
    names: set[str] = set()
    for family in ServiceMetrics().families:
        suffixes = ("_bucket", "_count", "_sum") if family.kind == "histogram" else ("",)
        names |= {family.name + suffix for suffix in suffixes}
    return names


def metrics_in(expression: str) -> set[str]:
    """Names of metrics and of recorded series in a PromQL expression."""
    return set(re.findall(r"\b(?:eyas[_:]|process_|up\b)[\w:]*", re.sub(r'"[^"]*"', "", expression)))


def panel_queries() -> dict[str, str]:
    """Every query of the shipped dashboard by panel title and letter."""
    return {
        f"{panel['title']}/{target['refId']}": target["expr"]
        for panel in dashboard()["panels"]
        for target in panel.get("targets", ())
    }


def as_promql(query: str) -> str:
    """A dashboard query with Grafana's variables filled in."""
    return query.replace("$__rate_interval", "1m").replace("$instance", ".*")
