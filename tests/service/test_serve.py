"""How ``serve`` starts and ends, as a process with a scripted engine (D1, D3)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from engine.errors import ConfigError
from service.commands.serve import SAME_SIGNAL_SECONDS, serve
from service.settings import load_settings
from tests.engine.fake_engine import COUNT, ENDLESS, FACTORY, HANGING_FACTORY, LOOP, RAISE, REFUSING_FACTORY
from tests.fixtures.tokenizers import word_tokenizer, write_tokenizer

ROOT = Path(__file__).parents[2]
BOUND = 30.0
"""A hang is a failure, not a wait; far above what anything here takes."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "fake"
    write_tokenizer(directory, word_tokenizer(1000))
    return directory


class Server:
    """``serve`` in a process of its own, with its log."""

    def __init__(self, model: Path, factory: str, **options: Any) -> None:
        given = {"model": str(model), "port": 0, "log_format": "json", **options}
        code = (
            "import sys\n"
            "from service.commands.serve import serve\n"
            "from service.settings import load_settings\n"
            f"sys.exit(serve(load_settings({given!r}), {factory!r}))"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        self.until(lambda: re.search(r"running on https?://127\.0\.0\.1:(\d+)", self.log))
        port = re.search(r"https?://127\.0\.0\.1:(\d+)", self.log)
        assert port is not None
        self.port = int(port[1])
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=BOUND)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)

    @property
    def log(self) -> str:
        return "".join(self.lines)

    @property
    def engine(self) -> psutil.Process:
        [engine] = psutil.Process(self.process.pid).children()
        return engine

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + BOUND
        while not condition():
            assert time.monotonic() < deadline, self.log
            assert self.process.poll() is None, self.log
            time.sleep(0.02)

    def ready(self) -> bool:
        return self.client.get("/ready").status_code == 200

    def complete(self, kind: int, **body: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={"prompt": [kind], **body})

    def stream(self, kind: int, max_tokens: int = 90) -> contextlib.AbstractContextManager[httpx.Response]:
        body = {"prompt": [kind], "stream": True, "max_tokens": max_tokens}
        return self.client.stream("POST", "/v1/completions", json=body)

    def wait(self) -> int:
        return self.process.wait(BOUND)


def starting(model: Path) -> Iterator[Callable[..., Server]]:
    """A fixture's body: starts servers of ``model``, which end with the test."""
    servers: list[Server] = []

    def start(factory: str = FACTORY, **options: Any) -> Server:
        servers.append(Server(model, factory, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.client.close()
        server.process.kill()
        server.process.wait()


@pytest.fixture
def start(model: Path) -> Iterator[Callable[..., Server]]:
    yield from starting(model)


def test_serve_answers_tells_what_it_resolved_and_ends_with_0(start: Callable[..., Server]):
    server = start(api_key=["secret-key"])
    server.client.headers["Authorization"] = "Bearer secret-key"
    server.until(server.ready)
    answer = server.complete(COUNT, max_tokens=5).json()
    assert answer["usage"]["completion_tokens"] == 5
    assert 'eyas_requests_total{outcome="length"} 1.0' in server.client.get("/metrics").text
    [ready] = [json.loads(line) for line in server.lines if '"event": "ready"' in line]
    assert (ready["num_speculative_tokens"], ready["max_num_seqs"], ready["port"]) == ("3", "64", "0")
    engine = server.engine
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    assert not engine.is_running()
    assert "secret-key" not in server.log


def test_sigterm_drains(start: Callable[..., Server]):
    """D3: readiness drops, the port stays open, at the time-out what runs ends with an error event."""
    server = start(drain_timeout=2.0)
    server.until(server.ready)
    engine = server.engine
    with server.stream(ENDLESS) as running:
        lines = running.iter_lines()
        assert "data: {" in next(lines)
        server.process.send_signal(signal.SIGTERM)
        server.until(lambda: not server.ready())
        refused = server.complete(COUNT)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        assert server.client.get("/health").status_code == 200
        rest = [line for line in lines if line]
    assert "error" in json.loads(rest[-1].removeprefix("data: "))
    assert server.wait() == 0
    assert not engine.is_running()


def test_a_second_signal_ends_at_once(start: Callable[..., Server]):
    server = start(drain_timeout=10 * BOUND)
    server.until(server.ready)
    with server.stream(ENDLESS) as running:
        lines = running.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGINT)
        # Twice at once is one signal, delivered twice.
        server.process.send_signal(signal.SIGINT)
        server.until(lambda: not server.ready())
        time.sleep(2 * SAME_SIGNAL_SECONDS)
        assert server.client.get("/health").status_code == 200
        server.process.send_signal(signal.SIGINT)
        assert "error" in [line for line in lines if line][-1]
    assert server.wait() == 0


def test_sigterm_during_the_load(start: Callable[..., Server]):
    server = start(HANGING_FACTORY)
    assert server.client.get("/ready").status_code == 503
    assert server.client.get("/health").status_code == 200
    server.until(lambda: psutil.Process(server.process.pid).children())
    engine = server.engine
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    assert not engine.is_running()


@pytest.mark.parametrize("how", ["SIGKILL", "exception"])
def test_the_death_of_the_engine_is_answered_and_ends_the_server(start: Callable[..., Server], how: str):
    """D1: without restarts streams get an error, health and readiness fall, the exit code is not 0."""
    server = start(max_engine_restarts=0)
    server.until(server.ready)
    with server.stream(ENDLESS) as running:
        lines = running.iter_lines()
        next(lines)
        if how == "SIGKILL":
            os.kill(server.engine.pid, signal.SIGKILL)
        else:
            assert server.complete(RAISE).status_code >= 500
        rest = [line for line in lines if line]
    assert "error" in json.loads(rest[-1].removeprefix("data: "))
    assert "[DONE]" not in rest
    assert server.client.get("/health").status_code == 503
    assert server.complete(COUNT).status_code == 503
    assert "eyas_requests_running 0.0" in server.client.get("/metrics").text
    assert server.wait() == 1


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP", "exception", "endless loop"])
def test_the_engine_is_started_again(start: Callable[..., Server], how: str):
    """D1: whatever happens to the engine is noticed, answered and mended."""
    server = start(engine_timeout=1.0)
    server.until(server.ready)
    dead = server.engine
    with server.stream(ENDLESS) as running:
        lines = running.iter_lines()
        next(lines)
        if how in ("SIGKILL", "SIGSTOP"):
            os.kill(dead.pid, signal.Signals[how])
        else:
            assert server.complete(RAISE if how == "exception" else LOOP).status_code == 503
        rest = [line for line in lines if line]
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "engine_dead"
    assert server.client.get("/health").status_code == 200
    server.until(server.ready)
    assert not dead.is_running()
    assert server.complete(COUNT, max_tokens=5).status_code == 200
    page = server.client.get("/metrics").text
    assert "eyas_engine_restarts_total 1.0" in page
    assert 'eyas_requests_total{outcome="length"} 1.0' in page
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0


def test_restarts_are_bounded(start: Callable[..., Server]):
    server = start(max_engine_restarts=1)
    server.until(server.ready)
    os.kill(server.engine.pid, signal.SIGKILL)
    server.until(lambda: "engine_restarted" in server.log)
    os.kill(server.engine.pid, signal.SIGKILL)
    assert server.wait() == 1


def test_sigterm_between_two_engines(start: Callable[..., Server]):
    server = start(max_engine_restarts=9)
    server.until(server.ready)
    os.kill(server.engine.pid, signal.SIGKILL)
    server.until(lambda: "engine_restarting" in server.log)
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0


def test_a_model_that_cannot_be_loaded_ends_the_server(start: Callable[..., Server]):
    server = start(REFUSING_FACTORY)
    assert server.wait() == 1
    told = [json.loads(line)["event"] for line in server.lines if "model_type='x': not supported" in line]
    assert told == ["engine_died"]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_tls(start: Callable[..., Server], tmp_path: Path):
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    ]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    server = start(ssl_certfile=str(certificate), ssl_keyfile=str(key))
    server.client = httpx.Client(
        base_url=f"https://127.0.0.1:{server.port}",
        verify=ssl.create_default_context(cafile=str(certificate)),
    )
    server.until(server.ready)
    assert server.complete(COUNT, max_tokens=2).status_code == 200


def test_a_damaged_certificate_is_refused_by_option(model: Path):
    with pytest.raises(ConfigError, match="--ssl-certfile"):
        serve(load_settings({"model": model, "ssl_certfile": model / "tokenizer.json"}), FACTORY)


def test_a_start_that_is_refused_leaves_no_directory_of_bundles(model: Path, tmp_path: Path):
    given = {"model": model, "nan_bundle_dir": tmp_path / "bundles"}
    with pytest.raises(ConfigError, match="--ssl-certfile"):
        serve(load_settings(given | {"ssl_certfile": model / "tokenizer.json"}), FACTORY)
    assert not (tmp_path / "bundles").exists()


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_port_in_use_is_refused_by_option(model: Path, log_format: str):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        command = [sys.executable, "-m", "service.cli", "serve", "--model", str(model), "--port", str(port)]
        run = subprocess.run(
            [*command, "--log-format", log_format],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=BOUND,
        )
    assert run.returncode == 2
    last = run.stderr.splitlines()[-1]
    assert re.fullmatch(f"eyas: --host 127.0.0.1 --port {port}: .*address already in use", last)


def test_a_client_that_sends_too_much_sees_why(start: Callable[..., Server]):
    """It is told before its body is read, and can still send it."""
    server = start(max_body_bytes=1000)
    server.until(server.ready)
    for content in (b" " * 2**25, iter([b" " * 2**20] * 32)):
        headers = {"Content-Type": "application/json"}
        answer = server.client.post("/v1/completions", content=content, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
    assert server.complete(COUNT, max_tokens=5).status_code == 200


def test_sigterm_while_a_body_is_on_its_way(start: Callable[..., Server]):
    """Who is still sending is told at once, and holds nothing up."""
    server = start(drain_timeout=10 * BOUND)
    server.until(server.ready)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    begun = head + b'Content-Length: 100\r\n\r\n{"prompt":'
    with socket.create_connection(("127.0.0.1", server.port), timeout=BOUND) as slow:
        slow.sendall(begun)
        assert server.client.get("/health").status_code == 200  # so what came before is read
        server.process.send_signal(signal.SIGTERM)
        answer = b"".join(iter(lambda: slow.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 503 ") and b'"code":"shutting_down"' in answer
        assert server.wait() == 0
    for words in ("Exception", "Traceback", "Cancel", '"level": "error"'):
        assert words not in server.log


def test_the_directory_of_bundles_is_made_before_the_engine_starts_or_refused(
    start: Callable[..., Server], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    start(nan_bundle_dir=str(tmp_path / "a" / "bundles"))
    assert stat.S_IMODE((tmp_path / "a" / "bundles").stat().st_mode) == 0o700
    assert list((tmp_path / "a" / "bundles").iterdir()) == []
    monkeypatch.setattr("service.commands.serve.Server.run", lambda _: pytest.fail("the engine starts"))
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "b", Path("/proc/bundles")):
        with pytest.raises(ConfigError, match=f"^--nan-bundle-dir {path}: "):
            serve(load_settings({"model": model, "nan_bundle_dir": path}), FACTORY)
