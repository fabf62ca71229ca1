"""The real Prometheus in front of a real server with traffic: every rule and panel query has an answer."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from deploy.grafana.panels import AUDIT, GUARD
from tests.deploy.monitoring import PROMETHEUS, as_promql, load, panel_queries, rules, shipped_rules
from tests.deploy.server import BOUND, EyasServer, eyas_server
from tests.fixtures.checkpoints import F1, build_f1

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus (Debian package) is not installed"
)

MIN_SAMPLES = 8
"""Scrapes, a second apart, before rates over the shortest ranges are asked for."""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Prometheus:
    """Its HTTP API."""

    def __init__(self, url: str) -> None:
        self.client = httpx.Client(base_url=url, timeout=10.0)

    def query(self, expression: str) -> list[dict[str, Any]]:
        response = self.client.get("/api/v1/query", params={"query": expression})
        assert response.status_code == 200, f"{expression}: {response.text}"
        result: list[dict[str, Any]] = response.json()["data"]["result"]
        return result

    def until_not_empty(self, expression: str) -> list[dict[str, Any]]:
        deadline = time.monotonic() + BOUND
        while time.monotonic() < deadline:
            if result := self.query(expression):
                return result
            time.sleep(0.2)
        raise AssertionError(f"no answer: {expression}")


@contextmanager
def prometheus(server: str, directory: Path) -> Iterator[Prometheus]:
    """The shipped configuration and rules, scraping ``server`` every second."""
    config = load(PROMETHEUS / "prometheus.yml")
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(PROMETHEUS / name) for name in config["rule_files"]]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [server.removeprefix("http://")]}]
    file = directory / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    port = free_port()
    log = directory / "prometheus.log"
    command = [
        "prometheus", f"--config.file={file}", f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip
    with log.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, cwd=directory)
    try:
        client = Prometheus(f"http://127.0.0.1:{port}")
        deadline = time.monotonic() + BOUND
        while True:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            try:
                if client.client.get("/-/ready").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.1)
        yield client
    finally:
        process.terminate()
        process.wait()


def drive(url: str, seconds: float) -> None:
    """Streams and whole answers, shared prompts for the prefix cache, and a sampled request at times."""

    def client(worker: int) -> None:
        end = time.monotonic() + seconds
        words = " ".join(f"w{2 + i}" for i in range(40))
        number = 0
        while time.monotonic() < end:
            number += 1
            body = {
                "prompt": words,
                "max_tokens": 24,
                "temperature": number % 3 and 0.0,
                "stream": worker == 0,
            }
            response = httpx.post(f"{url}/v1/completions", json=body, timeout=BOUND)
            assert response.status_code == 200, response.text

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(client, range(2)))


@pytest.fixture(scope="module")
def server(f1_wrong: F1, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EyasServer]:
    options: dict[str, Any] = {
        "max_num_seqs": 4,
        "kv_page_size": 16,
        "num_kv_pages": 64,
        "num_speculative_tokens": 3,
        "audit_rate": 1.0,
    }
    with eyas_server(f1_wrong.path, tmp_path_factory.mktemp("server") / "log", **options) as server:
        yield server


@pytest.fixture(scope="module")
def metrics(server: EyasServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with prometheus(server.url, tmp_path_factory.mktemp("prometheus")) as client:
        client.until_not_empty("eyas_ready == 1")
        drive(server.url, MIN_SAMPLES)
        client.until_not_empty(f"count_over_time(eyas_ready[1m]) >= {MIN_SAMPLES}")
        # Rules of rules need one more evaluation each.
        client.until_not_empty("eyas:goodput:rate5m > 0")
        client.until_not_empty("eyas:forward_replay:ratio_rate5m")
        yield client


def test_every_recording_rule_has_an_answer(metrics: Prometheus):
    # A step of three drafts has no position 3 and beyond.
    missing = [
        f"{rule['record']} {rule.get('labels', '')}"
        for rule in rules("rules.yml")
        if int(rule.get("labels", {}).get("position", 0)) < 3 and not metrics.query(rule["expr"])
    ]
    assert missing == []


def test_every_panel_has_an_answer(metrics: Prometheus):
    # What a server without CUDA has no series of; the queries must be accepted all the same.
    silent = {f"{panel.title}/{letter}" for row in (GUARD, AUDIT) for panel in row.panels for letter in "ABC"}
    missing = [title for title, query in panel_queries().items() if not metrics.query(as_promql(query))]
    assert set(missing) - silent == set()


def test_panels_show_more_than_nothing(metrics: Prometheus):
    for title in ("Tokens/s/A", "Time to first token/B", "Between tokens/B", "Accept length per step/A"):
        results = metrics.query(as_promql(panel_queries()[title]))
        assert any(float(result["value"][1]) > 0 for result in results), title


def test_no_rule_fails_and_a_healthy_server_raises_no_alarm(metrics: Prometheus):
    groups = metrics.client.get("/api/v1/rules").json()["data"]["groups"]
    loaded = [rule for group in groups for rule in group["rules"]]
    assert len(loaded) == len(rules(*shipped_rules()))
    assert [rule["name"] for rule in loaded if rule["health"] != "ok"] == []
    assert [rule["name"] for rule in loaded if rule.get("state", "inactive") != "inactive"] == []


def test_ratios_have_their_known_values_on_a_server_without_graphs(metrics: Prometheus):
    for expression, value in (
        ("eyas:forward_eager:ratio_rate5m", 1.0),
        ("eyas:forward_replay:ratio_rate5m", 0.0),
        ("eyas:forward_fallback:ratio_rate5m", 0.0),
        ("eyas:time_to_first_token_good:ratio_rate5m", 1.0),
        ("eyas:requests_error:ratio_rate5m", 0.0),
    ):
        [result] = metrics.query(expression)
        assert float(result["value"][1]) == pytest.approx(value), expression
    [accept] = metrics.query("eyas:spec_accept_length:rate5m")
    assert 1.0 < float(accept["value"][1]) < 4.0


def test_the_audit_finds_nothing(metrics: Prometheus):
    metrics.until_not_empty('eyas_audits_total{outcome="scored"} > 0')
    assert metrics.query("sum(eyas_audit_mismatches_total) == 0")


def test_the_scrape_is_openmetrics(metrics: Prometheus):
    # Prometheus asks for OpenMetrics first; a page that it could not parse would leave the target down.
    [target] = metrics.client.get("/api/v1/targets").json()["data"]["activeTargets"]
    assert target["health"] == "up" and target["lastError"] == ""


def test_an_alert_fires_for_an_engine_that_is_killed(metrics: Prometheus, server: EyasServer):
    server.kill_engine()
    [alert] = metrics.until_not_empty('ALERTS{alertname="EyasEngineRestarting", alertstate="firing"}')
    assert alert["metric"]["severity"] == "critical" and alert["metric"]["job"] == "eyas"
    # The server is whole again, without anyone's help.
    metrics.until_not_empty("eyas_engine_restarts_total == 1 and eyas_ready == 1")
    drive(server.url, 1)


def test_an_alert_fires_for_the_first_nan(tmp_path: Path):
    poisoned = build_f1(tmp_path / "f3", nan_tokens=[9])
    with (
        eyas_server(poisoned.path, tmp_path / "log", max_num_seqs=4, num_kv_pages=64) as server,
        prometheus(server.url, tmp_path) as metrics,
    ):
        metrics.until_not_empty("eyas_ready == 1")
        body = {"prompt": "w5 w9 w6", "max_tokens": 4, "temperature": 0}
        refused = httpx.post(f"{server.url}/v1/completions", json=body, timeout=BOUND)
        assert refused.status_code == 500 and refused.json()["error"]["code"] == "numerical_error"
        trips = metrics.until_not_empty('ALERTS{alertname="EyasNaNTrip", alertstate="firing"}')
        assert {alert["metric"]["severity"] for alert in trips} == {"warning"}
        # This one could not be mended, and its client has seen it.
        [failed] = metrics.until_not_empty('ALERTS{alertname="EyasNaNFailedRequests", alertstate="firing"}')
        assert failed["metric"]["severity"] == "critical"
