"""A real server in a process of its own, with the real engine, for tests that look at it from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

ROOT = Path(__file__).parents[2]
BOUND = 120.0
"""Seconds after which a wait is a failure."""


@dataclass(frozen=True)
class EyasServer:
    """A server that is ready."""

    url: str
    process: psutil.Process

    def kill_engine(self) -> None:
        """As a CUDA fault or the kernel's out-of-memory killer would."""
        [engine] = self.process.children()
        engine.kill()


@contextmanager
def eyas_server(model: Path, log: Path, **options: object) -> Iterator[EyasServer]:
    """A server that is stopped by SIGTERM, and must end well."""
    variables = {f"EYAS_{name.upper()}": str(value) for name, value in options.items()}
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "EYAS_MODEL": str(model),
        "EYAS_PORT": "0",
        **variables,
    }
    with log.open("w") as stream:
        command = [sys.executable, "-m", "service.cli", "serve", "--log-format", "json"]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=stream)
    try:
        yield EyasServer(_until_ready(process, log), psutil.Process(process.pid))
        process.send_signal(signal.SIGTERM)
        assert process.wait(BOUND) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def _until_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + BOUND
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        _, found, rest = log.read_text().partition("running on http://")
        if found:
            url = "http://" + rest.split()[0].rstrip('",')
            if httpx.get(f"{url}/ready").status_code == 200:
                return url
        time.sleep(0.1)
    raise AssertionError(log.read_text())
