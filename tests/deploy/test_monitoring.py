"""Prometheus rules and the Grafana dashboard: they parse, name what is exported, and fire when they should."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from deploy.grafana import generate
from tests.deploy.monitoring import (
    DEPLOY,
    PROMETHEUS,
    STANDARD,
    as_promql,
    exported,
    load,
    metrics_in,
    panel_queries,
    rules,
    shipped_rules,
)

SHIPPED = shipped_rules()
ALERT_FILES = [file for file in SHIPPED if file != "rules.yml"]
RUNBOOK = DEPLOY.parent / "docs" / "runbook.md"

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool (Debian package prometheus) is not installed"
)


def unit_tests(file: str) -> Path:
    return PROMETHEUS / "tests" / file.replace(".yml", "_test.yml")


def promtool(*arguments: str) -> str:
    result = subprocess.run(["promtool", *arguments], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@needs_promtool
def test_promtool_accepts_the_configuration_and_all_rules():
    promtool("check", "config", str(PROMETHEUS / "prometheus.yml"))
    promtool("check", "rules", *(str(PROMETHEUS / file) for file in SHIPPED))


@needs_promtool
@pytest.mark.parametrize("file", ALERT_FILES)
def test_promtool_unit_tests(file: str):
    assert "SUCCESS" in promtool("test", "rules", str(unit_tests(file)))


@pytest.mark.parametrize("file", ALERT_FILES)
def test_every_alert_is_tested_firing_and_silent(file: str):
    cases = [case for test in load(unit_tests(file))["tests"] for case in test.get("alert_rule_test", ())]
    for alert in rules(file):
        expected = [case["exp_alerts"] for case in cases if case["alertname"] == alert["alert"]]
        assert any(expected), f"{alert['alert']} is not tested firing"
        assert [] in expected, f"{alert['alert']} is not tested silent"


@needs_promtool
def test_a_broken_rule_fails_its_unit_test(tmp_path: Path):
    for directory in ("tests", ""):
        (tmp_path / directory).mkdir(exist_ok=True)
        for source in (PROMETHEUS / directory).glob("*.yml"):
            shutil.copy(source, tmp_path / directory)
    alerts = tmp_path / "alerts.yml"
    alerts.write_text(alerts.read_text().replace("ratio_rate5m < 0.95", "ratio_rate5m < 0.5"))
    result = subprocess.run(
        ["promtool", "test", "rules", tmp_path / "tests" / "alerts_test.yml"], capture_output=True
    )
    assert result.returncode != 0


@pytest.mark.parametrize("file", ALERT_FILES)
def test_every_alert_says_what_it_means_and_has_its_section_in_the_runbook(file: str):
    headings = re.findall(r"^## (\w+)$", RUNBOOK.read_text(), flags=re.MULTILINE)
    for alert in rules(file):
        assert alert["labels"]["severity"] in ("warning", "critical")
        assert set(alert["annotations"]) == {"summary", "impact", "runbook_url"}
        assert alert["annotations"]["runbook_url"] == f"docs/runbook.md#{alert['alert'].lower()}"
        assert alert["alert"] in headings


def test_rules_name_only_what_is_exported_or_recorded():
    recorded = {rule["record"] for rule in rules("rules.yml") if "record" in rule}
    known = exported() | recorded | STANDARD
    for rule in rules(*SHIPPED):
        unknown = metrics_in(rule["expr"]) - known
        assert not unknown, f"{rule.get('record', rule.get('alert'))}: {unknown}"


def test_every_rule_file_is_shipped():
    assert {path.name for path in PROMETHEUS.glob("*.yml")} == {*SHIPPED, "prometheus.yml"}


def test_the_dashboard_is_what_the_generator_writes():
    assert generate.TARGET.read_text() == generate.text()


def test_the_dashboard_names_only_what_is_exported_or_recorded():
    recorded = {rule["record"] for rule in rules("rules.yml") if "record" in rule}
    for title, query in panel_queries().items():
        names = metrics_in(query)
        assert names, f"{title} asks for nothing"
        assert names <= exported() | recorded | STANDARD, title


@needs_promtool
def test_every_query_of_the_dashboard_parses(tmp_path: Path):
    parsed = [
        {"record": f"q:{i}", "expr": as_promql(query)} for i, query in enumerate(panel_queries().values())
    ]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": parsed}]}))
    assert f"{len(parsed)} rules found" in promtool("check", "rules", str(file))


def test_panels_do_not_overlap_and_have_a_description():
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(generate.TARGET.read_text())["panels"]:
        grid = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(grid["x"], grid["x"] + grid["w"])
            for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not cells & taken and grid["x"] + grid["w"] <= 24, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or panel["description"]
