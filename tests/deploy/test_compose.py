"""The compose project: its files exist, its server is confined, and it monitors what the rules need."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from service.settings import ENV_PREFIX, Settings
from tests.deploy.monitoring import DEPLOY, PROMETHEUS, load

COMPOSE = DEPLOY / "compose"
PROJECT: dict[str, Any] = load(COMPOSE / "compose.yaml")


def compose_works() -> bool:
    docker = shutil.which("docker")
    if docker is None:
        return False
    return subprocess.run([docker, "compose", "version"], capture_output=True).returncode == 0


@pytest.mark.skipif(not compose_works(), reason="docker compose is not installed")
def test_docker_compose_accepts_the_project():
    command = ["docker", "compose", "-f", str(COMPOSE / "compose.yaml"), "config", "--quiet"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def mounts(service: str) -> dict[str, Path]:
    """Mounted files and directories of the repository by their path in the container."""
    pairs = [volume.split(":") for volume in PROJECT["services"][service]["volumes"]]
    return {pair[1]: (COMPOSE / pair[0]).resolve() for pair in pairs if pair[0].startswith(".")}


@pytest.mark.parametrize("service", ["prometheus", "grafana"])
def test_every_mounted_path_exists(service: str):
    for target, source in mounts(service).items():
        assert source.exists(), f"{target} is mounted from {source}"


def test_prometheus_has_the_rules_that_its_configuration_names():
    files = load(COMPOSE / "prometheus.yml")["rule_files"]
    assert files == load(PROMETHEUS / "prometheus.yml")["rule_files"]
    assert {f"/etc/prometheus/{file}" for file in files} <= mounts("prometheus").keys()
    [scrape] = load(COMPOSE / "prometheus.yml")["scrape_configs"]
    assert scrape["static_configs"] == [{"targets": ["eyas:8000"]}]


def test_the_server_is_confined_and_has_time_to_drain():
    server = PROJECT["services"]["eyas"]
    assert server["read_only"] and server["tmpfs"] == ["/tmp"] and server["cap_drop"] == ["ALL"]
    drain = Settings.model_fields["drain_timeout"].default
    assert float(server["stop_grace_period"].removesuffix("s")) >= drain + 10
    known = {ENV_PREFIX + name.upper() for name in Settings.model_fields}
    assert server["environment"].keys() <= known


def test_ports_are_of_this_machine_alone_and_images_are_pinned():
    for name, service in PROJECT["services"].items():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
        if "build" not in service:
            assert service["image"].rpartition(":")[2][0] in "v0123456789", name
